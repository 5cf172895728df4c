"""Make the page: compile the kernels to WebAssembly, convert the checkpoints, gather the files."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attention_ext.build import cache, toolchain
from attention_ext.build.recipes import CSRC, KERNELS, ROOT, found
from attention_ext.parts import PARTS, BuildError
from model.checkpoint import SHIPPED, SUMS, shipped
from web import bundle

WEB = Path(__file__).resolve().parent
# Each build of the kernels: its flags. 'relaxed' has fused multiply-adds, which not every browser has.
BUILDS: dict[str, tuple[str, ...]] = {"simd": ("-msimd128",), "relaxed": ("-msimd128", "-mrelaxed-simd")}
FLAGS = (  # -flto: 2 to 6 % of the speed
    *("-target", "wasm32-wasi", "-mexec-model=reactor", "-std=c++17", "-O3", "-flto"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-Wl,--strip-all"),
)
MODEL = ("model", "generation")  # each has a folder csrc
# The page does not train, its threads would wait for each other, and it has no Python.
LEFT_OUT = ("part4_backward.cpp", "module.cpp")
STATIC = ("index.html", "style.css", "sw.js")
EMBEDDED = ("shakes256", "shakes1024")  # in the one file; the race needs the long window
WEIGHTS = ".planes.gz"  # how the names of weights end
STAMP = "shakespeare-page.json"  # in the page's folder: see stamp()
MAKER = "gpt.py web --build"  # in the stamp
NO_ZIG = "the page's kernels are compiled by ziglang, which is missing here: pip install ziglang"


def default_folder() -> Path:
    """The page's folder in the build cache. Raises BuildError without a home directory."""
    return cache.directory() / "attention_ext_page"


def make(folder: Path) -> bool:
    """Make the page in a folder, unless it is there and up to date; whether it was made.

    The page is made beside the folder and renamed, so the folder holds a whole page or none.
    Raises BuildError if the kernels cannot be compiled, ValueError if the folder holds other files.
    """
    folder, hashed = cache.real(folder), fingerprint()
    if is_current(folder, hashed):
        return False
    check_replaceable(folder)
    kernels = {f"kernels-{name}.wasm.gz": compiled(name) for name in BUILDS}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with cache.locked(cache.real(cache.directory()) / "attention_ext_page.lock"):
        if is_current(folder, hashed):  # another process made it while this one waited
            return False
        unfinished = f".{folder.name}-{STAMP}-"
        for left in folder.parent.glob(f"{unfinished}*"):  # of a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=unfinished) as work:
            made = Path(work) / "made"
            write_page(made, kernels, hashed)
            check_replaceable(folder)
            if folder.exists():
                folder.rename(Path(work) / "replaced")
            made.rename(folder)
    return True


def write_page(folder: Path, kernels: dict[str, Path], hashed: str) -> None:
    """Write all files of the page into a new folder, and the stamp that names them."""
    (folder / "js").mkdir(parents=True)
    for name, path in kernels.items():
        (folder / name).write_bytes(packed(path.read_bytes()))
    for path in sorted((WEB / "js").glob("*.js")):
        shutil.copyfile(path, folder / "js" / path.name)
    for name in STATIC:
        shutil.copyfile(WEB / name, folder / name)
    write_text(folder / "sources.json", json.dumps(sources()))
    write_models(folder / "models")
    write_text(folder / "index.html", hinted((WEB / "index.html").read_text(encoding="utf-8"), folder))
    own = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    weights = [name for name in own if name.startswith("models/") and name.endswith(WEIGHTS)]
    kept = [name for name in own if name != "sw.js" and name not in weights]
    worker = (folder / "sw.js").read_text(encoding="utf-8").replace("VERSION", hashed)
    for word, names in (("FILES", kept), ("WEIGHTS", weights)):
        worker = worker.replace(f'"{word}"', json.dumps(names))
    write_text(folder / "sw.js", worker)
    write_text(folder / "shakespeare.html", bundle.one_file(folder, WEB, EMBEDDED))
    write_stamp(folder, hashed)


def write_stamp(folder: Path, hashed: str) -> None:
    """Write the stamp of a page whose other files are all there."""
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_text(folder / STAMP, json.dumps({"made by": MAKER, "hash": hashed, "bytes": sizes}, indent=1))


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def stamp(folder: Path) -> dict | None:
    """A page's stamp: "hash" of all that decides its files, "bytes" of each file. None without one."""
    try:
        found = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("made by") == MAKER else None


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a page with all its files."""
    found = stamp(folder)
    return found is not None and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in found["bytes"].items()
    )


def is_current(folder: Path, hashed: str) -> bool:
    """Whether a folder holds a whole page of these sources and checkpoints."""
    return (stamp(folder) or {}).get("hash") == hashed and is_whole(folder)


def check_replaceable(folder: Path) -> None:
    """Raise ValueError if a folder holds anything that no build of the page wrote."""
    if not folder.exists():
        return
    remedy = "choose another one, or remove it yourself"
    if not folder.is_dir():
        raise ValueError(f"folder is {folder}, a file; {remedy}")
    found = stamp(folder)
    own = {STAMP, *found["bytes"]} if found else set()
    own |= {parent.as_posix() for name in own for parent in Path(name).parents}
    other = next((path for path in folder.rglob("*") if path.relative_to(folder).as_posix() not in own), None)
    if other:
        raise ValueError(
            f"folder is {folder}; it must be empty, or hold a page that was made before and nothing else, "
            f"but it has {other.relative_to(folder)}; {remedy}"
        )


def fingerprint() -> str:
    """A hash of the sources and the checkpoints."""
    files = [path for path in sorted(WEB.rglob("*")) if path.is_file()]
    own = [
        path.read_bytes() for path in files if path.suffix in (".py", ".js", ".css", ".html", ".cpp", ".h")
    ]
    sums = [(shipped(name) / SUMS).read_bytes() for name in SHIPPED]
    return cache.fingerprint([*FLAGS, *own, *sums], *folders())


def folders() -> list[Path]:
    """Those of the sources that the page shares."""
    return [CSRC, *(ROOT / package / "csrc" for package in MODEL)]


def compiled(build: str) -> Path:
    """The path of a build's WebAssembly, compiled if need be. Raises BuildError if that fails."""
    if not importlib.util.find_spec("ziglang"):
        raise BuildError(NO_ZIG)
    compiler = [sys.executable, "-m", "ziglang", "c++"]
    flags = [*FLAGS, *BUILDS[build]]
    own = sorted([*WEB.glob("*.cpp"), *WEB.glob("*.h")])
    facts: list[str | bytes] = [*flags, toolchain.version(*compiler), *(path.read_bytes() for path in own)]
    named = cache.fingerprint(facts, *folders())
    made = cache.real(cache.directory()) / f"attention_ext_web_{build}_{named}" / "kernels.wasm"
    patterns = (*(f"{package}/csrc/*.cpp" for package in MODEL), "web/*.cpp")
    units = [*found(CSRC, *KERNELS), *found(ROOT, *patterns)]
    units = [path for path in units if path.name not in LEFT_OUT]

    def write(work: Path) -> Path:
        def compile(unit: Path) -> str:
            made = str(work / f"{units.index(unit)}.o")
            toolchain.run(compiler, [*flags, f"-I{CSRC}", f"-I{ROOT}", "-c", str(unit), "-o", made], work)
            return made

        # In parallel, before the link: for its first link zig compiles its C++ library, which takes a minute.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile, units))
        file = work / made.name
        toolchain.run(compiler, [*flags, *objects, "-o", str(file)], work)
        return file

    cache.make(made, f"the kernels to WebAssembly ({build})", write)
    return made


def sources() -> dict[str, dict[str, str]]:
    """The C++ of each part that is a kernel, for the page to show."""
    paths = {
        name: next((CSRC / "cpu").glob(f"{part.operator}.cpp"))
        for name, part in PARTS.items()
        if part.operator
    }
    return {
        name: {"name": path.name, "text": path.read_text(encoding="utf-8")} for name, path in paths.items()
    }


def write_models(folder: Path) -> None:
    """Write each shipped checkpoint's weights, packed, in fp32 and bf16, and models.json about them."""
    from safetensors.torch import load, save

    folder.mkdir()
    index = {}
    for name in SHIPPED:
        directory = shipped(name)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        characters = json.loads((directory / "meta.json").read_text(encoding="utf-8"))["characters"]
        exact = (directory / "model.safetensors").read_bytes()
        files = {}
        for precision, content in (("bf16", save(rounded(load(exact)))), ("fp32", exact)):
            path = folder / f"{name}-{precision}{WEIGHTS}"
            path.write_bytes(packed(planes(content)))
            files[precision] = {"path": f"models/{path.name}", "bytes": path.stat().st_size}
        index[name] = {"config": config, "characters": characters, "files": files}
    write_text(folder / "models.json", json.dumps(index))


def rounded(weights: dict) -> dict:
    """The weights with those matrices in bfloat16 that --weights bf16 rounds: all but the embeddings."""
    import torch

    def is_rounded(name: str) -> bool:
        return weights[name].dim() == 2 and ".wte." not in name and ".wpe." not in name

    return {name: w.to(torch.bfloat16) if is_rounded(name) else w for name, w in weights.items()}


def planes(content: bytes) -> bytes:
    """Bytes in another order: the first of each four, the second, the third, the fourth, and what is left.

    The exponents of bfloat16 and float32 come together so, and gzip makes less of them: bf16 weights become a
    ninth smaller. js/planes.js restores the order.
    """
    whole = len(content) // 4 * 4
    return b"".join([*(content[first:whole:4] for first in range(4)), content[whole:]])


def packed(content: bytes) -> bytes:
    """Bytes as gzip, the same each time: few hosts compress them."""
    return gzip.compress(content, 9, mtime=0)


def hinted(html: str, folder: Path) -> str:
    """The page with hints of what it will load, so that nothing waits for what loads it.

    The weights come first: a script in the page asks for those that the address names.
    """
    weights = sorted(path.relative_to(folder).as_posix() for path in (folder / "models").glob(f"*{WEIGHTS}"))
    early = (WEB / "early.js").read_text(encoding="utf-8").replace('"WEIGHTS"', json.dumps(weights))
    links = ['<link rel="preload" as="fetch" crossorigin href="models/models.json">']
    for path in sorted((folder / "js").glob("*.js")):
        if path.name not in ("worker.js", "session.js"):  # the worker's
            links.append(f'<link rel="modulepreload" href="js/{path.name}">')
    html = bundle.replaced(html, "(?<=script-src 'self')", f" '{bundle.digest(early)}'")
    # A script behind a stylesheet waits for it.
    html = bundle.replaced(html, '(?=<link rel="stylesheet")', f"<script>{early}</script>\n")
    return bundle.replaced(html, "(?=</head>)", "\n".join([*links, ""]))
