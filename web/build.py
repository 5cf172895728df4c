"""Make the page: compile the kernels to WebAssembly, convert the checkpoints, gather the files."""

import contextlib
import gzip
import importlib.util
import json
import re
import shutil
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from shakespeare.attention_ext import default_tile
from shakespeare.attention_ext.build import cache, prebuilt
from shakespeare.attention_ext.build.recipes import CSRC, KERNELS, ROOT, Recipe, found
from shakespeare.attention_ext.parts import PARTS, BuildError, Dtype, Precision
from shakespeare.attention_ext.webgpu import steps
from shakespeare.attention_ext.webgpu.driver import Source
from shakespeare.checkpoints import PRESENT
from shakespeare.generation.engines import native, slots, webgpu
from shakespeare.generation.sampling import OFF, SETTINGS
from shakespeare.lab import traffic
from shakespeare.model.checkpoint import SUMS, bf16_bits, shipped
from shakespeare.model.config import MOST, MOST_SIZE
from shakespeare.training import recipe

WEB = Path(__file__).resolve().parent
# Each build of the kernels: its flags. 'relaxed' has fused multiply-adds, which not every browser has.
BUILDS: dict[str, tuple[str, ...]] = {"simd": (), "relaxed": ("-mrelaxed-simd",)}
FLAGS = (
    *("-target", "wasm32-wasi", "-mexec-model=reactor", "-std=c++17", "-O2", "-msimd128"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-Wl,--strip-all"),
    "-D_LIBCPP_REMOVE_TRANSITIVE_INCLUDES",  # headers take most of the time
)
# Packages whose C++ is as fast when it is compiled for size, in two thirds of the time.
SMALL = ("model", "training", "web")
VECTORS = ("simd/vectors/*.cpp", "tools/limits.cpp")  # compiled for each build; the rest is the same in all
# Files of zig's C++ library that the kernels need beside csrc/library.cpp, and their flags.
LIBRARY = ("memory.cpp", "string.cpp")
LIBRARY_FLAGS = ("-Os", "-std=c++23", "-D_LIBCPP_BUILDING_LIBRARY", "-w")
ONCE = "; the first time zig compiles C's library too, which takes a while"
FOLDERS = tuple(ROOT / package / "csrc" for package in ("model", "generation", "training", "web"))
# Part 4's steps in WGSL that the page measures, with heads of this width: those in float32.
STEPS = [step for step in steps.STEPS.values() if "shader-f16" not in step.needs]
STEPS_D = 32
PORTABLE_BYTES = 16_384  # workgroup memory that WebGPU promises
PORTABLE_INVOCATIONS = 256
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "window")  # of a model
LEFT_OUT = ("bindings.cpp", "c_api.cpp")  # the page has no Python
# Of training/recipe.py, for the page's runs.
RUN = ("SHORTEST", "MOST_EVALUATED", "MOST_WATCHED", "EVALUATIONS", "LONGEST_WAIT", "MARGIN", "GOLDEN")
MODEL = "shakes256"  # the page begins with it, and with the first of the precisions
PRECISIONS = ("bf16", "fp32")
WEIGHTS = ".planes.gz"  # how the names of weights end
STAMP = "shakespeare-page.json"  # names the files of a page in its folder
MAKER = "gpt.py web --build"  # in the stamp
NO_ZIG = "the page's kernels are compiled by ziglang, which is missing here: pip install ziglang"


def path() -> Path:
    """The page's folder in the build cache, made or not. Raises BuildError without a home directory."""
    return cache.folder(f"attention_ext_page_{fingerprint()}") / "page"


def make() -> Path:
    """The page's folder in the build cache, made if need be. Raises BuildError, as cache.make() does."""
    made = path()
    for name in () if made.exists() else BUILDS:
        compiled(name)  # its errors come first
    cache.make(made, "the page", write_page)
    return made


def put(folder: Path) -> None:
    """Put the page into a folder, in place of an earlier page; the folder holds a whole page or none.

    Raises BuildError as make() does, ValueError if the folder holds other files.
    """
    folder = cache.resolved(folder)
    check_replaceable(folder)
    page = make()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        made = Path(shutil.copytree(page, Path(work) / "made"))
        check_replaceable(folder)
        if folder.exists():
            folder.rename(Path(work) / "replaced")
        made.rename(folder)


def write_page(work: Path) -> Path:
    """Write all files of the page into the new folder work/page, and the stamp that names them."""
    folder = work / "page"
    write_scripts(folder / "js")
    copies = [(WEB / "index.html", "index.html"), (WEB / "style.css", "style.css")]
    copies += [(WEB / "sonnets.txt", "sonnets.txt")]
    copies += [(compiled(name), f"kernels-{name}.wasm") for name in BUILDS]
    copies += [(path, f"csrc/{path.name}") for path in sources()]
    (folder / "csrc").mkdir()
    for path, name in copies:
        shutil.copyfile(path, folder / name)
    write_text(folder / "shaders.json", json.dumps(shaders()))
    write_weights(folder / "models")
    worker = (WEB / "sw.js").read_text(encoding="utf-8")
    write_text(folder / "sw.js", worker.replace("VERSION", fingerprint()))
    write_stamp(folder)
    return folder


def write_scripts(folder: Path) -> None:
    """Copy the modules into a new folder, and write facts.js beside them."""
    shutil.copytree(WEB / "js", folder, ignore=shutil.ignore_patterns("*.d.ts"))
    write_text(folder / "facts.js", facts())


def facts() -> str:
    """A module with what Python's tables say."""
    numbers = {name: known for name, known in SETTINGS.items() if known.slider}
    sliders = [{"name": name, "default": n.default, "slider": n.slider} for name, n in numbers.items()]
    tables = {
        "MODEL": MODEL,
        "MODELS": models(),
        "PRECISIONS": list(Precision),
        "PARTS": [{"name": part.name, "operator": part.operator} for part in PARTS.values() if part.operator],
        "BLOCK": [field.name for field in fields(traffic.Block)],
        "TILE": default_tile.DEFAULT,
        "SLIDERS": sliders,
        "OFF": OFF,
        "STEPS": [step.name for step in STEPS],
        "FASTEST": steps.FASTEST,
        "DECODER": webgpu.DECODER,
        "TILES": webgpu.TILES,
        "SIZES": {name: MOST.get(name, MOST_SIZE) for name in SIZES},
        "NESTS": nests(),
        "TRAFFIC": traffic.FORMULAS,
        "RECIPE": asdict(recipe.OWN_TEXT),
        "OPTIMIZER": recipe.OWN_TEXT.optimizer(),
        **{name: getattr(recipe, name) for name in RUN},
    }
    return "".join(f"export const {name} = {json.dumps(table)};\n" for name, table in tables.items())


def shaders() -> dict[str, Any]:
    """The WGSL of the decoder, which lacks the model's constants, and of each step: see step_shaders()."""
    files = tuple(webgpu.SOURCES / name for name in ("cache_fp32.wgsl", *webgpu.FILES))
    decoder = Source(files, tuple(slots.CONSTANTS.items()))
    return {"decoder": bare(decoder.text()), "steps": {step.name: step_shaders(step) for step in STEPS}}


def step_shaders(step: steps.Step) -> dict[str, Any]:
    """The features that a step needs, and its tiles, the best first, up to one that every adapter takes."""
    fours = steps.ceil_div(STEPS_D, 4)
    tiles = []
    for tile in step.best(step.tiles, fours):
        memory = step.memory(tile, fours)
        code = bare(step.source(STEPS_D, Dtype.FP32, tile).text())
        tiles.append({"br": tile.br, "memory": memory, "threads": tile.threads, "code": code})
        if memory <= PORTABLE_BYTES and tile.threads <= PORTABLE_INVOCATIONS:
            break
    return {"needs": [{"subgroup": "subgroups"}[feature] for feature in step.needs], "tiles": tiles}


def bare(wgsl: str) -> str:
    """WGSL without indentation, comments and empty lines."""
    return re.sub(r"^ *//.*\n|^ +| +// .*$|^\n", "", wgsl, flags=re.M)


def files(folder: Path) -> list[str]:
    """The paths of all files of a folder inside it."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def write_stamp(folder: Path) -> None:
    """Write the stamp of a page whose other files are all there."""
    write_text(folder / STAMP, json.dumps({"made by": MAKER, "files": files(folder)}, indent=1))


def check_replaceable(folder: Path) -> None:
    """Raise ValueError if a folder holds anything that no build of the page wrote."""
    remedy = "choose another one, or remove it yourself"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder is {folder}, a file; {remedy}")
    made: set[str] = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it has no stamp of a build
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        made = {STAMP, *stamp["files"]} if stamp["made by"] == MAKER else made
    made.update([parent.as_posix() for name in made for parent in Path(name).parents])
    paths = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")))
    for path in paths:
        if path not in made:
            must = "it must be empty, or hold a page that was made before and nothing else"
            raise ValueError(f"folder is {folder}; {must}, but it has {path}; {remedy}")


def fingerprint() -> str:
    """A hash of the sources and the checkpoints."""
    page = [(WEB / name).read_bytes() for name in files(WEB) if not name.endswith(".pyc")]
    sums = [(shipped(name) / SUMS).read_bytes() for name in PRESENT]
    texts = (*FLAGS, facts(), json.dumps(shaders()))
    return cache.fingerprint([*texts, *page, *sums], CSRC, *FOLDERS)


def compiled(build: str) -> Path:
    """The path of a build's WebAssembly: a wheel's, else compiled. Raises BuildError if that fails."""
    from_wheel = prebuilt.page(build)
    if from_wheel.is_file():
        return from_wheel
    zig = importlib.util.find_spec("ziglang")
    if not zig or not zig.origin:
        raise BuildError(NO_ZIG)
    folder = Path(zig.origin).parent
    plain = (*FLAGS, *native.DEFINES)
    vectors = found(CSRC, *VECTORS)
    others = [path for folder in FOLDERS for path in found(folder, "*.cpp") if path.name not in LEFT_OUT]
    small = tuple(path for path in others if path.parent.parent.name in SMALL)
    fast = tuple(path for path in [*found(CSRC, *KERNELS), *others] if path not in {*vectors, *small})
    recipe = Recipe(
        name=f"attention_ext_web_{build}",
        file="kernels.wasm",
        what=f"the kernels to WebAssembly ({build}){ONCE if build == next(iter(BUILDS)) else ''}",
        compiler=(str(folder / "zig"), "c++"),
        flags=(*plain, *LIBRARY_FLAGS),
        sources=found(folder / "lib" / "libcxx" / "src", *LIBRARY),
        folders=(CSRC, *FOLDERS),
        link=(*FLAGS, "-nostdlib++"),
    )
    for flags, files in ((("-Os",), small), ((), fast), (BUILDS[build], vectors)):
        recipe = replace(recipe, flags=(*plain, *flags), sources=files, needs=recipe)
    return recipe.make()


def sources() -> list[Path]:
    """The C++ of each part that is a kernel."""
    return [CSRC / "cpu" / f"{part.operator}.cpp" for part in PARTS.values() if part.operator]


def nests() -> dict[str, str]:
    """The loop nest of each part that has one, as a script of Tiles."""
    paths = sorted((WEB / "nests").glob("*.txt"))
    return {path.stem: path.read_text(encoding="utf-8").strip() for path in paths}


def models() -> dict[str, Any]:
    """Each shipped checkpoint's configuration, characters, and paths of weights by precision."""
    found = {}
    for name in PRESENT:
        config, meta = (
            json.loads((shipped(name) / f"{file}.json").read_bytes()) for file in ("config", "meta")
        )
        weights = {precision: f"models/{name}-{precision}{WEIGHTS}" for precision in PRECISIONS}
        found[name] = {"config": config, "characters": meta["characters"], "weights": weights}
    return found


def write_weights(folder: Path) -> None:
    """Write each shipped checkpoint's weights, packed, in bf16 and fp32."""
    folder.mkdir()
    for name in PRESENT:
        exact = (shipped(name) / "model.safetensors").read_bytes()
        for precision, content in (("bf16", rounded(exact)), ("fp32", exact)):
            (folder / f"{name}-{precision}{WEIGHTS}").write_bytes(packed(planes(content)))


def rounded(content: bytes) -> bytes:
    """A float32 safetensors file with its matrices in bfloat16, but for the embeddings, as --weights bf16."""
    weights = load(content)
    for name, w in weights.items():
        if w.ndim == 2 and not re.search(r"\.w[tp]e\.", name):
            weights[name] = bf16_bits(w)
    saved = save(weights)
    begin = 8 + int.from_bytes(saved[:8], "little")
    header = saved[8:begin].rstrip().replace(b'"U16"', b'"BF16"')  # NumPy has no bfloat16
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + saved[begin:]


def planes(content: bytes) -> bytes:
    """Bytes in another order: the first of each four, the second, the third, the fourth, and what is left.

    So gzip finds the exponents of bfloat16 and float32 together. js/models.js restores the order.
    """
    end = len(content) // 4 * 4
    return b"".join([*(content[first:end:4] for first in range(4)), content[end:]])


def packed(content: bytes) -> bytes:
    """Bytes as gzip, the same each time: few hosts compress them."""
    return gzip.compress(content, 6, mtime=0)
