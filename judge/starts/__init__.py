"""What `gpt.py try --new FILE` writes: the naive part, or its backward pass, with its loop nest explained.

With --from it is a kernel of the CUDA ladder.
"""

from pathlib import Path

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.build.nvrtc import SOURCES
from shakespeare.attention_ext.cuda.kernels import KERNELS
from shakespeare.attention_ext.parts import Dtype


def write(
    file: Path,
    backward: bool = False,
    triton: bool = False,
    kernel: str | None = None,
    dtype: str | None = None,
) -> list[Path]:
    """Write the start for a file's suffix, .cpp, .ispc, .cu or .py, and return the files.

    kernel: a name of KERNELS, whose source for a dtype is written, and the header of its name if it has one.
    Raises ValueError if a file exists, or if the start does not take the dtype.
    """
    name = "start" + ("_triton" if triton else "") + ("_backward" if backward else "") + file.suffix
    origin = Path(__file__).parent / name
    header = SOURCES / f"kernel{kernel}.h"
    if kernel:
        sources = KERNELS[kernel].sources
        origin = SOURCES / sources.get(Dtype(dtype or "fp32"), next(iter(sources.values())))
    user_kernel.dtype_for(origin, dtype)
    origins = {file: origin}
    if header.exists():
        origins[file.parent / header.name] = header
    for path in origins:
        if path.exists():
            which = "that file" if path == file else path.name
            raise ValueError(f"--new is {str(file)!r}; {which} exists, and is not replaced")
    for path, origin in origins.items():
        with path.open("x", encoding="utf-8") as new:
            new.write(origin.read_text(encoding="utf-8"))
    return [*origins]
