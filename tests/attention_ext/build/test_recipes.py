"""Build recipes: the sources, what decides the path of the result, and the program without Python."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, script

from shakespeare.attention_ext import PARTS, BuildError, processor
from shakespeare.attention_ext.build import recipes, toolchain
from shakespeare.generation.engines import native


def test_every_source_is_compiled_and_every_part_has_a_row():
    packages = ("attention_ext", "generation", "model", "training")  # the page has a build of its own
    on_disk = {path for package in packages for path in (recipes.ROOT / package).glob("csrc/**/*.cpp")}
    recipe = native.recipe("portable")
    training = recipes.module("training_step", ("model", "training"), "portable")
    compiled = {*recipe.sources, *training.sources, *recipe.needs.sources, *recipes.program("off").sources}
    compiled |= {*recipes.operators("portable").sources, *recipes.kernels("off").sources}
    compiled |= {*recipes.score_mod(Path("mine.h")).sources, *recipes.launcher().sources}
    compiled |= {*(recipes.CSRC / source for source in recipes.USER_KERNEL)}
    assert on_disk == compiled | {recipes.CSRC / source for source in recipes.HELPERS["ispc"][0]}
    rows = re.findall(r"^ +PART\((\w+), (\w+), ", (recipes.CSRC / "parts.h").read_text(), re.M)
    # In the same order, by which the page calls them.
    assert ["_".join(row) for row in rows] == [part.operator for part in PARTS.values() if part.operator]


def test_the_path_knows_what_cpp_reads_of_cuda():
    """Recipe.path() leaves the folders named cuda out, but for SHARED."""
    folders = (ROOT / name / "csrc" for name in ("attention_ext", "model", "generation", "training"))
    sources = [path for folder in folders for path in folder.rglob("*.*") if path.parent.name != "cuda"]
    named = {name for path in sources for name in re.findall(r'#include "(cuda/.*)"', path.read_text())}
    assert named and all(any(Path(name).match(shared) for shared in recipes.SHARED) for name in named)


def test_what_decides_the_path_and_its_absence_does_not(monkeypatch, tmp_path):
    """What only the operators and the training step are compiled with, PyTorch and Python, decides theirs."""
    source = tmp_path / "main.cpp"
    source.write_text("int main() {}\n")

    def paths():
        small = dataclasses.replace(recipes.program("portable"), folders=(tmp_path,), sources=(source,))
        training = recipes.module("training_step", ("training", "model"))
        made = (small, native.recipe(), recipes.operators(), training)
        return [recipe.path() for recipe in made]

    before = paths()
    all_but = lambda *same: [i not in same for i in range(4)]  # noqa: E731
    for change, changed in (
        (lambda patch: patch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-g0")), all_but()),
        (lambda patch: patch.setattr(processor, "capabilities", lambda: "another CPU"), all_but()),
        (lambda patch: patch.setenv("CXX", f"{toolchain.find_compiler()[0]} -O1"), all_but()),
        (lambda patch: source.write_text("int main() { return 1; }\n"), all_but(1, 2, 3)),
        (lambda patch: (tmp_path / "b.h").touch(), all_but(1, 2, 3)),
        (lambda patch: patch.setattr(torch, "__version__", "9.9.9"), all_but(0, 1)),
        (lambda patch: patch.setattr(sys, "version", "9.9.9"), all_but(0, 1, 2)),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert [a != b for a, b in zip(before, paths())] == changed
        source.write_text("int main() {}\n")
        (tmp_path / "b.h").unlink(missing_ok=True)
        assert paths() == before


def test_the_program_is_for_a_processor_and_over_helpers_of_cpp(extension):
    with pytest.raises(BuildError, match="failed: .*no-such-processor"):
        recipes.program("off", "no-such-processor").make()
    with pytest.raises(ValueError, match="simd is 'ispc'; the program's must be auto, portable or off"):
        recipes.program("ispc")


OLD_CLANG = """\
[ "$1" = --version ] && echo a clang && exit
case "$*" in
*-fopenmp*) exit 1;;
*mine.cpp*) echo "mine.cpp:1:9: error: unexpected '#pragma omp' [-Werror,-Wsource-uses-openmp]"; exit 1;;
esac
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def test_openmp_that_is_missing_is_a_sentence(monkeypatch, tmp_path):
    """The compiler makes empty files, so nothing is compiled."""
    monkeypatch.setenv("CXX", script(tmp_path / "clang++", OLD_CLANG))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    (tmp_path / "mine.cpp").write_text("#pragma omp parallel\n")
    with pytest.raises(BuildError, match="^mine.cpp: it uses OpenMP, which this compiler lacks"):
        recipes.user_kernel(tmp_path / "mine.cpp").make()


def test_a_compiler_is_told_the_home_that_the_environment_does_not_name(monkeypatch):
    """zig has its cache there and ends without one."""
    monkeypatch.delenv("HOME", raising=False)
    for home, named in (("/home/user", "/home/user"), ("~", None)):  # ~: the system does not know the user
        monkeypatch.setattr("os.path.expanduser", lambda path, home=home: home)
        assert toolchain.environment().get("HOME") == named


def test_the_peak_counts_what_the_processor_does(extension, tmp_path):
    """A chain that the compiler evaluates in advance would be counted and not executed."""
    made = tmp_path / "limits.s"
    compiler = toolchain.find_compiler()
    flags = [*toolchain.flags(compiler), f"-I{recipes.CSRC}", "-S", "-o", str(made)]
    source = recipes.CSRC / "tools" / "limits.cpp"
    subprocess.run([*compiler, *flags, str(source)], check=True)
    (peak,) = re.findall(r"^_?_Z13multiply_adds[lx]:.*?$(.*?)\.cfi_endproc", made.read_text(), re.M | re.S)
    done = len(re.findall(r"^\s*(?:vfmadd\w+ps|fmla)\s", peak, re.M))
    if not done:
        pytest.skip("this compiler's target has no fused multiply-add")
    assert done % 12 == 0  # 3 * CHAINS is 12 or 24; the loop may be unrolled
