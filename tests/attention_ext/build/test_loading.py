"""Loading the extension in a new process: when it is built, and what is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import script, start_python

pytestmark = pytest.mark.full

LOAD = "from attention_ext import extension; extension.load(); print(extension.describe())"
VERSION = 'case "$*" in *--version*) exit 0;; esac'
TRY = """
from attention_ext import extension, BuildError
try: extension.load({!r})
except BuildError as e: print(e)
"""


def start(cache: Path, code: str = LOAD, **env: str) -> subprocess.Popen:
    """Start a process that loads the extension, with `cache` as its cache directory."""
    return start_python(cache, "-c", code, **env)


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
    time.sleep(1)  # now the compiler is running
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (directory,) = tmp_path.iterdir()
    assert not (directory / "attention_ext.so").exists()
    (left,) = (path for path in directory.iterdir() if path.is_dir())
    (left / "lock").touch()  # torch's own lock: torch would wait for it for ever
    out, err = finish(start(tmp_path))
    assert "Compiling" in err and "Waiting" not in err
    assert sorted(path.name for path in directory.iterdir()) == ["attention_ext.so", "building"]


def test_an_ispc_that_fails_shows_its_message(extension, tmp_path):
    ispc = script(tmp_path / "ispc", f"{VERSION}\necho Error: kaboom >&2; exit 1")
    code = TRY.format("ispc")
    out, _ = finish(start(tmp_path / "cache", code, ISPC=ispc))
    assert out.startswith(f"{ispc} failed: Error: kaboom (full output: ") and out.count("\n") == 1


def test_a_compiler_that_fails_shows_its_message(extension, tmp_path):
    compiler = script(tmp_path / "broken", f"{VERSION}\necho error: kaboom >&2; exit 1")
    code = TRY.format("auto")
    out, _ = finish(start(tmp_path / "cache", code, CXX=f"{compiler} -x"))
    assert out.startswith(f"{compiler} -x failed: error: kaboom (full output: ") and out.count("\n") == 1
    assert "kaboom" in Path(out.split("full output: ")[1].rstrip(")\n")).read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_named(extension, tmp_path):
    tmp_path.chmod(0o500)
    code = TRY.format("auto")
    out, _ = finish(start(tmp_path / "cache", code))
    assert "cannot write the build directory" in out and "TORCH_EXTENSIONS_DIR" in out


def test_a_cache_directory_that_is_a_file_is_named(extension, tmp_path):
    (tmp_path / "cache").touch()
    code = TRY.format("auto")
    out, _ = finish(start(tmp_path / "cache", code))
    assert "cannot write the build directory" in out and "TORCH_EXTENSIONS_DIR" in out
