"""The cells of a sweep: which contender is timed at which size, tile, mask and number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from attention_ext import PARTS, SIMD, tiles
from attention_ext.parts import Dtype, check_dtype, resolve_simd
from lab import costs, machine

# part4_amx.cpp takes so many queries or more, for these SIMD helpers.
FEWEST_AMX_QUERIES, AMX_SIMDS = 32, (None, "auto", "portable")
OTHERS = ("sdpa", "onnx")  # what can be timed beside the parts; lab.bench.contenders says how


@dataclass(frozen=True)
class Cell:
    """One contender at one case: q is (batch, heads, queries, d), k and v are (batch, heads, N, d).

    simd, br, bc: None where the contender has none.
    """

    contender: str
    simd: str | None
    N: int
    queries: int
    d: int
    batch: int
    heads: int
    causal: bool
    br: int | None
    bc: int | None
    threads: int
    dtype: str = Dtype.FP32.value

    @property
    def by_amx(self) -> bool:
        """Whether AMX computes this where the processor has it; of PyTorch's SDPA it is assumed."""
        ours = self.contender == "part4" and self.queries >= FEWEST_AMX_QUERIES and self.simd in AMX_SIMDS
        return self.dtype == Dtype.BF16 and (ours or self.contender == "sdpa")

    @property
    def group(self) -> tuple:
        """Equal for cells that are timed together."""
        return self.N, self.queries, self.d, self.batch, self.heads, self.causal, self.dtype, self.threads

    @property
    def flops(self) -> float:
        """Useful floating-point operations of one call."""
        return self.case().flops

    @property
    def memory(self) -> int:
        """Bytes of q, k, v and the output, and of their float64 copies that verify the output."""
        B, H, Nq, Nk, d = self.batch, self.heads, self.queries, self.N, self.d
        return B * H * d * (Nq * (2 * 4 + 4 * 8) + Nk * (2 * 4 + 2 * 8))

    def case(self, heads: int | None = None, threads: int | None = None) -> costs.Case:
        """The call as lab.costs counts it. heads: all of the batch's; threads: the cell's unless given."""
        tile = {"br": self.br, "bc": self.bc} if self.br and self.bc else {}
        return costs.Case(
            self.queries,
            self.N,
            self.d,
            heads=heads or self.batch * self.heads,
            causal=self.causal,
            threads=threads or self.threads,
            dtype=Dtype(self.dtype),
            **tile,
        )


def plan(
    names: Sequence[str],
    *,
    lengths: Sequence[int] = (1024,),
    widths: Sequence[int] = (32,),
    queries: int | None = None,
    batch: int = 1,
    heads: int = 4,
    masks: Sequence[bool] = (False,),
    br: Sequence[int | None] = (None,),
    bc: Sequence[int | None] = (None,),
    threads: Sequence[int] = (1,),
    simds: Sequence[str] = ("auto",),
    dtype: str = Dtype.FP32.value,
) -> list[Cell]:
    """The cells of a sweep: every contender at every length, width, mask and number of threads.

    queries: as many as keys unless given. br, bc: tiles of parts that have them, None for the tuned one.
    simds: of SIMD. dtype: that of the inputs. Raises ValueError naming the argument that is wrong.
    """
    for what, chosen, known in (("contender", names, (*PARTS, *OTHERS)), ("simd", simds, SIMD)):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{what} is {name!r}; it must be one of {', '.join(known)}")
        if len(set(chosen)) < len(chosen) or not chosen:
            raise ValueError(f"{what} is {','.join(chosen)!r}; it must name one or more, each once")
    for name in names:
        if name in PARTS:
            check_dtype(name, dtype)
        elif name == "onnx" and dtype != Dtype.FP32:
            raise ValueError(f"dtype is {dtype!r}; contender 'onnx' takes fp32 only")
    cells = []
    for N, d, causal, count in itertools.product(lengths, widths, masks, threads):
        if causal and queries not in (None, 1, N):
            raise ValueError(
                f"queries is {queries}; with a causal mask it must be 1 or N={N}: PyTorch's mask differs"
            )
        causal = causal and queries != 1  # one query sees all keys
        for name in names:
            part = PARTS.get(name)
            for simd in simds if part and part.operator else (None,):
                tile_sizes = itertools.product(br, bc) if part and part.tiled else ((None, None),)
                for rows, columns in tile_sizes:
                    if part and part.tiled:
                        rows_of_all = batch * heads * (queries or N)
                        tuned = tiles.tile(resolve_simd(simd or "auto"), count, d, N, causal, rows_of_all)
                        rows, columns = rows or tuned[0], columns or tuned[1]
                    case = (N, queries or N, d, batch, heads, causal, rows, columns, count, dtype)
                    cells.append(Cell(name, simd, *case))
    return list(dict.fromkeys(cells))


def check_memory(cells: Sequence[Cell]) -> None:
    """Raise ValueError if a cell's inputs and outputs alone need more memory than this machine has free."""
    available = machine.available_memory()
    for cell in cells:
        if available is not None and cell.memory > available:
            raise ValueError(
                f"N={cell.N}, queries={cell.queries}, d={cell.d}, heads={cell.heads}, batch={cell.batch} "
                f"need {machine.size_text(cell.memory)}, and {machine.size_text(available)} are free"
            )
