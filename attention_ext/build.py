"""Compiles the extension once, just in time, and loads it.

The build directory is named by a hash of everything that decides the outcome: sources, flags, torch,
compiler and CPU. A lock that the kernel releases with its process guards it, so a build in progress is
waited for, aloud, and a killed one is taken over. Only a finished library has the name that is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from attention_ext import PARTS, BuildError

CSRC = Path(__file__).parent / "csrc"
SOURCES = (
    "bindings.cpp",
    "part1_naive.cpp",
    "part2_blocked.cpp",
    "part3_fused.cpp",
    "part4_flash.cpp",
    "simd_portable.cpp",
)
UNFINISHED = "attention_ext_unfinished"
FLAGS = (
    "-O3",
    "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # PyTorch 2.10, the oldest with what bindings.cpp uses
)
NO_COMPILER = (
    "parts 1 to 4 need a C++ compiler and none was found; install one "
    "(Debian, Ubuntu: apt install g++; macOS: xcode-select --install; or pip install ziglang)"
)


_loading = threading.Lock()


def load() -> None:
    """Make torch.ops.attention_ext available, compiling it if this machine has not yet.

    Raises BuildError if there is no compiler, it fails, or the cache directory cannot be used.
    """
    with _loading:
        _load()


@functools.cache
def _load() -> None:
    compiler = find_compiler()
    directory = cache_directory() / f"attention_ext_{_fingerprint(compiler)}"
    library = directory / "attention_ext.so"
    if not library.exists():
        _compile(compiler, directory, library)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded ({error}); delete it to compile it again") from None
    _register_fakes()


def simd_name() -> str:
    """Which SIMD helpers the extension was compiled with, for people to read."""
    load()
    return torch.ops.attention_ext.simd_name()


def read_4d(t: torch.Tensor, index: tuple[int, int, int, int]) -> float:
    """t[index] as the extension reads it, by strides; t is a float32 CPU tensor (B, H, N, d).

    Raises ValueError if t or index is anything else.
    """
    if t.dtype != torch.float32 or t.device.type != "cpu" or t.ndim != 4:
        raise ValueError(f"t is {t.dtype} on {t.device} of shape {tuple(t.shape)}; it must be 4-D float32")
    if len(index) != 4 or any(not 0 <= i < n for i, n in zip(index, t.shape)):
        raise ValueError(f"index is {index}; it must be inside the shape {tuple(t.shape)}")
    load()
    return torch.ops.attention_ext.read_4d(t, *index)


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else c++, g++ or clang++ on PATH, else the ziglang package's.

    Raises BuildError if there is none.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if found := shutil.which(chosen[0]):
            return [os.path.abspath(found), *chosen[1:]]
        raise BuildError(f"CXX is {chosen[0]!r}; it must be a C++ compiler, and no such program was found")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError(NO_COMPILER)


def cache_directory() -> Path:
    """Where builds are kept: $TORCH_EXTENSIONS_DIR, else torch_extensions in the user's cache."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def _fingerprint(compiler: list[str]) -> str:
    """16 hexadecimal digits of everything that decides what the compiler makes."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the C++ compiler {shlex.join(compiler)} does not run: {error}") from None
    digest = hashlib.sha256()
    for item in (shlex.join(compiler), *FLAGS, torch.__version__, sys.version, _cpu()):
        digest.update(item.encode() + b"\0")
    digest.update(version)
    for source in sorted(CSRC.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in kept)


def _compile(compiler: list[str], directory: Path, library: Path) -> None:
    """Compile under a lock, in a fresh directory, and give the finished library its name."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(directory / "building"):
            if library.exists():  # another process made it while this one waited
                return
            print("Compiling code into a PyTorch module...", file=sys.stderr, flush=True)
            # A killed build's compilers may still be writing where it worked, so never work there again.
            with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as work:
                _run_compiler(compiler, Path(work))
                (Path(work) / f"{UNFINISHED}.so").replace(library)
    except OSError as error:
        raise BuildError(
            f"cannot write the build directory {directory}: {error.strerror}; "
            "TORCH_EXTENSIONS_DIR can name another"
        ) from error


def _run_compiler(compiler: list[str], work: Path) -> None:
    """Make work/UNFINISHED.so, which torch's builder also loads; renamed, it is the same library."""
    from torch.utils import cpp_extension  # slow to import, and only a build needs it

    with _environment(_as_one_program(compiler, work)):
        try:
            cpp_extension.load(
                UNFINISHED,
                [str(CSRC / name) for name in SOURCES],
                extra_cflags=list(FLAGS),
                build_directory=str(work),
                is_python_module=False,
            )
        except RuntimeError as error:
            log = work.parent / "build.log"
            log.write_text(str(error))
            reason = next((line for line in str(error).splitlines() if "error" in line), "no reason given")
            raise BuildError(
                f"{shlex.join(compiler)} failed: {reason.strip()} (all it said: {log})"
            ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on path; say so when another process has it."""
    import fcntl

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another build of the extension...", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _as_one_program(compiler: list[str], directory: Path) -> str:
    """The path of the compiler, or of a script for a command of several words, which torch would quote."""
    if len(compiler) == 1:
        return compiler[0]
    script = directory / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    script.chmod(0o700)
    return str(script)


@contextlib.contextmanager
def _environment(compiler: str) -> Iterator[None]:
    """The environment that torch's builder wants; ninja may lie beside a Python that is not on PATH."""
    changes = {
        "CXX": compiler,
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # only the stable C interface is used
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _register_fakes() -> None:
    """What torch.compile and opcheck know of the operators: shapes and types."""

    def fake(q, k, v, causal, scale, return_lse, br=1, bc=1):
        B, H, Nq, d = q.shape
        return q.new_empty(B, H, Nq, d), q.new_empty((B, H, Nq) if return_lse else (0,))

    for part in PARTS.values():
        if part.operator:
            torch.library.register_fake(f"attention_ext::{part.operator}", fake)
