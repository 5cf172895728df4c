"""Structures that are read from C++ have the compiler's sizes and offsets, and a difference is an error."""

import ctypes
import re
import subprocess

import pytest
from support import ROOT

from shakespeare.attention_ext.build import structs, toolchain
from shakespeare.attention_ext.parts import BuildError
from shakespeare.generation.engines import native

ATTENTION = structs.CSRC / "attention.h"
STRUCTS = {
    "attention.h": ("MatricesOf<float>", "Attention", "AttentionGradient"),
    "rules.h": ("Strip", "Rules"),
    "generation/csrc/team.h": ("Span",),
}


def fields(struct):
    """Its fields and those above them, each a name and a type."""
    return [field for each in reversed(struct.__mro__) for field in vars(each).get("_fields_", ())]


def offsets(struct, start=0):
    """Where each number begins and how many bytes it has, those of structs in it one by one."""
    found = []
    for name, kind in fields(struct):
        at = start + getattr(struct, name).offset
        found += offsets(kind, at) if hasattr(kind, "_fields_") else [(at, ctypes.sizeof(kind))]
    return found


def test_sizes_and_offsets_are_the_compilers(extension, tmp_path):
    mine, expressions = [], []
    for header, names in STRUCTS.items():
        for name in names:
            file = ROOT / header if "/" in header else structs.CSRC / header
            struct = structs.structure(file, name.split("<")[0])
            names_of = [field for field, _ in fields(struct)]
            mine += [ctypes.sizeof(struct), *(getattr(struct, field).offset for field in names_of)]
            expressions += [f"sizeof({name})", *(f"offsetof({name}, {field})" for field in names_of)]
    includes = "".join(f'#include "{header}"\n' for header in STRUCTS)
    text = f"{includes}#include <cstddef>\nextern const unsigned long N[] = {{{', '.join(expressions)}}};\n"
    source, library = tmp_path / "sizes.cpp", tmp_path / "sizes.so"
    source.write_text(text)
    folders = (f"-I{folder}" for folder in (structs.CSRC, ROOT, ROOT / "model" / "csrc"))
    command = [*toolchain.find_compiler(), "-std=c++17", "-w", "-shared", "-fPIC", *native.DEFINES, *folders]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    assert list((ctypes.c_ulong * len(mine)).in_dll(ctypes.CDLL(str(library)), "N")) == mine


def test_a_kernel_in_ispc_has_the_same_struct():
    ispc = offsets(structs.structure(structs.CSRC / "attention.isph", "Attention"))
    assert ispc == offsets(structs.structure(ATTENTION, "Attention"))[: len(ispc)]


def test_a_library_with_another_struct_is_refused(tmp_path):
    planted = tmp_path / "attention.h"
    planted.write_text(re.sub(r"( +)int threads;", r"\1int threads;\n\1double more;", ATTENTION.read_text()))
    right, wrong = (structs.structure(file, "Attention") for file in (ATTENTION, planted))
    structs.check(right, ctypes.sizeof(right))
    size = ctypes.sizeof(right)
    with pytest.raises(
        BuildError, match=rf"AttentionOf has {size} bytes in the library; it must have {size + 8}"
    ):
        structs.check(wrong, size)


def test_constants_are_read(tmp_path):
    file = tmp_path / "numbers.h"
    file.write_text(
        "#define ONE 1  // not 2\nconstexpr int TWO = 2, SUM = ONE + TWO, THREE = 3;\n"
        "enum { FOUR = 4, FIVE = 5 };\n"
        "constexpr size_t SHIFTED = 1 << 3;\nconst SIX = 6u;\nint lower = 7;\n"
    )
    assert structs.constants(file) == {"ONE": 1, "TWO": 2, "THREE": 3, "FOUR": 4, "FIVE": 5, "SIX": 6}
