"""What is compiled: libraries for Python over each SIMD helper, and a standalone program of the kernels.

Sources are found by folder. The kernels are compiled once for each helper, and all libraries link them.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from shakespeare.attention_ext import processor, rules
from shakespeare.attention_ext.build import cache, ninja, toolchain
from shakespeare.attention_ext.build.structs import CSRC
from shakespeare.attention_ext.parts import MOST_SCORES, BuildError, resolve_simd

ROOT = Path(__file__).resolve().parent.parent.parent
# Each implementation of simd/simd.h: its source beside KERNELS, and the flags of all compiled over it.
HELPERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ispc": (("simd/ispc.cpp",), ("-DSIMD_ELSEWHERE",)),
    "portable": ((), ()),
    "off": (("simd/off.cpp",), ("-DSIMD_ELSEWHERE", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")),
}
TORCH_VERSION = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10, the oldest with all that is used
ISPC_SOURCE = "simd/simd.ispc"
ISPC_FLAGS = ("-O3", "--pic")
SHARED = ("*_table.h", "arguments.h", "score_mod.h")
KERNELS = ("cpu/*.cpp", "simd/vectors/*.cpp")  # the latter: simd/portable.h, used over every helper
OPERATORS = ("bindings/operators.cpp", "tools/limits.cpp")
LAUNCHER = ("bindings/launcher.cpp",)
PROGRAM = ("tools/alone.cpp",)
USER_KERNEL = ("tools/user_kernel.cpp",)
# Programs of a user's file, and their linker's arguments: two sanitizers, and a simulator of caches.
USER_PROGRAMS = {"address": ("-fsanitize=address",), "thread": ("-fsanitize=thread",), "simulated": ()}
# Python has loaded its own functions before a library is loaded.
LINK = ("-shared", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)


@dataclass(frozen=True)
class Recipe:
    """A file to compile, and everything that decides its content.

    name: the directory's, before the fingerprint. what: for messages. sources: in C++ and ISPC. folders: of
    headers; every file in them enters the fingerprint, and so does what the first source includes elsewhere.
    includes: folders of packages' headers. link: the linker's arguments. ispc: its command. versions: of
    packages whose headers are included. needs: a recipe whose objects are also linked.
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
    ispc: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    needs: "Recipe | None" = None

    def path(self) -> Path:
        """The file's path, before and after it is made. Raises BuildError if a compiler does not run."""
        facts = [*self._facts(), *self.link, processor.capabilities()]
        tops = (path for folder in self.folders for path in sorted(folder.iterdir()))
        # NVRTC compiles what is in cuda, and C++ includes these too
        shared = (path for folder in self.folders for path in found(folder / "cuda", *SHARED))
        sources = sorted({*self.sources, *self.read()})
        paths = (*(path for path in tops if path.name != "cuda"), *shared, *sources)
        named = cache.fingerprint(facts, *paths)
        return cache.folder(f"{self.name}_{named}") / self.file

    def make(self) -> Path:
        """The file, compiled if need be. Raises BuildError as cache.make() does, or if compiling fails."""
        while True:
            file = self.path()
            try:
                cache.make(file, self.what, lambda work: self._compiled(work, file))
            except _Saved:
                continue
            cache.prune(file.parent)
            return file

    def objects(self) -> list[ninja.Object]:
        """The objects to link."""
        includes = tuple(f"-I{folder}" for folder in (*self.folders, ROOT))
        compilers = {".ispc": (self.ispc, includes, self._facts())}
        system = (word for folder in self.includes for word in ("-isystem", folder))
        usual = self.compiler, (*includes, *self.flags, *system), self.versions
        objects = [ninja.Object(path, *compilers.get(path.suffix, usual)) for path in self.sources]
        return objects + (self.needs.objects() if self.needs else [])

    def _facts(self) -> tuple[str, ...]:
        """What decides the objects besides the sources."""
        tools = [self.compiler, self.ispc[:1]] if self.ispc else [self.compiler]
        versions = (toolchain.version(*tool).decode(errors="replace") for tool in tools)
        facts = (shlex.join(self.compiler), shlex.join(self.ispc), *self.flags, *self.versions, *versions)
        return (*facts, *(self.needs._facts() if self.needs else ()))

    def first_object(self) -> Path:
        """The object of the first source, which stays after make()."""
        return self._folder() / self.objects()[0].name

    def first_read(self) -> set[Path]:
        """What the compiler read for the first source when it was last compiled, but for system headers."""
        return ninja.listed(self.first_object())

    def read(self) -> list[Path]:
        """Those of first_read() that are not in folders: a user's."""
        return sorted(path for path in self.first_read() if not {*self.folders} & {*path.parents})

    def _folder(self) -> Path:
        """The folder of the objects."""
        version = toolchain.version(*self.compiler)
        machine = processor.capabilities()
        identity = cache.fingerprint([shlex.join(self.compiler), version, machine, str(ROOT)])
        return cache.folder(f"attention_ext_objects_{identity}")

    def _compiled(self, work: Path, named: Path) -> Path:
        file = work / self.file
        folder = self._folder()
        link = (*self.link, *toolchain.libraries(self.compiler))
        try:
            ninja.build(folder, self.objects(), self.compiler, link, file)
        except BuildError as error:
            if re.search(r"-Wsource-uses-openmp|\bomp\.h\b", error.output):
                raise BuildError(f"{self.what}: {toolchain.NO_OPENMP}", error.output) from None
            raise
        cache.prune(folder)
        if self.path() != named:
            raise _Saved
        return file


class _Saved(Exception):
    """A source was saved while it was compiled, or includes other files than before."""


def kernels(simd: str = "auto") -> Recipe:
    """The kernels' objects. Raises ValueError unless simd is one of SIMD, BuildError without a compiler."""
    helpers = resolve_simd(simd)
    ispc = _ispc("simd is 'ispc'") if helpers == "ispc" else None
    helper_sources, flags = HELPERS[helpers]
    sources = found(CSRC, *KERNELS, *helper_sources, *([ISPC_SOURCE] if ispc else []))
    recipe = _recipe(f"attention_ext_kernels_{helpers}", "", "the kernels", sources, *flags)
    return replace(recipe, ispc=(ispc, *ISPC_FLAGS, "--target=host") if ispc else ())


def operators(simd: str = "auto") -> Recipe:
    """The library of attention's operators over one of SIMD; it needs torch. Raises as kernels() does."""
    over = kernels(simd)
    name = over.name.replace("kernels_", "")
    facts = (f"-DATTENTION_EXT={name}", f"-DMOST_SCORES={MOST_SCORES}", *rules.macros())
    return with_torch(_library(name, "the operators", over, (CSRC,), found(CSRC, *OPERATORS), *facts))


def launcher() -> Recipe:
    """Part 4's CUDA operator; it needs torch, but no CUDA headers. Raises BuildError without a compiler."""
    what = "the launcher of CUDA kernels"
    sources = found(CSRC, *LAUNCHER)
    recipe = _recipe("attention_ext_cuda", "launcher.so", what, sources, *rules.macros())
    return with_torch(replace(recipe, link=LINK))


def library(
    name: str, packages: tuple[str, ...], simd: str = "auto", defines: tuple[str, ...] = ()
) -> Recipe:
    """The C++ in the folders `package`/csrc and the kernels, without Python. Raises as kernels() does.

    defines: flags of the C++ in these folders.
    """
    over = kernels(simd)
    folders = tuple(ROOT / package / "csrc" for package in packages)
    sources = tuple(path for folder in folders for path in found(folder, "*.cpp"))
    title = name.replace("_", " ")
    prefix = over.name.replace("kernels", name)
    return _library(prefix, f"the {title}", over, (CSRC, *folders), sources, *defines)


def module(name: str, packages: tuple[str, ...], simd: str = "auto") -> Recipe:
    """library() as a Python module of PYBIND11_MODULE(name, m). Raises BuildError without Python's header."""
    what = name.replace("_", " ")
    header = toolchain.python_header()
    if not header.is_file():
        remedy = "install it (Debian, Ubuntu: apt install python3-dev), or choose part0"
        raise BuildError(f"the {what} needs Python's header, and {header} is missing; {remedy}")
    try:
        import pybind11
    except ImportError:
        raise BuildError(f"the {what} needs pybind11: pip install pybind11") from None
    recipe = with_torch(library(name, packages, simd))
    includes = (pybind11.get_include(), str(header.parent), *recipe.includes)
    return replace(recipe, includes=includes, versions=(*recipe.versions, pybind11.__version__, sys.version))


def program(simd: str = "auto", march: str = "native") -> Recipe:
    """The standalone program of tools/alone.cpp, which runs one part without Python or PyTorch.

    simd: 'portable', 'off', or 'auto', which is AUTO. march: the compiler's -march. Raises ValueError for
    another simd, BuildError without a compiler.
    """
    if resolve_simd(simd) == "ispc":
        raise ValueError(f"simd is {simd!r}; the program's must be auto, portable or off")
    native = toolchain.NATIVE if march == "native" else f"-march={march}"
    over = kernels(simd)
    flags = ("-g", *(native if flag == toolchain.NATIVE else flag for flag in over.flags))
    over = replace(over, name=over.name.replace("kernels", "alone"), flags=flags)
    sources = (*over.sources, *found(CSRC, *PROGRAM))
    return replace(over, file="alone", what="a standalone program of the kernels", sources=sources)


def user_kernel(file: Path, program: str = "", march: str = "native") -> Recipe:
    """The library of a user's file in C++ or ISPC, or one of USER_PROGRAMS.

    march: as in program(), for 'simulated'. Raises BuildError if a compiler is missing.
    """
    file = Path(os.path.realpath(file))
    ispc = _ispc(f"{file.name} is in ISPC") if file.suffix == ".ispc" else None
    over = kernels()
    defines = ("-DUSER_KERNEL", *(("-DUSER_KERNEL_ISPC",) if ispc else ()))
    flags = (*over.flags, *defines)
    if program == "simulated":
        flags = (*(f"-march={march}" if flag == toolchain.NATIVE else flag for flag in flags), "-g")
        over = replace(over, flags=flags)
    elif program:  # the kernels are not instrumented
        flags = (*flags, "-g", "-O1", "-fno-omit-frame-pointer", *USER_PROGRAMS[program])
    caller = found(CSRC, *(PROGRAM if program else USER_KERNEL))
    base = replace(over, flags=flags, sources=caller, ispc=(), needs=over)
    link = (*USER_PROGRAMS.get(program, ()), *(() if program else LINK), "-pthread")
    if sys.platform != "darwin":  # a copy of a part may have names of the parts
        link = ("-Wl,--allow-multiple-definition", "-Wl,--no-undefined", *link)
    openmp: tuple[str, ...] = ("-Werror=source-uses-openmp",)
    if toolchain.has_openmp(*base.compiler):  # only a file that uses OpenMP is linked with it
        openmp = ("-fopenmp",)
        link = (*link, *(("-Wl,--as-needed",) if sys.platform != "darwin" else ()), *openmp)
    how = {"address": " with AddressSanitizer", "thread": " with ThreadSanitizer"}.get(program, "")
    target = "avx2-i32x8" if march == "haswell" else "host"
    parent = f"-I{file.parent}"
    command = (ispc, f"--target={target}", *ISPC_FLAGS, *(("-g",) if program else ()), parent) if ispc else ()
    return replace(
        base,
        name="attention_ext_user_kernel",
        file="program" if program else "user_kernel.so",
        what=f"{file.name}{how}",
        sources=(file,),
        flags=(*flags, *openmp, parent),
        link=link,
        ispc=command,
        needs=base,
    )


def score_mod(header: Path) -> Recipe:
    """The library of a user's change of scores. Raises BuildError without a compiler."""
    over = kernels()
    source = found(CSRC, "tools/score_mod.cpp")
    mod = _library("attention_ext_score_mod", header.name, over, (CSRC,), source, f'-DSCORE_MOD="{header}"')
    return replace(mod, needs=None)


def found(folder: Path, *patterns: str) -> tuple[Path, ...]:
    """The files below a folder that match these patterns, in their order."""
    return tuple(path for pattern in patterns for path in sorted(folder.glob(pattern)))


def _ispc(why: str) -> str:
    """The ISPC compiler. Raises BuildError, which says why it is needed, without one."""
    ispc = toolchain.find_ispc()
    if ispc is None:
        raise BuildError(f"{why}, but no ispc was found on PATH; scripts/install-ispc.sh gets it")
    return ispc


def _recipe(name: str, file: str, what: str, sources: tuple[Path, ...], *flags: str) -> Recipe:
    """A file of these sources, by the compiler that is found."""
    compiler = tuple(toolchain.find_compiler())
    return Recipe(name, file, what, compiler, (*toolchain.flags(compiler), *flags, "-fPIC"), sources)


def _library(
    name: str, what: str, over: Recipe, folders: tuple[Path, ...], sources: tuple[Path, ...], *flags: str
) -> Recipe:
    """A shared library of these sources and of the kernels."""
    flags = (*over.flags, *flags)
    return Recipe(name, f"{name}.so", what, over.compiler, flags, sources, folders, link=LINK, needs=over)


def with_torch(recipe: Recipe) -> Recipe:
    """The recipe with PyTorch's headers and libraries, which Python has loaded before."""
    import torch

    folder = Path(torch.__file__).parent
    libraries = (f"-L{folder / 'lib'}", "-Wl,--as-needed", "-ltorch_cpu", "-lc10")
    flags = (*recipe.flags, TORCH_VERSION)
    includes = (*recipe.includes, str(folder / "include"))
    link = recipe.link if sys.platform == "darwin" else (*recipe.link, *libraries)
    versions = (*recipe.versions, torch.__version__)
    return replace(recipe, flags=flags, includes=includes, link=link, versions=versions)
