"""doctor: checks what the parts need on this machine. A line for each check names the remedy if it fails.

Nothing is compiled or changed here. What can end a process is tried in another one.
"""

import contextlib
import functools
import importlib.metadata
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from shakespeare.attention_ext import AUTO, BuildError, processor
from shakespeare.attention_ext.build import cache, nvrtc, prebuilt, recipes, toolchain
from shakespeare.checkpoints import PRESENT
from shakespeare.lab.subprocesses import run as run_command

OK = "ok"
ABSENT = "--"
BROKEN = "FAIL"

OLDEST_TORCH = (2, 10)
# Other packages that the commands import: distribution names.
PACKAGES = (
    "click",
    "filelock",
    "fsspec",
    "numpy",
    "platformdirs",
    "safetensors",
    *(() if sys.platform == "win32" else ["ninja"]),
)
# A package of each of setup.cfg's extras, without those that have a line of their own.
EXTRAS = {
    "torch": "pybind11",
    "serve": "starlette",
    "web": "ziglang",
    "lab": "matplotlib",
    "bench": "ctranslate2",
}
INSTALL = "pip install -c constraints.txt -e ."

VERSION_SECONDS = 10
TORCH_SECONDS = 120  # torch takes long to read from a cold disk
BUILD_BYTES = 16 << 20  # free space that a build needs; it writes some 2 MB

TORCH = "import torch; print(torch.__version__)"
WEBGPU = """
from shakespeare.attention_ext.parts import BuildError
from shakespeare.attention_ext.webgpu.driver import opened
try:
    adapter = opened().adapter
except BuildError as error:
    print(f"!{error}")
else:
    slow = ", right but slow: it is the CPU" if adapter.is_cpu else ""
    features = ", ".join(sorted(adapter.features)) or "no optional features"
    print(f"{adapter.name} by {adapter.backend}, {features}{slow}")
"""
BROUGHT = prebuilt.find("decoder")  # by a wheel
DECODER = """
import ctypes, sys
name = ctypes.CDLL(sys.argv[1]).decoder_simd_name
name.restype = ctypes.c_char_p
print(name().decode())
"""
OPERATORS = """
import sys, torch
torch.ops.load_library(sys.argv[1])
print(getattr(torch.ops, sys.argv[2]).simd_name())
"""


class Missing(Exception):
    """An optional feature is missing; the message names its purpose and how to get it."""


class Broken(Exception):
    """Something does not work; the message names it and the one remedy."""


def run(echo: Callable[[str], None]) -> bool:
    """Echo a line for each check; False if something is broken."""
    states = set()
    for name, state, text in examine():
        echo(f"{state:4}  {name:14} {text}")
        states.add(state)
    return BROKEN not in states


def examine() -> Iterator[tuple[str, str, str]]:
    """(name, OK or ABSENT or BROKEN, one line of text) of each check. Only Ctrl-C stops it early."""
    unknown = set()
    for name, (look, *needs) in CHECKS.items():
        if lacking := [needed for needed in needs if needed in unknown]:
            state = ABSENT
            text = f"not checked without {lacking[0]}"
        else:
            try:
                state = OK
                text = look()
            except Missing as error:
                state = ABSENT
                text = str(error)
            except Exception as error:
                state = BROKEN
                text = _reason(error)
        if state != OK:
            unknown.add(name)
        yield name, state, "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _reason(error: Exception) -> str:
    """The error's message, with its type unless the message was written for users."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    readable = isinstance(error, (Broken, BuildError, ValueError)) and str(error)
    return str(error) if readable else f"{type(error).__name__}: {error}"


def _output(command: list[str], seconds: float) -> str:
    """What a program writes to stdout, or else to stderr. Raises Broken if it fails or takes too long."""
    try:
        code, out, err = run_command(command, seconds)
    except subprocess.TimeoutExpired:
        raise Broken(f"did not answer within {seconds} s") from None
    if code:
        how = f"failed with exit code {code}" if code > 0 else f"was ended: {signal.strsignal(-code)}"
        raise Broken(": ".join([how, *err.splitlines()[-1:]]))
    return out or err


def _python_says(program: str, *arguments: str) -> str:
    """The last line that a program in Python prints. Raises Broken as _output() does."""
    return _output([sys.executable, "-c", program, *arguments], TORCH_SECONDS).splitlines()[-1]


def _version(command: list[str], remedy: str) -> str:
    """The first line of a program's --version, and its path. Raises Broken, with the remedy."""
    path = shutil.which(command[0]) or command[0]
    try:
        output = _output([*command, "--version"], VERSION_SECONDS)
    except (Broken, OSError) as error:
        raise Broken(f"{shlex.join(command)} --version {_reason(error)}; {remedy}") from None
    return f"{output.splitlines()[0] if output else 'no version'} ({shlex.join([path, *command[1:]])})"


def _packages() -> str:
    if missing := [name for name in PACKAGES if _installed(name) is None]:
        raise Broken(f"{', '.join(missing)} not installed; {INSTALL}")
    return ", ".join(f"{name} {_installed(name)}" for name in PACKAGES)


def _installed(package: str) -> str | None:
    """A package's version; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _torch() -> str:
    """torch's version, found in another process."""
    if _installed("torch") is None:
        raise Missing(f"not installed (part0, the lab, training and CUDA); {INSTALL[:-1]}'.[torch]'")
    try:
        version = _python_says(TORCH)
    except Broken as error:
        raise Broken(f"its import {error}; {INSTALL}") from None
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < OLDEST_TORCH:
        raise Broken(f"{version}; it must be at least {'.'.join(map(str, OLDEST_TORCH))}: {INSTALL}")
    return version


def _threads() -> str:
    chosen = os.environ.get("OMP_NUM_THREADS")
    use = f"{processor.threads()} of {processor.cores()} cores"
    return f"{use}, OMP_NUM_THREADS {'is ' + chosen if chosen else 'not set'}"


def _compiler() -> str:
    if sys.platform == "win32":
        raise Missing(f"{toolchain.WSL} (a text needs none: the decoder is compiled already)")
    if BROUGHT and not any(map(shutil.which, ("c++", "g++", "clang++"))) and "CXX" not in os.environ:
        raise Missing("none, and none is needed for a text: the decoder is compiled already")
    return _version(toolchain.find_compiler(), "let CXX name a C++ compiler that works")


def _python_header() -> str:
    if not toolchain.python_header().is_file():
        raise Missing(f"no {toolchain.python_header()}, so no native training step; apt install python3-dev")
    return str(toolchain.python_header())


def _ispc() -> str:
    ispc = toolchain.find_ispc()
    if ispc is None:
        remedy = "scripts/install-ispc.sh gets it on Debian 12"
        raise Missing(f"not found (--simd auto works without it); {remedy}")
    return _version([ispc], "let ISPC name an ISPC compiler that works, or unset it")


def _cache() -> str:
    directory = cache.directory().absolute()
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise Broken(f"{there} is no directory; {cache.ELSEWHERE}")
    try:  # permissions do not tell what root can write
        tempfile.TemporaryDirectory(prefix="doctor", dir=there).cleanup()
    except OSError as error:
        how = "written" if there == directory else "made"
        raise Broken(f"{directory} cannot be {how}: {error.strerror}; {cache.ELSEWHERE}") from None
    cache.check_owner(directory)
    if hasattr(os, "statvfs") and os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise Broken(f"{directory} is mounted noexec, so nothing can be loaded from it; {cache.ELSEWHERE}")
    free = shutil.disk_usage(there).free
    if free < BUILD_BYTES:
        room = f"{directory} has room for {free >> 20} MiB; a build needs {BUILD_BYTES >> 20}"
        raise Broken(f"{room}; {cache.ELSEWHERE}")
    made = "" if there == directory else " (the first build makes it)"
    return f"{directory}, {free / 2**30:.1f} GiB free{made}"


def _decoder() -> str:
    if BROUGHT:
        return f"{BROUGHT} ({_python_says(DECODER, str(BROUGHT))})"
    from shakespeare.generation.engines import native  # it imports NumPy, which may be missing

    return _compiled(native.recipe, DECODER)


def _compiled(recipe: Callable[[], Any], program: str, *arguments: str) -> str:
    """A library's path and what a program that loads it prints. Nothing is compiled."""
    library = recipe().path().absolute()
    if not library.exists():
        log = library.with_name("build.log")
        if log.exists():
            raise Broken(f"its last build failed; {log} has the reason")
        raise Missing("not compiled yet; its first use compiles it")
    cache.check_owner(library.parent)
    try:
        name = _python_says(program, str(library), *arguments)
    except Broken as error:
        raise Broken(f"loading {library} {error}; delete it to compile it again") from None
    return f"{library} ({name})"


def _gpu() -> str:
    import torch  # the line of torch has tried it

    built = torch.version.cuda
    if built is None:
        raise Missing("this PyTorch has no CUDA (for part4 --device cuda); pytorch.org has builds with it")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        why = f"none that PyTorch, for CUDA {built}, can use"
        raise Missing(f"{why} (for part4 --device cuda); nvidia-smi shows what there is")
    names = ", ".join(f"{gpu.name} ({gpu.major}.{gpu.minor})" for gpu in gpus)
    return f"{names}, PyTorch for CUDA {built}"


def _nvrtc() -> str:
    if missing := [name for name in ("cuda-core", "cuda-bindings") if _installed(name) is None]:
        what = "not installed (CUDA kernels, for part4 --device cuda)"
        raise Missing(f"{' and '.join(missing)} {what}; {nvrtc.INSTALL}")
    core, version = nvrtc.versions()
    return f"NVRTC {version}, cuda-core {core}"


def _webgpu() -> str:
    if _installed("wgpu") is None:
        raise Missing(f"wgpu not installed (part4 --device webgpu on any GPU); {INSTALL[:-1]}'.[webgpu]'")
    adapter = _python_says(WEBGPU)
    if adapter.startswith("!"):
        raise Missing(adapter[1:])
    return adapter


def _checkpoint(name: str) -> str:
    from shakespeare.model.checkpoint import load

    try:
        checkpoint = load(name)
    except ValueError as error:
        raise Broken(f"{error}; git restore checkpoints/{name}, or install the package again") from None
    return f"block size {checkpoint.config.block_size}, {len(checkpoint.tokenizer)} characters"


def _extras() -> str:
    if missing := [extra for extra, package in EXTRAS.items() if _installed(package) is None]:
        raise Missing(f"without {', '.join(missing)}; {INSTALL[:-1]}'.[{','.join(missing)}]'")
    return ", ".join(EXTRAS)


# Each line: a function that returns its result, and the names of the lines that it depends on. The function
# raises Missing for a missing option, any other error for a broken one.
CHECKS: dict[str, tuple[Any, ...]] = {
    "Python": (lambda: f"{platform.python_version()} ({sys.executable})",),
    "packages": (_packages,),
    "torch": (_torch,),
    "instructions": (lambda: f"{processor.instructions()}, {platform.machine()}",),
    "threads": (_threads,),
    "compiler": (_compiler,),
    "Python header": (_python_header, "compiler"),
    "ispc": (_ispc, "compiler"),
    "cache": (_cache,),
    "decoder": (_decoder, *(() if BROUGHT else ("compiler", "cache"))),
    "operators": (
        functools.partial(_compiled, recipes.operators, OPERATORS, f"attention_ext_{AUTO}"),
        *("torch", "compiler", "cache"),
    ),
    "GPU": (_gpu, "torch"),
    "NVRTC": (_nvrtc,),
    "WebGPU": (_webgpu,),
    **{name: (functools.partial(_checkpoint, name), "packages") for name in PRESENT},
    "extras": (_extras,),
}
