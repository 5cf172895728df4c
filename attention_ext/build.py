"""Compiles the extension once, just in time, and loads it.

The build directory is named by a hash of everything that decides the outcome: sources, flags, torch,
compiler and CPU. A lock that the kernel releases with its process guards it, so a build in progress is
waited for, aloud, and a killed one is taken over. Only a finished library has the name that is loaded, and
only from where nobody else can put one (SECURITY.md).
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
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import library as torch_library

from attention_ext import AUTO, PARTS, SIMD, BuildError

CSRC = Path(__file__).parent / "csrc"
KERNELS = ("part1_naive.cpp", "part2_blocked.cpp", "part3_fused.cpp", "part4_flash.cpp")
SOURCES = ("bindings.cpp", *KERNELS, "peak.cpp", "decoder.cpp")
LOCK = "building"  # in a build's directory, locked while a process compiles there
ELSEWHERE = "TORCH_EXTENSIONS_DIR can name another directory"
# What the line has that says why a compiler failed, the surest first; a crash is told by the shell.
REASONS = ("no space left on device", "error:", "segmentation fault", "killed", "aborted")
VERSION_SECONDS = 60  # what a compiler is given to tell its version
ALONE = "alone.cpp"  # with KERNELS, a program
DECODER_BINDINGS = "decoder_bindings.cpp"  # compiled where Python's own header is installed
# Each implementation of simd.h: its source, and the flags that it alone is compiled with.
VARIANTS = {
    "ispc": ("simd_ispc.cpp", ()),
    "portable": ("simd_portable.cpp", ()),
    "off": ("simd_off.cpp", ("-fno-tree-vectorize", "-fno-tree-slp-vectorize")),
}
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = (
    "-O3",
    NATIVE,
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


def load(simd: str = "auto") -> Any:
    """The operators, torch.ops.attention_ext_<variant>, compiled first if this machine has not yet.

    simd: one of SIMD; 'auto' is AUTO.
    Raises ValueError for another simd, BuildError if there is no compiler, it fails, or the cache
    directory cannot be used or can be written by others.
    """
    if simd not in SIMD:
        raise ValueError(f"simd is {simd!r}; it must be one of {', '.join(SIMD)}")
    with _loading:
        return _load(AUTO if simd == "auto" else simd)


def load_decoder(simd: str = "auto") -> Any:
    """The class Decoder of decoder_bindings.cpp, compiled first if need be; simd as in load().

    Raises ValueError and BuildError as load() does, and BuildError where Python's header is missing.
    """
    if not has_python_header():
        raise BuildError(
            f"the native engine needs Python's header, and there is no {python_header()}; install it "
            "(Debian, Ubuntu: apt install python3-dev), or choose the torch engine"
        )
    load(simd)
    with _loading:
        return _load_decoder(AUTO if simd == "auto" else simd)


def has_python_header() -> bool:
    """Whether C++ that knows Python can be compiled here."""
    return python_header().is_file()


def python_header() -> Path:
    """Where Python's own header is, or would be."""
    return Path(sysconfig.get_path("include")) / "Python.h"


@functools.cache
def _load_decoder(variant: str) -> Any:
    library = _libraries[variant]
    spec = importlib.util.spec_from_file_location(f"attention_ext_{variant}", library)
    assert spec is not None and spec.loader is not None  # the suffix is one of an extension module
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Decoder


_libraries: dict[str, Path] = {}  # of each variant that is loaded


@functools.cache
def _load(variant: str) -> Any:
    compiler, ispc = _compilers(variant)
    name, library = f"attention_ext_{variant}", _extension_path(compiler, ispc, variant)
    _make(library, "code into a PyTorch module", lambda work: _make_library(compiler, ispc, variant, work))
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        reason = error.__cause__ or error  # torch's own names the library only
        raise BuildError(f"{library} cannot be loaded ({reason}); delete it to compile it again") from None
    _register_fakes(name)
    _libraries[variant] = library
    return getattr(torch.ops, name)


def extension_path(simd: str = "auto") -> Path:
    """Where load() finds the library, or puts it: its directory has build.log where compiling it failed.

    simd: one of SIMD. Raises BuildError without a compiler.
    """
    variant = AUTO if simd == "auto" else simd
    return _extension_path(*_compilers(variant), variant)


def _extension_path(compiler: list[str], ispc: str | None, variant: str) -> Path:
    name = f"attention_ext_{variant}_{_fingerprint(compiler, ispc, variant)}"
    return _real(cache_directory()) / name / "attention_ext.so"


def _compilers(variant: str) -> tuple[list[str], str | None]:
    """The C++ compiler's command, and the ISPC compiler where the variant needs it."""
    compiler = find_compiler()
    ispc = find_ispc() if variant == "ispc" else None
    if variant == "ispc" and ispc is None:
        raise BuildError("simd is 'ispc', but no ispc was found on PATH; scripts/install-ispc.sh gets it")
    return compiler, ispc


def program(simd: str = "auto", march: str = "native") -> Path:
    """The program of alone.cpp, one part without Python or PyTorch, compiled first if need be.

    simd: 'portable', 'off', or 'auto', which is AUTO. march: the processor to compile for, as the compiler's
    -march names it.
    Raises ValueError for another simd, BuildError as load() does.
    """
    variant = AUTO if simd == "auto" else simd
    if variant not in ("portable", "off"):
        raise ValueError(f"simd is {simd!r}; the program's must be auto, portable or off")
    compiler = find_compiler()
    name = f"attention_ext_alone_{variant}_{_fingerprint(compiler, None, variant, march)}"
    made = _real(cache_directory()) / name / "alone"
    _make(made, "a program of the kernels alone", lambda work: _make_program(compiler, variant, march, work))
    return made


def describe(simd: str = "auto") -> str:
    """Which SIMD helpers, instruction set and number of threads are in use, for people to read."""
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"SIMD: {load(simd).simd_name()}, {capability}, {threads} thread{'s' * (threads > 1)}"


def read_4d(t: torch.Tensor, index: tuple[int, int, int, int]) -> float:
    """t[index] as the extension reads it, by strides; t is a float32 CPU tensor (B, H, N, d).

    Raises ValueError if t or index is anything else.
    """
    if t.dtype != torch.float32 or t.device.type != "cpu" or t.ndim != 4:
        raise ValueError(f"t is {t.dtype} on {t.device} of shape {tuple(t.shape)}; it must be 4-D float32")
    if len(index) != 4 or any(not 0 <= i < n for i, n in zip(index, t.shape)):
        raise ValueError(f"index is {index}; it must be inside the shape {tuple(t.shape)}")
    return load().read_4d(t, *index)


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


def cache_directory() -> Path:
    """Where builds are kept: $TORCH_EXTENSIONS_DIR, else torch_extensions in the user's cache.

    Raises BuildError for a user without a home.
    """
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError(f"{error} {ELSEWHERE}") from None
    return Path(cache) / "torch_extensions"


def check_owner(directory: Path) -> None:
    """Raise BuildError if somebody else could put a library into a directory, or replace the directory.

    Those above it may be everybody's if they have the sticky bit, as /tmp has: it keeps what is one user's
    from the others. What does not exist yet is passed over.
    """
    directory = _real(directory)
    trusted = (0, os.geteuid(), os.stat("/").st_uid)  # root may have another number in a container
    for path in (directory, *directory.parents):
        if not path.exists():
            continue
        status = path.stat()
        if status.st_uid not in trusted:
            raise BuildError(
                f"{path} belongs to user {status.st_uid}, whose library would be run; {ELSEWHERE}"
            )
        shared = bool(status.st_mode & stat.S_ISVTX)
        if shared and path != directory:
            continue
        if status.st_mode & stat.S_IWOTH:
            who, change = "everybody", "o-w"
        elif status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid):
            who, change = f"group {status.st_gid}", "g-w"
        else:
            continue
        ours = status.st_uid == os.geteuid() and not shared
        remedy = f"chmod {change} {shlex.quote(str(path))}" if ours else ELSEWHERE
        raise BuildError(f"{path} can be written by {who}, whose library would be run; {remedy}")


def _is_private(group: int) -> bool:
    """Whether a group is root's, or has the user's name and no other members.

    Many systems give each user such a group, and let it write what the user makes.
    """
    import grp
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return group == 0
    return group == 0 or (found.gr_name == user and set(found.gr_mem) <= {user})


def _real(directory: Path) -> Path:
    """The path without symbolic links: who may change one of those decides what is loaded, too."""
    return Path(os.path.realpath(directory))


def _fingerprint(compiler: list[str], ispc: str | None, variant: str, march: str = "native") -> str:
    """16 hexadecimal digits of everything that decides what the compilers make."""
    digest = hashlib.sha256()
    flags, decoder = _flags(variant, march), f"decoder {has_python_header()}"
    for item in (shlex.join(compiler), *flags, torch.__version__, sys.version, _cpu(), decoder):
        digest.update(item.encode() + b"\0")
    for command in (compiler, *([[ispc]] if ispc else [])):
        try:
            version = subprocess.run(
                [*command, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=VERSION_SECONDS,
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"the compiler {shlex.join(command)} does not run: {error}") from None
        digest.update(version)
    for source in sorted(CSRC.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _flags(variant: str, march: str = "native") -> tuple[str, ...]:
    flags = (f"-march={march}" if flag == NATIVE and march != "native" else flag for flag in FLAGS)
    return (*flags, *VARIANTS[variant][1], f"-DATTENTION_EXT=attention_ext_{variant}")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in kept)


def _make(made: Path, what: str, make: Callable[[Path], Path]) -> None:
    """Let make(directory) write a file into a fresh one, under a lock; finished, it gets the name `made`.

    Nothing is done if the file is there. Raises BuildError where somebody else could have put it.
    """
    directory = made.parent
    try:
        for path in (*reversed(directory.parents), directory):
            path.mkdir(mode=0o700, exist_ok=True)
        for path in (directory.parent, directory):
            check_owner(path)
        if made.exists():
            return
        with _locked(directory / LOCK):
            if made.exists():  # another process made it while this one waited
                return
            print(f"Compiling {what}...", file=sys.stderr, flush=True)
            # A killed build's compilers may still be writing where it worked, so never work there again.
            for left in directory.glob(f"{tempfile.gettempprefix()}*"):
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as work:
                make(Path(work)).replace(made)
    except OSError as error:
        raise BuildError(
            f"cannot write the build directory {directory}: {error.strerror}; {ELSEWHERE}"
        ) from error


def _run_ispc(ispc: str, work: Path) -> str:
    """Compile simd.ispc for this processor; gives the object file's path."""
    made = work / "simd_ispc_kernels.o"
    _run([ispc], [str(CSRC / "simd.ispc"), "--target=host", "-O3", "--pic", "-o", str(made)], work)
    return str(made)


def _make_library(compiler: list[str], ispc: str | None, variant: str, work: Path) -> Path:
    """Make a library in `work`, which torch's builder also loads; renamed, it is still the same one."""
    from torch.utils import cpp_extension  # slow to import, and only a build needs it

    objects = [_run_ispc(ispc, work)] if ispc else []
    sources = (*((DECODER_BINDINGS,) if has_python_header() else ()), *SOURCES, VARIANTS[variant][0])
    with _environment(_as_one_program(compiler, work)):
        try:
            cpp_extension.load(
                "unfinished",
                [str(CSRC / name) for name in sources],
                extra_cflags=list(_flags(variant)),
                extra_ldflags=objects,
                build_directory=str(work),
                is_python_module=False,
            )
        except RuntimeError as error:
            raise _failure(compiler, str(error), work) from None
        except UnicodeDecodeError as error:  # of a compiler that failed and said it in another encoding
            raise _failure(compiler, error.object.decode(errors="replace"), work) from None
        except OSError as error:
            if error.errno is not None:
                raise
            made = f"{shlex.join(compiler)} made a library that cannot be loaded"
            raise BuildError(f"{made} ({error.__cause__ or error})") from None
    return next(work.glob("*.so"))


def _make_program(compiler: list[str], variant: str, march: str, work: Path) -> Path:
    """Make the program in `work`; debuggers and profilers find the lines of its sources."""
    made = work / "alone"
    sources = [str(CSRC / name) for name in (ALONE, *KERNELS, VARIANTS[variant][0])]
    _run(compiler, ["-std=c++17", "-g", *_flags(variant, march), *sources, "-o", str(made)], work)
    return made


def _run(compiler: list[str], arguments: list[str], work: Path) -> None:
    """Run a compiler. Raises BuildError if it fails."""
    done = subprocess.run(
        [*compiler, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        code = done.returncode
        ended = f"error: it was ended: {signal.strsignal(-code)}\n" if code < 0 else ""
        raise _failure(compiler, done.stdout + done.stderr + ended, work)


def _failure(compiler: list[str], output: str, work: Path) -> BuildError:
    """The error of a compiler that failed: the line that says most, and where all lines are."""
    log = work.parent / "build.log"
    log.write_text(output, errors="replace")
    told = ((sign, line) for sign in REASONS for line in output.splitlines())
    reason = next((line for sign, line in told if sign in line.lower()), "no reason given")
    return BuildError(f"{shlex.join(compiler)} failed: {reason.strip()} (all it said: {log})")


def running_builds() -> list[Path]:
    """The build directories in which a process is compiling now."""
    import fcntl

    running = []
    for path in sorted(cache_directory().glob(f"attention_ext_*/{LOCK}")):
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            running.append(path.parent)
        except OSError:  # another user's, or removed meanwhile
            continue
    return running


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on path; say so when another process has it."""
    import fcntl

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another build...", file=sys.stderr, flush=True)
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


def _register_fakes(name: str) -> None:
    """What torch.compile and opcheck know of the operators: shapes and types."""

    def fake(q, k, v, causal, scale, return_lse, br=1, bc=1):
        B, H, Nq, d = q.shape
        return q.new_empty(B, H, Nq, d), q.new_empty((B, H, Nq) if return_lse else (0,))

    for part in PARTS.values():
        if part.operator:
            torch_library.register_fake(f"{name}::{part.operator}", fake)
