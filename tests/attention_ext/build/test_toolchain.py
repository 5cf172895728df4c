"""The compilers: how they are found, and the errors if they are not."""

from __future__ import annotations

import sys

import pytest

from attention_ext import BuildError
from attention_ext.build import recipes, toolchain


def test_ispc_is_found_by_its_variable_and_named_when_it_is_not(monkeypatch, extension):
    monkeypatch.setenv("ISPC", "no-such-ispc")
    with pytest.raises(BuildError, match="ISPC is 'no-such-ispc'"):
        toolchain.find_ispc()
    monkeypatch.setenv("ISPC", sys.executable)
    assert toolchain.find_ispc() == sys.executable
    monkeypatch.delenv("ISPC")
    monkeypatch.setattr(toolchain, "find_ispc", lambda: None)
    with pytest.raises(BuildError, match="no ispc was found on PATH; scripts/install-ispc.sh gets it"):
        recipes.extension("ispc")


def test_no_compiler_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="need a C\\+\\+ compiler .* apt install g\\+\\+"):
        toolchain.find_compiler()


@pytest.mark.parametrize(
    "command, message",
    [
        ("no-such-compiler -O1", "^CXX is 'no-such-compiler'"),
        ("'c++", """^CXX is "'c\\+\\+"; it must be a compiler's command: No"""),
    ],
)
def test_a_wrong_compiler_is_named(monkeypatch, command, message):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(BuildError, match=message):
        toolchain.find_compiler()


def test_only_gcc_gets_the_flags_of_gcc(tmp_path):
    for banner, added in (
        ("Copyright (C) Free Software Foundation, Inc.", True),
        ("clang version 19", False),
    ):
        compiler = tmp_path / f"compiler{added}"
        compiler.write_text(f"#!/bin/sh\necho '{banner}'\n")
        compiler.chmod(0o700)
        flags = toolchain.flags([str(compiler)])
        assert flags == (*toolchain.FLAGS, *(toolchain.FLAGS_OF_GCC if added else ()))


@pytest.mark.parametrize(
    "command", ["gcc", "/usr/bin/cc", "ccache clang-19", "x86_64-linux-gnu-gcc-13", "gcc -O1"]
)
def test_a_c_compiler_is_told_to_link_the_library_of_cxx(command):
    (library,) = toolchain.libraries(command.split())
    assert library in ("-lstdc++", "-lc++")


@pytest.mark.parametrize("command", ["c++", "/usr/bin/g++-12", "clang++", "python -m ziglang c++"])
def test_a_cxx_compiler_links_it_by_itself(command):
    assert toolchain.libraries(command.split()) == ()
