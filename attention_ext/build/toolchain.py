"""Finds the compilers of this machine, runs them, and reports why one failed."""

import functools
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
from collections.abc import Sequence
from pathlib import Path

from attention_ext.parts import BuildError

VERSION_SECONDS = 60  # the time limit of a compiler's --version
# Signs of the line that says why a compiler failed, the most reliable first; the shell reports a crash.
REASONS = ("no space left on device", "error:", "segmentation fault", "killed", "aborted")
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = (
    "-std=c++17",
    "-O3",
    NATIVE,
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
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


@functools.cache
def version(*command: str) -> bytes:
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
    """FLAGS, and FLAGS_OF_GCC if the compiler is GCC. Raises BuildError if it does not run.

    A command that names a processor, as CXX="g++ -march=haswell", gets no NATIVE, which would override it.
    """
    chosen = (*FLAGS, *FLAGS_OF_GCC) if b"Free Software Foundation" in version(*command) else FLAGS
    named = any(word.startswith(("-march=", "-mcpu=")) for word in command)
    return tuple(flag for flag in chosen if not (named and flag == NATIVE))


def libraries(command: Sequence[str]) -> tuple[str, ...]:
    """The C++ library, which a C compiler such as CXX=gcc must be told to link.

    Without it an extension takes the library's functions from any loaded module. Where two copies are loaded,
    an error in C++ can end the process.
    """
    if not any(_C_COMPILER.fullmatch(os.path.basename(word)) for word in command):
        return ()
    return ("-lc++",) if sys.platform == "darwin" else ("-lstdc++",)


def run(command: list[str], arguments: list[str], work: Path) -> None:
    """Run a compiler whose output goes to `work`; a log of a failure's output stays beside `work`.

    Raises BuildError with the line that gives the reason if the compiler fails.
    """
    done = subprocess.run(
        [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode == 0:
        return
    code = done.returncode
    output = done.stdout + done.stderr
    if code < 0:
        output += f"error: ended by a signal: {signal.strsignal(-code)}\n"
    log = work.parent / "build.log"
    log.write_text(output)
    told = ((sign, line) for sign in REASONS for line in output.splitlines())
    reason = next((line for sign, line in told if sign in line.lower()), "no reason given")
    raise BuildError(f"{shlex.join(command)} failed: {reason.strip()} (full output: {log})")


def build(
    command: list[str], sources: Sequence[Path], flags: Sequence[str], link: Sequence[str], made: Path
) -> Path:
    """Compile C++ sources, as many at once as there are processors, and link them as `made`; returns `made`.

    The objects lie beside it. flags: of each source. link: the linker's arguments, after the objects.
    Raises BuildError as run() does.
    """
    from concurrent.futures import ThreadPoolExecutor

    work = made.parent
    objects = [str(work / f"{i}.o") for i in range(len(sources))]

    def compile(source: Path, object: str) -> None:
        run(command, [*flags, "-c", str(source), "-o", object], work)

    # The longest first, so that no processor waits for one that began late.
    order = sorted(zip(sources, objects), key=lambda pair: pair[0].stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile, *zip(*order)))
    run(command, [*objects, *link, "-o", str(made)], work)
    return made
