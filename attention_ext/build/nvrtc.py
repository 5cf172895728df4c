"""Compiles CUDA kernels with NVRTC, through NVIDIA's cuda-core. Neither a GPU nor nvcc is needed."""

import io
import logging
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from shakespeare.attention_ext.build import cache, ninja, prebuilt, toolchain
from shakespeare.attention_ext.build.structs import CSRC
from shakespeare.attention_ext.parts import BuildError

SOURCES = CSRC / "cuda"
INSTALL = "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc, or pip install -e '.[cuda]'"

# Headers of the C++ library that a user's may include: csrc/cuda/standard.h has what scores need of them.
STANDARD = ("algorithm", "cmath", "cstdint", "cstdlib", "math.h", "stdint.h", "stdlib.h")

log = logging.getLogger(__name__)
_IMPORTING = threading.Lock()  # cuda.core's modules import each other, which threads may not do together


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel, as ptxas reports them.

    registers: 32-bit ones of a thread. stack, spill_stores, spill_loads: its bytes of local memory. shared:
    static bytes of a block. losses: ptxas's warnings of lost performance.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A kernel to compile: its file, its macros, and the architecture, such as sm_90a.

    folder: holds the file; None for SOURCES, whose headers every file may include. lines: keep line numbers.
    headers: a folder of other headers.
    """

    file: str
    arch: str
    macros: Mapping[str, int | str]
    folder: Path | None = None
    lines: bool = False
    headers: Path | None = None

    def fingerprint(self, *compiler: str) -> str:
        """A hash of the sources, the macros and the architecture, and of the compiler's versions if given."""
        macros = sorted(f"{name}={value}" for name, value in self.macros.items())
        return cache.fingerprint((self.file, self.arch, *macros, *compiler), *self._folders())

    def name(self) -> str:
        """The file of the compiled kernel in a wheel: changed sources or other macros have another one."""
        return f"{Path(self.file).stem}-{self.arch}-{self.fingerprint()}.cubin"

    def path(self) -> Path:
        """Where the compiled kernel is kept. Raises BuildError if NVRTC is missing."""
        named = self.fingerprint(*versions())
        return cache.folder(f"attention_ext_cuda_{named}") / f"{Path(self.file).stem}.cubin"

    def make(self) -> bytes:
        """The machine code, from a wheel or compiled if need be.

        Raises BuildError if NVRTC is missing or refuses the source, or as cache.make(), prebuilt.kernel().
        """
        brought = prebuilt.kernel(self.name()) if prebuilt.in_wheel() else None
        if brought:
            return brought
        file = self.path()
        cache.make(file, f"{self.file} for {self.arch}", self._write)
        return file.read_bytes()

    def compile(self, target_type: Literal["cubin", "ptx"] = "cubin") -> tuple[bytes, Resources]:
        """The machine code and its resources, always compiled anew. Raises BuildError as make() does.

        target_type: "ptx" gives text without resources, which the driver compiles for a later architecture.
        """
        core = _core()
        options = core.ProgramOptions(
            name=self.file,
            arch=self.arch,
            std="c++17",
            device_as_default_execution_space=True,  # a generic lambda cannot say where it runs
            define_macro=[(name, str(value)) for name, value in self.macros.items()] or None,
            include_path=[*map(str, self._folders())],
            ptxas_options=["-v"],
            lineinfo=self.lines or None,
            no_cache=True,  # the log would be empty
        )
        log = io.StringIO()
        text = ((self.folder or SOURCES) / self.file).read_text()
        try:
            code = core.Program(text, "c++", options).compile(target_type, logs=log).code
        except Exception as error:  # cuda-core has types of its own for each compiler
            what = f"{self.file} for {self.arch}"
            raise BuildError(f"NVRTC failed to compile {what}: {_reason(error)}") from None
        return bytes(code), parse(log.getvalue())

    def _folders(self) -> list[Path]:
        return [folder for folder in (self.folder, SOURCES, self.headers) if folder]

    def _write(self, work: Path) -> Path:
        start = time.perf_counter()
        code, _ = self.compile()
        log.warning("Compiled in %.1f s.", time.perf_counter() - start)
        file = work / "kernel.cubin"
        file.write_bytes(code)
        return file


def arch(capability: tuple[int, int]) -> str:
    """NVRTC's name of a compute capability: 'sm_90'."""
    major, minor = capability
    return f"sm_{major}{minor}"


def included(file: Path) -> list[Path]:
    """The user's files that a source includes, by the C++ compiler. Raises BuildError if there is none."""
    command = [*toolchain.find_compiler(), "-MM", "-MG", "-D__CUDACC_RTC__", f"-I{SOURCES}", "-x", "c++"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    files = sorted(ninja.names_in(done.stdout) - {file})
    return [path for path in files if not path.is_relative_to(SOURCES)]


def make_all(sources: Iterable[Source]) -> list[bytes]:
    """Source.make() of each; those that must be compiled are compiled at the same time."""
    with cache.uncounted(), ThreadPoolExecutor(toolchain.jobs()) as pool:
        return list(pool.map(Source.make, sources))


def parse(log: str) -> Resources:
    """The resources that ptxas -v reports for a source with one kernel, or for its largest kernel."""

    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, log)), default=0)

    return Resources(
        registers=largest(r"Used (\d+) registers"),
        stack=largest(r"(\d+) bytes stack frame"),
        spill_stores=largest(r"(\d+) bytes spill stores"),
        spill_loads=largest(r"(\d+) bytes spill loads"),
        shared=largest(r"(\d+) bytes smem"),
        losses=tuple(line for line in log.splitlines() if "Performance Loss" in line or "C75" in line),
    )


def missing(what: str) -> BuildError:
    """The error for a missing package."""
    return BuildError(f"CUDA kernels need cuda-core, cuda-bindings and NVRTC, and {what}; {INSTALL}")


def _core() -> Any:
    """The module cuda.core. Raises BuildError if it is missing."""
    try:
        with _IMPORTING:
            import cuda.core
    except ImportError:
        raise missing("cuda.core is missing") from None
    return cuda.core


def versions() -> tuple[str, ...]:
    """The versions of cuda-core and NVRTC. Raises BuildError if one is missing."""
    try:
        core = metadata.version("cuda-core")  # to import it takes longer than all else
    except metadata.PackageNotFoundError:
        raise missing("cuda.core is missing") from None
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-pathfinder has types of its own for a missing library
        raise missing(f"NVRTC cannot be loaded ({_reason(error)})") from None
    return core, f"{major}.{minor}"


def _reason(error: Exception) -> str:
    """The line of an error that gives the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else type(error).__name__)
