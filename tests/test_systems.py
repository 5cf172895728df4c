"""What macOS and Windows lack and report, on Linux, which cannot run their programs."""

import fcntl
import os
import re
import sys
import types
from pathlib import Path

import pytest
from support import finished, printed

from shakespeare.attention_ext import processor
from shakespeare.attention_ext.build import cache, recipes
from shakespeare.model import files

# Hides files of Linux, its names in os, and functions of its C library. The processor's features are given:
# they come from such a file, and decide which build is taken.
MACOS = """
import ctypes, os, sys

def hide(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "hidden", arguments[0])

for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise", "O_TMPFILE"):
    if hasattr(os, name):
        delattr(os, name)
sys.modules.pop("tempfile", None)  # it remembers O_TMPFILE; numba-cuda imports it when Python starts

def function(library, name, original=ctypes.CDLL.__getattr__):
    if name in ("mallopt", "malloc_trim"):
        raise AttributeError(name)
    return original(library, name)

ctypes.CDLL.__getattr__ = function
sys.addaudithook(hide)
sys.path.insert(0, os.getcwd())

from shakespeare.attention_ext import processor
given = sys.argv.pop(1)
processor.capabilities = lambda: given
"""
# Also modules and names of POSIX. A wheel's decoder is given. What is imported first sees the real system.
WINDOWS = """
import asyncio, click, multiprocessing.connection, numpy, pathlib, safetensors.numpy, signal, types

sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "readline", "resource", "termios"))
for name in ("geteuid", "killpg", "sysconf"):
    delattr(os, name)
ctypes.windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(
    IsProcessorFeaturePresent=lambda number: 0, GetLogicalProcessorInformation=lambda records, size: 0))
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda file, mode, count: None)
sys.platform = "win32"
from shakespeare.attention_ext.build import prebuilt
library = pathlib.Path(sys.argv.pop(1))
prebuilt.FOLDER, prebuilt.find, prebuilt._verified = library.parent, lambda name: library, lambda file: file
"""
MAIN = "from shakespeare.app.cli import main; main(sys.argv[1:])"


@pytest.mark.full
@pytest.mark.parametrize(
    "system, command, code, shown",
    [
        ("macOS", "part4 -N 64 -br 16 -bc 16", 0, "manual attention == pytorch attention True"),
        ("macOS", "part4 --inference -m shakes128 --num-samples 1 --max-new-tokens 8", 0, ""),
        ("macOS", "bench part0,part4 -N 64 --rounds 2 --min-time 0.001", 0, "| part4 |"),
        ("macOS", "explain part4 -N 64", 0, "bound by"),
        ("macOS", "doctor", 0, "attention_ext_portable.so (portable C++"),
        ("Windows", "-m shakes1024 --max-new-tokens 60 --prompt ROMEO:", 0, "ROMEO:\nYou shall be"),
        ("Windows", "-m shakes1024 --prompt \u2603", 2, r"\u2603"),  # which the console does not have
        ("Windows", "race part1,part4 -m shakes256", 0, "identical: all 2 texts"),
        ("Windows", "doctor", None, "compiler       compiling needs Linux or a Mac; on Windows use WSL ("),
        ("Windows", "--compile -m shakes256", 2, "compiling needs Linux or a Mac; on Windows use WSL\n"),
        ("Windows", "try mine.cpp", 2, "error: this command needs Linux or a Mac; on Windows use WSL\n"),
    ],
)
def test_a_command_needs_nothing_of_linux(extension, system, command, code, shown, tmp_path):
    words, env = ["-c", MACOS + MAIN, processor.capabilities()], {}
    if system == "Windows":
        words = ["-c", MACOS + WINDOWS + MAIN, "", recipes.library("decoder", ("model", "generation")).make()]
        env = {"PYTHONIOENCODING": "cp1252"}
    done = finished(sys.executable, *words, *command.split(), ATTENTION_TILES=str(tmp_path / "tiles"), **env)
    assert code in (None, done.returncode), done.stdout + done.stderr
    assert shown in done.stdout + done.stderr and "Compiling" not in done.stderr


def test_files_that_are_open_on_windows(tmp_path, monkeypatch):
    """A lock is refused, waited for and removed; a file that another program reads is not replaced."""
    file = tmp_path / "lock"

    def locking(descriptor: int, tries: int, count: int) -> None:
        assert os.lseek(descriptor, 0, os.SEEK_CUR) > 1 << 20  # others may read the file
        owner.close() if tries > 1 else None  # meanwhile
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlink(path: Path, removed=Path.unlink) -> None:
        with open(path) as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails for a file that is open
        removed(path)

    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(LK_LOCK=10, LK_NBLCK=1, locking=locking))
    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(sys, "platform", "win32")
    with files.locked(file, "writes"):
        with pytest.raises(ValueError, match=rf"another process \({os.getpid()}\) writes in"):
            files.locked(file, "writes").__enter__()
    assert not file.exists()
    with open(file, "w") as owner, open(file, "w") as waiting:
        assert cache.lock(owner.fileno(), wait=False) and cache.lock(waiting.fileno())
    monkeypatch.setattr(files.os, "replace", lambda *names: os.open(tmp_path, os.O_WRONLY))  # it fails
    with pytest.raises(OSError, match=str(file)):
        files.write_file(file, b"new")
    assert [*tmp_path.iterdir()] == [file] and file.read_bytes() == b""


def test_every_system_takes_the_names_of_the_files():
    """No two differ in case only, and Windows takes each."""
    names = printed("git", "ls-files").lower().splitlines()
    assert len({*names}) == len(names) > 100
    assert not [name for name in names if re.search(r'[<>:"\\|?*]|(^|/)(con|prn|aux|nul)(\.|/|$)', name)]
