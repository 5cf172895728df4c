"""The costs of a call beside its traffic: its scratch, and the sizes of the kernels' blocks."""

from attention_ext import PARTS, extension
from attention_ext.parts import check_part
from lab.traffic import FLOAT_BYTES, Block, Case


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
