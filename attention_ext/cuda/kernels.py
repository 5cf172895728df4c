"""Launches the CUDA kernels of steps.STEPS on PyTorch's tensors and current stream.

Nothing here waits for the GPU, and all memory comes from PyTorch's allocator, so a CUDA graph can capture a
call.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_ext.build import nvrtc
from attention_ext.cuda import steps
from attention_ext.cuda.steps import FORMATS, Step, Tile
from attention_ext.parts import PARTS, BuildError, Dtype

ALIGNMENT = 16  # bytes of a vector load
MERGE_THREADS = 128  # MERGE_THREADS of split.cu
EARLY_LAUNCH = (9, 0)  # the least compute capability
MOST_DISTINGUISHED = 16  # queries, by which tiles differ
CTYPES = (ctypes.Structure, ctypes._SimpleCData)


class Strides(ctypes.Structure):
    _fields_ = [("batch", ctypes.c_longlong), ("head", ctypes.c_longlong), ("row", ctypes.c_longlong)]


class Call(ctypes.Structure):
    """struct Call of csrc/cuda/call.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("q_strides", Strides),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("batches", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("Nq", ctypes.c_int),
        ("Nk", ctypes.c_int),
        ("causal", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True)
class Gpu:
    """What decides how a kernel is compiled. shared: the most bytes of shared memory for a block."""

    name: str
    capability: tuple[int, int]
    shared: int
    multiprocessors: int


@functools.cache
def gpu(index: int) -> Gpu:
    """The GPU with this number."""
    found: Any = torch.cuda.get_device_properties(index)  # PyTorch's types leave out some of its fields
    return Gpu(
        found.name,
        (found.major, found.minor),
        found.shared_memory_per_block_optin,
        found.multi_processor_count,
    )


def attribute(name: str, index: int) -> int:
    """An attribute of the GPU with this number, by the driver's name without CU_DEVICE_ATTRIBUTE."""
    driver = _driver()
    named = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return _check(driver.cuDeviceGetAttribute(named, _check(driver.cuDeviceGet(index))))


def check_gpu() -> None:
    """Raise BuildError, in one line, if PyTorch cannot use a GPU here."""
    if torch.version.cuda is None:
        raise BuildError(
            f"device is 'cuda', and this PyTorch ({torch.__version__}) is built without CUDA; pytorch.org "
            "has builds with it"
        )
    if not torch.cuda.is_available():
        raise BuildError("device is 'cuda', and PyTorch finds no GPU and driver here (see nvidia-smi)")


def choose(step: str | int | None, d: int, dtype: Dtype, index: int, few: bool = False) -> Step:
    """The step by its name, the fastest that takes such heads if None, on the GPU with this number.

    few: whether there are so few queries that splitting the keys is faster, by steps.few_queries().
    Raises ValueError if there is none, or the step does not take the dtype or run on the GPU.
    """
    return choose_for(step, d, dtype, gpu(index), few)


def choose_for(step: str | int | None, d: int, dtype: Dtype, on: Gpu, few: bool = False) -> Step:
    """choose() for a GPU that need not be here."""
    if step is None or step == "":
        return steps.default(d, dtype, on.capability, on.shared, few)
    row = steps.check_step(step)
    if dtype not in row.dtypes:
        raise ValueError(f"step is {row.name!r}; it takes {', '.join(row.dtypes)}, not {dtype}")
    if not row.runs_on(on.capability):
        major, minor = row.capability
        has = ".".join(map(str, on.capability))
        needs = f"{major}.x" if row.only else f"{major}.{minor} or more"
        raise ValueError(f"step is {row.name!r}; it needs compute capability {needs}; {on.name} has {has}")
    return row


def architecture(step: Step, capability: tuple[int, int]) -> str:
    """What NVRTC compiles a step for; instructions of one architecture alone need the suffix."""
    return f"sm_{capability[0]}{capability[1]}{'a' * step.only}"


def source(step: Step, tile: Tile, d: int, dtype: Dtype, capability: tuple[int, int]) -> nvrtc.Source:
    """The kernel to compile. d: as given, not yet padded."""
    macros = {**tile.macros, "FORMAT": FORMATS[dtype], "HEAD_DIM": step.padded(d)}
    return nvrtc.Source.of(step.source(dtype), architecture(step, capability), macros)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel on a GPU. functions: of the driver, by their names in the source."""

    step: Step
    tile: Tile
    library: object  # keeps the functions alive
    functions: dict[str, object]

    def launch(self, name: str, blocks: int, *arguments: Any, threads: int = 0, early: bool = False) -> None:
        """Launch a function on the current stream of the current device.

        arguments: ctypes objects, or the driver's tensor maps. threads: of a block without shared memory; the
        tile's unless given. early: once all blocks of the launch before allow it, instead of at its end
        (programmatic dependent launch); the function waits for what it reads. For sm_90 and later.
        """
        driver = _driver()
        block, shared = ((threads, 1), 0) if threads else (self.tile.threads, self.tile.shared)
        pointers = (ctypes.c_void_p * len(arguments))(*map(_address, arguments))
        stream, parameters = torch.cuda.current_stream().cuda_stream, ctypes.addressof(pointers)
        function = self.functions[name]
        if not early:
            _check(driver.cuLaunchKernel(function, blocks, 1, 1, *block, 1, shared, stream, parameters, 0))
            return
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = *block, 1
        config.sharedMemBytes, config.hStream = shared, stream
        config.attrs, config.numAttrs = [_early()], 1
        _check(driver.cuLaunchKernelEx(config, function, parameters, 0))

    def resident(self, name: str) -> int:
        """The most blocks of a function that a multiprocessor holds at a time, by the driver."""
        threads, shared = math.prod(self.tile.threads), self.tile.shared
        most = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
        return _check(most(self.functions[name], threads, shared))


@functools.cache
def _early() -> Any:
    """The driver's attribute of a launch that may begin before the one before has ended."""
    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _address(argument: Any) -> int:
    """Where an argument of a launch is, from where the driver copies it."""
    return ctypes.addressof(argument) if isinstance(argument, CTYPES) else int(argument.getPtr())


@functools.cache
def load(step: Step, tile: Tile, d: int, dtype: Dtype, index: int) -> Kernel:
    """The kernel of a step for heads of width d on a GPU, compiled if need be. Its context must be current.

    Raises BuildError if it cannot be compiled or loaded.
    """
    driver, on = _driver(), gpu(index)
    code = source(step, tile, d, dtype, on.capability).make()
    library = _check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    functions = {}
    for name in step.kernels:
        kernel = _check(driver.cuLibraryGetKernel(library, name.encode()))
        function = _check(driver.cuKernelGetFunction(kernel))
        if tile.shared > 48 * 1024:  # more must be asked for
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, tile.shared))
        functions[name] = function
    return Kernel(step, tile, library, functions)


def kernel_for(step: str, heads: int, Nq: int, Nk: int, d: int, dtype: Dtype, index: int) -> Kernel:
    """The kernel of a step, of the fastest one if its name is empty, for a call; heads: of all batches.

    Raises ValueError and BuildError as choose() and load() do. The GPU's context must be current.
    """
    few = steps.few_queries(Nq, Nk, heads, gpu(index).multiprocessors)
    return _prepared(step, d, dtype, index, few, min(Nq, MOST_DISTINGUISHED))


@functools.cache
def _prepared(step: str, d: int, dtype: Dtype, index: int, few: bool, queries: int) -> Kernel:
    row = choose(step, d, dtype, index, few)
    return load(row, row.tile(d, dtype, gpu(index).shared, queries), d, dtype, index)


def describe(part: str, step: str | int | None, d: int, dtype: Dtype = Dtype.FP32) -> str:
    """What computes a part on the current GPU, in a line for people."""
    row, index = PARTS[part], torch.cuda.current_device()
    if row.operator is None:
        return f"Attention by {row.summary} on {gpu(index).name}"
    chosen = choose(step, d, dtype, index)
    return f"CUDA step {chosen.name}, {chosen.summary}, on {gpu(index).name}"


def run(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, return_lse: bool, step: str = ""
) -> tuple[Tensor, Tensor]:
    """Part 4 by a step, by the fastest if its name is empty. The tensors are as attention() checks them.

    Returns the output (B, H, Nq, d), contiguous, and the logsumexp (B, H, Nq), or an empty tensor without it.
    """
    B, H, Nq, d = q.shape
    dtype = Dtype.of(q.dtype)
    Nk, index = k.shape[2], q.device.index
    with torch.cuda.device(q.device):
        kernel = kernel_for(step, B * H, Nq, Nk, d, dtype, index)
        row = kernel.step
        q, k, v = (_laid_out(t, row) for t in (q, k, v))
        out = q.new_empty(B, H, Nq, row.padded(d))
        lse = q.new_empty((B, H, Nq) if return_lse else (0,), dtype=torch.float32)
        call = Call(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            lse.data_ptr() if return_lse else None,
            *(Strides(*t.stride()[:3]) for t in (q, k, v)),
            B,
            H,
            Nq,
            Nk,
            causal,
            scale / math.log(2),
        )
        LAUNCHES.get(row.file, _launch_once)(kernel, call, q, k, v)
    return (out if out.shape[3] == d else out[..., :d].contiguous()), lse


def _launch_once(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A block for each tile of queries of each head."""
    kernel.launch(kernel.step.kernels[0], _tiles(kernel, call), call)


def _tiles(kernel: Kernel, call: Call) -> int:
    return call.batches * call.heads * -(-call.Nq // kernel.tile.br)


def _launch_for_each_tile_of_keys(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Step 1: as many launches as tiles of keys, with the state of all rows in global memory."""

    class State(ctypes.Structure):
        _fields_ = [(name, ctypes.c_void_p) for name in "mlo"]

    m, l = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    o = q.new_empty(q.shape, dtype=torch.float32)
    state = State(*(t.data_ptr() for t in (m, l, o)))
    for first_key in range(0, call.Nk, kernel.tile.bc):
        kernel.launch(kernel.step.kernels[0], _tiles(kernel, call), call, state, ctypes.c_int(first_key))


def _launch_resident(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Step 6: at most a block for each multiprocessor, which takes one tile after the other."""
    from attention_ext.cuda.tensor_maps import tensor_map

    tile = kernel.tile
    maps = tensor_map(q, tile.br), tensor_map(k, tile.bc), tensor_map(v, tile.bc)
    blocks = min(_tiles(kernel, call), gpu(q.device.index).multiprocessors)
    kernel.launch(kernel.step.kernels[0], blocks, *maps, call)


def _launch_split(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Few queries: a block for each span of keys, then one for each row, which merges the spans' results."""
    split, merge = kernel.step.kernels
    rows, tile = _tiles(kernel, call), kernel.tile
    slots = gpu(q.device.index).multiprocessors * tile.macros["BLOCKS"]
    count = steps.spans(rows, call.Nk, tile.bc, slots)
    B, H, Nq, d = q.shape
    partial = q.new_empty(B * H * Nq * count * (d + 2), dtype=torch.float32)
    arguments = call, ctypes.c_void_p(partial.data_ptr()), ctypes.c_int(count)
    kernel.launch(split, rows * count, *arguments)
    early = gpu(q.device.index).capability >= EARLY_LAUNCH
    kernel.launch(merge, B * H * Nq, *arguments, threads=MERGE_THREADS, early=early)


# How a file's kernels are launched, where it is not once.
LAUNCHES: dict[str, Callable[[Kernel, Call, Tensor, Tensor, Tensor], None]] = {
    "step1.cu": _launch_for_each_tile_of_keys,
    "step6.cu": _launch_resident,
    "split.cu": _launch_split,
}


def _laid_out(t: Tensor, step: Step) -> Tensor:
    """The tensor (B, H, N, d) as a step can read it: itself, or a copy whose rows are padded and aligned."""
    d, size = t.shape[3], t.element_size()
    if more := step.padded(d) - d:
        return torch.nn.functional.pad(t, (0, more))
    strides = [stride for stride, n in zip(t.stride(), t.shape[:3]) if n > 1]
    aligned = not step.vectors or (
        t.data_ptr() % ALIGNMENT == 0
        and all(stride * size % ALIGNMENT == 0 for stride in strides)
        and (t.stride(2) > 0 or t.shape[2] == 1)  # a tensor map cannot repeat a row
    )
    if aligned and (t.stride(3) == 1 or d == 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)


@functools.cache
def _driver():
    """The module cuda.bindings.driver. Raises BuildError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise nvrtc.missing("cuda.bindings is missing") from None
    return driver


def _check(result: tuple):
    """The values of a call of the driver. Raises BuildError if it failed."""
    error, *values = result
    if error != 0:
        _, name = _driver().cuGetErrorName(error)
        _, text = _driver().cuGetErrorString(error)
        raise BuildError(f"the CUDA driver failed: {name.decode()}, {text.decode()}")
    return values[0] if values else None
