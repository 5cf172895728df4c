"""The libraries and CUDA kernels that a wheel brings, compiled by scripts/make-wheels.py."""

import hashlib
import os
import sys
from pathlib import Path

from shakespeare.attention_ext import processor
from shakespeare.attention_ext.parts import BuildError

SUMS = "SHA256SUMS"  # beside the libraries, for sha256sum -c
FOLDER = Path(__file__).resolve().parent.parent / "prebuilt"
REMEDY = "install the package again, or give --compile"
COMPILE = "ATTENTION_COMPILE"  # 1: compile for this processor although a wheel brings libraries
SUFFIXES = {"linux": ".so", "darwin": ".dylib", "win32": ".dll"}  # by sys.platform
# Clang's name of each kind of processor, the best first, and its features as Linux names them.
LEVELS: dict[str, dict[str, set[str]]] = {
    "x86_64": {
        "x86_64_v4+avx512vnni": processor.AVX512 | {"avx512_vnni"},
        "x86_64_v4": processor.AVX512,
        "x86_64_v3": processor.AVX2,
        "x86_64": set(),
    },
    "aarch64": {"generic+dotprod": {"asimddp"}, "generic": set()},
    "arm64": {"apple_m1": set()},
}
# GPUs that a wheel has kernels for, by compute capability; KiB of shared memory for a block.
GPUS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}


def level(name: str) -> str:
    """What a library is compiled for: one of LEVELS, or 'this processor'."""
    library = find(name)
    return library.stem.removeprefix(f"{name}-") if library else "this processor"


def find(name: str) -> Path | None:
    """The best of a wheel's libraries of this name for this processor; None if there is none."""
    if not in_wheel():
        return None
    features = processor.features()
    for processor_level, needed in LEVELS.get(processor.machine(), {}).items():
        library = FOLDER / f"{name}-{processor_level}{SUFFIXES.get(sys.platform, '.so')}"
        if needed <= features and library.is_file():
            return library
    return None


def in_wheel() -> bool:
    """Whether a wheel brings libraries, and none is to be compiled instead."""
    return FOLDER.is_dir() and os.environ.get(COMPILE, "0") == "0"


def checked(name: str) -> Path:
    """The library of find(). Raises BuildError if there is none or its checksum is wrong."""
    library = find(name)
    if library is None:
        raise BuildError(f"{FOLDER} has no {name} for this processor, {processor.machine()}; {REMEDY}")
    return _verified(library)


def kernel(name: str) -> bytes | None:
    """A wheel's CUDA kernel, by nvrtc.Source.name(); None if it has none. Raises BuildError as checked()."""
    file = FOLDER / name
    return _verified(file).read_bytes() if file.is_file() else None


def _verified(library: Path) -> Path:
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    if f"{digest}  {library.name}" not in (FOLDER / SUMS).read_text(encoding="utf-8").splitlines():
        raise BuildError(f"{library} is not the file that {SUMS} beside it names; {REMEDY}")
    return library


def page(build: str) -> Path:
    """The WebAssembly of one of web.build.BUILDS in a wheel; there is none in a checkout."""
    return FOLDER / f"page-{build}.wasm"
