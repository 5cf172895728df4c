"""Speaks to the player, the process that calls a user's kernel.

The kernel may crash that process, run forever in it, or change what it likes there: nothing is read but the
outputs, in memory that both share, and that a call has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import BuildError
from shakespeare.judge import library_calls
from shakespeare.judge.cases import Array
from shakespeare.judge.diagnosis import FORWARD, Finding
from shakespeare.judge.gradients import BACKWARD
from shakespeare.judge.player_process import DONE, GO, NOT_DUMPABLE, PAGE
from shakespeare.lab.subprocesses import environment

LOAD_SECONDS = 300.0  # that loading a file may take
PREPARE_SECONDS = 60.0  # that a player may take for what is not a call
JIT_SECONDS = 60.0  # more for the first call of Numba and Triton, which compile at it
FILL = 3.0  # out holds it before a call
STOP_SECONDS = 10.0  # that a player may take to stop, and what it leaves behind to end
LATE_SECONDS = 0.1  # that a wrong result is given to change
PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of Linux
SUBREAPER = 36  # option of Linux's prctl()
MAX_ANSWER_BYTES = 1 << 16  # bytes
SIGNALS = {
    "SIGSEGV": "segmentation fault: it reads or writes where no memory is",
    "SIGBUS": "bus error: it reads or writes where no memory is",
    "SIGFPE": "arithmetic error: it divides a whole number by 0",
    "SIGILL": "illegal instruction: this processor does not have it",
    "SIGABRT": "aborted: the C++ library found an error, or an exception left a thread",
    "SIGKILL": "killed, probably for its memory",
    "SIGALRM": "it did not end in time",
}
LATE = Finding("late", "the output was not there when the call ended: it is written afterwards")
MALFORMED = Finding("crash", "the kernel writes into the pipe through which it is called")


class Found(Exception):
    """What a call has shown about a kernel, whatever its result is. finding: what."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.sentence)
        self.finding = finding


class Gone(Found):
    """The player's process has ended, or does not answer."""


class Wrong(Found):
    """A call broke a rule."""


@functools.cache
def close_this_process() -> None:
    """Let no other process of this user read this one's memory, and take over its players' orphans."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(NOT_DUMPABLE, 0)
        ctypes.CDLL(None).prctl(SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started and that still run, and theirs; none without /proc."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *descendants(child)]
    return found


def strangers() -> set[int]:
    """The processes below this one that are none of its players', such as orphans that it got from one."""
    mine = {pid for player in Player.every for pid in (player.pid, *descendants(player.pid))}
    return set(descendants(os.getpid())) - mine


def end_strangers(others: set[int]) -> None:
    """Kill the strangers but for `others`, which were there before a user's file ran."""
    end = time.monotonic() + STOP_SECONDS
    while time.monotonic() < end:
        left = strangers() - others
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(1e-3)


class CpuSeconds(NamedTuple):
    """CPU seconds of a player: all, its first thread's, other processes'; 0 where the system does not say."""

    total: float
    main: float
    others: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        """What was taken after `before`."""
        return CpuSeconds(*(now - then for now, then in zip(self, before)))


class Player:
    """A process that makes calls. threads: for which libraries may start threads of their own."""

    every: ClassVar[set[Player]] = set()

    def __init__(self, with_torch: bool, threads: int | None = None) -> None:
        close_this_process()
        self.with_torch = with_torch
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("matrices")
        else:
            with tempfile.TemporaryFile() as unnamed:
                self._file = os.dup(unnamed.fileno())
        self._memory = mmap.mmap(-1, PAGE)
        # Each result in the shared memory, and as it was when the call ended
        self._last = list[tuple[Array, Array]]()
        self._into = FORWARD.into
        self.sources = list[Path]()
        self._stopped = False
        self._stopped_children = list[int]()
        self._socket, theirs = socket.socketpair()
        self._notes, notes = os.pipe()
        os.set_blocking(self._notes, False)
        descriptors = (theirs.fileno(), notes, self._file)
        command = [sys.executable, "-m", "shakespeare.judge.player_process", *map(str, descriptors)]
        if with_torch:
            command.append("torch")
        libraries = ("OMP", "OPENBLAS", "MKL", "NUMBA") if threads else ()
        env = environment() | {f"{name}_NUM_THREADS": str(threads) for name in libraries}
        nothing: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(
            command, **nothing, env=env, pass_fds=descriptors, start_new_session=True
        )
        self.pid = self._process.pid
        Player.every.add(self)
        theirs.close()
        os.close(notes)

    def close(self) -> None:
        """End the process and what it has started."""
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        Player.every.discard(self)
        self._socket.close()
        os.close(self._notes)
        os.close(self._file)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def load(
        self, file: Path, memory_limit: int | None = None, backward: bool = False, dtype: str = "fp32"
    ) -> None:
        """Load a kernel, or its backward pass; C++ and ISPC are compiled here. Raises BuildError, Gone."""
        file = file.resolve()
        user_kernel.check(file, backward)
        self._into = (BACKWARD if backward else FORWARD).into
        made = str(recipes.user_kernel(file).make()) if file.suffix in (".cpp", ".ispc") else None
        request = {"load": str(file), "library": made, "memory_limit": memory_limit, "backward": backward}
        imported = self.ask({**request, "dtype": dtype}, LOAD_SECONDS).get("imported", ())
        self.sources = [*dict.fromkeys((*user_kernel.sources(file), *map(Path, imported)))]

    def call(
        self,
        inputs: Mapping[str, Array],
        seconds: float,
        *,
        fill: float = FILL,
        place: Callable[[Sequence[int]], tuple[list[int], int]] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        **settings: Any,
    ) -> tuple[Array, float, CpuSeconds]:
        """The result of a call, its seconds, and the CPU time that the player took from the inputs on.

        Several matrices of a result lie below each other. inputs: those that a Subject names; they may be
        views of one matrix. seconds: after which it is endless. fill: the result's numbers before the call.
        place: gives the offsets of matrices of so many bytes in the shared memory, and its size; by default
        each ends at a page without rights. shapes: the result's matrices', by default the Subject's.
        settings: what prepare() takes besides. Raises Wrong, Gone, and RuntimeError with what the kernel
        raised.
        """
        self._check_last()
        bases = {name: _base(t) for name, t in inputs.items()}
        bases_by_id = {id(base): base for base in bases.values()}
        shapes = shapes or {name: inputs[like].shape for name, like in self._into.items()}
        sizes = [
            *(t.nbytes for t in bases_by_id.values()),
            *(4 * math.prod(shape) for shape in shapes.values()),
        ]
        offsets, size = (place or at_ends)(sizes)
        if size > len(self._memory):
            self._last = []
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        begins = dict(zip(bases_by_id, offsets))
        arrays = {}
        for name, t in inputs.items():
            offset = begins[id(bases[name])] + t.ctypes.data - bases[name].ctypes.data
            arrays[name] = offset, t.shape, t.strides
        into = [*zip(offsets[len(bases_by_id) :], shapes.values())]
        guards = [] if place else [offset + n for offset, n in zip(offsets, sizes)]
        placed = {"size": len(self._memory), "arrays": arrays, "into": dict(zip(shapes, into))}
        self.ask({**settings, **placed, "guards": guards})
        self.stop()
        self._check_last()
        copies = [self._at(offset, t.shape) for offset, t in zip(offsets, bases_by_id.values())]
        for copy, t in zip(copies, bases_by_id.values()):
            copy[...] = t
        shared = [self._at(*at) for at in into]
        for t in shared:
            t[...] = fill
        before = self.cpu_seconds()
        taken = self.go(seconds)
        results = [t.copy() for t in shared]
        self._last = [*zip(shared, results)]
        for copy, base in zip(copies, bases_by_id.values()):
            if not np.array_equal(copy, base, equal_nan=True):
                names = (name for name, each in bases.items() if each is base)
                raise Wrong(Finding("inputs", f"the kernel writes into {' or '.join(names)}"))
        joined = results[0] if len(results) == 1 else np.concatenate(results, 2)
        return joined, taken, self.cpu_seconds().since(before)

    def go(self, seconds: float) -> float:
        """The seconds of the prepared call, after which the player is stopped. Raises as call() does."""
        self._resume()
        start = time.perf_counter()
        answer = self._answer(GO, seconds)
        end = time.perf_counter()
        self.stop()
        _raise(answer)
        return end - start

    def settle(self) -> None:
        """Raise Wrong if the last call's output changes after its end."""
        self._resume()
        time.sleep(LATE_SECONDS)
        self._check_last()
        if self._last:
            self.ask({"again": True})
            self._check_last()

    def _check_last(self) -> None:
        if not all(np.array_equal(now, then, equal_nan=True) for now, then in self._last):
            self._last = []
            raise Wrong(LATE)

    def library(self, file: Path) -> str:
        """A sentence if the loaded file calls another's attention; else ''."""
        names = library_calls.in_text(file.resolve(), self.sources)
        if not user_kernel.read(file).ladder:  # which this project's launcher launches
            names |= library_calls.in_memory(self.pid, self.with_torch)
        with contextlib.suppress(BlockingIOError):
            names.update(os.read(self._notes, 1 << 12).decode(errors="replace").splitlines())
        return library_calls.sentence(names)

    def scratch(self, *sizes: int) -> int | None:
        """The floats of scratch that the file says for B, H, Nq, Nk, d, causal, threads; None for Python."""
        floats = self.ask({"scratch": sizes}).get("floats")
        return floats if isinstance(floats, int) else None

    def ask(self, request: Mapping[str, Any], seconds: float = PREPARE_SECONDS) -> dict[str, Any]:
        """Send what is not a call; return the answer. Raises BuildError, RuntimeError, Gone."""
        self._resume()
        return _raise(self._answer(json.dumps(request).encode() + b"\n", seconds))

    def _answer(self, line: bytes, seconds: float) -> bytes:
        """The player's answer to a line. Raises Gone."""
        self._socket.settimeout(seconds)
        answer = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                self._socket.sendall(line)
            answer = self._socket.recv(MAX_ANSWER_BYTES)
        except TimeoutError:
            what = f"a call did not end within {seconds:g} s, and was ended"
            raise Gone(Finding("endless", what)) from None
        except ConnectionResetError:  # it ended before it read the line
            pass
        if not answer.endswith(b"\n"):
            raise Gone(MALFORMED if answer else ended(self._process.wait()))
        return answer

    def _at(self, offset: int, shape: Sequence[int]) -> Array:
        return np.ndarray(shape, np.float32, self._memory, offset)

    def stop(self) -> None:
        """Stop the process with all its threads, and wait until they have."""
        if self._stopped:
            return
        os.kill(self.pid, signal.SIGSTOP)
        states = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        end = time.monotonic() + STOP_SECONDS
        while True:
            event = os.waitid(os.P_PID, self.pid, states)
            if event:
                break
            if time.monotonic() > end:  # it waits for a child that shares its memory
                raise Gone(Finding("endless", "it cannot be stopped after a call"))
        if event.si_code != os.CLD_STOPPED:
            raise Gone(ended(self._process.wait()))
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        self._stopped = True
        # Later: until a child has begun, its parent cannot stop.
        self._stopped_children = descendants(self.pid)
        self._signal_children(signal.SIGSTOP)

    def _resume(self) -> None:
        if self._stopped:
            self._stopped = False
            os.kill(self.pid, signal.SIGCONT)
            self._signal_children(signal.SIGCONT)

    def _signal_children(self, signal: int) -> None:
        for pid in self._stopped_children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal)

    def page_faults(self) -> int:
        """The pages of memory that the system has given to the player so far; 0 without /proc."""
        with contextlib.suppress(OSError):
            return int(self._stat()[7])
        return 0

    def _stat(self) -> list[str]:
        """The fields of /proc's stat after the program's name."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()

    def cpu_seconds(self) -> CpuSeconds:
        """The CPU time so far, with that of the player's children, also of those that the judge got."""
        mine = main = others = 0.0
        with contextlib.suppress(OSError, ValueError):  # not Linux
            mine = time.clock_gettime((~self.pid << 3) | PROCESS_CLOCK)
            for pid in (*descendants(self.pid), *strangers()):
                others += time.clock_gettime((~pid << 3) | PROCESS_CLOCK)
            main = 1e-9 * int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0])
            ended_children = self._stat()[13:15]
            others += sum(map(int, ended_children)) / os.sysconf("SC_CLK_TCK")
        return CpuSeconds(mine + others, main, others)


def _raise(answer: bytes) -> dict[str, Any]:
    """Raise what an answer reports; return what else it says."""
    if answer == DONE:
        return {}
    try:
        fields: dict[str, Any] = dict(json.loads(answer))
    except (ValueError, TypeError):
        raise Gone(MALFORMED) from None
    if "refused" in fields:
        raise BuildError(str(fields["refused"]), str(fields.get("output", "")))
    if "raised" in fields:
        raise RuntimeError(str(fields["raised"]))
    return fields


def _base(t: Any) -> Array:
    """The contiguous matrix that a view is of."""
    while isinstance(t.base, np.ndarray) and t.base.dtype == t.dtype:
        t = t.base
    return t


def at_ends(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of matrices of so many bytes, each followed by a page for itself, and the bytes of all."""
    offsets = []
    size = 0
    for n in sizes:
        pages = -(-n // PAGE)
        offsets.append(size + pages * PAGE - n)
        size += (pages + 1) * PAGE
    return offsets, size


def ended(code: int) -> Finding:
    """How a process ended before it was asked to. code: its exit code, negative for a signal."""
    how = f"it crashed, {signalled(code)}" if code < 0 else f"it ended the program with exit({code})"
    return Finding("crash", how)


def signalled(code: int) -> str:
    """What the signal means that ended a process. code: its negative number."""
    name = signal.Signals(-code).name
    return SIGNALS.get(name, name)
