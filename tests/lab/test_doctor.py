"""doctor: each line and what breaks it. Nothing is compiled or left behind."""

import configparser
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support import ROOT, copy_tree, script

from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import BuildError
from shakespeare.generation.engines import native
from shakespeare.lab import doctor
from shakespeare.model import checkpoint

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def look(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name][:1]})
        ((_, state, text),) = doctor.examine()
    return state, text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    directory.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(directory))
    return directory


def test_this_machine_passes(cli, extension):
    native.library()
    done = cli("doctor", code=None)
    lines = re.findall(r"^(ok  |--  |FAIL)  (.{14}) (.+)$", done.stdout, re.M)
    assert [name.strip() for _, name, _ in lines] == list(doctor.CHECKS)
    assert len(lines) == done.stdout.count("\n")
    states = {name.strip(): state.strip() for state, name, _ in lines}
    needed = {"Python", "packages", "torch", "instructions", "threads", "compiler", "operators", "decoder"}
    for name in needed | set(checkpoint.SHIPPED):
        assert states[name] == "ok", done.stdout
    assert done.returncode == ("FAIL" in states.values()) and done.stderr == ""


def test_a_broken_compiler_exits_1_and_the_rest_is_still_checked(cli, monkeypatch):
    kept = ("compiler", "operators", "shakes128")
    monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name] for name in kept})
    monkeypatch.setenv("CXX", "/bin/false")
    done = cli("doctor", code=1)
    assert [line[:4] for line in done.stdout.splitlines()][:3] == ["FAIL", "--  ", "ok  "]
    assert "operators      not checked without compiler\n" in done.stdout


def test_a_wrong_compiler(monkeypatch):
    for chosen, message in (
        ("no-such-compiler", "CXX is 'no-such-compiler'; it must be a C++ compiler"),
        ("'c++", """CXX is "'c++"; it must be a compiler's command: No"""),
        (
            "/bin/sh -c 'echo kaboom >&2; exit 3'",
            "--version failed with exit code 3: kaboom; let CXX name a C++ compiler",
        ),
    ):
        monkeypatch.setenv("CXX", chosen)
        state, text = look("compiler")
        assert state == "FAIL" and message in text


def test_ispc_is_optional_but_not_a_wrong_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ISPC", raising=False)
    state, text = look("ispc")
    assert state == "--" and "scripts/install-ispc.sh gets it" in text
    with pytest.raises(BuildError, match="no ispc was found on PATH; scripts/install-ispc.sh gets it"):
        recipes.kernels("ispc")
    broken = script(tmp_path / "ispc", "exit 1")
    for named, said in (("no-such-ispc", "ISPC is 'no-such-ispc'"), (broken, "unset it")):
        monkeypatch.setenv("ISPC", named)
        state, text = look("ispc")
        assert state == "FAIL" and said in text


def test_a_cache_that_cannot_be_used(monkeypatch, tmp_path, cache):
    (tmp_path / "file").touch()
    for place, message in (
        ("/proc/x", "/proc/x cannot be made: "),
        (tmp_path / "file", f"{tmp_path}/file is no directory"),
        (tmp_path / "file" / "x", f"{tmp_path}/file is no directory"),
    ):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(place))
        state, text = look("cache")
        assert state == "FAIL" and message in text
        assert text.endswith("; TORCH_EXTENSIONS_DIR can name another directory")


@pytest.mark.full
def test_an_extension_is_not_compiled_here_and_a_broken_one_is_to_be_deleted(extension, cache):
    state, text = look("operators")
    assert state == "--" and "its first use compiles it" in text
    assert list(cache.iterdir()) == []
    paths = (Path(path) for path in torch.ops.loaded_libraries if "attention_ext_portable" in path)
    whole = next(path for path in paths if path.exists()).read_bytes()  # another path is that of the build
    library = recipes.operators().path()
    library.parent.mkdir()
    for part in (whole[: len(whole) // 2], b""):
        library.write_bytes(part)
        state, text = look("operators")
        assert state == "FAIL" and text.startswith(f"loading {library} ")
        assert text.endswith("; delete it to compile it again")


def test_a_truncated_checkpoint(monkeypatch, tmp_path):
    copy_tree(checkpoint.shipped("shakes128"), tmp_path / "checkpoints" / "shakes128")
    weights = tmp_path / "checkpoints" / "shakes128" / "model.safetensors"
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    monkeypatch.setattr(checkpoint, "CHECKPOINTS", tmp_path / "checkpoints")
    state, text = look("shakes128")
    assert state == "FAIL" and f"{weights} cannot be read" in text
    assert text.endswith("; git restore checkpoints/shakes128, or install the package again")
    assert look("shakes1024")[0] == "FAIL"  # it is missing


def names(requirements):
    return {re.match(r"[\w-]+", line)[0] for line in requirements.splitlines() if line and line[0] != "#"}


def test_the_packages_are_those_of_setup_cfg(monkeypatch):
    """The command that brings an optional one brings it."""
    assert names(SETUP["options"]["install_requires"]) == {*doctor.PACKAGES}
    metadata = doctor.importlib.metadata
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
    state, text = look("packages")
    assert state == "FAIL" and text.endswith("not installed; pip install -c constraints.txt -e .")
    state, text = look("extras")
    assert state == "--" and text.endswith(f"'.[{','.join(doctor.EXTRAS)}]'")
    for extra, package in doctor.EXTRAS.items():
        assert package in names(SETUP["options.extras_require"][extra])


def test_the_gpu_is_optional(monkeypatch):
    gpus = [SimpleNamespace(name="A", major=8, minor=0), SimpleNamespace(name="B", major=9, minor=0)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    for version, count, state, text in (
        (None, 0, "--", "this PyTorch has no CUDA (for part4 --device cuda); pytorch.org"),
        ("13.0", 0, "--", "none that PyTorch, for CUDA 13.0, can use (for part4"),
        ("13.0", 2, "ok", "A (8.0), B (9.0), PyTorch for CUDA 13.0"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        told = look("GPU")
        assert told[0] == state and told[1].startswith(text), told


def test_nvrtc_is_optional_but_not_a_broken_one(monkeypatch):
    broken = Mock(side_effect=BuildError("NVRTC cannot be loaded"))
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name == "cuda-core" else "1.0")
    state, text = look("NVRTC")
    assert state == "--" and text.startswith("cuda-core not installed (CUDA kernels, for part4")
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    monkeypatch.setattr(doctor.nvrtc, "versions", broken)
    assert look("NVRTC") == ("FAIL", "NVRTC cannot be loaded")
