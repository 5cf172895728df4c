"""Write wheels that need no compiler: dist/*.whl for Linux, macOS and Windows, on x86-64 and ARM.

    python scripts/make-wheels.py [--platform manylinux_2_17_x86_64] [--out dist]

The package ziglang compiles the decoder for each platform and for each kind of processor of
attention_ext/build/prebuilt.py, and for the page. A wheel fits every version of Python: the decoder has a C
interface. It holds two of the shipped models. Those for Linux have the CUDA kernels of sources(), which NVRTC
compiles without a GPU. pip and setuptools must be installed; the network is not used.
"""

import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shakespeare.app.cli import options  # noqa: E402
from shakespeare.attention_ext.build import nvrtc, prebuilt, toolchain  # noqa: E402
from shakespeare.attention_ext.cuda import driver, kernels  # noqa: E402
from shakespeare.attention_ext.cuda.tiles import LARGE, Queries  # noqa: E402
from shakespeare.attention_ext.parts import CachePrecision, Dtype, Precision  # noqa: E402
from shakespeare.generation.engines import layouts, native  # noqa: E402
from shakespeare.model import load  # noqa: E402
from shakespeare.web import build  # noqa: E402

# pip's name of each platform: Python's and Clang's names of it, and the key of prebuilt.LEVELS.
PLATFORMS = {
    "manylinux_2_17_x86_64": ("linux", "x86_64-linux-gnu.2.17", "x86_64"),
    "manylinux_2_17_aarch64": ("linux", "aarch64-linux-gnu.2.17", "aarch64"),
    "macosx_11_0_arm64": ("darwin", "aarch64-macos.11.0", "arm64"),
    "macosx_11_0_x86_64": ("darwin", "x86_64-macos.11.0", "x86_64"),
    "win_amd64": ("win32", "x86_64-windows-gnu", "x86_64"),
    "win_arm64": ("win32", "aarch64-windows-gnu", "aarch64"),
}
MODELS = ("shakes256", "shakes1024")
ZIG = (sys.executable, "-m", "ziglang", "c++")


def compile_for(target: str, level: str, library: Path) -> None:
    """Compile the decoder for a kind of processor."""
    recipe = native.recipe()
    assert recipe.needs
    machine = ("-target", target, f"-mcpu={level}")
    flags = (*(flag for flag in toolchain.flags(ZIG) if flag != toolchain.NATIVE), "-fPIC", *machine)
    # Linking compiles the C++ library: without -mcpu once for all levels.
    others = {"compiler": ZIG, "file": "decoder", "link": ("-shared", "-s", *machine[:2])}
    needs = replace(recipe.needs, **others, flags=flags)
    made = replace(recipe, **others, flags=(*flags, *native.DEFINES), needs=needs).make()
    shutil.copyfile(made, library)


def sources() -> Iterator[nvrtc.Source]:
    """The CUDA kernels of a wheel, for the models' sizes: part 4's, and the cuda engine's.

    Those that one text needs in each precision; in float32, the default, those for any number of texts. The
    others would make them 5 MB.
    """
    config = load(MODELS[0]).config
    for capability, shared in prebuilt.GPUS.items():
        on = kernels.Gpu("", capability, shared << 10, 1, l2=sys.maxsize)
        for weights, kv_cache in itertools.product(layouts.WEIGHT_BITS, CachePrecision):
            clusters, grid = layouts.layouts_for(config, weights, kv_cache, on)
            reader = replace(grid, prompt=True)
            few = [each.alone(drafts, on.shared) for each in clusters[:1] for drafts in (True, False)]
            found = {(reader, reader.most_texts(on.shared)), *(few or [(grid, layouts.GRID_TEXTS[0])])}
            if (weights, kv_cache) == (Precision.FP32, CachePrecision.FP32):
                found.update((grid, n) for n in layouts.GRID_TEXTS if n <= grid.most_texts(on.shared))
                found.update((c, n + 1) for c in clusters for n in range(c.most_texts(on.shared)))
            yield from (layout.source(texts, capability) for layout, texts in found)
        for queries in (LARGE, Queries(1, few=True)):
            row, tile = kernels.choose(None, config.head_dim, Dtype.FP32, on, queries)
            yield driver.source(row, tile, config.head_dim, Dtype.FP32, capability)


def write_sums(folder: Path) -> None:
    """Write the file that names the libraries in a folder with their SHA-256."""
    lines = (f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in folder.iterdir())
    (folder / prebuilt.SUMS).write_text("".join(lines), encoding="utf-8")


def wheel(platform: str, out: Path) -> None:
    """Write the wheel of a platform to a folder."""
    system, target, machine = PLATFORMS[platform]
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    with tempfile.TemporaryDirectory() as work:
        for name in filter(None, tracked.split("\0")):
            model = Path(name).parts[1] if name.startswith("checkpoints/") else MODELS[0]
            if model in (*MODELS, "__init__.py"):
                Path(work, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, Path(work, name), follow_symlinks=False)
        folder = Path(work, prebuilt.FOLDER.relative_to(ROOT))
        folder.mkdir()
        for level in prebuilt.LEVELS[machine]:
            if system == "darwin" and "v4" in level:
                continue  # no Mac says that it has AVX-512
            compile_for(target, level, folder / f"decoder-{level}{prebuilt.SUFFIXES[system]}")
        if system == "linux":
            needed = [*sources()]
            for source, code in zip(needed, nvrtc.make_all(needed)):
                (folder / source.name()).write_bytes(code)
        write_sums(folder)
        for name in build.BUILDS:
            shutil.copyfile(build.compiled(name), Path(work, prebuilt.page(name).relative_to(ROOT)))
        options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out)]
        named = f"--config-settings=--build-option=--plat-name={platform}"
        subprocess.run([sys.executable, "-m", "pip", "wheel", *options, named, work], check=True)


ONLY = "Only for this one; may be repeated."


@click.command()
@options.choice("--platform", "platforms", ONLY, choices=PLATFORMS, default=None, multiple=True)
@options.folder("--out", "Folder of the wheels.", default=ROOT / "dist")
def main(platforms: tuple[str, ...], out: Path) -> None:
    """Write the wheels."""
    for platform in platforms or PLATFORMS:
        wheel(platform, out)


if __name__ == "__main__":
    main()
