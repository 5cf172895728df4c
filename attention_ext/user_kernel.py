"""A user's file as a part: C++ and ISPC are compiled, CUDA by NVRTC, Python is imported.

row() gives its Part, loaded() its kernel, attend() calls it with tensors. A file is compiled or imported only
where its user has named it. torch is imported for CUDA and by files that import it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import linecache
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import cache, nvrtc, recipes, structs
from shakespeare.attention_ext.cuda.kernels import EVERY, KERNELS, Gpu
from shakespeare.attention_ext.parts import SUFFIXES, BuildError, Dtype, Part

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float32]
POINTER = ctypes.c_void_p
SHARED_BYTES = 227 * 1024  # a block has at most, where a kernel of the ladder is compiled without a GPU
# What runs a kernel in Python without a GPU, by its package: its name, and the variable that asks for it.
SIMULATORS = {
    "numba": ("Numba's simulator", "NUMBA_ENABLE_CUDASIM"),
    "triton": ("Triton's interpreter", "TRITON_INTERPRET"),
}
MISSING = {
    ".cpp": "void attention(const Attention&, float* scratch)",
    ".ispc": "export void attention(const uniform Attention& a, uniform float scratch[])",
    ".cu": 'extern "C" __global__ void attention(const Call call)',
    ".py": "def attention(q, k, v, causal, scale)",
}
BACKWARD = {  # the same of a backward pass
    ".cpp": "void attention_backward(const AttentionGradient&, float* scratch)",
    ".py": "def attention_backward(q, k, v, out, lse, dout, causal, scale)",
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


class Source(NamedTuple):
    """A file's text and what it asks for.

    device: 'cuda' for .cu, and on a GPU for Python with Triton or Numba's CUDA; else 'cpu'. torch: it
    imports torch or Triton. simulated: which of SIMULATORS runs it, or ''. compiling: Python that is compiled
    at its first call. ladder: '1' for CUDA C++ that defines attention_kernel1, or ''.
    dtypes: of q, k and v.
    """

    text: str
    device: str
    torch: bool = False
    simulated: str = ""
    compiling: bool = False
    ladder: str = ""
    triton: bool = False
    dtypes: tuple[Dtype, ...] = (Dtype.FP32,)

    @property
    def needs_torch(self) -> bool:
        """Whether its kernel takes tensors."""
        return self.torch or self.device == "cuda"

    @property
    def untimed(self) -> str:
        """Why its speed is not measured; '' if it is."""
        what = SIMULATORS[self.simulated][0] if self.simulated else ""
        return what and f"it was not timed: without a GPU it ran in {what}"

    def simulate(self) -> None:
        """Ask for the simulator, before its package is imported."""
        if self.simulated and self.simulated not in sys.modules:
            os.environ[SIMULATORS[self.simulated][1]] = "1"


def check_name(file: Path, backward: bool = False) -> None:
    """Raise ValueError if a file's suffix is none of a kernel's, or of a backward pass's."""
    suffixes = [*BACKWARD] if backward else SUFFIXES
    if file.suffix not in suffixes:
        with_it = "with --backward " if backward else ""
        raise ValueError(f"FILE is {str(file)!r}; {with_it}it must end with {', '.join(suffixes)}")


def read(file: Path) -> Source:
    """The source in a file."""
    text = file.read_text("utf-8-sig", errors="replace")
    if file.suffix == ".cu":
        defined = re.search(r"__global__[^;{]*?\battention_kernel(\d)\s*\(", text)
        ladder = defined[1] if defined else ""
        formats = KERNELS[ladder].dtypes if ladder in KERNELS else tuple(Dtype)
        return Source(text, "cuda", ladder=ladder, dtypes=formats)
    if file.suffix != ".py":
        return Source(text, "cpu")

    def imports(pattern: str) -> bool:
        return bool(re.search(rf"^\s*({pattern})\b", text, re.M))

    triton = imports(r"(import|from)\s+triton")
    torch = imports(r"(import|from)\s+torch")
    on_gpu = imports(r"from\s+numba\s+import\s.*\bcuda|(import|from)\s+numba\.cuda")
    package = "triton" if triton else "numba" if on_gpu else ""
    device, simulated = ("cuda", "") if package and has_gpu() else ("cpu", package)
    compiling = triton or imports(r"(import|from)\s+numba")
    dtypes: tuple[Dtype, ...] = (Dtype.FP32,)
    if triton:  # its interpreter multiplies the bits of bfloat16
        dtypes = tuple(Dtype) if device == "cuda" else (Dtype.FP32, Dtype.FP16)
    return Source(text, device, triton or torch, simulated, compiling, triton=triton, dtypes=dtypes)


def dtype_for(file: Path, dtype: str | None) -> Dtype:
    """A dtype, by default the first that a file's kernel takes. Raises ValueError if it does not take it."""
    dtypes = read(file).dtypes
    if dtype and dtype not in dtypes:
        raise ValueError(f"dtype is {dtype!r}; it must be {' or '.join(dtypes)} for {file.name}")
    return Dtype(dtype or dtypes[0])


@functools.cache
def has_gpu() -> bool:
    """Whether the system has a GPU for CUDA."""
    return any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))


_rows: dict[tuple[str, Path], Any] = {}
_loaded: dict[tuple[Path, bool], Any] = {}
_modules: dict[Path, list[str]] = {}  # that a file in Python imports from beside it


def row(part: str) -> Part:
    """The Part of a user's file. Raises ValueError unless the file exists."""
    if not os.path.isfile(part):
        raise ValueError(f"part is {part!r}; there is no such file")
    file = Path(part).absolute()
    return cache.latest(_rows, (part, file), lambda: _row(part, file), lambda: [file])


def _row(part: str, file: Path) -> Part:
    source = read(file)
    takes = {source.device: tuple(dtype.torch_name for dtype in source.dtypes)}
    by_file = functools.partial(attend, file)
    summary = f"the kernel in {file.name}"
    return Part(part, "YOUR ATTENTION", summary, dtypes=takes, ruled={}, file=file, attend=by_file)


def loaded(file: Path, backward: bool = False) -> Any:
    """A file's kernel, or backward pass, loaded again after a save. Raises BuildError if it is wrong."""
    file = file.resolve()
    key = file, backward
    return cache.latest(_loaded, key, lambda: _load(file, backward), lambda: sources(file))


def sources(file: Path) -> list[Path]:
    """A file, and the user's files that were read with it when it was last compiled or imported here."""
    found = [file.resolve()]
    with contextlib.suppress(BuildError):
        if file.suffix in (".cpp", ".ispc"):
            found += recipes.user_kernel(file).read()
        elif file.suffix == ".cu":
            found += nvrtc.included(file)
        else:
            found += (Path(sys.modules[name].__file__ or "") for name in _modules.get(found[0], ()))
    return [*dict.fromkeys(found)]


def joined(files: Iterable[Path]) -> str:
    """The text of these files."""
    return "\n".join(file.read_text("utf-8-sig", errors="replace") for file in files)


def check(file: Path, backward: bool = False) -> Source:
    """The source in a file. Raises BuildError if its kind has no backward pass, or CUDA no kernel."""
    if backward and file.suffix not in BACKWARD:
        raise BuildError(f"{file.name} is not tried: a backward pass is in C++ (.cpp) or Python (.py)")
    source = read(file)
    named = file.suffix != ".cu" or source.ladder or re.search(r"\battention\s*\(", joined(sources(file)))
    if not named:
        raise BuildError(f"{file.name} has no function attention; it must define {MISSING['.cu']}")
    return source


def _load(file: Path, backward: bool) -> Any:
    source = check(file, backward)
    if file.suffix == ".cu":
        return OnLadder(file, source) if source.ladder else OnCuda(file, source)
    return InPython(file, source, backward) if file.suffix == ".py" else Native(file, backward)


def attend(file: Path, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """The output (B, H, Nq, d) of a file's kernel; checks.check_tensors() has checked the tensors.

    Raises BuildError as loaded() does, and RuntimeError with what the kernel raised.
    """
    import torch

    kernel = loaded(file)
    if kernel.takes_tensors:
        return kernel(q, k, v, causal, scale)
    arrays = [t.detach().numpy() for t in (q, k, v)]
    return torch.from_numpy(kernel(*arrays, causal, scale, threads=torch.get_num_threads()))


TILE = 64  # br and bc of a call, for a kernel that has tiles


Call = structs.structure(structs.CSRC / "attention.h", "Attention")
Gradient = structs.structure(structs.CSRC / "attention.h", "AttentionGradient")
Rules = structs.structure(structs.CSRC / "rules.h", "Rules")
CudaCall = structs.structure(structs.CSRC / "cuda" / "arguments.h", "Call")


def matrices(t: Array) -> tuple[int, ...]:
    """A matrix (B, H, N, d) with its columns beside each other, for a kernel in C++."""
    return t.ctypes.data, *(s // 4 for s in t.strides[:3]), 1, 1


class Native:
    """The kernel of a file in C++ or ISPC, or its backward pass. library: its build, made by default."""

    takes_tensors = False

    def __init__(self, file: Path, backward: bool = False, library: Path | None = None) -> None:
        try:
            self._c = ctypes.CDLL(str(library or recipes.user_kernel(file).make()))
        except OSError as error:
            raise BuildError(f"{file.name} was compiled but cannot be loaded: {error}") from None
        if not self._c.user_kernel_defines(backward):
            raise BuildError(f"{file.name} must define {(BACKWARD if backward else MISSING)[file.suffix]}")
        self._struct = Gradient if backward else Call
        structs.check(self._struct, self._c.user_kernel_bytes(backward))
        ends = "backward" if backward else "call"
        self._scratch = self._c[f"user_kernel_scratch_of_{ends}"]
        self._run = self._c[f"user_kernel_{ends}"]
        self._scratch.restype = ctypes.c_int64
        self._run.restype = ctypes.c_char_p
        self._scratch.argtypes = (POINTER,)
        self._run.argtypes = (POINTER, POINTER)

    def scratch(self, B: int, H: int, Nq: int, Nk: int, d: int, causal: bool, threads: int) -> int:
        """The floats of scratch of a call. Raises RuntimeError if the file asks for less than none."""
        call = self._struct(B, H, Nq, Nk, d, causal, 0, min(TILE, Nq), min(TILE, Nk), threads)
        floats = self._scratch(ctypes.byref(call))
        if not 0 <= floats < 2**40:
            raise RuntimeError(f"the scratch of a call is {floats}; it must be a number of floats")
        return floats

    def prepared(
        self,
        matrices_by_name: Mapping[str, Array],
        into: Mapping[str, Array],
        causal: bool,
        scale: float,
        threads: int = 1,
        scratch: Array | None = None,
        window: int | None = None,
    ) -> Callable[[], None]:
        """A call that writes into `into`, both by the struct's names. scratch: allocated by default.

        window: keys before its own that a query sees, of a causal call.
        """
        matrices_by_name = {
            name: t if t.shape[-1] == 1 or t.strides[-1] == 4 else np.ascontiguousarray(t)
            for name, t in matrices_by_name.items()
        }
        B, H, Nq, d = matrices_by_name["q"].shape
        Nk = matrices_by_name["k"].shape[2]
        if scratch is None:
            scratch = np.empty(self.scratch(B, H, Nq, Nk, d, causal, threads), np.float32)
        sizes = B, H, Nq, Nk, d, causal, scale, min(TILE, Nq), min(TILE, Nk), threads
        strided = ("q", "k", "v", "dout")
        fields = {
            n: matrices(t) if n in strided else t.ctypes.data for n, t in {**matrices_by_name, **into}.items()
        }
        rules = None if window is None else Rules(left=window)  # right is 0: the call is causal
        call = self._struct(*sizes, rules=ctypes.addressof(rules) if rules else None, **fields)
        function = self._run
        pointers = (ctypes.byref(call), scratch.ctypes.data)

        def run(alive: Any = (matrices_by_name, into, call, scratch, rules)) -> None:
            why = function(*pointers)
            if why:
                raise RuntimeError(f"the kernel threw: {why.decode(errors='replace')}")

        return run

    def __call__(
        self, q: Array, k: Array, v: Array, causal: bool, scale: float, *, threads: int = 1
    ) -> Array:
        """The output (B, H, Nq, d). Raises RuntimeError with what the kernel throws."""
        out = np.empty(q.shape, np.float32)
        self.prepared({"q": q, "k": k, "v": v}, {"out": out}, causal, scale, threads=threads)()
        return out


def cached_file(name: str, text: str, beside: Sequence[Path] = ()) -> Path:
    """A file of this name and text among the builds: NVRTC's folder of sources has nothing else.

    beside: the user's file and what it includes from below its folder, which is kept there too.
    """
    texts = cache.texts_of(beside) if beside else {}
    return cache.kept("attention_ext_user_kernel", name, texts | {name: text}) / name


class OnCuda:
    """The kernel of a file in CUDA: a block of THREADS threads for each BR queries of each head."""

    takes_tensors = True

    def __init__(self, file: Path, source: Source) -> None:
        text = CUDA.format(name=file.name, text=source.text)
        self._file = cached_file("user_kernel.cu", text, sources(file))
        self._on: dict[tuple[int, Dtype, int], tuple[Any, Any, list[int]]] = {}

    def source(self, d: int, dtype: Dtype, arch: str) -> nvrtc.Source:
        """What NVRTC compiles for heads of width d and an architecture such as sm_90."""
        from shakespeare.attention_ext.cuda import driver

        macros = {"FORMAT": driver.FORMATS[dtype], "HEAD_DIM": d}
        return nvrtc.Source("user_kernel.cu", arch, macros, self._file.parent, lines=True)

    def _compiled(self, *key: Any) -> tuple[Any, Any, list[int]]:
        """The library, the function, and BR, THREADS and SHARED, for heads of width d in a dtype on a GPU."""
        if key not in self._on:
            from shakespeare.attention_ext.cuda import driver

            d, dtype, index = key
            arch = nvrtc.arch(driver.gpu(index).capability)
            module = driver.Module(self.source(d, dtype, arch))
            launch = module.ints("attention_launch", 3)
            self._on[key] = module, module.function("attention", launch[2]), launch
        return self._on[key]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, *, out: Tensor | None = None
    ) -> Tensor:
        """The output (B, H, Nq, d), in `out` if given. Raises BuildError, RuntimeError if a launch fails."""
        import torch

        from shakespeare.attention_ext.cuda import driver

        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        B, H, Nq, d = q.shape
        Nk = k.shape[2]
        with torch.cuda.device(q.device):
            _, function, (br, threads, shared) = self._compiled(d, Dtype.parse(q.dtype), q.device.index or 0)
            data = (t.data_ptr() for t in (q, k, v, out))
            strides = (t.stride()[:3] for t in (q, k, v, out))
            call = CudaCall(*data, None, *strides, B, H, Nq, Nk, causal, scale * math.log2(math.e))
            blocks = B * H * -(-Nq // br)
            try:
                driver.launch(function, blocks, threads, call, shared=shared)
            except BuildError as error:
                what = f"{blocks} blocks of {threads} threads and {shared} bytes of shared memory"
                raise RuntimeError(f"the launch of {what} failed: {error}") from None
        return out


class OnLadder:
    """A kernel of the ladder in a file, such as attention_kernel4: it has that one's tiles and launches."""

    takes_tensors = True

    def __init__(self, file: Path, source: Source) -> None:
        if source.ladder not in KERNELS:
            raise BuildError(f"{file.name} defines attention_kernel{source.ladder}; the ladder has none")
        path = str(cached_file(file.name, source.text, sources(file)))
        self._row = replace(KERNELS[source.ladder], name=path, sources=dict.fromkeys(source.dtypes, path))
        EVERY[path] = self._row  # where the launcher looks

    def source(self, d: int, dtype: Dtype, arch: str) -> nvrtc.Source:
        """What NVRTC compiles for heads of width d and an architecture such as sm_90."""
        from shakespeare.attention_ext.cuda import driver

        capability = int(arch[3:-1]), int(arch[-1])
        tile = self._row.tile(d, dtype, Gpu(arch, capability, SHARED_BYTES, 1))
        return driver.source(self._row, tile, d, dtype, capability)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        """The output (B, H, Nq, d) on q's GPU."""
        from shakespeare.attention_ext.cuda import operators

        try:
            return operators.flash(q, k, v, causal, scale, self._row.name)
        except RuntimeError as error:
            operators.raise_reason(error)
            raise


class InPython:
    """The function of a file in Python, on tensors if it imports torch, else arrays of NumPy or Numba.

    in_turn: whether calls of different sizes take the tiles of triton.autotune in turn, unmeasured.
    """

    def __init__(self, file: Path, source: Source, backward: bool = False) -> None:
        source.simulate()
        try:
            module = imported(file)
        except (Exception, SystemExit) as error:
            why = f"{file.name} cannot be imported: {reason(error, file)}"
            if source.triton and isinstance(error, ModuleNotFoundError) and error.name == "triton":
                why = f"{file.name} imports triton, which is not installed: pip install triton (on Linux)"
            raise BuildError(why) from error
        self._function: Any = getattr(module, "attention_backward" if backward else "attention", None)
        self._tuned = [(tuner, tuner.configs) for tuner in tuned(module)]
        self.in_turn = bool(source.simulated)  # a simulator measures nothing
        if not callable(self._function):
            raise BuildError(f"{file.name} must define {(BACKWARD if backward else MISSING)['.py']}")
        self._file = file
        self._source = source
        self.takes_tensors = source.needs_torch

    def __call__(self, q: Any, k: Any, v: Any, *rest: Any, threads: int = 1) -> Any:
        """The output (B, H, Nq, d), or dq, dk and dv: tensors for tensors, else arrays. threads: not used.

        rest: causal and scale; before them out, lse and dout for a backward pass. Raises RuntimeError with
        what the function raised, and if a result has a wrong form.
        """
        arguments: Sequence[Any] = (q, k, v, *rest[:-2])
        if self.takes_tensors and not self._source.torch:
            from numba import cuda

            arguments = [cuda.as_cuda_array(t) for t in arguments]
        elif self._source.simulated == "numba":  # it copies only contiguous arrays to a GPU
            arguments = [np.ascontiguousarray(t) for t in arguments]
        if self.in_turn:
            turn = hash((*q.shape, k.shape[2], rest[-2]))
            for tuner, configs in self._tuned:
                tuner.configs = [configs[turn % len(configs)]]
        try:
            result = self._function(*arguments, *rest[-2:])
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"the function raised {reason(error, self._file)}") from error
        if len(arguments) == 3:
            return self._formed(result, q, "q")
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise RuntimeError("the function must return dq, dk and dv")
        return tuple(map(self._formed, result, (q, k, v), "qkv"))

    def _formed(self, result: Any, like: Any, name: str) -> Any:
        """A result, which must have the shape of an input, in that one's dtype."""
        if self.takes_tensors:
            import torch

            result = torch.as_tensor(result, device=like.device).to(like.dtype)
        else:
            result = np.asarray(result, np.float32)
        got = tuple(result.shape)
        must = tuple(like.shape)
        if got != must:
            raise RuntimeError(f"the function returned the shape {got}; it must be {name}'s, {must}")
        return result


def imported(file: Path) -> ModuleType:
    """The module in a user's file. Raises what the file raises."""
    module = ModuleType(f"user_kernel_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    linecache.checkcache(str(file))
    for name in _modules.pop(file, ()):
        sys.modules.pop(name, None)
    before = set(sys.modules)
    folder = str(file.parent)
    was = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # two versions that are saved in one second have the same bytecode file
    importlib.invalidate_caches()
    sys.path.insert(0, folder)
    try:
        exec(compile(file.read_text("utf-8-sig"), str(file), "exec"), vars(module))
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = was
        _modules[file] = [name for name in sorted(set(sys.modules) - before) if is_beside(name, folder)]
    return module


def is_beside(name: str, folder: str) -> bool:
    """Whether an imported module is a user's, in a folder or below it; packages may be installed there."""
    path = Path(getattr(sys.modules[name], "__file__", None) or "/")
    installed = "site-packages" in path.parts or name.startswith("shakespeare.")
    return path.is_relative_to(folder) and not installed


def tuned(module: ModuleType) -> list[Any]:
    """The kernels under triton.autotune of a user's file."""
    return [value for value in vars(module).values() if type(value).__name__ == "Autotuner"]


def reason(error: BaseException, file: Path) -> str:
    """What was raised, with its line in a user's file. Triton's errors have it in their cause."""
    text = "".join(linecache.getlines(str(file)))
    at = 0
    chain = [error]
    while cause := chain[-1].__cause__:
        chain.append(cause)
    for each in chain:
        for frame, number in traceback.walk_tb(each.__traceback__):
            if frame.f_code.co_filename == str(file):
                at = number
        line = getattr(getattr(each, "node", None), "lineno", 0)  # Triton counts from the function
        function = str(getattr(each, "src", None))
        if line and function in text:
            at = text.count("\n", 0, text.index(function)) + line
    raised = chain[-1] if type(error).__module__.startswith("triton") else error
    message = (str(getattr(raised, "error_message", None) or raised).strip().splitlines() or [""])[0]
    return f"{type(raised).__name__}: {message}" + (f" at {file.name}:{at}" if at else "")
