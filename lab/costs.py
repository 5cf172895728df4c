"""The costs of a call beside its traffic: its scratch, its waiting sums, the sizes of the kernels' blocks."""

from attention_ext import PARTS, extension
from attention_ext.parts import check_part
from lab.traffic import FLOAT_BYTES, Block, Case

OVERLAPPED_MULTIPLY_ADDS = 128  # most multiply-adds of the next sum that begin before a sum ends
SCALAR = ("part1",)  # parts that use one lane of a vector, and sum each output in one chain of additions


def block_of(simd: str | None = "auto") -> Block:
    """The sizes that the kernels over these SIMD helpers are compiled with; compiles them if need be."""
    names = ("lanes", "panel", "rows", "part2.T", "part2.DEPTH", "part4.STEP")
    return Block(*(extension.size(name, simd or "auto") for name in names))


def scratch(part: str, case: Case, simd: str | None = "auto") -> int:
    """Bytes of scratch of a call of a part, counted by its kernel.

    Raises ValueError for a name that is not in PARTS, and BuildError as extension.load() does.
    """
    if check_part(part).operator is None:  # PyTorch: S and P of all heads
        return FLOAT_BYTES * 2 * case.heads * case.Nq * case.Nk
    sizes = (1, case.heads, case.Nq, case.Nk, case.d)
    tile = {"br": case.Br, "bc": case.Bc} if PARTS[part].tiled else {}
    return extension.scratch(
        part, *sizes, threads=case.threads, simd=simd or "auto", dtype=case.dtype, **tile
    )


def chained(part: str, case: Case) -> float:
    """Multiply-adds that wait for the one before: those of the sums over the keys, for each output.

    A processor can begin only some of the operations after a sum. The scores are short sums, so several are
    in progress at a time. Parts that are not SCALAR have many sums in progress.
    """
    if part not in SCALAR:
        return 0
    return case.heads * case.Nq * max(0, case.seen - OVERLAPPED_MULTIPLY_ADDS) * case.d
