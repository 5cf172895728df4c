"""The memory of a call beside its traffic: its scratch, and the sizes of the kernels' blocks."""

from shakespeare.attention_ext import extension, user_kernel
from shakespeare.attention_ext.parts import check_part
from shakespeare.lab.traffic import FLOAT_BYTES, Block, Case


def block_of(simd: str | None) -> Block:
    """The sizes that the kernels over these SIMD helpers are compiled with; compiles them if need be."""
    names = ("lanes", "panel", "rows", "part2.T", "part2.DEPTH", "part4.STEP")
    return Block(*(extension.size(name, simd or "auto") for name in names))


def scratch(part: str, case: Case, simd: str | None = "auto") -> int:
    """Bytes of scratch of a call of a part, counted by its kernel; 0 of a user's file that does not say.

    Raises ValueError for a name that is not in PARTS, and BuildError as extension.load() does.
    """
    row = check_part(part)
    sizes = (1, case.heads, case.Nq, case.Nk, case.d)
    if row.file:
        kernel = user_kernel.loaded(row.file)
        if not isinstance(kernel, user_kernel.Native):
            return 0
        return FLOAT_BYTES * kernel.scratch(*sizes, case.causal, case.threads)
    if row.operator is None:  # PyTorch: S and P of all heads
        return FLOAT_BYTES * 2 * case.heads * case.Nq * case.Nk
    tile = {"br": case.Br, "bc": case.Bc} if row.tiled else {}
    return extension.scratch(part, sizes, threads=case.threads, simd=simd or "auto", dtype=case.dtype, **tile)
