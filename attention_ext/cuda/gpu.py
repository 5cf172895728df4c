"""CUDA's driver: what a GPU is, and the kernels of the table compiled and loaded on it.

torch is imported by the functions that need it: a user's kernel is tried without it.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.cuda.kernels import MOST_SPLIT, Gpu, Kernel, choose, few_queries
from shakespeare.attention_ext.cuda.tiles import Tile
from shakespeare.attention_ext.parts import PARTS, BuildError, Dtype

FORMATS = {dtype: number for number, dtype in enumerate(Dtype)}  # FORMAT of csrc/cuda/call.h


@functools.cache
def gpu(index: int) -> Gpu:
    """The GPU with this number."""
    import torch

    found: Any = torch.cuda.get_device_properties(index)  # PyTorch's types leave out some of its fields
    capability, shared = (found.major, found.minor), found.shared_memory_per_block_optin
    return Gpu(found.name, capability, shared, found.multi_processor_count)


def attribute(name: str, index: int) -> int:
    """An attribute of the GPU with this number, by the driver's name without CU_DEVICE_ATTRIBUTE."""
    driver = bindings()
    named = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return checked(driver.cuDeviceGetAttribute(named, checked(driver.cuDeviceGet(index))))


def check_gpu() -> None:
    """Raise BuildError, in one line, if PyTorch cannot use a GPU here."""
    import torch

    if torch.version.cuda is None:
        raise BuildError(
            f"device is 'cuda', and this PyTorch ({torch.__version__}) is built without CUDA; pytorch.org "
            "has builds with it"
        )
    if not torch.cuda.is_available():
        raise BuildError("device is 'cuda', and PyTorch finds no GPU and driver here (see nvidia-smi)")


def source(row: Kernel, tile: Tile, d: int, dtype: Dtype, capability: tuple[int, int]) -> nvrtc.Source:
    """The kernel to compile. d: as given, not yet padded."""
    macros = {"FORMAT": FORMATS[dtype], "HEAD_DIM": row.padded(d), **tile.sizes}
    macros |= {"BR": tile.br, "BC": tile.bc, "THREADS": tile.threads}
    # instructions of one architecture alone need the suffix
    file = Path(row.sources[dtype])  # a path, if it is a user's
    folder = file.parent if file.is_absolute() else None
    arch = f"sm_{capability[0]}{capability[1]}{'a' * row.only}"
    return nvrtc.Source(file.name, arch, macros, folder, lines=folder is not None)


@dataclass(frozen=True)
class Compiled:
    """A kernel on a GPU.

    width: of its heads, padded. functions: of the driver, by their names in the source.
    """

    row: Kernel
    tile: Tile
    width: int
    on: Gpu
    library: object  # keeps the functions alive
    functions: dict[str, Any]

    def launch(self, name: str, blocks: int, *arguments: Any) -> None:
        """Launch a function on the current stream of the current device. arguments: ctypes objects."""
        import torch

        driver, tile = bindings(), self.tile
        # where the arguments are, from where the driver copies them
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream, parameters = torch.cuda.current_stream().cuda_stream, ctypes.addressof(pointers)
        sizes = (blocks, 1, 1, tile.threads, 1, 1, tile.shared)
        checked(driver.cuLaunchKernel(self.functions[name], *sizes, stream, parameters, 0))

    def resident(self) -> int:
        """The most blocks of the first function that a multiprocessor holds at a time, by the driver."""
        most = bindings().cuOccupancyMaxActiveBlocksPerMultiprocessor
        return checked(most(self.functions[self.row.functions[0]], self.tile.threads, self.tile.shared))


@functools.cache
def load(row: Kernel, tile: Tile, d: int, dtype: Dtype, index: int) -> Compiled:
    """A kernel for heads of width d on a GPU, compiled if need be. The GPU's context must be current.

    Raises BuildError if it cannot be compiled or loaded.
    """
    driver, on = bindings(), gpu(index)
    code = source(row, tile, d, dtype, on.capability).make()
    library = checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    functions = {}
    for name in row.functions:
        function = checked(
            driver.cuKernelGetFunction(checked(driver.cuLibraryGetKernel(library, name.encode())))
        )
        if tile.shared > 48 * 1024:  # more must be asked for
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, tile.shared))
        functions[name] = function
    return Compiled(row, tile, row.padded(d), on, library, functions)


def compiled(kernel: str | None, heads: int, Nq: int, Nk: int, d: int, dtype: Dtype, index: int) -> Compiled:
    """The kernel with this name, the fastest one for None, for a call; heads: of all batches.

    Raises ValueError and BuildError as kernels.choose() and load() do. The GPU's context must be current.
    """
    few = few_queries(Nq, Nk, heads, gpu(index).multiprocessors, dtype)
    return _compiled(kernel, d, dtype, index, few, min(Nq, MOST_SPLIT))


@functools.cache
def _compiled(kernel: str | None, d: int, dtype: Dtype, index: int, few: bool, queries: int) -> Compiled:
    return load(*choose(kernel, d, dtype, gpu(index), few, queries), d, dtype, index)


def describe(part: str, kernel: str | None, d: int, dtype: Dtype = Dtype.FP32) -> str:
    """What computes a part on the current GPU, in a line for people."""
    import torch

    row, on = PARTS[part], gpu(torch.cuda.current_device())
    if row.operator is None:
        return f"Attention by {row.summary} on {on.name}"
    chosen, _ = choose(kernel, d, dtype, on)
    return f"CUDA kernel {chosen.name}, {chosen.summary}, on {on.name}"


@functools.cache
def bindings():
    """The module cuda.bindings.driver. Raises BuildError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise nvrtc.missing("cuda.bindings is missing") from None
    return driver


def checked(result: tuple, all: bool = False):
    """The value of a call of the driver, or all of them. Raises BuildError if it failed."""
    error, *values = result
    if error != 0:
        _, name = bindings().cuGetErrorName(error)
        _, text = bindings().cuGetErrorString(error)
        raise BuildError(f"the CUDA driver failed: {name.decode()}, {text.decode()}")
    return values if all else values[0] if values else None
