"""The compilers: what each is told."""

from support import script

from shakespeare.attention_ext.build import toolchain


def test_only_gcc_gets_the_flags_of_gcc(tmp_path):
    for name, banner in (("gcc", "Copyright (C) Free Software Foundation"), ("clang", "clang version 19")):
        added = toolchain.GCC_FLAGS if name == "gcc" else ()
        compiler = script(tmp_path / name, f"echo '{banner}'")
        assert toolchain.flags([compiler]) == (*toolchain.FLAGS, *added)
        named = toolchain.flags([compiler, "-march=haswell"])
        assert set(toolchain.flags([compiler])) - set(named) == {toolchain.NATIVE}


def test_a_c_compiler_is_told_to_link_the_library_of_cxx():
    for command in ("gcc", "/usr/bin/cc", "ccache clang-19", "x86_64-linux-gnu-gcc-13", "gcc -O1"):
        assert toolchain.libraries(command.split()) in (("-lstdc++",), ("-lc++",)), command
    for command in ("c++", "/usr/bin/g++-12", "clang++", "python -m ziglang c++"):
        assert toolchain.libraries(command.split()) == (), command
