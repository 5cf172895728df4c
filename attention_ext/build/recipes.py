"""What is compiled: the extension of PyTorch for each SIMD helper, and a standalone program of the kernels.

Sources are found by folder in csrc/, so a new kernel or a new precision is a new file.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pybind11
import torch

from attention_ext import processor
from attention_ext.build import cache, toolchain
from attention_ext.parts import BuildError, resolve_simd

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "attention_ext" / "csrc"
PORTABLE = "simd/portable/*.cpp"  # the helpers of simd/portable.h, in every extension and program
# Each implementation of simd/simd.h: its sources beside PORTABLE, and the flags of its extension and program.
HELPERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ispc": (("simd/ispc.cpp",), ("-DSIMD_ELSEWHERE",)),
    "portable": ((), ()),
    "off": (("simd/off.cpp",), ("-DSIMD_ELSEWHERE", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")),
}
ISPC_SOURCE = "simd/simd.ispc"
KERNELS = "cpu/*.cpp"
MODEL = ("model/csrc/*.cpp", "generation/csrc/*.cpp", "training/csrc/*.cpp")  # below ROOT
EXTENSION = (KERNELS, PORTABLE, "tools/limits.cpp", "bindings/operators.cpp")
DECODER_MODULE = ROOT / "generation/csrc/module.cpp"  # compiled only where Python's header is installed
PROGRAM = (KERNELS, PORTABLE, "tools/alone.cpp")


@dataclass(frozen=True)
class Recipe:
    """A file to compile, and everything that decides its content.

    name: the directory's name before the fingerprint. file: the file's name. what: a description for
    messages. csrc: the source folders; every file in them enters the fingerprint. includes: headers' folders.
    ispc: the compiler of ISPC_SOURCE, if needed. compile: makes the file in a folder and returns its path.
    """

    name: str
    file: str
    what: str
    csrc: tuple[Path, ...]
    sources: tuple[Path, ...]
    includes: tuple[str, ...]
    flags: tuple[str, ...]
    compiler: tuple[str, ...]
    ispc: str | None
    compile: Callable[[Recipe, Path], Path]

    def path(self) -> Path:
        """The file's path, before and after it is made. Raises BuildError if a compiler does not run."""
        versions = [toolchain.version(self.compiler), toolchain.version([self.ispc]) if self.ispc else b""]
        decoder = f"decoder {toolchain.has_python_header()}"
        versions_of = (torch.__version__, pybind11.__version__, sys.version)
        facts = (shlex.join(self.compiler), *self.flags, *versions_of)
        named = cache.fingerprint([*facts, processor.capabilities(), decoder, *versions], *self.csrc)
        return cache.real(cache.directory()) / f"{self.name}_{named}" / self.file

    def make(self) -> Path:
        """The file, compiled if need be. Raises BuildError as cache.make() does, or if compiling fails."""
        made = self.path()
        cache.make(made, self.what, lambda work: self.compile(self, work))
        return made


def extension(simd: str = "auto") -> Recipe:
    """The extension: a library of the operators and the decoder, over one of SIMD.

    Raises ValueError if simd is not one of SIMD, BuildError if a compiler is missing.
    """
    helpers = resolve_simd(simd)
    compiler = toolchain.find_compiler()
    ispc = toolchain.find_ispc() if helpers == "ispc" else None
    if helpers == "ispc" and ispc is None:
        raise BuildError("simd is 'ispc', but no ispc was found on PATH; scripts/install-ispc.sh gets it")
    own, flags = HELPERS[helpers]
    name = f"attention_ext_{helpers}"
    sources = (*found(CSRC, (*EXTENSION, *own)), *found(ROOT, MODEL))
    if not toolchain.has_python_header():
        sources = tuple(path for path in sources if path != DECODER_MODULE)
    return Recipe(
        name=name,
        file="attention_ext.so",
        what="code into a PyTorch module",
        csrc=(CSRC, *(ROOT / folder / "csrc" for folder in ("model", "generation", "training"))),
        sources=sources,
        includes=(pybind11.get_include(), str(CSRC), str(ROOT)),  # PyTorch adds its own after these
        flags=(*toolchain.flags(compiler), *flags, f"-DATTENTION_EXT={name}"),
        compiler=tuple(compiler),
        ispc=ispc,
        compile=make_extension,
    )


def program(simd: str = "auto", march: str = "native", csrc: Path = CSRC) -> Recipe:
    """The standalone program of tools/alone.cpp, which runs one part without Python or PyTorch.

    simd: 'portable', 'off', or 'auto', which is AUTO. march: the processor to compile for, as the compiler's
    -march names it.
    Raises ValueError for another simd, BuildError if there is no compiler.
    """
    helpers = resolve_simd(simd)
    if helpers == "ispc":
        raise ValueError(f"simd is {simd!r}; the program's must be auto, portable or off")
    own, flags = HELPERS[helpers]
    native = toolchain.NATIVE if march == "native" else f"-march={march}"
    compiler = toolchain.find_compiler()
    general = (native if flag == toolchain.NATIVE else flag for flag in toolchain.flags(compiler))
    return Recipe(
        name=f"attention_ext_alone_{helpers}",
        file="alone",
        what="a standalone program of the kernels",
        csrc=(csrc,),
        sources=found(csrc, (*PROGRAM, *own)),
        includes=(str(csrc),),
        flags=(*general, *flags),
        compiler=tuple(compiler),
        ispc=None,
        compile=make_program,
    )


def found(csrc: Path, patterns: tuple[str, ...]) -> tuple[Path, ...]:
    """The files below csrc that match these patterns, in their order."""
    return tuple(path for pattern in patterns for path in sorted(csrc.glob(pattern)))


def make_extension(recipe: Recipe, work: Path) -> Path:
    """Make an extension in `work`. torch's builder also loads it; a renamed library is not loaded twice."""
    from torch.utils import cpp_extension  # slow to import, and only a build needs it

    objects = [_run_ispc(recipe, recipe.ispc, work)] if recipe.ispc else []
    compiler = list(recipe.compiler)
    with toolchain.environment(compiler, work):
        try:
            cpp_extension.load(
                "unfinished",
                [str(source) for source in recipe.sources],
                extra_cflags=list(recipe.flags),
                extra_include_paths=list(recipe.includes),
                extra_ldflags=[*objects, *toolchain.libraries(compiler)],
                build_directory=str(work),
                is_python_module=False,
            )
        except RuntimeError as error:
            raise toolchain.failure(compiler, str(error), work) from None
        except UnicodeDecodeError as error:  # the message of a failed compiler, in another encoding
            raise toolchain.failure(compiler, error.object.decode(errors="replace"), work) from None
        except OSError as error:
            if error.errno is not None:
                raise
            made = f"{shlex.join(compiler)} made a library that cannot be loaded"
            raise BuildError(f"{made} ({error.__cause__ or error})") from None
    return next(work.glob("*.so"))


def make_program(recipe: Recipe, work: Path) -> Path:
    """Make a program in `work`, with line numbers for debuggers and profilers."""
    made = work / recipe.file
    sources = [str(source) for source in recipe.sources]
    arguments = [
        "-std=c++17",
        "-g",
        *recipe.flags,
        *(f"-I{path}" for path in recipe.includes),
        *sources,
        *toolchain.libraries(recipe.compiler),
        "-o",
        str(made),
    ]
    toolchain.run(list(recipe.compiler), arguments, work)
    return made


def _run_ispc(recipe: Recipe, ispc: str, work: Path) -> str:
    """Compile ISPC_SOURCE for this processor; returns the object file's path."""
    made = work / "simd_ispc_kernels.o"
    arguments = [str(CSRC / ISPC_SOURCE), "--target=host", "-O3", "--pic", "-o", str(made)]
    toolchain.run([ispc], arguments, work)
    return str(made)
