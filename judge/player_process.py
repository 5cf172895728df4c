"""The measured process: loads a user's file, and calls it with matrices in memory that the judge shares.

python -m shakespeare.judge.player_process CHANNEL NOTES MEMORY [torch]

The three are file descriptors. A line in CHANNEL is GO, or a request as JSON, such as {"load": ...}; each
gets a line as an answer: DONE, or JSON. NOTES has a line for each call of another's attention. This process
decides nothing and has no clock: the kernel may do with it what it wants. player.Player is its other side.
"""

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.checks import first_line
from shakespeare.attention_ext.parts import BuildError, Dtype
from shakespeare.judge import cases, library_calls
from shakespeare.judge.cases import CASES, Array
from shakespeare.lab.freed_memory import keep_freed_memory

Arrays = dict[str, Array]
GO = b"go\n"
DONE = b".\n"
PAGE = mmap.PAGESIZE
COMPILED_FOR = "sm_90"  # without a GPU
ONCE = 13  # cases that compute-sanitizer watches
GUARD = 1024  # floats of NaN after each matrix on a GPU
# Options of Linux's prctl()
DIES_WITH_PARENT = 1
NOT_DUMPABLE = 4
NO_NEW_PRIVILEGES = 38
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: a container's root reads its user's files
CAPABILITIES = 0b110


class Caller:
    """A loaded kernel or backward pass, and the call that GO makes."""

    def __init__(self, file: Path, library: str | None, backward: bool = False, dtype: str = "fp32") -> None:
        self.source = user_kernel.read(file)
        native = library and user_kernel.Native(file, backward, Path(library))
        self.kernel: Any = native or user_kernel.loaded(file, backward)
        self.guard = GUARD if isinstance(self.kernel, user_kernel.OnCuda) else 0
        self.result: Any = None  # that of the last call in Python
        self._scratch = np.empty(0, np.float32)
        self._dtype = Dtype(dtype)
        if self.source.device == "cuda":
            check_gpu(self.kernel, self._dtype)

    def prepare(
        self,
        arrays: Arrays,
        into: Arrays,
        causal: bool,
        scale: float,
        threads: int = 1,
        scratch_fill: float | None = np.nan,
        window: int | None = None,
    ) -> Callable[[], object]:
        """What GO calls. scratch_fill: fills new scratch, which ends where memory ends; None: the last."""
        kernel = self.kernel
        if isinstance(kernel, user_kernel.Native):
            B, H, Nq, d = arrays["q"].shape
            Nk = arrays["k"].shape[2]
            floats = kernel.scratch(B, H, Nq, Nk, d, causal, threads)
            if scratch_fill is not None:
                self._scratch = guarded(floats, scratch_fill)
            elif len(self._scratch) != floats:
                self._scratch = np.ones(floats, np.float32)
            return kernel.prepared(arrays, into, causal, scale, threads, self._scratch, window)
        if self.source.device == "cuda":
            return self._on_gpu(arrays, into, causal, scale)
        inputs: Sequence[Any] = [*arrays.values()]
        if kernel.takes_tensors:
            import torch

            torch.set_num_threads(threads)
            kind = self._dtype.torch_dtype
            inputs = [*map(torch.from_numpy, inputs)]

        def call() -> None:
            arguments = [t.to(kind) for t in inputs] if kernel.takes_tensors else inputs
            self.result = kernel(*arguments, causal, scale)
            self.copy(into)

        return call

    def copy(self, into: Arrays) -> None:
        """Copy the last result."""
        if self.result is not None:
            results = self.result if isinstance(self.result, tuple) else (self.result,)
            for t, result in zip(into.values(), results):
                np.copyto(t, result.detach().cpu().float().numpy() if self.kernel.takes_tensors else result)

    def _on_gpu(self, inputs: Arrays, into: Arrays, causal: bool, scale: float) -> Callable[[], object]:
        """A call on a GPU, where `guard` numbers that are NaN follow each matrix."""
        import torch

        self.kernel.in_turn = True  # so that each of Triton's tiles is tried
        kind = self._dtype.torch_dtype
        bits_kind = getattr(torch, f"int{8 * self._dtype.bytes}")

        def call() -> None:
            buffers = []
            views = []
            for t in (*inputs.values(), *into.values()):
                strides = [stride // 4 for stride in t.strides]
                count = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, strides))
                flat = np.lib.stride_tricks.as_strided(t, (count,), (4,))  # with what lies between its rows
                padded = np.concatenate([flat, np.full(self.guard, np.nan, np.float32)])
                buffers.append(torch.from_numpy(padded).to("cuda", kind))
                views.append(buffers[-1].as_strided(t.shape, strides))
            bits = [t.view(bits_kind) for t in buffers]  # NaN is not equal to itself
            before = [t.clone() for t in bits]
            out = {"out": views[-1]} if isinstance(self.kernel, user_kernel.OnCuda) else {}
            self.result = self.kernel(*views[: len(inputs)], causal, scale, **out)
            torch.cuda.synchronize()
            for name, now, then in zip((*inputs, *into), bits, before):
                same = (now == then).cpu()
                if not same[len(same) - self.guard :].all():
                    raise RuntimeError(f"out of bounds: it writes beyond {name}")
                if name not in into and not same.all():
                    inputs[name][...] = np.nan  # the judge sees it
            self.copy(into)

        return call

    def on_gpu_memory(
        self, handles: dict[str, Any], names: list[str], causal: bool, scale: float
    ) -> Callable[[], object]:
        """A call with the judge's memory on the GPU, (handle, shape) by name. names: the results'."""
        import torch

        from shakespeare.attention_ext.cuda import driver

        tensors = {}
        for name, (handle, shape) in handles.items():
            tensors[name] = driver.tensor_at(driver.address_of(bytes.fromhex(handle)), shape, self._dtype)
        into = [tensors.pop(name) for name in names]
        in_place = {"out": into[0]} if isinstance(self.kernel, user_kernel.OnCuda) else {}

        def call() -> None:
            results = self.kernel(*tensors.values(), causal, scale, **in_place)
            for t, result in zip(() if in_place else into, results if len(into) > 1 else [results]):
                t.copy_(result)
            torch.cuda.synchronize()

        return call


class Decoder:
    """A file's GPT with a checkpoint's weights, and its caches."""

    def __init__(self, file: Path, name: str) -> None:
        from shakespeare.model import load

        checkpoint = load(name)
        self._config = checkpoint.config
        self._caches = list[Any]()
        module: Any = user_kernel.imported(file)
        self._model = module.GPT.from_weights(checkpoint.config, checkpoint.weights)

    def prepare(self, arrays: Arrays, into: Arrays, new: bool, cached: bool) -> Callable[[], object]:
        """What GO calls: the logits of tokens `ids`. new: with empty caches, if it is `cached`."""
        import torch

        from shakespeare.model.kv_cache import KVCache

        torch.set_num_threads(1)
        ids = arrays["ids"]
        config = self._config
        if new:
            sizes = len(ids), config.n_head, config.block_size, config.head_dim
            self._caches = [KVCache(*sizes) for _ in range(config.n_layer)] if cached else []

        @torch.inference_mode()
        def call() -> None:
            np.copyto(into["logits"], self._model(torch.from_numpy(ids).long(), self._caches or None).numpy())

        return call

    def copy(self, into: Arrays) -> None:
        """Nothing is left to copy."""


def guarded(floats: int, fill: float) -> Array:
    """Memory that ends where memory ends: reading or writing beyond it ends the process."""
    size = -(-4 * floats // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    array = np.frombuffer(memory, np.float32, floats, size - 4 * floats)
    protect(memory, [size], 0)
    array[...] = fill
    return array


def protect(memory: mmap.mmap, pages: Iterable[int], flags: int) -> None:
    """Give the pages at these offsets other rights: 0 for none."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in pages:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(PAGE), flags)


def check_gpu(kernel: Any, dtype: Dtype) -> None:
    """Raise BuildError if there is no GPU, or if CUDA's compiler refuses the kernel."""
    from shakespeare.attention_ext.cuda import driver

    try:
        driver.check_gpu()
    except BuildError:
        if isinstance(kernel, user_kernel.InPython):
            raise
        _, resources = kernel.source(64, dtype, COMPILED_FOR).compile()
        what = f"it compiles for {COMPILED_FOR}, with {resources.registers} registers, and is not tried"
        raise BuildError(f"{what}: no GPU and driver are found here (see nvidia-smi)") from None
    if not isinstance(kernel, user_kernel.OnCuda):
        return
    arch = nvrtc.arch(driver.gpu(0).capability)
    nvrtc.make_all(kernel.source(d, dtype, arch) for d in {case.d for case in CASES})


def once(file: Path, dtype: str) -> None:
    """Call a file's kernel in this process, for compute-sanitizer."""
    caller = Caller(file, None, dtype=dtype)
    caller.guard = 0
    for case in CASES[:ONCE]:
        inputs = dict(zip("qkv", cases.inputs(case)))
        out = {"out": np.empty(inputs["q"].shape, np.float32)}
        caller.prepare(inputs, out, case.causal, case.applied, 1, None)()


def give_up_rights() -> None:
    """Lose what root may do with another process's memory: then the judge's is closed to the kernel."""
    with contextlib.suppress(AttributeError):  # not Linux
        c = ctypes.CDLL(None)
        c.prctl(DIES_WITH_PARENT, signal.SIGKILL)
        c.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # nor does what it starts get them back
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        rights = (ctypes.c_uint32 * 6)()
        c.capget(header, rights)
        rights[:] = [rights[0] & CAPABILITIES, rights[1] & CAPABILITIES, 0, 0, 0, 0]
        c.capset(header, rights)


class Desk:
    """Answers requests. call: what GO calls."""

    def __init__(self, memory: int) -> None:
        self._file = memory
        self._memory = mmap.mmap(-1, PAGE)
        self._guards = list[int]()
        self._caller: Any = None
        self._into: Arrays = {}
        self.call: Callable[[], object] = lambda: None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked. Raises BuildError if a file cannot be loaded, RuntimeError as the kernel does."""
        if "seal" in request:
            ctypes.CDLL(None).prctl(NOT_DUMPABLE, 0)
        elif "model" in request:
            self._caller = Decoder(Path(request["load"]), request["model"])
        elif "load" in request:
            return self._load(Path(request["load"]), **request)
        elif "gpu" in request:
            self.call = self._caller.on_gpu_memory(
                request["gpu"], request["into"], request["causal"], request["scale"]
            )
        elif "again" in request:
            self._caller.copy(self._into)
        elif "scratch" in request:
            native = isinstance(self._caller.kernel, user_kernel.Native)
            return {"floats": self._caller.kernel.scratch(*request["scratch"]) if native else None}
        else:
            self._prepare(**request)
        return {}

    def _load(
        self, file: Path, load: str, library: str | None, memory_limit: int | None, **settings: Any
    ) -> dict[str, Any]:
        if memory_limit:
            with contextlib.suppress(OSError, ValueError):
                mapped = PAGE * int(Path("/proc/self/statm").read_text().split()[0])
                resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_limit,) * 2)
        self._caller = Caller(file, library, **settings)
        return {} if library else {"imported": [*map(str, user_kernel.sources(file)[1:])]}

    def _prepare(
        self, size: int, arrays: dict[str, Any], into: dict[str, Any], guards: list[int], **settings: Any
    ) -> None:
        if size != len(self._memory):
            populated = getattr(mmap, "MAP_POPULATE", 0)  # no page is new in a timed call
            self._memory = mmap.mmap(self._file, size, mmap.MAP_SHARED | populated)
        protect(self._memory, self._guards, mmap.PROT_READ | mmap.PROT_WRITE)
        protect(self._memory, guards, 0)
        self._guards = guards

        def placed(offset: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Array:
            return np.ndarray(shape, np.float32, self._memory, offset, strides)

        inputs, self._into = ({name: placed(*at) for name, at in some.items()} for some in (arrays, into))
        self.call = self._caller.prepare(inputs, self._into, **settings)


def main(channel: int, notes: int, memory: int, with_torch: bool = False) -> None:
    """Warm up, and answer requests until there are no more."""
    give_up_rights()
    keep_freed_memory()  # as bench does
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if with_torch:
        with contextlib.suppress(Exception):  # the load says why
            import torch

            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")
                nvrtc.versions()
    desk = Desk(memory)
    read = os.read
    write = os.write
    line = b""
    known = set[str]()

    def note(name: str) -> None:
        if name not in known:
            known.add(name)
            write(notes, f"{name}\n".encode())

    library_calls.watch(note, with_torch)
    while more := read(channel, 1 << 16):
        line += more
        if not line.endswith(b"\n"):
            continue
        answer: Any = {}
        try:
            if line == GO:
                desk.call()
            else:
                answer = desk.answer(json.loads(line))
        except BuildError as error:
            answer = {"refused": str(error), "output": error.output}
        except Exception as error:
            answer = {"raised": first_line(error)[:2000]}
        write(channel, json.dumps(answer).encode() + b"\n" if answer else DONE)
        line = b""
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "once":
        give_up_rights()
        once(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "run":
        give_up_rights()
        os.execv(sys.argv[2], sys.argv[2:])
    else:
        channel, notes, memory = map(int, sys.argv[1:4])
        main(channel, notes, memory, "torch" in sys.argv)
