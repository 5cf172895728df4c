"""Whether a user's kernel is right. The judge makes inputs, compares, explains; a player makes the calls.

The player is a process of its own. The kernel may crash it, run forever in it, or change what it likes there:
the judge reads nothing but the outputs, in memory that both share, and that a call has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import mmap
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import BuildError
from shakespeare.lab.command import IMPORTS
from shakespeare.own import kernel as kernels
from shakespeare.own.trial import cases, diagnosis, library
from shakespeare.own.trial.cases import Array, Case, Floats
from shakespeare.own.trial.diagnosis import FORWARD, Finding
from shakespeare.own.trial.gradients import BACKWARD
from shakespeare.own.trial.player import DONE, GO, NOT_DUMPABLE, PAGE
from shakespeare.own.trial.verdict import Verdict, shown

LOAD_SECONDS = 300.0  # that loading a file may take
PREPARE_SECONDS = 60.0  # that a player may take for what is not a call
JIT_SECONDS = 60.0  # more for the first call of Numba and Triton, which compile at it
MOST_MEMORY = 4 << 30  # bytes that a kernel on the CPU may map in the cases
SHARE = 0.3  # of the limit that a case may be expected to take, by the fastest one before it
MEASURED_WORK = 1000  # multiply-adds; a smaller call says little
SIMULATED_WORK = 60_000  # multiply-adds of a case at most in Numba's simulator of CUDA
FILL = 3.0  # of out before a call
STOP_SECONDS = 10.0  # that a player may take to stop, and what it leaves behind to end
LATE_SECONDS = 0.1  # that a wrong result is given to change
PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of Linux
SUBREAPER = 36  # of Linux's prctl()
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


class Gone(Exception):
    """The player's process has ended, or does not answer. finding: how."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.sentence)
        self.finding = finding


class Wrong(Exception):
    """A call broke a rule, whatever its result is. finding: which."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.sentence)
        self.finding = finding


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
    while (left := strangers() - others) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(1e-3)


class Cpu(NamedTuple):
    """CPU seconds of a player: all, its first thread's, other processes'; 0 where the system does not say."""

    total: float
    main: float
    others: float

    def since(self, before: Cpu) -> Cpu:
        """What was taken after `before`."""
        return Cpu(*(now - then for now, then in zip(self, before)))


class Player:
    """A process that makes calls. threads: for which libraries may start threads of their own."""

    every: ClassVar[set[Player]] = set()

    def __init__(self, with_torch: bool = False, threads: int | None = None) -> None:
        close_this_process()
        self.with_torch = with_torch
        self._file = os.memfd_create("matrices") if hasattr(os, "memfd_create") else _unnamed()
        self._memory = mmap.mmap(-1, PAGE)
        # Each result in the shared memory, and as it was when the call ended
        self._last = list[tuple[Array, Array]]()
        self._into = FORWARD.into
        self.sources = list[Path]()
        self._stopped, self._held = False, list[int]()
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._notes, notes = os.pipe()
        os.set_blocking(self._notes, False)
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN | select.POLLHUP)
        given = (commands, answers, notes, self._file)
        command = [sys.executable, "-m", "shakespeare.own.trial.player", *map(str, given)]
        command += ["torch"] * with_torch
        libraries = ("OMP", "OPENBLAS", "MKL", "NUMBA") if threads else ()
        env = environment() | {f"{name}_NUM_THREADS": str(threads) for name in libraries}
        nothing: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, **nothing, env=env, pass_fds=given, start_new_session=True)
        self.pid = self._process.pid
        Player.every.add(self)
        for descriptor in given[:-1]:
            os.close(descriptor)

    def close(self) -> None:
        """End the process and what it has started."""
        for pid in (*descendants(self.pid), self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        Player.every.discard(self)
        for descriptor in (self._commands, self._answers, self._notes, self._file):
            os.close(descriptor)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def load(self, file: Path, most_memory: int | None = None, backward: bool = False) -> None:
        """Load a kernel, or its backward pass; C++ and ISPC are compiled here. Raises BuildError, Gone."""
        file = file.resolve()
        kernels.check(file, backward)
        self._into = (BACKWARD if backward else FORWARD).into
        made = recipes.own(file).make() if file.suffix in (".cpp", ".ispc") else None
        request = {"load": str(file), "library": made and str(made), "most_memory": most_memory}
        imported = self.ask(request | {"backward": backward}, LOAD_SECONDS).get("imported", ())
        self.sources = [*dict.fromkeys((*kernels.sources(file), *map(Path, imported)))]

    def call(
        self,
        inputs: Mapping[str, Array],
        seconds: float,
        *,
        fill: float = FILL,
        place: Callable[[Sequence[int]], tuple[list[int], int]] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        **asked: Any,
    ) -> tuple[Array, float, Cpu]:
        """The result of a call, its seconds, and the CPU time that the player took from the inputs on.

        Several matrices of a result lie below each other. inputs: those that a Subject names; they may be
        views of one matrix. seconds: after which it is endless. fill: of the result before the call. place:
        gives the offsets of matrices of so many bytes in the shared memory, and its size; by default each
        ends at a page without rights. shapes: of the result's matrices, by default the Subject's. asked: what
        the player's prepare() takes besides. Raises Wrong, Gone, RuntimeError with what the kernel raised.
        """
        self._check_last()
        whole = {id(base := _base(t)): base for t in inputs.values()}
        shapes = shapes or {name: inputs[like].shape for name, like in self._into.items()}
        sizes = [*(t.nbytes for t in whole.values()), *(4 * math.prod(shape) for shape in shapes.values())]
        offsets, size = (place or at_ends)(sizes)
        if size > len(self._memory):
            self._last = []
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        begins = dict(zip(whole, offsets))
        arrays: dict[str, Any] = {
            name: (begins[id(base := _base(t))] + _address(t) - _address(base), t.shape, t.strides)
            for name, t in inputs.items()
        }
        places = zip(offsets[len(whole) :], shapes.items())
        into = {name: (offset, shape, _strides(shape)) for offset, (name, shape) in places}
        guards = [] if place else [offset + n for offset, n in zip(offsets, sizes)]
        asked |= {"size": len(self._memory), "arrays": arrays, "into": into, "guards": guards}
        self.ask(asked, PREPARE_SECONDS)
        self.stop()
        self._check_last()
        copies = [self._at(offset, t.shape) for offset, t in zip(offsets, whole.values())]
        for copy, t in zip(copies, whole.values()):
            copy[...] = t
        shared = [self._at(offset, shape) for offset, shape, _ in into.values()]
        for t in shared:
            t[...] = fill
        before = self.cpu_seconds()
        taken = self.go(seconds)
        results = [t.copy() for t in shared]
        self._last = [*zip(shared, results)]
        for copy, (key, t) in zip(copies, whole.items()):
            if not np.array_equal(copy, t, equal_nan=True):
                names = (name for name, view in inputs.items() if id(_base(view)) == key)
                raise Wrong(Finding("inputs", f"the kernel writes into {' or '.join(names)}"))
        whole_result = results[0] if len(results) == 1 else np.concatenate(results, 2)
        return whole_result, taken, self.cpu_seconds().since(before)

    def go(self, seconds: float) -> float:
        """The seconds of the prepared call, after which the player is stopped. Raises as call() does."""
        self._resume()
        start = time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            os.write(self._commands, GO)
        answer = self._answer(seconds)
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
            self.ask({"again": True}, PREPARE_SECONDS)
            self._check_last()

    def _check_last(self) -> None:
        if not all(np.array_equal(now, then, equal_nan=True) for now, then in self._last):
            self._last = []
            raise Wrong(LATE)

    def library(self, file: Path) -> str:
        """That the loaded file calls another's attention: a sentence, or ''."""
        names = library.in_text(file.resolve(), self.sources)
        if not kernels.read(file).ladder:  # which this project's launcher launches
            names |= library.in_memory(self.pid, self.with_torch)
        with contextlib.suppress(BlockingIOError):
            names |= {*os.read(self._notes, 1 << 12).decode(errors="replace").split("\n")} - {""}
        return library.sentence(names)

    def scratch(self, *sizes: int) -> int | None:
        """The floats of scratch that the file says for B, H, Nq, Nk, d, causal, threads; None for Python."""
        floats = self.ask({"scratch": sizes}, PREPARE_SECONDS).get("floats")
        return floats if isinstance(floats, int) else None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send what is not a call; return the answer. Raises BuildError, RuntimeError, Gone."""
        self._resume()
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            os.write(self._commands, json.dumps(request).encode() + b"\n")
        return _raise(self._answer(seconds))

    def _answer(self, seconds: float) -> bytes:
        """A line of the player's. Raises Gone."""
        if not self._poll.poll(1000 * seconds):
            raise Gone(Finding("endless", f"a call did not end within {seconds:g} s, and was ended"))
        answer = os.read(self._answers, 1 << 16)
        if not answer.endswith(b"\n"):
            raise Gone(ended(self._process.wait()) if not answer else MALFORMED)
        return answer

    def _at(self, offset: int, shape: Sequence[int]) -> Array:
        return np.ndarray(shape, np.float32, self._memory, offset)

    def stop(self) -> None:
        """Stop the process with all its threads, and wait until they have."""
        if self._stopped:
            return
        os.kill(self.pid, signal.SIGSTOP)
        states, end = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG, time.monotonic() + STOP_SECONDS
        while not (event := os.waitid(os.P_PID, self.pid, states)):
            if time.monotonic() > end:  # it waits for a child that shares its memory
                raise Gone(Finding("endless", "it cannot be stopped after a call"))
        if event.si_code != os.CLD_STOPPED:
            raise Gone(ended(self._process.wait()))
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        self._stopped = True
        self._held = descendants(self.pid)  # later: until a child has begun, its parent cannot stop
        self._signal_held(signal.SIGSTOP)

    def _resume(self) -> None:
        if self._stopped:
            self._stopped = False
            os.kill(self.pid, signal.SIGCONT)
            self._signal_held(signal.SIGCONT)

    def _signal_held(self, signal: int) -> None:
        for pid in self._held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal)

    def page_faults(self) -> int:
        """The pages of memory that the system has given to the player so far; 0 without /proc."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[7])
        return 0

    def cpu_seconds(self) -> Cpu:
        """The CPU time so far, with that of the player's children, also of those that the judge got."""
        mine = main = others = 0.0
        with contextlib.suppress(OSError, ValueError):  # not Linux
            mine = time.clock_gettime((~self.pid << 3) | PROCESS_CLOCK)
            for pid in (*descendants(self.pid), *strangers()):
                others += time.clock_gettime((~pid << 3) | PROCESS_CLOCK)
            main = 1e-9 * int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0])
            ended_children = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[13:15]
            others += sum(map(int, ended_children)) / os.sysconf("SC_CLK_TCK")
        return Cpu(mine + others, main, others)


MALFORMED = Finding("crash", "the kernel writes into the pipe through which it is called")


def _unnamed() -> int:
    """The descriptor of a file without a name."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _raise(answer: bytes) -> dict[str, Any]:
    """Raise what an answer reports; return what else it says."""
    if answer == DONE:
        return {}
    try:
        said: dict[str, Any] = dict(json.loads(answer))
    except (ValueError, TypeError):
        raise Gone(MALFORMED) from None
    if "refused" in said:
        raise BuildError(str(said["refused"]), str(said.get("output", "")))
    if "raised" in said:
        raise RuntimeError(str(said["raised"]))
    return said


def _base(t: Any) -> Array:
    """The contiguous matrix that a view is of."""
    while isinstance(t.base, np.ndarray) and t.base.dtype == t.dtype:
        t = t.base
    return t


def _address(t: Array) -> int:
    return t.__array_interface__["data"][0]


def _strides(shape: Sequence[int]) -> list[int]:
    """Those of a contiguous matrix."""
    return [4 * math.prod(shape[i + 1 :]) for i in range(len(shape))]


def at_ends(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of matrices of so many bytes, each followed by a page for itself, and the bytes of all."""
    offsets, size = [], 0
    for n in sizes:
        pages = -(-n // PAGE)
        offsets.append(size + pages * PAGE - n)
        size += (pages + 1) * PAGE
    return offsets, size


def environment() -> dict[str, str]:
    """That of a process of this package."""
    path = os.pathsep.join(filter(None, (str(IMPORTS), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def ended(code: int) -> Finding:
    """How a process ended before it was asked to. code: its exit code, negative for a signal."""
    how = f"it crashed, {signalled(code)}" if code < 0 else f"it ended the program with exit({code})"
    return Finding("crash", how)


def signalled(code: int) -> str:
    """What the signal means that ended a process. code: its negative number."""
    name = signal.Signals(-code).name
    return SIGNALS.get(name, name)


class Checker:
    """Tries kernels, each in a player of its own, which is started before it is needed."""

    def __init__(self) -> None:
        self._player: Player | None = None
        self._others = strangers()

    def close(self) -> None:
        """End the player."""
        if self._player:
            self._player.close()
            self._player = None

    def end_strangers(self) -> None:
        """End what a file has left behind. No compiler may run then."""
        end_strangers(self._others)

    def warm(self, file: Path) -> None:
        """Start the player that this file needs."""
        source = kernels.read(file)
        with_torch = source.torch or source.device == "cuda"
        if self._player and (with_torch > self._player.with_torch or not self._player.alive):
            self.close()
        self._player = self._player or Player(with_torch)

    def check(
        self, file: Path, seconds: float, seed: int = 0, backward: bool = False, windowed: bool = False
    ) -> Verdict:
        """Try the kernel of a file, or its backward pass, with all cases.

        seconds: that a call may take before it is endless. seed: of the inputs. windowed: also with a window.
        """
        self.warm(file)
        player, source, verdict = self._player, kernels.read(file), Verdict(backward=backward)
        assert player
        of = BACKWARD if backward else FORWARD
        limits = [seconds + JIT_SECONDS * source.compiling]
        every = enumerate(cases.seeded(seed, windowed))
        chosen = {case: n for n, case in every if source.simulated != "numba" or case.work <= SIMULATED_WORK}
        on_gpu = source.device == "cuda"
        seconds += JIT_SECONDS * (source.triton and on_gpu)  # it compiles for new sizes and tiles
        beside = threading.Thread(target=lambda: [*map(of.expected, chosen)])
        beside.start()  # while a compiler runs

        def run(case: Case, inputs: Sequence[Array] | None = None, **settings: Any) -> Floats:
            given = dict(zip(of.names, of.inputs(case) if inputs is None else inputs))
            asked: dict[str, Any] = {"causal": case.causal, "scale": case.applied, "threads": case.threads}
            asked |= {"window": case.window} if windowed else {}
            limit = limits.pop() if limits else seconds
            return np.array(player.call(given, limit, **asked | settings)[0], np.float64)

        try:
            player.load(file, None if on_gpu else MOST_MEMORY, backward)
            beside.join()
            verdict.sources = player.sources
            tried(run, player.settle, chosen, math.inf if on_gpu else seconds, verdict, of)
            verdict.library = player.library(file)
        except BuildError as error:
            verdict.refused, verdict.output = str(error), error.output
            verdict.sources = kernels.sources(file)
        except (Gone, Wrong) as error:
            verdict.add(error.finding)
        except RuntimeError as error:
            said = str(error)
            beyond = re.search("illegal memory access|misaligned address|out of bounds", said)
            verdict.add(Finding("bounds" if beyond else "raised", said))
        finally:
            beside.join()
            self.close()
        return verdict


def tried(
    run: diagnosis.Run,
    settle: Callable[[], object],
    chosen: Mapping[Case, int],
    seconds: float,
    verdict: Verdict,
    of: diagnosis.Subject = FORWARD,
) -> None:
    """Try a kernel with cases, and explain what is wrong, in a verdict. Raises as Player.call() does.

    run: calls it. settle: raises Wrong if a result changes after its call. chosen: the cases' numbers.
    """
    wrong: dict[Case, Floats] = {}
    fastest = math.inf  # seconds of a multiply-add
    for case, number in chosen.items():
        if fastest < math.inf and fastest * case.work * case.repeats > SHARE * seconds:
            verdict.skipped.append(str(case))
            continue
        if not wrong:
            verdict.at, verdict.case = str(case), number
        start = time.perf_counter()
        results = (run(case) for _ in range(case.repeats))
        bad = next((got for got in results if not of.expected(case).allows(got)), None)
        spent = time.perf_counter() - start
        verdict.tried += 1
        if bad is None:
            verdict.passed.append(number)
        else:
            if not wrong:
                settle()
            verdict.wrong, verdict.shown = True, verdict.shown or shown(case, of, bad)
            wrong[case] = bad
        if case.work >= MEASURED_WORK:
            fastest = min(fastest, spent / case.work / case.repeats)
    settle()
    verdict.finished = True
    if wrong:
        with contextlib.suppress(RuntimeError, Wrong, Gone):
            verdict.finding = diagnosis.diagnose(run, wrong, of)
