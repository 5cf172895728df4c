"""A user's file as a part: C++ and ISPC are compiled, CUDA by NVRTC, Python is imported.

load() gives the kernel, attend() calls it with tensors. A file is compiled or imported only by these, so only
where its user has named it. torch is imported for CUDA and by files that import it.
"""

from __future__ import annotations

import ctypes
import functools
import linecache
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import cache, nvrtc, recipes
from shakespeare.attention_ext.parts import BuildError, Dtype, Part

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float32]
NAME = "attention_ext_own"  # of the build directories
SHARED_BYTES = 163 * 1024  # of a block, for which a kernel of the ladder is compiled where there is no GPU
MISSING = {
    ".cpp": "void attention(const Attention&, float* scratch)",
    ".ispc": "export void attention(const uniform Attention& a, uniform float scratch[])",
    ".cu": 'extern "C" __global__ void attention(const Call call)',
    ".py": "def attention(q, k, v, causal, scale)",
}
# The user's kernel and how it is launched. NVRTC's messages have the lines of the user's file.
CUDA = """\
#include "call.h"
extern "C" __global__ void attention(const Call call);
#line 1 "{name}"
{text}
#ifndef SHARED
#define SHARED 0
#endif
extern "C" {{ __device__ int attention_launch[3] = {{BR, THREADS, SHARED}}; }}
"""


def row(part: str) -> Part:
    """The row of a user's file. Raises ValueError unless the file exists."""
    file = Path(part)
    if not file.is_file():
        raise ValueError(f"part is {part!r}; there is no such file")
    return Part(
        part,
        "YOUR ATTENTION",
        f"the kernel in {file.name}",
        dtypes={device(file): ("float32",)},
        file=file,
        attend=functools.partial(attend, file),
    )


def device(file: Path) -> str:
    """Where the file's kernel runs: 'cuda' for .cu, and for Python with Triton or, on a GPU, Numba's CUDA."""
    if file.suffix == ".cu":
        return "cuda"
    if file.suffix != ".py":
        return "cpu"
    text = file.read_text("utf-8-sig", errors="replace")
    if re.search(r"^\s*(import|from)\s+triton\b", text, re.M):
        return "cuda"
    return "cuda" if uses_numba_cuda(text) and not simulated() else "cpu"


def uses_numba_cuda(text: str) -> bool:
    """Whether Python imports numba.cuda."""
    return bool(
        re.search(r"^\s*(from\s+numba\s+import\s.*\bcuda\b|(import|from)\s+numba\.cuda\b)", text, re.M)
    )


@functools.cache
def simulated() -> bool:
    """Whether Numba's CUDA kernels run in its simulator: there is no GPU."""
    return not (Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists())


def loaded(file: Path) -> Any:
    """The kernel of a file, a Native, OnCuda or InPython; a changed file is compiled or imported again.

    Raises BuildError if it cannot be compiled or has no function `attention`.
    """
    status = file.stat()
    return load(file.resolve(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(8)
def load(file: Path, *version: int) -> Any:
    """loaded() for a version of the file."""
    text = file.read_text("utf-8-sig", errors="replace")
    if file.suffix == ".cu" and of_ladder(text):
        return OnLadder(file)
    if not re.search(r"\battention\b", text):
        raise BuildError(f"{file.name} has no function attention; it must define {MISSING[file.suffix]}")
    kinds: dict[str, Any] = {".cu": OnCuda, ".py": InPython}
    return kinds.get(file.suffix, Native)(file)


def attend(file: Path, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """The output (B, H, Nq, d) of a file's kernel; checks.check_tensors() has checked the tensors.

    Raises BuildError as loaded() does, and RuntimeError with what the kernel raised.
    """
    import torch

    kernel = loaded(file)
    if kernel.takes_tensors:
        return kernel(q, k, v, causal, scale)
    arrays = [t.detach().numpy() for t in (q, k, v)]
    return torch.from_numpy(kernel(*arrays, causal=causal, scale=scale, threads=torch.get_num_threads()))


def make(file: Path, program: str = "", march: str = "native") -> Path:
    """The library of a file in C++ or ISPC, or one of recipes.OWN_PROGRAMS, compiled if need be.

    march: as in recipes.own(). Raises BuildError if it cannot be compiled.
    """
    try:
        return recipes.own(file, program, march).make()
    except BuildError as error:
        if re.search(r"undefined reference to `attention|undefined symbol.*attention\(", str(error)):
            raise BuildError(f"{file.name} must define {MISSING[file.suffix]}") from None
        raise


TILE = 64  # br and bc of a call, for a kernel that has tiles


class Matrices(ctypes.Structure):
    """struct MatricesOf of csrc/attention.h; strides in floats."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch_stride", "head_stride", "row_stride", "col_stride")),
    ]


class Call(ctypes.Structure):
    """struct Attention of csrc/attention.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "H", "Nq", "Nk", "d")),
        *(("causal", ctypes.c_bool), ("scale", ctypes.c_float)),
        *(("br", ctypes.c_int64), ("bc", ctypes.c_int64), ("threads", ctypes.c_int)),
        *((name, Matrices) for name in ("q", "k", "v")),
        *(("out", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("kv", ctypes.c_int)),
    ]


class Native:
    """The kernel of a file in C++ or ISPC."""

    takes_tensors = False

    def __init__(self, file: Path) -> None:
        library = make(file)
        try:
            self._c = ctypes.CDLL(str(library))
        except OSError as error:
            raise BuildError(f"{file.name} was compiled but cannot be loaded: {error}") from None
        self._c.own_scratch_of.restype, self._c.own_call.restype = ctypes.c_int64, ctypes.c_char_p
        self._c.own_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._c.own_scratch_of.argtypes = (ctypes.c_void_p,)

    def scratch(self, B: int, H: int, Nq: int, Nk: int, d: int, causal: bool, threads: int) -> int:
        """The floats of scratch of a call. Raises RuntimeError if the file asks for less than none."""
        return self._scratch(Call(B, H, Nq, Nk, d, causal, 0, min(TILE, Nq), min(TILE, Nk), threads))

    def _scratch(self, call: Call) -> int:
        floats = self._c.own_scratch_of(ctypes.byref(call))
        if not 0 <= floats < 2**40:
            raise RuntimeError(f"scratch() returned {floats}; it must be a number of floats")
        return floats

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        causal: bool,
        scale: float,
        *,
        threads: int = 1,
        out: Array | None = None,
        scratch: Array | None = None,
    ) -> Array:
        """The output (B, H, Nq, d), in `out` if given. scratch: memory for a call, allocated by default."""
        q, k, v = (t if t.shape[3] == 1 or t.strides[3] == 4 else np.ascontiguousarray(t) for t in (q, k, v))
        (B, H, Nq, d), Nk = q.shape, k.shape[2]
        if out is None:
            out = np.empty((B, H, Nq, d), np.float32)
        matrices = (Matrices(t.ctypes.data, *(s // 4 for s in t.strides[:3]), 1) for t in (q, k, v))
        tile = min(TILE, Nq), min(TILE, Nk)
        call = Call(B, H, Nq, Nk, d, causal, scale, *tile, threads, *matrices, out.ctypes.data)
        if scratch is None:
            scratch = np.empty(self._scratch(call), np.float32)
        if why := self._c.own_call(ctypes.byref(call), scratch.ctypes.data):
            raise RuntimeError(f"the kernel threw: {why.decode(errors='replace')}")
        return out


class Strides(ctypes.Structure):
    """struct Strides of csrc/cuda/call.h."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("batch", "head", "row")]


class CudaCall(ctypes.Structure):
    """struct Call of csrc/cuda/call.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((name, Strides) for name in ("q_strides", "k_strides", "v_strides")),
        *((name, ctypes.c_int) for name in ("batches", "heads", "Nq", "Nk", "causal")),
        ("scale", ctypes.c_float),
    ]


class OnCuda:
    """The kernel of a file in CUDA: a block of THREADS threads for each BR queries of each head."""

    takes_tensors = True

    def __init__(self, file: Path) -> None:
        text = file.read_text("utf-8-sig")
        for macro in ("BR", "THREADS"):
            if not re.search(rf"^\s*#\s*define\s+{macro}\b", text, re.M):
                raise BuildError(f"{file.name} does not define {macro}; its head must: #define {macro} 64")
        self.name, self._text = file.name, CUDA.format(name=file.name, text=text)
        self._on: dict[tuple[int, int], tuple[Any, Any, list[int]]] = {}

    def source(self, d: int, arch: str) -> nvrtc.Source:
        """What NVRTC compiles for heads of width d and an architecture such as sm_90."""
        named = cache.fingerprint([self._text])
        folder = cache.real(cache.directory()) / f"{NAME}_{named}"
        cache.make(folder / "own.cu", self.name, self._write)
        cache.prune(folder)
        return nvrtc.Source("own.cu", arch, {"FORMAT": 0, "HEAD_DIM": d}, folder, lines=True)

    def _write(self, work: Path) -> Path:
        made = work / "own.cu"
        made.write_text(self._text, encoding="utf-8")
        return made

    def compiled(self, d: int, index: int) -> tuple[Any, Any, list[int]]:
        """The library, the function, and BR, THREADS and SHARED, for heads of width d on a GPU.

        Raises BuildError if NVRTC refuses the file or the GPU the launch.
        """
        if (d, index) not in self._on:
            from shakespeare.attention_ext.cuda.gpu import Module, gpu

            major, minor = gpu(index).capability
            module = Module(self.source(d, f"sm_{major}{minor}"))
            launch = module.ints("attention_launch", 3)
            self._on[d, index] = module, module.function("attention", launch[2]), launch
        return self._on[d, index]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        *,
        out: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The output (B, H, Nq, d) on q's GPU, in `out` if given. others are not used."""
        import torch

        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        with torch.cuda.device(q.device):
            pointers = [t.data_ptr() for t in (q, k, v, out)]
            strides = [t.stride()[:3] for t in (q, k, v)]
            at = q.device.index or 0, torch.cuda.current_stream().cuda_stream
            self.launch(pointers, strides, (*q.shape, k.shape[2]), causal, scale, *at)
        return out

    def launch(
        self,
        pointers: Sequence[int],
        strides: Sequence[Sequence[int]],
        sizes: tuple[int, int, int, int, int],
        causal: bool,
        scale: float,
        index: int = 0,
        stream: int = 0,
    ) -> None:
        """Launch the kernel on a GPU, whose context must be current.

        pointers: of q, k, v and out. strides: of q, k and v from a batch, head and row to the next, in
        floats. sizes: B, H, Nq, d, Nk. Raises BuildError as compiled() does, and RuntimeError if the launch
        fails.
        """
        from shakespeare.attention_ext.cuda.gpu import launch

        B, H, Nq, d, Nk = sizes
        _, function, (br, threads, shared) = self.compiled(d, index)
        shape = (B, H, Nq, Nk, causal, scale * math.log2(math.e))
        call = CudaCall(*pointers, None, *(Strides(*each) for each in strides), *shape)
        blocks = B * H * -(-Nq // br)
        try:
            launch(function, blocks, threads, call, shared=shared, stream=stream)
        except BuildError as error:
            what = f"{blocks} blocks of {threads} threads and {shared} bytes of shared memory"
            raise RuntimeError(f"the launch of {what} failed: {error}") from None


def of_ladder(text: str) -> str | None:
    """The kernel of the ladder that CUDA C++ defines, '1' to '6', as attention_kernel1 ...; else None."""
    found = re.search(r"__global__[^;{]*?\battention_kernel(\d)\s*\(", text)
    return found[1] if found else None


class OnLadder:
    """A kernel of the ladder in a file, such as attention_kernel4: it has that one's tiles and launches."""

    takes_tensors = True

    def __init__(self, file: Path) -> None:
        from shakespeare.attention_ext.cuda.kernels import KERNELS

        text = file.read_text("utf-8-sig")
        number = of_ladder(text)
        if number not in KERNELS:
            raise BuildError(f"{file.name} defines attention_kernel{number}; the ladder has none")

        def write(work: Path) -> Path:
            (work / file.name).write_text(text, encoding="utf-8")
            return work / file.name

        folder = cache.real(cache.directory()) / f"{NAME}_{cache.fingerprint([file.name, text])}"
        made = folder / file.name
        cache.make(made, file.name, write)
        cache.prune(folder)
        self._row = replace(KERNELS[number], name=str(made), sources={Dtype.FP32: str(made)})
        KERNELS[self._row.name] = self._row  # where the launcher looks

    def source(self, d: int, arch: str) -> nvrtc.Source:
        """What NVRTC compiles for heads of width d and an architecture such as sm_90."""
        from shakespeare.attention_ext.cuda.gpu import source
        from shakespeare.attention_ext.cuda.kernels import Gpu

        capability = int(arch[3:-1]), int(arch[-1])
        tile = self._row.tile(d, Dtype.FP32, Gpu(arch, capability, SHARED_BYTES, 1))
        return source(self._row, tile, d, Dtype.FP32, capability)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, **others: Any) -> Tensor:
        """The output (B, H, Nq, d) on q's GPU. others are not used."""
        from shakespeare.attention_ext.cuda import operators

        try:
            return operators.flash(q, k, v, causal, scale, self._row.name)
        except RuntimeError as error:
            operators.raise_reason(error)
            raise


class InPython:
    """The function of a file in Python. It gets tensors if the file imports torch, else NumPy's arrays.

    On a GPU without torch it gets the arrays of Numba.
    """

    def __init__(self, file: Path) -> None:
        self._file, text = file, file.read_text("utf-8-sig")
        if uses_numba_cuda(text) and simulated() and "numba" not in sys.modules:
            import os

            os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
        module = ModuleType(f"own_{file.stem}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module
        linecache.checkcache(str(file))
        sys.path.insert(0, str(file.parent))
        try:  # Python's own import may take bytecode of a version that was saved in the same second
            exec(compile(text, str(file), "exec"), vars(module))
        except Exception as error:
            raise BuildError(f"{file.name} cannot be imported: {self.reason(error)}") from error
        finally:
            sys.path.remove(str(file.parent))
        function = getattr(module, "attention", None)
        if not callable(function):
            raise BuildError(f"{file.name} must define {MISSING['.py']}")
        self._function, self._on_gpu = function, device(file) == "cuda"
        self._simulated = uses_numba_cuda(text) and not self._on_gpu
        self.takes_tensors = (
            bool(re.search(r"^\s*(import|from)\s+(torch|triton)\b", text, re.M)) or self._on_gpu
        )
        self._wants_tensors = bool(re.search(r"^\s*(import|from)\s+(torch|triton)\b", text, re.M))

    def reason(self, error: BaseException) -> str:
        """What was raised, with its line in the file."""
        line, trace = "", error.__traceback__
        while trace:
            if trace.tb_frame.f_code.co_filename == str(self._file):
                line = f" at {self._file.name}:{trace.tb_lineno}"
            trace = trace.tb_next
        said = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {said}{line}"

    def __call__(self, q: Any, k: Any, v: Any, causal: bool, scale: float, **others: Any) -> Any:
        """The output (B, H, Nq, d): a tensor for tensors, else an array. others are not used.

        Raises RuntimeError with what the function raised, and if its result has a wrong form.
        """
        given: Any = (q, k, v)
        if self._on_gpu and not self._wants_tensors:
            from numba import cuda

            given = tuple(map(cuda.as_cuda_array, given))
        elif self._simulated:  # Numba copies only contiguous arrays to a GPU
            given = tuple(map(np.ascontiguousarray, given))
        try:
            out = self._function(*given, causal, scale)
        except Exception as error:
            raise RuntimeError(f"the function raised {self.reason(error)}") from error
        if self.takes_tensors:
            import torch

            out = torch.as_tensor(out, device=q.device).to(torch.float32)
        else:
            out = np.asarray(out, np.float32)
        if tuple(out.shape) != tuple(q.shape):
            raise RuntimeError(
                f"the function returned the shape {tuple(out.shape)}; it must be q's, {tuple(q.shape)}"
            )
        return out
