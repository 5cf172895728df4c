"""CUDA's driver, and the only file that speaks to it: GPUs, memory, kernels on a GPU and their launches.

A user's kernel and the cuda engine run without torch.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.build.structs import CSRC, constants
from shakespeare.attention_ext.checks import first_line
from shakespeare.attention_ext.cuda.kernels import choose, queries_of
from shakespeare.attention_ext.cuda.launches import Compiled, Gpu, Kernel, Sizes
from shakespeare.attention_ext.cuda.tiles import Tile
from shakespeare.attention_ext.parts import PARTS, BuildError, Dtype
from shakespeare.attention_ext.rules import ScoreMod

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = constants(CSRC / "cuda" / "numbers.h")
FORMATS = {dtype: _NUMBERS[dtype.name] for dtype in Dtype}  # FORMAT of csrc/cuda/call.h
GRANTED = 48 * 1024  # bytes of shared memory that a block has without asking


@functools.cache
def bindings() -> Any:
    """The module cuda.bindings.driver. Raises BuildError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise nvrtc.missing("cuda.bindings is missing") from None
    return driver


def checked(result: tuple) -> Any:
    """The value of a driver's call, or a list of several or none. Raises MemoryError or BuildError."""
    error, *values = result
    if error != 0:
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise MemoryError("the GPU's memory does not suffice")
        _, text = bindings().cuGetErrorString(error)
        raise BuildError(f"the CUDA driver failed: {error.name}, {text.decode()}")
    return values[0] if len(values) == 1 else values


def check_gpu() -> None:
    """Raise BuildError, in one line, if PyTorch cannot use a GPU here."""
    import torch

    if torch.version.cuda is None:
        what = f"this PyTorch ({torch.__version__}) is built without CUDA"
        raise BuildError(f"device is 'cuda', and {what}; pytorch.org has builds with it")
    if not torch.cuda.is_available():
        raise BuildError("device is 'cuda', and PyTorch finds no GPU and driver here (see nvidia-smi)")


@functools.cache
def gpu(index: int = 0) -> Gpu:
    """The GPU with this number. Raises BuildError, in one line, if there is none or no cuda-bindings."""
    driver = bindings()
    try:
        checked(driver.cuInit(0))
        device = checked(driver.cuDeviceGet(index))
    except RuntimeError as error:  # the driver's library is missing
        raise BuildError(f"device is 'cuda', and no GPU can be used: {first_line(error)}") from None
    name = checked(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    major, minor = (attribute(f"COMPUTE_CAPABILITY_{part}", index) for part in ("MAJOR", "MINOR"))
    kilohertz = attribute("MEMORY_CLOCK_RATE", index)
    bits = attribute("GLOBAL_MEMORY_BUS_WIDTH", index)
    return Gpu(
        name,
        capability=(major, minor),
        shared=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", index),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT", index),
        l2=attribute("L2_CACHE_SIZE", index),
        hertz=1e3 * attribute("CLOCK_RATE", index),
        bandwidth=2e3 * kilohertz * bits / 8,  # two transfers in a clock
        memory=int(checked(driver.cuDeviceTotalMem(device))),
        identity=checked(driver.cuDeviceGetUuid(device)).bytes.hex(),
    )


def count() -> int:
    """The GPUs that this process may use, at least one. Raises BuildError as gpu() does."""
    gpu()  # which starts the driver
    return checked(bindings().cuDeviceGetCount())


def attribute(name: str, index: int = 0) -> int:
    """An attribute of the GPU with this number, by the driver's name without CU_DEVICE_ATTRIBUTE."""
    driver = bindings()
    named = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return checked(driver.cuDeviceGetAttribute(named, checked(driver.cuDeviceGet(index))))


@functools.cache
def _context(index: int) -> Any:
    gpu(index)  # which starts the driver
    driver = bindings()
    return checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(index))))


def activate(index: int = 0) -> None:
    """Make a GPU's primary context, PyTorch's too, the calling thread's. Raises BuildError as gpu() does."""
    checked(bindings().cuCtxSetCurrent(_context(index)))


def stream() -> Any:
    """A new stream, which does not wait for others'."""
    return checked(bindings().cuStreamCreate(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))


def synchronize(stream: Any = 0) -> None:
    """Wait for what a stream was given. Raises BuildError if that failed."""
    checked(bindings().cuStreamSynchronize(stream))


def captured(stream: Any, launches: Callable[[], None]) -> Callable[[], None]:
    """What launches() gives the stream, which does not run yet, as a CUDA graph; a call launches that."""
    driver = bindings()
    checked(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    launches()
    graph = checked(driver.cuGraphInstantiate(checked(driver.cuStreamEndCapture(stream)), 0))
    return lambda: checked(driver.cuGraphLaunch(graph, stream))


def synchronize_all() -> None:
    """Wait for all that the current context was given. Raises BuildError if that failed."""
    checked(bindings().cuCtxSynchronize())


class Event:
    """A moment of a stream."""

    def __init__(self) -> None:
        self._event = checked(bindings().cuEventCreate(bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def record(self, stream: Any) -> None:
        """Make it the end of what the stream was given."""
        checked(bindings().cuEventRecord(self._event, stream))

    def wait(self) -> None:
        """Wait for the moment; for none, if it was never recorded."""
        checked(bindings().cuEventSynchronize(self._event))


@functools.cache
def address_of(handle: bytes) -> int:
    """The address here of another process's memory, by its handle()."""
    driver = bindings()
    known = driver.CUipcMemHandle()
    ctypes.memmove(known.getPtr(), handle, len(handle))
    at_first_use = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(checked(driver.cuIpcOpenMemHandle(known, at_first_use)))


class Memory:
    """Zeroed bytes on the GPU, or on the host (`bytes`) where the GPU reaches them; freed with the object."""

    def __init__(self, size: int, host: bool = False) -> None:
        driver = bindings()
        self.size = size
        self._free = driver.cuMemFreeHost if host else driver.cuMemFree
        if host:
            self.address = int(checked(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE)))
            self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        else:
            self.address = int(checked(driver.cuMemAlloc(size)))
            checked(driver.cuMemsetD8(self.address, 0, size))

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Memory:
        """An array's numbers on the GPU."""
        memory = cls(array.nbytes)
        memory.write(array)
        return memory

    def write(self, array: NDArray[Any]) -> None:
        """Copy an array's numbers to the beginning."""
        data = np.ascontiguousarray(array)
        checked(bindings().cuMemcpyHtoD(self.address, data.ctypes.data, data.nbytes))

    def read(self, array: NDArray[Any], offset: int = 0) -> NDArray[Any]:
        """Copy bytes from an offset on into a contiguous array, which is returned."""
        checked(bindings().cuMemcpyDtoH(array.ctypes.data, self.address + offset, array.nbytes))
        return array

    def handle(self) -> bytes:
        """What address_of() takes in another process."""
        driver = bindings()
        found = checked(driver.cuIpcGetMemHandle(self.address))
        return ctypes.string_at(found.getPtr(), driver.CU_IPC_HANDLE_SIZE)

    def tensor(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        """A tensor in this memory, which must live as long."""
        return tensor_at(self.address, shape, dtype)

    def write_async(self, host: Memory, size: int, stream: Any) -> None:
        """Let a stream copy so many bytes of the host to the beginning."""
        checked(bindings().cuMemcpyHtoDAsync(self.address, host.address, size, stream))

    def set_async(self, number: float, stream: Any) -> None:
        """Let a stream set the first four bytes to a float32."""
        bits = ctypes.c_uint.from_buffer(ctypes.c_float(number)).value
        checked(bindings().cuMemsetD32Async(self.address, bits, 1, stream))

    def clear_async(self, stream: Any) -> None:
        """Let a stream set all bytes to zero."""
        checked(bindings().cuMemsetD8Async(self.address, 0, self.size, stream))

    def copy_async(self, to: int, origin: int, size: int, stream: Any) -> None:
        """Let a stream copy bytes from one offset to another."""
        checked(bindings().cuMemcpyDtoDAsync(self.address + to, self.address + origin, size, stream))

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():  # the process frees it then
            self._free(self.address)


def tensor_at(address: int, shape: Sequence[int], dtype: Dtype) -> Tensor:
    """A contiguous tensor in memory at an address on the GPU."""
    import torch

    class Shared:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "version": 3,
            "shape": tuple(shape),
            "typestr": f"<i{dtype.bytes}",
            "data": (address, False),
        }

    return torch.as_tensor(Shared(), device="cuda").view(dtype.torch_dtype)


class Module:
    """The kernels of a source on the current context's GPU. Raises BuildError if it does not compile."""

    def __init__(self, source: nvrtc.Source) -> None:
        self._library = checked(bindings().cuLibraryLoadData(source.make(), [], [], 0, [], [], 0))

    def function(self, name: str, shared: int = 0, big_clusters: bool = False) -> Any:
        """A kernel by its name, which may have so many bytes of shared memory, and clusters of 16 blocks."""
        driver = bindings()
        kernel = checked(driver.cuLibraryGetKernel(self._library, name.encode()))
        function = checked(driver.cuKernelGetFunction(kernel))
        attributes = {"NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 1} if big_clusters else {}
        if shared > GRANTED:
            attributes["MAX_DYNAMIC_SHARED_SIZE_BYTES"] = shared
        for title, value in attributes.items():
            named = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{title}")
            checked(driver.cuFuncSetAttribute(function, named, value))
        return function

    def ints(self, name: str, count: int) -> list[int]:
        """The numbers of a global array of int."""
        array = (ctypes.c_int * count)()
        address, size = checked(bindings().cuLibraryGetGlobal(self._library, name.encode()))
        checked(bindings().cuMemcpyDtoH(ctypes.addressof(array), address, size))
        return list(array)


def launch(
    function: Any,
    blocks: int,
    threads: int,
    *arguments: Any,
    shared: int = 0,
    early: bool = False,
    stream: Any = None,
) -> None:
    """Launch a kernel on a stream, by default PyTorch's. arguments: ctypes objects. shared: bytes of a block.

    early: a programmatic dependent launch, which begins before the last one ends and waits for that itself.
    """
    if stream is None:
        import torch

        stream = torch.cuda.current_stream().cuda_stream
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    launch_prepared(prepared_launch(blocks, threads, shared, stream, early=early), function, pointers)


def prepared_launch(
    blocks: int,
    threads: int,
    shared: int,
    stream: Any,
    cluster: int = 0,
    cooperative: bool = False,
    early: bool = False,
) -> Any:
    """A launch for the driver. cluster: blocks of each. cooperative: all run at once. early: see launch()."""
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX = blocks
    config.gridDimY = 1
    config.gridDimZ = 1
    config.blockDimX = threads
    config.blockDimY = 1
    config.blockDimZ = 1
    config.sharedMemBytes = shared
    config.hStream = stream
    attribute = driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    if cluster:
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x = cluster
        size.y = 1
        size.z = 1
        attribute.value.clusterDim = size
    elif early:
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
    else:
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = int(cooperative)
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


def launch_prepared(config: Any, function: Any, pointers: Any) -> None:
    """Launch a kernel. pointers: a ctypes array of the addresses of its arguments."""
    checked(bindings().cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


def most_clusters(function: Any, config: Any) -> int:
    """The most clusters of a prepared launch that run at a time; 0 if none does."""
    error, count = bindings().cuOccupancyMaxActiveClusters(function, config)
    return 0 if error else count


def source(
    row: Kernel,
    tile: Tile,
    d: int,
    dtype: Dtype,
    capability: tuple[int, int],
    rules: int = 0,
    mod: ScoreMod | None = None,
) -> nvrtc.Source:
    """The kernel to compile. d: as given, not yet padded. rules: a sum of launches.RULES.

    mod: a user's change of scores, with MODIFIED.
    """
    macros: dict[str, int | str] = {
        "FORMAT": FORMATS[dtype],
        "HEAD_DIM": row.padded(d),
        **tile.sizes,
        **({"RULES": rules} if rules else {}),
        "BR": tile.br,
        "BC": tile.bc,
        "THREADS": tile.threads,
    }
    file = Path(row.sources[dtype])  # a path, if it is a user's
    folder = file.parent if file.is_absolute() else None
    arch = nvrtc.arch(capability) + ("a" if row.only else "")  # for instructions of this one alone
    headers = None
    if mod:
        headers = mod.kept
        macros["SCORE_MOD"] = f'"user/{mod.header.name}"'
    return nvrtc.Source(file.name, arch, macros, folder, lines=folder is not None, headers=headers)


@functools.cache
def load(
    row: Kernel,
    tile: Tile,
    d: int,
    dtype: Dtype,
    index: int,
    rules: int = 0,
    mod: ScoreMod | None = None,
) -> Compiled:
    """A kernel for heads of width d on a GPU, whose context must be current. Raises as Module."""
    on = gpu(index)
    module = Module(source(row, tile, d, dtype, on.capability, rules, mod))
    functions = {name: module.function(name, tile.shared) for name in row.functions}
    return Compiled(row, tile, row.padded(d), on, module, functions)


def compiled(
    kernel: str | None,
    call: Sizes,
    d: int,
    dtype: Dtype,
    index: int,
    rules: int = 0,
    mod: ScoreMod | None = None,
) -> Compiled:
    """The kernel with this name, the fastest one for None, for a call. rules, mod: as source() takes them.

    Raises ValueError and BuildError as kernels.choose() and load() do. The GPU's context must be current.
    """
    queries = queries_of(call, dtype, gpu(index), rules)
    return load(*choose(kernel, d, dtype, gpu(index), queries, rules), d, dtype, index, rules, mod)


def resident(kernel: Compiled) -> int:
    """The most blocks of each of a kernel's functions that a multiprocessor holds at a time."""
    occupancy = bindings().cuOccupancyMaxActiveBlocksPerMultiprocessor
    tile = kernel.tile
    return min(
        checked(occupancy(function, tile.threads, tile.shared)) for function in kernel.functions.values()
    )


def describe(part: str, kernel: str | None, d: int, dtype: Dtype = Dtype.FP32) -> str:
    """What computes a part on the current GPU, in a line for people."""
    import torch

    row = PARTS[part]
    on = gpu(torch.cuda.current_device())
    if row.operator is None:
        return f"Attention by {row.summary} on {on.name}"
    chosen, _ = choose(kernel, d, dtype, on)
    return f"CUDA kernel {chosen.name}, {chosen.summary}, on {on.name}"
