"""The clock for kernels on a GPU: memory and events are the judge's, in a process beside the kernel's."""

import math
import secrets
from pathlib import Path

import torch
from torch import Tensor

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.cuda.driver import Memory
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge.clock import Clock, Timed
from shakespeare.judge.diagnosis import FORWARD
from shakespeare.judge.gradients import BACKWARD
from shakespeare.judge.player import Player
from shakespeare.judge.speed import Size
from shakespeare.lab.cuda.device import Gpu

SETS = 3  # sets of q, k, v and out, used in turn
OUTPUT_SHARE = 0.25  # share of the free memory that outputs may take


class GpuClock(Clock):
    """Times one size. A call begins with L2 cleared and ends when the judge has copied the output."""

    pinned = False

    def __init__(self, file: Path, size: Size) -> None:
        self._gpu = Gpu()
        self._turn = 0
        subject = BACKWARD if size.backward else FORWARD
        self._input_names = subject.names
        self._into = [*subject.into]
        self._shape = (1, size.heads, size.N, size.d)
        names = (*self._input_names, *self._into)
        shapes = {name: self._shape[: 3 if name == "lse" else 4] for name in names}
        dtype = Dtype(size.dtype)
        self._memory = [
            {n: (Memory(dtype.bytes * math.prod(s)), s) for n, s in shapes.items()} for _ in range(SETS)
        ]
        self._sets = [{n: m.tensor(s, dtype) for n, (m, s) in each.items()} for each in self._memory]
        self.max_output_bytes = int(OUTPUT_SHARE * self._gpu.free())
        super().__init__(file, size)

    def _call(self, player: Player, timed: Timed, limit: float = 600.0) -> float:
        self._turn = (self._turn + 1) % SETS
        tensors = self._sets[self._turn]
        seed = secrets.randbits(62)
        handles = {name: (m.handle().hex(), shape) for name, (m, shape) in self._memory[self._turn].items()}
        size = self._size
        player.ask({"gpu": handles, "into": self._into, "causal": size.causal, "scale": timed.d**-0.5})
        player.stop()
        matrices = self._inputs(seed, timed)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()  # before the inputs are there, because a kernel on the GPU can wait for them
        for name, t in matrices.items():
            tensors[name].copy_(t)
        for name in self._into:
            tensors[name].fill_(torch.nan)
        self._gpu.clear_cache()
        torch.cuda.synchronize()
        player.go(limit)
        out = torch.cat([tensors[name] for name in self._into], 2)
        end.record()
        end.synchronize()
        if player is self._player:
            timed.outs.append((seed, out))
        return 1e-3 * begin.elapsed_time(end)

    def _inputs(self, seed: int, timed: Timed) -> dict[str, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        kind = Dtype(self._size.dtype).torch_dtype
        q, k, v, dout = (
            torch.randn(self._shape, device="cuda", generator=generator).to(kind) for _ in range(4)
        )
        if not self._size.backward:
            return {"q": q, "k": k, "v": v}
        out, lse = attention("part4", q, k, v, causal=self._size.causal, return_lse=True)
        return {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
