"""A source distribution and a wheel give a command that works in any folder and writes only there."""

import platform
import runpy
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support import ROOT, copy_tree, finished, printed

from shakespeare.attention_ext.build import prebuilt

pytestmark = pytest.mark.full

PACKAGES = ("app", "attention_ext", "checkpoints", "generation", "judge", "lab", "model", "training", "web")
CACHES = shutil.ignore_patterns("__pycache__")
TEXT = ("part4", "--inference", "-m", "shakes256", "--num-samples", "1", "--max-new-tokens", "60")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """What a command prints; PYTHONPATH is not passed on."""
    return printed(*command, cwd=cwd, **{"PYTHONPATH": None} | env)


def files(folder: Path) -> set[str]:
    """All files below a folder but Python's caches."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in found if "__pycache__" not in name}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A new environment with the source distribution. The packages that it needs are those of this one."""
    work = tmp_path_factory.mktemp("package")
    source, made = work / "source", work / "environment"
    for name in (*PACKAGES, "shakespeare"):  # a copy, because setuptools leaves folders where it builds
        copy_tree(ROOT / name, source / name, ignore=CACHES, symlinks=True)
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    needed = {"PYTHONPATH": sysconfig.get_path("purelib")}
    run(sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('..')", cwd=source, **needed)
    install(made, "--no-build-isolation", *work.glob("*.tar.gz"), cwd=work, **needed)
    return made


def install(made: Path, *what: str | Path, **settings) -> None:
    """Install something into a new environment, beside the packages of this one."""
    venv.create(made, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", made / "bin" / "python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", *what, **settings)
    # The folder is added after the installation's own, and its .pth files, as of this checkout, are not read.
    (packages(made) / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def test_the_installed_command_writes_the_text_of_the_checkout(environment, tmp_path, extension):
    command, before = environment / "bin" / "shakespeare", files(packages(environment))
    shown = run(command, *TEXT, cwd=tmp_path)
    assert shown == run(sys.executable, ROOT / "gpt.py", *TEXT, cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).startswith("shakespeare-attention ")
    wrong = finished(command, "part9", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("shakespeare: error: ")
    (tmp_path / "mine.txt").write_text("To be, or not to be\n" * 20)
    run(command, "prepare", "--corpus", "mine.txt", cwd=tmp_path)
    assert files(packages(environment)) == before
    made = ("input.txt", "train.bin", "val.bin", "meta.pkl", "meta.json")
    assert files(tmp_path) == {"mine.txt", *(f"data/shakespeare_char/{name}" for name in made)}
    done = finished(command, *TEXT, cwd=tmp_path)
    vocabulary = packages(environment) / "shakespeare" / "checkpoints" / "shakes256" / "meta.json"
    assert done.stdout == shown and f"\nLoading meta from {vocabulary}...\n" in done.stderr


def test_it_works_beside_nanogpt_whose_files_are_model_py_and_data(environment, tmp_path, extension):
    """One import name is this project's: every other is the user's, whichever is found first."""
    nanogpt, folder = tmp_path / "nanoGPT", packages(environment)
    nanogpt.mkdir()
    for name in ("model", "train", "sample", "web", "app", "lab"):
        (nanogpt / f"{name}.py").write_text(f"GPT = {name!r}\n")
    names = {path.name for path in folder.iterdir() if path.suffix not in (".dist-info", ".pth")}
    assert names - {"__pycache__"} == {"shakespeare"}
    code = (
        "import sys, model, web; from shakespeare import attention, generate, load; from model import GPT\n"
        "import shakespeare.model, shakespeare.web\n"
        "assert (GPT, web.GPT) == ('model', 'web') and shakespeare.__file__.startswith(sys.argv[1])\n"
        "print(generate(load('shakes256'), max_new_tokens=60, seed=1), end='')"
    )
    python = environment / "bin" / "python"
    shown = run(python, "-c", code, folder, cwd=nanogpt)
    text = run(python, "-m", "shakespeare", *TEXT, cwd=nanogpt)
    assert text == run(sys.executable, ROOT / "gpt.py", *TEXT, cwd=nanogpt)  # as the checkout's, also there
    assert "4Daccess" in run(python, "-m", "shakespeare", "--help", cwd=nanogpt)  # imports every command
    # Without an installation, the checkout's folder on the path.
    assert shown == run(sys.executable, "-c", code, ROOT, cwd=nanogpt, PYTHONPATH=str(ROOT))


def test_the_installation_has_every_file(environment):
    installed = packages(environment) / "shakespeare"
    for name in PACKAGES:
        assert files(installed / name) == files(ROOT / name), name
    assert files(ROOT / "shakespeare") <= files(installed)


def test_a_wheel_works_without_a_compiler_and_without_torch(tmp_path, monkeypatch, extension):
    """With the kernels for plain x86-64, as on a processor without AVX2."""
    pytest.importorskip("ziglang", reason="pip install ziglang")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the wheel is made for Linux on x86-64")
    monkeypatch.setitem(prebuilt.LEVELS, "x86_64", {"x86_64": set()})
    monkeypatch.setattr(prebuilt, "GPUS", {})  # engines/test_cuda.py has what a wheel brings for them
    make = runpy.run_path(str(ROOT / "scripts" / "make-wheels.py"))
    make["wheel"]("manylinux_2_17_x86_64", tmp_path)
    (wheel,) = tmp_path.glob("*-py3-none-manylinux_2_17_x86_64.whl")
    made = tmp_path / "environment"
    install(made, wheel, cwd=tmp_path)
    (packages(made) / "torch.py").write_text('raise ModuleNotFoundError("no torch", name="torch")\n')
    command, own = made / "bin" / "shakespeare", {"PATH": "", "CXX": "none", "HOME": str(tmp_path)}
    expected = run(sys.executable, ROOT / "gpt.py", *TEXT, cwd=tmp_path)
    assert run(command, *TEXT[2:], cwd=tmp_path, **own) == expected  # part4 --inference is the default
    # The README's text, race, bulk, the page, and the server with it.
    python = made / "bin" / "python"
    run(python, ROOT / "scripts" / "try-wheel.py", ROOT / "README.md", command, cwd=tmp_path, **own)

    (library,) = packages(made).glob("shakespeare/attention_ext/prebuilt/decoder-*")
    library.unlink()
    for options, said in ((("--compile",), "CXX is 'none'"), ((), "has no decoder for this processor")):
        done = finished(command, *options, *TEXT, cwd=tmp_path, PYTHONPATH=None, **own)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
