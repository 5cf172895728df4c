"""What is compiled: libraries for Python over each SIMD helper, and a standalone program of the kernels.

Sources are found by folder, so a new kernel or a new precision is a new file. The kernels are compiled once
for each SIMD helper, and every library links them.
"""

import ctypes
import shlex
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from attention_ext import processor
from attention_ext.build import cache, toolchain
from attention_ext.parts import MOST_SCORES, BuildError, resolve_simd

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "attention_ext" / "csrc"
# Each implementation of simd/simd.h: its source beside KERNELS, and the flags of all compiled over it.
HELPERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ispc": (("simd/ispc.cpp",), ("-DSIMD_ELSEWHERE",)),
    "portable": ((), ()),
    "off": (("simd/off.cpp",), ("-DSIMD_ELSEWHERE", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")),
}
TORCH_VERSION = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10, the oldest with all that is used
ISPC_SOURCE = "simd/simd.ispc"
KERNELS = ("cpu/*.cpp", "simd/portable/*.cpp")  # the latter: simd/portable.h, used over every helper
OPERATORS = ("bindings/operators.cpp", "tools/limits.cpp")
LAUNCHER = ("bindings/launcher.cpp",)
PROGRAM = ("tools/alone.cpp",)
OWN = ("tools/own.cpp",)
# Programs of a user's file beside its library, and their linker's arguments: under AddressSanitizer, under
# ThreadSanitizer, and for a simulator of caches.
OWN_PROGRAMS = {"address": ("-fsanitize=address",), "thread": ("-fsanitize=thread",), "simulated": ()}
# Python has loaded its own functions before a library is loaded.
LINK = ("-shared", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)


@dataclass(frozen=True)
class Recipe:
    """A file to compile, and everything that decides its content.

    name: the directory's name before the fingerprint. file: the file's name. what: a description for
    messages. folders: of headers; every file in them enters the fingerprint. includes: other folders of
    headers. link: the linker's arguments. ispc: the compiler of ISPC_SOURCE, if needed. kernels: linked too.
    versions: of packages whose headers it includes.
    """

    name: str
    file: str
    what: str
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    sources: tuple[Path, ...]
    folders: tuple[Path, ...] = (CSRC,)
    includes: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    ispc: str | None = None
    kernels: "Recipe | None" = None
    versions: tuple[str, ...] = ()

    def path(self) -> Path:
        """The file's path, before and after it is made. Raises BuildError if a compiler does not run."""
        commands = [self.compiler, (self.ispc,)] if self.ispc else [self.compiler]
        outputs = [toolchain.version(*command) for command in commands]
        kernels = self.kernels.path().parent.name if self.kernels else ""
        facts = [shlex.join(self.compiler), *self.flags, processor.capabilities(), kernels, *self.versions]
        found = (path for folder in self.folders for path in sorted(folder.iterdir()))
        inputs = (path for path in found if path.name != "cuda")  # NVRTC compiles those
        named = cache.fingerprint([*facts, *outputs], *inputs)
        return cache.real(cache.directory()) / f"{self.name}_{named}" / self.file

    def make(self) -> Path:
        """The file, compiled if need be. Raises BuildError as cache.make() does, or if compiling fails."""
        made = self.path()
        cache.make(made, self.what, self._compiled)
        return made

    def _compiled(self, work: Path) -> Path:
        # An object file must not bring a C++ library of its own.
        link = [*self.link, *(() if "-r" in self.link else toolchain.libraries(self.compiler))]
        if self.kernels:
            link.insert(0, str(self.kernels.make()))
        if self.ispc:
            link.insert(0, str(work / "ispc.o"))
            source = str(self.folders[0] / ISPC_SOURCE)
            toolchain.run([self.ispc], [source, "--target=host", "-O3", "--pic", "-o", link[0]], work)
        includes = (*self.includes, *self.folders, ROOT)
        flags = [*self.flags, *(f"-I{folder}" for folder in includes)]
        made = toolchain.build(list(self.compiler), self.sources, flags, link, work / self.file)
        if made.suffix == ".so":
            try:
                ctypes.CDLL(str(made))  # a renamed library is not loaded twice
            except OSError as error:
                reason = f"{shlex.join(self.compiler)} made a library that cannot be loaded ({error})"
                raise BuildError(reason) from None
        return made


def kernels(simd: str = "auto") -> Recipe:
    """The object file of the kernels over one of SIMD, compiled for this processor.

    Raises ValueError if simd is not one of SIMD, BuildError if a compiler is missing.
    """
    helpers = resolve_simd(simd)
    ispc = toolchain.find_ispc() if helpers == "ispc" else None
    if helpers == "ispc" and ispc is None:
        raise BuildError("simd is 'ispc', but no ispc was found on PATH; scripts/install-ispc.sh gets it")
    own, flags = HELPERS[helpers]
    compiler = toolchain.find_compiler()
    return Recipe(
        name=f"attention_ext_kernels_{helpers}",
        file="kernels.o",
        what="the kernels",
        compiler=tuple(compiler),
        flags=(*toolchain.flags(compiler), *flags, "-fPIC"),
        sources=found(CSRC, *KERNELS, *own),
        link=("-r", "-nostdlib"),
        ispc=ispc,
    )


def operators(simd: str = "auto") -> Recipe:
    """The library of attention's operators over one of SIMD; it needs torch. Raises as kernels() does."""
    over = kernels(simd)
    name = over.name.replace("kernels_", "")
    facts = (f"-DATTENTION_EXT={name}", f"-DMOST_SCORES={MOST_SCORES}")
    return with_torch(_library(name, "the operators", over, (CSRC,), found(CSRC, *OPERATORS), *facts))


def launcher() -> Recipe:
    """The library of part 4's operator on CUDA; it needs torch, and neither CUDA's headers nor a GPU.

    Raises BuildError if there is no compiler.
    """
    compiler = toolchain.find_compiler()
    made = Recipe(
        name="attention_ext_cuda",
        file="launcher.so",
        what="the launcher of CUDA kernels",
        compiler=tuple(compiler),
        flags=(*toolchain.flags(compiler), "-fPIC"),
        sources=found(CSRC, *LAUNCHER),
        link=LINK,
    )
    return with_torch(made)


def library(name: str, packages: tuple[str, ...], simd: str = "auto") -> Recipe:
    """The C++ in the folders `package`/csrc, and the kernels over one of SIMD; it needs no Python.

    Raises as kernels() does.
    """
    over = kernels(simd)
    folders = tuple(ROOT / package / "csrc" for package in packages)
    sources = tuple(path for folder in folders for path in found(folder, "*.cpp"))
    title = name.replace("_", " ")
    return _library(over.name.replace("kernels", name), f"the {title}", over, (CSRC, *folders), sources)


def module(name: str, packages: tuple[str, ...], simd: str = "auto") -> Recipe:
    """The same as a Python module: one of the sources has PYBIND11_MODULE(name, m). It may use PyTorch.

    Raises as kernels() does, and BuildError if Python's header is missing.
    """
    if not toolchain.has_python_header():
        raise BuildError(
            f"the {name.replace('_', ' ')} needs Python's header, and {toolchain.python_header()} is "
            "missing; install it (Debian, Ubuntu: apt install python3-dev), or choose part0"
        )
    try:
        import pybind11
    except ImportError:
        raise BuildError(f"the {name.replace('_', ' ')} needs pybind11: pip install pybind11") from None
    made = with_torch(library(name, packages, simd))
    return replace(
        made,
        includes=(pybind11.get_include(), sysconfig.get_path("include"), *made.includes),
        versions=(*made.versions, pybind11.__version__, sys.version),
    )


def program(simd: str = "auto", march: str = "native") -> Recipe:
    """The standalone program of tools/alone.cpp, which runs one part without Python or PyTorch.

    It has line numbers for debuggers and profilers. simd: 'portable', 'off', or 'auto', which is AUTO.
    march: the processor to compile for, as the compiler's -march names it.
    Raises ValueError for another simd, BuildError if there is no compiler.
    """
    if resolve_simd(simd) == "ispc":
        raise ValueError(f"simd is {simd!r}; the program's must be auto, portable or off")
    native = toolchain.NATIVE if march == "native" else f"-march={march}"
    over = kernels(simd)
    return replace(
        over,
        name=over.name.replace("kernels", "alone"),
        file="alone",
        what="a standalone program of the kernels",
        flags=("-g", *(native if flag == toolchain.NATIVE else flag for flag in over.flags)),
        sources=(*over.sources, *found(CSRC, *PROGRAM)),
        link=(),
    )


def own(in_ispc: bool, program: str = "", march: str = "native") -> Recipe:
    """The object file that a user's file is linked with: what it may call, and what calls it.

    in_ispc: it is in ISPC. program: one of OWN_PROGRAMS, or '' for a library. march: as in program(), for
    'simulated'. Raises BuildError if there is no compiler.
    """
    over = kernels()
    ours: tuple[str, ...] = ("-DOWN", *(("-DOWN_ISPC",) if in_ispc else ()))
    made = replace(over, file="own.o", what="what your kernel is linked with", link=("-r", "-nostdlib"))
    name = over.name.replace("kernels", f"base{'_ispc' * in_ispc}{'_' * bool(program)}{program}")
    if program == "simulated":
        sources = (*over.sources, *found(CSRC, *PROGRAM))
        ours += ("-g",)
        flags = tuple(f"-march={march}" if flag == toolchain.NATIVE else flag for flag in over.flags)
        return replace(made, name=name, flags=(*flags, *ours), sources=sources)
    if program:  # the kernels are not instrumented
        ours += ("-g", "-O1", "-fno-omit-frame-pointer", *OWN_PROGRAMS[program])
    sources = found(CSRC, *(PROGRAM if program else OWN))
    return replace(made, name=name, flags=(*over.flags, *ours), sources=sources, kernels=over)


def found(folder: Path, *patterns: str) -> tuple[Path, ...]:
    """The files below a folder that match these patterns, in their order."""
    return tuple(path for pattern in patterns for path in sorted(folder.glob(pattern)))


def _library(
    name: str, what: str, over: Recipe, folders: tuple[Path, ...], sources: tuple[Path, ...], *flags: str
) -> Recipe:
    """A shared library of these sources and of the kernels."""
    return Recipe(
        name=name,
        file=f"{name}.so",
        what=what,
        compiler=over.compiler,
        flags=(*over.flags, *flags),
        sources=sources,
        folders=folders,
        link=LINK,
        kernels=over,
    )


def with_torch(recipe: Recipe) -> Recipe:
    """The recipe with PyTorch's headers and libraries, which Python has loaded before."""
    import torch

    folder = Path(torch.__file__).parent
    libraries = (f"-L{folder / 'lib'}", "-Wl,--as-needed", "-ltorch_cpu", "-lc10")
    return replace(
        recipe,
        flags=(*recipe.flags, TORCH_VERSION),
        includes=(*recipe.includes, str(folder / "include")),
        link=recipe.link if sys.platform == "darwin" else (*recipe.link, *libraries),
        versions=(*recipe.versions, torch.__version__),
    )
