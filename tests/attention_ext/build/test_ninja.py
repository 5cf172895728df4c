"""Incremental builds: what a change compiles, and what a mistake says."""

import dataclasses
import os
import subprocess

import pytest
from support import script

from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.build import cache, ninja, recipes, toolchain

SOURCES = {
    "main.cpp": '#include "a.h"\nint other();\nint main() { return A + other(); }\n',
    "other.cpp": "int other() { return 40; }\n",
    "a.h": "#define A 2\n",
}


@pytest.fixture
def program(tmp_path, monkeypatch, extension):
    """Build the program of SOURCES: gives its exit code, and the names of the objects that were compiled."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))

    def objects():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/*/*.o")}

    def make(**options):
        before = objects()
        sources = (folder / "main.cpp", folder / "other.cpp")
        options = {"folders": (folder,), "sources": sources} | options
        recipe = dataclasses.replace(recipes.program("portable"), **options)
        code = subprocess.run([recipe.make()]).returncode
        return code, {path.name for path, time in objects().items() if before.get(path) != time}

    make.folder = folder
    return make


def test_a_change_compiles_what_includes_it(program):
    assert program() == (42, {"main.o", "other.o"})
    assert program() == (42, set())
    (program.folder / "a.h").write_text("#define A 3\n")
    assert program() == (43, {"main.o"})
    (program.folder / "other.cpp").write_text("int other() { return 50; }\n")
    os.utime(program.folder / "other.cpp", (10**9, 10**9))  # an older file takes its place
    assert program() == (53, {"other.o"})
    (program.folder / "b.h").write_text("")
    assert program() == (53, set())


def test_what_a_users_source_includes_is_what_the_compiler_read(program, caplog):
    def made():
        return program(folders=())

    folder = program.folder
    assert made() == (42, {"main.o", "other.o"})
    assert made() == (42, set())
    (folder / "a.h").write_text('#include "lib/b c.cpp"\n')
    (folder / "lib").mkdir()
    (folder / "lib" / "b c.cpp").write_text("#define A 3\n")
    assert made() == (43, {"main.o"})
    (folder / "lib" / "b c.cpp").write_text("#define A 4\n")
    caplog.clear()
    assert made() == (44, {"main.o"})
    assert [message[:9] for message in caplog.messages] == ["Compiling"]
    (folder / "lib" / "b c.cpp").unlink()
    with pytest.raises(BuildError, match="lib/b c.cpp: No such file"):
        made()
    (folder / "a.h").write_text(SOURCES["a.h"])
    assert made()[0] == 42


def test_a_mistake_is_shown_as_the_compiler_wrote_it(program):
    program()
    (program.folder / "a.h").write_text("#define A 3\n")
    (program.folder / "other.cpp").write_text("int other() { return 40 }\n")
    told = r"failed: .*other.cpp:1:\d+: error: .*full output: .*build.log"
    with pytest.raises(BuildError, match=told) as caught:
        program()
    assert "return 40 }" in caught.value.output and "^" in caught.value.output
    assert "main.cpp" not in caught.value.output
    (log,) = program.folder.parent.glob("cache/*/build.log")
    assert log.read_text() == caught.value.output


def test_a_killed_command_is_an_error(program, monkeypatch, tmp_path):
    """The shell that runs the compiler has no time to tell what failed."""
    real = toolchain.find_compiler()[0]
    kill = "read -r _ _ _ shell _ < /proc/$PPID/stat; kill -KILL $shell; exit 1"
    kill = f'case "$*" in *main.cpp*) {kill};; esac; exec {real} "$@"'
    monkeypatch.setenv("CXX", script(tmp_path / "ended", f'[ "$1" = --version ] && exit 0\n{kill}'))
    with pytest.raises(BuildError, match="^ninja failed: "):
        program()


def test_max_jobs_is_ninjas(program, monkeypatch):
    commands = []
    monkeypatch.setattr(ninja, "_run", lambda command, *_: commands.append(command))
    monkeypatch.setenv("MAX_JOBS", "3")
    with pytest.raises(BuildError):  # nothing is made
        program()
    assert "-j3" in commands[0]


def test_ninja_that_is_missing_is_a_sentence(monkeypatch):
    monkeypatch.setattr(ninja.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(ninja.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="pip install ninja"):
        ninja.find()


def test_the_builds_used_least_recently_are_deleted_but_none_that_may_be_running(tmp_path):
    folders = [tmp_path / f"attention_ext_user_kernel_{i}" for i in range(cache.MAX_BUILDS + 4)]
    for folder in folders:
        folder.mkdir()
    cache.prune(folders[0])
    assert all(folder.exists() for folder in folders)
    for i, folder in enumerate(folders[2:]):
        os.utime(folder, (10**9 - i, 10**9 - i))
    cache.prune(folders[-1])
    assert [folder for folder in folders if not folder.exists()] == folders[-5:-1]
