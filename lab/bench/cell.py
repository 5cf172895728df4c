"""A cell of a sweep: one contender at one size, tile, mask and number of threads."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from shakespeare.attention_ext import AUTO, extension
from shakespeare.attention_ext.parts import Dtype, resolve_simd
from shakespeare.lab import rule_options
from shakespeare.lab.traffic import Case


@dataclass(frozen=True)
class Cell:
    """One contender at one case: q is (batch, heads, queries, d), k and v are (batch, heads, N, d).

    simd, br, bc: None if it has none. threads: the CPU's. device: one of DEVICES. l2: one of L2 on CUDA, else
    None. rules: as rule_options.parse() takes them. backward: the gradients of q, k and v are computed.
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
    device: str = "cpu"
    l2: str | None = None
    rules: str | None = None
    backward: bool = False

    def options(self, device: Any) -> dict[str, Any]:
        """The options of attention() for the rules, with tensors on a device."""
        found = rule_options.example(self.heads, self.N, device, **rule_options.parse(self.rules))
        if "documents" in found:
            found["documents"] = found["documents"].expand(self.batch, self.N)
        return found

    @property
    def seen(self) -> list[range]:
        """The keys that each query sees, by the rules."""
        return rule_options.seen(self.N, self.causal, **rule_options.parse(self.rules))

    @property
    def by_amx(self) -> bool:
        """Whether AMX computes this on a processor that has it; assumed for PyTorch's SDPA."""
        if self.device != "cpu" or self.dtype != Dtype.BF16:
            return False
        if self.contender != "part4":
            return self.contender == "sdpa"
        return resolve_simd(self.simd or "auto") == AUTO and self.queries >= extension.size("amx.BLOCK")

    @property
    def inputs(self) -> tuple:
        """Equal for cells that have the same q, k, v and mask."""
        shared = "N queries d batch heads causal dtype device rules backward"
        return tuple(getattr(self, name) for name in shared.split())

    @property
    def group(self) -> tuple:
        """Equal for cells that are compared with each other."""
        return *self.inputs, self.threads, self.l2

    @property
    def flops(self) -> float:
        """Useful floating-point operations of one call; those of gradients as FlashAttention counts them."""
        return self.case().flops * (2.5 if self.backward else 1)

    @property
    def memory(self) -> int:
        """Bytes of q, k, v and the output, and of their float64 copies that verify the output.

        On CUDA the copies of k and v are slices. Gradients take up to four times as much.
        """
        copies = 2 * 8 if self.device == "cpu" else 0
        row = self.queries * (2 * 4 + 4 * 8) + self.N * (2 * 4 + copies)
        return (4 if self.backward else 1) * self.batch * self.heads * self.d * row

    @property
    def least_traffic(self) -> float:
        """Bytes of q, k, v and the output, and of their gradients, which each move through memory once."""
        rows = (2 * self.queries + 2 * self.N) * (1 + self.backward)
        return float(self.batch * self.heads * self.d * rows * Dtype(self.dtype).bytes)

    def case(self, heads: int | None = None, threads: int | None = None) -> Case:
        """The call, for lab.traffic. heads: by default all of the batch. threads: by default the cell's."""
        sizes = self.queries, self.N, self.d, heads or self.batch * self.heads, self.causal
        tile: dict[str, Any] = {"br": self.br, "bc": self.bc} if self.br and self.bc else {}
        if self.rules:
            tile["keys"] = fmean(map(len, self.seen))
        return Case(*sizes, threads=threads or self.threads, dtype=Dtype(self.dtype), **tile)
