"""The just-in-time build: what leads to one, what does not, and that nothing waits in silence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from attention_ext import SIMD, BuildError, build

LOAD = "from attention_ext import build; build.load(); print(build.describe())"


def start(cache: Path, code: str = LOAD, **env: str) -> subprocess.Popen:
    """A new process that loads the extension with `cache` as its cache directory."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(cache)} | env,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def test_compiles_once_then_loads(extension, tmp_path):
    out, err = finish(start(tmp_path))
    assert "Compiling code into a PyTorch module..." in err
    assert "floats" in out
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    out, err = finish(start(tmp_path))
    assert err == ""
    assert list(tmp_path.iterdir()) == [directory]


def test_processes_that_start_together_compile_once(extension, tmp_path):
    results = [finish(p) for p in [start(tmp_path) for _ in range(3)]]
    errors = "".join(err for _, err in results)
    assert errors.count("Compiling code") == 1
    assert errors.count("Waiting for another build") <= 2
    assert len({out for out, _ in results}) == 1


def test_a_killed_build_is_taken_over(extension, tmp_path):
    process = start(tmp_path)
    assert process.stderr is not None and "Compiling" in process.stderr.readline()
    time.sleep(1)  # the compiler is at work by now
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (directory,) = tmp_path.iterdir()
    assert not (directory / "attention_ext.so").exists()
    (left,) = (path for path in directory.iterdir() if path.is_dir())
    (left / "lock").touch()  # torch's own, left behind; it would wait for it for ever
    out, err = finish(start(tmp_path))
    assert "Compiling" in err and "Waiting" not in err
    assert sorted(path.name for path in directory.iterdir()) == ["attention_ext.so", "building"]


def test_what_decides_the_outcome_decides_the_directory(monkeypatch, extension):
    compiler = build.find_compiler()
    fingerprint = partial(build._fingerprint, compiler, None, "portable")
    here = fingerprint()
    assert fingerprint() == here
    for name, value in (("FLAGS", (*build.FLAGS, "-g")), ("_cpu", lambda: "another CPU")):
        with monkeypatch.context() as patch:
            patch.setattr(build, name, value)
            assert fingerprint() != here
    with monkeypatch.context() as patch:
        patch.setattr(build.torch, "__version__", "9.9")
        assert fingerprint() != here
    assert build._fingerprint(compiler, None, "off") != here
    assert build._fingerprint(compiler, sys.executable, "portable") != here  # another ispc's --version


def test_a_changed_source_decides_too(monkeypatch, extension, tmp_path):
    compiler = build.find_compiler()
    here = build._fingerprint(compiler, None, "portable")
    for source in build.CSRC.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "CSRC", tmp_path)
    assert build._fingerprint(compiler, None, "portable") == here
    with open(tmp_path / "attention.h", "a") as file:
        file.write("// changed\n")
    assert build._fingerprint(compiler, None, "portable") != here


def test_every_source_is_compiled_or_included():
    on_disk = {path.name for path in build.CSRC.glob("*.cpp")}
    variants = {source for source, _ in build.VARIANTS.values()}
    assert on_disk == {build.DECODER_BINDINGS, build.ALONE, *build.SOURCES, *variants}
    assert {"auto", *build.VARIANTS} == set(SIMD)


def test_the_program_is_compiled_once_for_each_processor(extension, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    made = build.program("off")
    assert "Compiling a program of the kernels alone..." in capsys.readouterr().err
    assert build.program("off") == made
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in made.parent.iterdir()) == ["alone", "building"]
    with pytest.raises(BuildError, match="failed: .*no-such-processor"):
        build.program("off", "no-such-processor")
    with pytest.raises(ValueError, match="simd is 'ispc'; the program's must be auto, portable or off"):
        build.program("ispc")


def test_ispc_is_found_by_its_variable_and_named_when_it_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv("ISPC", "no-such-ispc")
    with pytest.raises(BuildError, match="ISPC is 'no-such-ispc'"):
        build.find_ispc()
    monkeypatch.setenv("ISPC", sys.executable)
    assert build.find_ispc() == sys.executable
    monkeypatch.delenv("ISPC")
    monkeypatch.setattr(build.shutil, "which", lambda name: None if name == "ispc" else name)
    build._load.cache_clear()
    with pytest.raises(BuildError, match="no ispc was found on PATH; scripts/install-ispc.sh gets it"):
        build.load("ispc")


def test_an_ispc_that_fails_shows_its_message(extension, tmp_path):
    script = tmp_path / "ispc"
    script.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho Error: kaboom >&2; exit 1\n')
    script.chmod(0o700)
    code = "from attention_ext import build, BuildError\ntry: build.load()\nexcept BuildError as e: print(e)"
    code = code.replace("load()", "load('ispc')")
    out, _ = finish(start(tmp_path / "cache", code, ISPC=str(script)))
    assert out.startswith(f"{script} failed: Error: kaboom (all it said: ") and out.count("\n") == 1


def test_no_compiler_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="need a C\\+\\+ compiler .* apt install g\\+\\+"):
        build.find_compiler()


def test_an_unknown_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(BuildError, match="CXX is 'no-such-compiler'"):
        build.find_compiler()


def test_a_compiler_that_fails_shows_its_message(extension, tmp_path):
    script = tmp_path / "broken"
    script.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho error: kaboom >&2; exit 1\n')
    script.chmod(0o700)
    code = "from attention_ext import build, BuildError\ntry: build.load()\nexcept BuildError as e: print(e)"
    out, _ = finish(start(tmp_path / "cache", code, CXX=f"{script} -x"))
    assert out.startswith(f"{script} -x failed: error: kaboom (all it said: ") and out.count("\n") == 1
    assert "kaboom" in Path(out.split("all it said: ")[1].rstrip(")\n")).read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_named(extension, tmp_path):
    tmp_path.chmod(0o500)
    code = "from attention_ext import build, BuildError\ntry: build.load()\nexcept BuildError as e: print(e)"
    out, _ = finish(start(tmp_path / "cache", code))
    assert "cannot write the build directory" in out and "TORCH_EXTENSIONS_DIR" in out


def test_a_cache_directory_that_is_a_file_is_named(extension, tmp_path):
    (tmp_path / "cache").touch()
    code = "from attention_ext import build, BuildError\ntry: build.load()\nexcept BuildError as e: print(e)"
    out, _ = finish(start(tmp_path / "cache", code))
    assert "cannot write the build directory" in out and "TORCH_EXTENSIONS_DIR" in out


def test_the_peak_counts_what_the_processor_does(extension, tmp_path):
    """A chain that the compiler can work out beforehand would be counted and not done."""
    made = tmp_path / "peak.s"
    flags = [*build.FLAGS, "-std=c++17", "-S", "-o", str(made)]
    subprocess.run([*build.find_compiler(), *flags, str(build.CSRC / "peak.cpp")], check=True)
    (peak,) = re.findall(r"^_?_Z8fma_peakd:.*?$(.*?)\.cfi_endproc", made.read_text(), re.M | re.S)
    done = len(re.findall(r"^\s*(?:vfmadd\w+ps|fmla)\s", peak, re.M))
    if not done:
        pytest.skip("this compiler's target has no fused multiply-add")
    assert done % 12 == 0  # 3 CHAINS of them, 12 or 24, as often as the loop is unrolled
