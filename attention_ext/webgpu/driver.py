"""A GPU through WebGPU, by the package wgpu and without PyTorch: adapter, buffers, shaders, dispatches."""

import contextlib
import functools
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shakespeare.attention_ext.build.structs import CSRC
from shakespeare.attention_ext.parts import BuildError

SOURCES = CSRC / "webgpu"
INSTALL = "pip install wgpu, or pip install -e '.[webgpu]'"
DRIVER = "a driver for Vulkan, Metal or Direct3D 12; mesa-vulkan-drivers has one that runs on the CPU"
OPTIONAL = ("subgroup", "shader-f16")  # features that are asked for where they exist
ENABLED = {"shader-f16": "enable f16;"}  # what a source begins with; browsers also want subgroups enabled
NO_CHECKS = 0  # of wgpu-native's WGPUShaderRuntimeChecks
BACKENDS = ("Vulkan", "Metal", "DX12")  # OpenGL's has no subgroups, and less of everything
MOST_GROUPS = 65_535  # of a dimension of a dispatch, on every adapter


class Lost(BuildError):
    """The device was lost: the driver was reset, or its GPU is gone. opened() opens another one."""


@dataclass(frozen=True)
class Source:
    """A shader to compile.

    files: joined in this order; those without a folder are in SOURCES. constants: whole numbers that the
    source names, as `const NAME: u32`. aliases: types that it names. needs: the features of OPTIONAL.
    """

    files: tuple[str | Path, ...]
    constants: tuple[tuple[str, int], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()

    def text(self) -> str:
        """The WGSL, as wgpu takes it."""
        lines = [ENABLED[feature] for feature in self.needs if feature in ENABLED]
        lines += [f"alias {name} = {target};" for name, target in self.aliases]
        lines += [f"const {name}: u32 = {value}u;" for name, value in self.constants]
        for file in self.files:
            lines += unrolled((SOURCES / file).read_text().splitlines(), dict(self.constants))
        return "\n".join(lines)


_LOOP = re.compile(r"( *)for \(var (\w+) = 0u; \2 < ([^;]+); \2\+\+\) \{  // unroll")


def unrolled(lines: Sequence[str], constants: Mapping[str, int]) -> list[str]:
    """WGSL whose loops are written out if their first line ends with `// unroll`.

    Their bound is a number, a constant, or one of them times or divided by another: 4u, KEYS, KEYS / 2.
    """
    written: list[str] = []
    at = 0
    while at < len(lines):
        loop = _LOOP.fullmatch(lines[at])
        if loop is None:
            written.append(lines[at])
            at += 1
            continue
        indent, index, bound = loop.groups()
        first, *rest = (constants[word] if word in constants else word.rstrip("u") for word in bound.split())
        count = int(first)
        if rest:
            count = count * int(rest[1]) if rest[0] == "*" else count // int(rest[1])
        end = lines.index(indent + "}", at)
        body = unrolled(lines[at + 1 : end], constants)
        for i in range(count):
            written += [indent + "{", f"{indent}    const {index} = {i}u;", *body, indent + "}"]
        at = end + 1
    return written


@dataclass(frozen=True)
class Adapter:
    """What an adapter is and has, by wgpu's names."""

    name: str
    backend: str
    kind: str
    features: frozenset[str]
    limits: Mapping[str, int] = field(repr=False)

    @property
    def is_cpu(self) -> bool:
        """Whether a driver runs it on the CPU, which is right but slow."""
        return self.kind == "CPU"


class Gpu:
    """An open device. All calls are of one thread at a time, which holds LOCK.

    Raises BuildError if wgpu is missing or finds no adapter, or for what it refuses; calls also raise Lost.
    """

    def __init__(self) -> None:
        try:
            import wgpu
            from wgpu.backends.wgpu_native import extras
        except ImportError as error:
            raise BuildError(f"device is 'webgpu', which needs wgpu: {INSTALL} ({error})") from None
        with contextlib.suppress(RuntimeError):
            extras.set_instance_extras(backends=BACKENDS)  # the first device of the process
        unset = "XDG_RUNTIME_DIR" not in os.environ  # without a screen Mesa complains on stderr
        try:
            os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
            adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
        except RuntimeError:
            adapter = None
        finally:
            if unset:
                del os.environ["XDG_RUNTIME_DIR"]
        if adapter is None:
            raise BuildError(f"device is 'webgpu', and no adapter was found; it needs {DRIVER}")
        info = adapter.info
        limits = dict(adapter.limits)
        name = info["device"] or info["description"]
        features = frozenset(OPTIONAL) & adapter.features
        self.adapter = Adapter(name, info["backend_type"], info["adapter_type"], features, limits)
        with _errors():
            wanted = {"required_features": sorted(features), "required_limits": limits}
            self.device = adapter.request_device_sync(**wanted)
        self._pipelines: dict[tuple[Source, str], Any] = {}

    def pipeline(self, source: Source, entry: str = "main") -> Any:
        """The compiled entry point of a shader; each is compiled once."""
        key = source, entry
        if key not in self._pipelines:
            if missing := sorted(set(source.needs) - self.adapter.features):
                needs = f"{source.files[-1]} needs {' and '.join(missing)}"
                raise BuildError(f"{needs}, which {self.adapter.name} lacks")
            with _errors():
                stage = {"module": self._module(source.text()), "entry_point": entry}
                self._pipelines[key] = self.device.create_compute_pipeline(layout="auto", compute=stage)
        return self._pipelines[key]

    def _module(self, code: str) -> Any:
        """A shader without checks, which keep arrays out of registers. wgpu's call reports errors first.

        wgpu has no public call for it, so setup.cfg bounds its version.
        """
        from wgpu.backends.wgpu_native import GPUShaderModule, ffi, lib

        self.device.create_shader_module(code=code)
        text = ffi.new("char[]", code.encode())
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code.data = text
        source.code.length = len(text) - 1
        descriptor = ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        made = lib.wgpuDeviceCreateShaderModuleTrusted(self.device._internal, descriptor, NO_CHECKS)
        return GPUShaderModule("", made, self.device)

    def buffer(self, content: NDArray[Any] | int, uniform: bool = False) -> Any:
        """A buffer with an array's numbers, or of so many bytes of zeros. uniform: for var<uniform>.

        Raises BuildError if it is larger than the adapter allows.
        """
        import wgpu

        size = content if isinstance(content, int) else content.nbytes
        size = max(16, (size + 3) // 4 * 4)
        name = self.adapter.name
        limit = self.adapter.limits["max-storage-buffer-binding-size"]
        if size > limit:
            raise BuildError(f"{name} allows {limit:,} bytes in a buffer, and {size:,} are needed")
        usage = wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        usage |= wgpu.BufferUsage.UNIFORM if uniform else wgpu.BufferUsage.STORAGE
        with _errors():
            buffer = self.device.create_buffer(size=size, usage=usage)
            if not isinstance(content, int):
                self.write(buffer, content)
            return buffer

    def write(self, buffer: Any, content: NDArray[Any], offset: int = 0) -> None:
        """Copy an array's numbers into a buffer, from a byte on that is a multiple of 4."""
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        if padding := -data.size % 4:
            data = np.concatenate([data, np.zeros(padding, np.uint8)])
        with _errors():
            self.device.queue.write_buffer(buffer, offset, data)

    def read(self, buffer: Any, dtype: DTypeLike, count: int, offset: int = 0) -> NDArray[Any]:
        """`count` numbers of a buffer from a byte on, a multiple of 4. It waits for all dispatches."""
        size = (count * np.dtype(dtype).itemsize + 3) // 4 * 4
        with _errors():
            return np.frombuffer(self.device.queue.read_buffer(buffer, offset, size), dtype)[:count]

    def copy(self, copies: Sequence[tuple[Any, int, Any, int, int]]) -> None:
        """Copy bytes between buffers: (source, its offset, target, its offset, size), multiples of 4."""
        with _errors():
            encoder = self.device.create_command_encoder()
            for copy in copies:
                encoder.copy_buffer_to_buffer(*copy)
            self.device.queue.submit([encoder.finish()])

    def run(self, pipeline: Any, buffers: Sequence[Any], groups: tuple[int, ...], times: int = 1) -> None:
        """Dispatch workgroups, without waiting. buffers: bindings 0, 1 ..., all used by the shader."""
        with _errors():
            entries = [
                {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
                for i, buffer in enumerate(buffers)
            ]
            bound = self.device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
            encoder = self.device.create_command_encoder()
            for _ in range(times):
                work = encoder.begin_compute_pass()
                work.set_pipeline(pipeline)
                work.set_bind_group(0, bound)
                work.dispatch_workgroups(*groups)
                work.end()
            self.device.queue.submit([encoder.finish()])


def grid(count: int) -> tuple[int, int]:
    """The x and y of a dispatch of at least `count` workgroups: number y * num_workgroups.x + x."""
    y = -(-count // MOST_GROUPS)
    return -(-count // y), y


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turns wgpu's errors into BuildError or Lost, with the first line that says something."""
    import wgpu

    try:
        yield
    except BuildError:
        raise
    except (wgpu.GPUError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = ": ".join(line for line in lines if line not in ("Validation Error", "Caused by:"))[:300]
        if "lost" in reason.lower():
            _opened.cache_clear()
            raise Lost(f"the WebGPU device was lost: {reason}") from None
        raise BuildError(f"WebGPU refused: {reason}") from None


LOCK = threading.RLock()  # a Gpu's calls are of one thread at a time
_opened = functools.cache(Gpu)


def opened() -> Gpu:
    """The process's device, opened on first use. Raises BuildError if there is none."""
    with LOCK:
        return _opened()
