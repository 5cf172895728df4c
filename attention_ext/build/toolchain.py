"""Finds the compilers of this machine, and what they are told."""

import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from shakespeare.attention_ext import processor
from shakespeare.attention_ext.parts import BuildError

VERSION_SECONDS = 60  # the time limit of a compiler's --version
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ("-std=c++17", "-O3", NATIVE, "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
# GCC 13 splits multiply-adds for some processors; the bits of a row would then depend on its place in a tile.
GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
WSL = "compiling needs Linux or a Mac; on Windows use WSL"
NO_COMPILER = "parts 1 to 4 need a C++ compiler and none was found; install one "
NO_COMPILER += "(Debian, Ubuntu: apt install g++; macOS: xcode-select --install; or pip install ziglang)"
NO_OPENMP = "it uses OpenMP, which this compiler lacks; let CXX name one that has it, such as g++"
_C_COMPILER = re.compile(r"(.*-)?(gcc|cc|clang)(-[\d.]+)?")  # not g++, c++ or clang++


def find_compiler() -> list[str]:
    """$CXX, else c++, g++ or clang++ on PATH, else ziglang's. Raises BuildError without one or on Windows."""
    if sys.platform == "win32":
        raise BuildError(WSL)
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is {os.environ['CXX']!r}; it must be a compiler's command: {error}") from None
    if chosen:
        path = shutil.which(chosen[0])
        if path:
            return [os.path.abspath(path), *chosen[1:]]
        raise BuildError(f"CXX is {chosen[0]!r}; it must be a C++ compiler, and no such program was found")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError(NO_COMPILER)


def find_ispc() -> str | None:
    """The ISPC compiler: $ISPC, else ispc on PATH; None without one. Raises BuildError for a wrong $ISPC."""
    chosen = os.environ.get("ISPC")
    if chosen:
        path = shutil.which(chosen)
        if path:
            return os.path.abspath(path)
        raise BuildError(f"ISPC is {chosen!r}; it must be the ISPC compiler, and no such program was found")
    return shutil.which("ispc")


def jobs() -> int:
    """Compilers that run at the same time: $MAX_JOBS, as for PyTorch's extensions, else processor.cores().

    Raises BuildError for a wrong $MAX_JOBS.
    """
    chosen = os.environ.get("MAX_JOBS")
    if not chosen:
        return processor.cores()
    if not re.fullmatch("0*[1-9][0-9]{0,5}", chosen):
        raise BuildError(f"MAX_JOBS is {chosen!r}; it must be a number of compilers, at least 1")
    return int(chosen)


def python_header() -> Path:
    """The path of Python.h, which may be missing."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def environment() -> dict[str, str]:
    """The environment of a compiler. It names the user's home, where zig has its cache."""
    home = os.path.expanduser("~")
    return os.environ | {"HOME": home} if os.path.isabs(home) else dict(os.environ)


@functools.cache
def version(*command: str) -> bytes:
    """A compiler's output for --version. Raises BuildError if it does not run."""
    try:
        settings: dict = dict(stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_SECONDS)
        return subprocess.run([*command, "--version"], check=True, env=environment(), **settings).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler {shlex.join(command)} does not run: {error}") from None


def flags(command: Sequence[str]) -> tuple[str, ...]:
    """FLAGS, and GCC_FLAGS if the compiler is GCC. Raises BuildError if it does not run.

    A command that names a processor, as CXX="g++ -march=haswell", gets no NATIVE, which would override it.
    """
    chosen = (*FLAGS, *GCC_FLAGS) if b"Free Software Foundation" in version(*command) else FLAGS
    named = any(word.startswith(("-march=", "-mcpu=")) for word in command)
    return tuple(flag for flag in chosen if not (named and flag == NATIVE))


@functools.cache
def has_openmp(*command: str) -> bool:
    """Whether a compiler has OpenMP: GCC brings it, Clang needs libomp."""
    if b"Free Software Foundation" in version(*command):
        return True
    words = [*command, "-fopenmp", "-fsyntax-only", "-x", "c++", "-include", "omp.h", os.devnull]
    return subprocess.run(words, capture_output=True, check=False, env=environment()).returncode == 0


def libraries(command: Sequence[str]) -> tuple[str, ...]:
    """The C++ library, which a C compiler such as CXX=gcc must be told to link: it takes any loaded copy."""
    if not any(_C_COMPILER.fullmatch(os.path.basename(word)) for word in command):
        return ()
    return ("-lc++",) if sys.platform == "darwin" else ("-lstdc++",)
