"""The clock for kernels on a GPU: memory and events are the judge's, in a process beside the kernel's."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext.cuda.gpu import Memory
from shakespeare.lab.cuda.gpu import Gpu
from shakespeare.own.trial.clock import Clock, Timed, sampled
from shakespeare.own.trial.judge import PREPARE_SECONDS, Cpu, Player

SETS = 3  # of q, k, v and out
KEPT_SHARE = 0.25  # of the free memory, for outputs


class GpuClock(Clock):
    """Times one size. A call ends when the judge has copied the output, whatever the kernel's streams do.

    L2 is cleared before each call.
    """

    def __init__(
        self, file: Path, heads: int, sizes: list[tuple[int, int]], causal: bool, threads: int
    ) -> None:
        self._gpu = Gpu()
        (N, d), self._turn = sizes[0], 0
        self._shape = 1, heads, N, d
        self._memory = [
            {name: Memory(4 * heads * N * d) for name in ("q", "k", "v", "out")} for _ in range(SETS)
        ]
        self._sets = [{name: m.tensor(*self._shape) for name, m in each.items()} for each in self._memory]
        self.most_kept = int(KEPT_SHARE * self._gpu.free())
        super().__init__(file, heads, sizes, causal, threads)

    def _call(self, player: Player, timed: Timed, limit: float) -> tuple[float, Cpu]:
        self._turn = (self._turn + 1) % SETS
        tensors, seed = self._sets[self._turn], secrets.randbits(63)
        handles = {name: (m.handle().hex(), self._shape) for name, m in self._memory[self._turn].items()}
        request = {"gpu": handles, "causal": self.causal, "scale": timed.d**-0.5}
        player.ask(request, PREPARE_SECONDS)
        player.stop()
        given = inputs(seed, self._shape)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()  # before the inputs are there, because a kernel on the GPU can wait for them
        for name, t in given.items():
            tensors[name].copy_(t)
        tensors["out"].fill_(torch.nan)
        self._gpu.clear_cache()
        torch.cuda.synchronize()
        player.go(limit)
        timed.outs.append((seed, tensors["out"].clone()))
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end), Cpu(0.0, 0.0)

    def _is_right(self, timed: Timed, seed: int, got: Any) -> bool:
        given = {name: t.cpu().numpy() for name, t in inputs(seed, self._shape).items()}
        out = got.cpu().numpy()
        return all(expected.allows(out[0, h, rows]) for h, rows, expected in sampled(given, self.causal))

    def _check_threads(self) -> None:
        pass

    @contextlib.contextmanager
    def _one_processor(self) -> Iterator[None]:
        yield


def inputs(seed: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """q, k and v of normal numbers, on the GPU."""
    normal: Any = partial(
        torch.randn, shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
    )
    return {name: normal() for name in "qkv"}
