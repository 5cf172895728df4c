"""Finds the compilers of this machine, runs them, and reports why one failed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from attention_ext.parts import BuildError

VERSION_SECONDS = 60  # the time limit of a compiler's --version
# Signs of the line that says why a compiler failed, the most reliable first; the shell reports a crash.
REASONS = ("no space left on device", "error:", "segmentation fault", "killed", "aborted")
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = (
    "-O3",
    NATIVE,
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # PyTorch 2.10, the oldest with all that operators.cpp uses
)
# GCC 13 splits multiply-adds for some processors; the bits of a row would then depend on its place in a tile.
FLAGS_OF_GCC = ("--param=avoid-fma-max-bits=0",)
NO_COMPILER = (
    "parts 1 to 4 need a C++ compiler and none was found; install one "
    "(Debian, Ubuntu: apt install g++; macOS: xcode-select --install; or pip install ziglang)"
)
_C_COMPILER = re.compile(r"(.*-)?(gcc|cc|clang)(-[\d.]+)?")  # not g++, c++ or clang++


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else c++, g++ or clang++ on PATH, else the ziglang package's.

    Raises BuildError if there is none.
    """
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is {os.environ['CXX']!r}; it must be a compiler's command: {error}") from None
    if chosen:
        if found := shutil.which(chosen[0]):
            return [os.path.abspath(found), *chosen[1:]]
        raise BuildError(f"CXX is {chosen[0]!r}; it must be a C++ compiler, and no such program was found")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError(NO_COMPILER)


def find_ispc() -> str | None:
    """The ISPC compiler: $ISPC, else ispc on PATH; None without one. Raises BuildError for a wrong $ISPC."""
    if chosen := os.environ.get("ISPC"):
        if found := shutil.which(chosen):
            return os.path.abspath(found)
        raise BuildError(f"ISPC is {chosen!r}; it must be the ISPC compiler, and no such program was found")
    return shutil.which("ispc")


def python_header() -> Path:
    """The path of Python.h, which may be missing."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def has_python_header() -> bool:
    """Whether C++ that includes Python.h can be compiled here."""
    return python_header().is_file()


def version(command: Sequence[str]) -> bytes:
    """A compiler's output for --version. Raises BuildError if it does not run."""
    try:
        return subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=VERSION_SECONDS,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler {shlex.join(command)} does not run: {error}") from None


def flags(command: Sequence[str]) -> tuple[str, ...]:
    """FLAGS, and FLAGS_OF_GCC if the compiler is GCC. Raises BuildError if it does not run."""
    return (*FLAGS, *FLAGS_OF_GCC) if b"Free Software Foundation" in version(command) else FLAGS


def libraries(command: Sequence[str]) -> tuple[str, ...]:
    """The C++ library, which a C compiler such as CXX=gcc must be told to link.

    Without it an extension takes the library's functions from any loaded module. Where two copies are loaded,
    an error in C++ can end the process.
    """
    if not any(_C_COMPILER.fullmatch(os.path.basename(word)) for word in command):
        return ()
    return ("-lc++",) if sys.platform == "darwin" else ("-lstdc++",)


def run(command: list[str], arguments: list[str], work: Path) -> None:
    """Run a compiler whose output goes to `work`. Raises BuildError if it fails."""
    done = subprocess.run(
        [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        code = done.returncode
        ended = f"error: ended by a signal: {signal.strsignal(-code)}\n" if code < 0 else ""
        raise failure(command, done.stdout + done.stderr + ended, work)


def failure(command: list[str], output: str, work: Path) -> BuildError:
    """The error of a failed compiler: the line with the reason, and a log of all output beside `work`."""
    log = work.parent / "build.log"
    log.write_text(output, errors="replace")
    told = ((sign, line) for sign in REASONS for line in output.splitlines())
    reason = next((line for sign, line in told if sign in line.lower()), "no reason given")
    return BuildError(f"{shlex.join(command)} failed: {reason.strip()} (full output: {log})")


@contextlib.contextmanager
def environment(compiler: list[str], work: Path) -> Iterator[None]:
    """Set the environment for torch's builder; ninja may be beside a Python that is not on PATH."""
    changes = {
        "CXX": _as_one_program(compiler, work),
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


def _as_one_program(compiler: list[str], directory: Path) -> str:
    """The compiler's path; for a command of several words, which torch would quote, a script's path."""
    if len(compiler) == 1:
        return compiler[0]
    script = directory / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    script.chmod(0o700)
    return str(script)
