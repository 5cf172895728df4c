"""The times of a user's kernel: the clock is the judge's, each call has new inputs, and outputs are kept.

A round is of calls of each size, and of some of an empty kernel: their time is that of handing a call
over, and is subtracted. When the clock has stopped, a random tenth of the outputs is compared, the last ones,
and random rows of the others. The CPU time of the player must fit the wall time of the calls.
"""

import contextlib
import ctypes
import itertools
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shakespeare.attention_ext import attention, user_kernel
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge import cases, tolerance
from shakespeare.judge.cases import Array
from shakespeare.judge.diagnosis import Finding
from shakespeare.judge.gradients import INPUTS
from shakespeare.judge.player import JIT_SECONDS, PAGE, CpuSeconds, Player, Wrong, end_strangers, strangers
from shakespeare.judge.speed import Size
from shakespeare.judge.tolerance import Expected
from shakespeare.lab import timing

ROUNDS = 6
MIN_TIME = 0.06  # seconds of all calls of a size
MAX_CALLS = 40  # calls of a round at most
EMPTY_CALLS = 4  # calls of the empty kernel in a round, at most
COMPARED = 0.1  # share of the outputs that are compared
MAX_SCORES = 2**22  # scores of a comparison; of a larger call random rows are compared
FEW_SCORES = 2**15  # scores of each other output that are compared
SLOTS = 4  # places in the shared memory for a call
LINE = 64  # bytes
JITTER = 64  # lines that a matrix may begin later in its slot
MUCH_CPU = 1.1  # times the wall time and the threads
FEW_CPU = 0.1  # share of the CPU time that is not of one thread
CALL_CPU = 100e-6  # seconds of the player around a call
EMPTY = {
    ".cpp": '#include "attention.h"\nvoid attention(const Attention&, float*) {}\n',
    ".cu": '#include "call.h"\n#define BR 64\n#define THREADS 64\n'
    'extern "C" __global__ void attention(const Call call) {}\n',
    "torch": "import torch\n\n\ndef attention(q, k, v, causal, scale):\n    return q\n",
    "numpy": "def attention(q, k, v, causal, scale):\n    return q\n",
    ".cpp backward": '#include "attention.h"\nvoid attention_backward(const AttentionGradient&, float*) {}\n',
    "torch backward": "import torch\n\n\ndef attention_backward(q, k, v, *rest):\n    return q, k, v\n",
    "numpy backward": "def attention_backward(q, k, v, *rest):\n    return q, k, v\n",
}
EMPTY_KEYS = {".cpp": ".cpp", ".ispc": ".cpp", ".cu": ".cu"}


@dataclass(kw_only=True)
class Timed(timing.Samples):
    """The calls at one size. outs: by the seed."""

    N: int
    d: int
    outs: list[tuple[int, Any]] = field(default_factory=list)


class Clock(timing.Cpu):
    """Times a file's kernel at a size, and at `more` of its (N, d), in another process. To be closed."""

    max_output_bytes = 2**27  # bytes of outputs of a size
    pinned = hasattr(os, "sched_setaffinity")  # for one thread, judge and player

    def __init__(self, file: Path, size: Size, more: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__()
        self._file = file
        self._size = size
        backward = size.backward
        self.sizes = [Timed(N=N, d=d) for N, d in ((size.N, size.d), *more)]
        self._empty = Timed(N=size.N, d=size.d)
        self._others = strangers()
        self._taken = list[tuple[float, CpuSeconds]]()
        source = user_kernel.read(file)
        with_torch = source.needs_torch
        key = "torch" if source.ladder else EMPTY_KEYS.get(file.suffix, "torch" if with_torch else "numpy")
        self._players = [Player(with_torch, size.threads) for _ in range(2)]
        self._player, self._peer = self._players
        try:
            name = f"empty{key if key.startswith('.') else '.py'}"
            self._peer.load(
                user_kernel.cached_file(name, EMPTY[f"{key} backward" if backward else key]),
                backward=backward,
                dtype=size.dtype,
            )
            self._peer.ask({"seal": True})
            empty = self._timer(self._peer, self._empty, EMPTY_CALLS)
            empty.round()  # before the file can do anything
            self._player.load(file, backward=backward, dtype=size.dtype)
            self._call(self._player, self.sizes[0], 600.0 + JIT_SECONDS * source.compiling)
            timers = [self._timer(self._player, timed, MAX_CALLS) for timed in self.sizes]
            self._taken.clear()  # a first call may compile, or start a pool
        except BaseException:
            self.close()
            raise
        self._turns = timing.rounds([*timers, empty], ROUNDS)

    def close(self) -> None:
        """End the players, and what they have left behind."""
        for player in self._players:
            player.close()
        end_strangers(self._others)

    def _timer(self, player: Player, timed: Timed, max_calls: int) -> timing.Timer:
        """A timer of a player's calls at a size, of at most so many in a round."""
        call = partial(self._call, player, timed)
        output_bytes = 4 * self._size.heads * timed.N * timed.d * (3 if self._size.backward else 1)
        max_calls = max(1, min(max_calls, self.max_output_bytes // output_bytes // ROUNDS))
        once = min(self.time(call, 2))
        seconds = min(MIN_TIME / ROUNDS, max_calls * once)
        return timing.Timer(call, self, seconds, samples=timed, once=once)

    def time(self, call: Callable[[], float], count: int, cold: bool = False) -> list[float]:
        """The seconds that each of `count` calls of a player gives. cold has no effect."""
        with self._one_processor():
            return [call() for _ in range(count)]

    def pages(self) -> int:
        """The number of memory pages that the system has given to the file's player."""
        return self._player.page_faults()

    def round(self) -> None:
        """A round of each size. Raises Wrong, Gone, RuntimeError as Player.call() does."""
        for _ in itertools.islice(self._turns, len(self.sizes) + 1):
            pass

    def finish(self) -> None:
        """Make the rounds that are missing, and compare. Raises Wrong, and as round() does."""
        for _ in self._turns:
            pass
        self._player.settle()
        for timed in self.sizes:
            self._compare(timed)
        self._check_threads()

    def _check_threads(self) -> None:
        """Raise Wrong if the calls on the CPU took more of its time than their threads have."""
        if not self._taken:
            return
        wall, total, main, others = map(sum, zip(*((wall, *cpu) for wall, cpu in self._taken)))
        calls = CALL_CPU * len(self._taken)
        # Where others use the processors, two threads may take no more than one.
        few = FEW_CPU * total + calls
        used = f"{total / wall:.1f} threads in its calls and around them"
        if self._size.threads == 1 and others > few:
            used = "other processes"
        elif self._size.threads == 1 and min(main, total - main) > few:
            used = "several threads"
        elif total <= MUCH_CPU * self._size.threads * wall + calls:
            return
        what = f"not measured: it takes the CPU time of {used}, and {self._size.threads} may be used"
        raise Wrong(Finding("threads", what))

    @property
    def handing(self) -> float:
        """The seconds that handing a call over takes: the least, which no kernel can make longer."""
        return min(self._empty.seconds)

    def seconds(self) -> list[float]:
        """The seconds of a call at each size without handing it over; 0 if it takes no longer than that."""
        return [max(0.0, timed.median - self.handing) for timed in self.sizes]

    def library(self) -> str:
        """A sentence if the file calls another's attention; else ''."""
        return self._player.library(self._file)

    def scratch(self) -> int | None:
        """The floats of scratch that the file says."""
        size = self._size
        timed = self.sizes[0]
        return self._player.scratch(1, size.heads, timed.N, timed.N, timed.d, size.causal, size.threads)

    @contextlib.contextmanager
    def _one_processor(self) -> Iterator[None]:
        """With one thread, judge and player share a processor: it is awake, its cache has the inputs."""
        if self._size.threads > 1 or not self.pinned:
            yield
            return
        allowed = os.sched_getaffinity(0)
        here = {ctypes.CDLL(None).sched_getcpu()} & allowed or allowed
        for pid in (0, *(player.pid for player in self._players)):
            os.sched_setaffinity(pid, here)
        try:
            yield
        finally:
            for pid in (0, *(player.pid for player in self._players)):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(pid, allowed)

    def _call(self, player: Player, timed: Timed, limit: float = 600.0) -> float:
        """The seconds of a call with new inputs at a new place; its output and its CPU time are kept."""
        seed = secrets.randbits(64)
        out, seconds, cpu = player.call(
            self._inputs(seed, timed),
            limit,
            fill=math.nan,
            place=places,
            causal=self._size.causal,
            scale=timed.d**-0.5,
            scratch_fill=None,
            threads=self._size.threads,
        )
        if player is self._player:
            timed.outs.append((seed, out))
            self._taken.append((seconds, cpu))
        return seconds

    def _compare(self, timed: Timed) -> None:
        """Compare a random tenth of the outputs and the last one. Raises Wrong."""
        count = len(timed.outs)
        random = secrets.SystemRandom()
        in_full = {*random.sample(range(count), max(1, round(COMPARED * count))), count - 1}
        max_scores = {n: MAX_SCORES if n in in_full else FEW_SCORES for n in range(count)}
        outs = enumerate(timed.outs)
        wrong = [n for n, (seed, out) in outs if not self._is_right(timed, seed, out, max_scores[n])]
        if not wrong:
            return
        seed, got = timed.outs[wrong[0]]
        where = f"in a timed call, {self._size.heads} heads of N = {timed.N}, d = {timed.d}"
        earlier = (n for n, (_, out) in enumerate(timed.outs[: wrong[0]]) if bool((out == got).all()))
        if bool((got != got).any()):  # NaN; also of a tensor
            what = f"numbers of the output are missing when the call ends, {where}"
        elif next(earlier, None) is not None:
            what = f"it gives an earlier call's result for new inputs, {where}"
        elif len(wrong) < count:
            what = f"it is right in some calls and wrong in others, {where}: call {wrong[0] + 1} of {count}"
        else:
            what = f"it is right in the cases and wrong {where}"
        raise Wrong(Finding("late" if "missing" in what else "changes", what))

    def _inputs(self, seed: int, timed: Timed) -> dict[str, Any]:
        """The inputs of a call, always the same for a seed."""
        matrices = normal(seed, self._size.heads, timed.N, timed.d, "qkv")
        if not self._size.backward:
            return matrices
        tensors = map(torch.from_numpy, matrices.values())
        out, lse = attention("part4", *tensors, causal=self._size.causal, return_lse=True)
        dout = normal(seed + 1, self._size.heads, timed.N, timed.d, ["dout"])
        return matrices | {"out": out.numpy(), "lse": lse.numpy()} | dout

    def _is_right(self, timed: Timed, seed: int, result: Any, max_scores: int) -> bool:
        """Whether random rows of a result are right; it and the inputs may be tensors on a GPU."""
        size = self._size
        tensors = {"": result, **self._inputs(seed, timed)}
        matrices = {name: torch.as_tensor(t).cpu().float().numpy() for name, t in tensors.items()}
        got = matrices.pop("")
        compute = gradient_rows if size.backward else output_rows
        checked = sampled(matrices, size.causal, compute, max_scores, Dtype(size.dtype))
        return all(expected.allows(got[0, h, rows]) for h, rows, expected in checked)


def normal(seed: int, heads: int, N: int, d: int, names: Iterable[str]) -> dict[str, Array]:
    """Matrices (1, heads, N, d) of normal numbers."""
    random = np.random.Generator(np.random.SFC64(seed))
    return {name: random.standard_normal((1, heads, N, d), np.float32) for name in names}


Rows = NDArray[np.int64]
Head = dict[str, Any]  # the matrices of one head, by name
Compute = Callable[[Head, Rows, bool, Any], list[Any]]


def sampled(
    matrices: Head, causal: bool, compute: Compute, max_scores: int, dtype: Dtype
) -> Iterator[tuple[int, Rows, Expected]]:
    """For each head random rows of a result, and what is expected of them; all rows if they are few."""
    _, heads, N, d = matrices["q"].shape
    count = max(1, min(N, max_scores // (heads * N)))
    for h in range(heads):
        rows = np.sort(np.random.default_rng(secrets.randbits(64)).choice(N, count, replace=False))
        exact, peer = (
            compute(
                {name: t[0, h].astype(float_type) for name, t in matrices.items()},
                rows,
                causal,
                float_type(d**-0.5),
            )
            for float_type in (np.float64, np.float32)
        )
        for i, (right, other) in enumerate(zip(exact, peer)):
            yield h, rows + i * N, tolerance.beside(right, other, 1e-6, dtype)


def output_rows(head: Head, rows: Rows, causal: bool, scale: Any) -> list[Any]:
    """The output's rows."""
    at = np.arange(len(head["k"]))
    seen = at <= rows[:, None] if causal else np.ones((len(rows), len(at)), bool)
    return [cases.attention(head["q"][rows], head["k"], head["v"], seen, scale)]


def gradient_rows(head: Head, rows: Rows, causal: bool, scale: Any) -> list[Any]:
    """The rows of dq, dk and dv, by csrc/attention.h."""
    q, k, v, out, lse, dout = (head[name] for name in INPUTS)
    at = np.arange(len(k))
    D = (dout * out).sum(-1)

    def weights(some: Rows, other: Rows) -> tuple[Any, Any]:
        """P and dS of some queries and keys."""
        s = scale * (q[some] @ k[other].T) - lse[some, None]
        if causal:
            s[at[other] > at[some][:, None]] = -np.inf
        p = np.exp(s)
        return p, scale * p * (dout[some] @ v[other].T - D[some, None])

    _, ds_queries = weights(rows, at)
    p, ds_keys = weights(at, rows)
    return [ds_queries @ k, ds_keys.T @ q, p.T @ dout]


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets in a random slot of the shared memory, each by some cache lines from the slot's own."""
    room = [-(-n // PAGE) * PAGE + JITTER * LINE for n in sizes]
    start = secrets.randbelow(SLOTS) * sum(room)
    offsets = []
    for n in room:
        offsets.append(start + LINE * secrets.randbelow(JITTER))
        start += n
    return offsets, SLOTS * sum(room)
