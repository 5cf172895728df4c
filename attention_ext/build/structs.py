"""Structures of ctypes and whole numbers, read from the C++ that declares them, so that each stands once."""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.parts import BuildError

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TYPES: dict[str, Any] = {
    **{name: getattr(ctypes, f"c_{name}") for name in ("bool", "int", "float", "double")},
    **{f"{name}_t": getattr(ctypes, f"c_{name}") for name in ("int32", "int64", "uint32", "uint64")},
    **{name: getattr(ctypes, f"c_{name}") for name in ("int32", "int64")},  # of ISPC
    **{"unsigned": ctypes.c_uint, "long long": ctypes.c_int64},
}


@functools.cache
def structure(file: Path, name: str) -> Any:
    """struct `name` of a file in C++ or ISPC, and its base's fields. A pointer is an address, an enum an int.

    What stands under `#if` is left out. Raises BuildError for a type that the file does not declare.
    """
    text = re.sub(r"//.*|^#if[\s\S]*?^#endif|\buniform\s+", "", file.read_text("utf-8"), flags=re.M)
    found = re.search(rf"struct[^;{{=]*\b{name}(?: : (\w+))? {{(.*?)^}};", text, re.M | re.S)
    if not found:
        if re.search(rf"enum(?: class)? {name}\b", text):
            return ctypes.c_int
        alias = re.search(rf"using {name} = (\w+)", text)
        if not alias:
            raise BuildError(f"{file.name} has no struct {name} that can be read")
        return structure(file, alias[1])
    base, body = found.groups()
    body = re.sub(r"\{\s*\}", "", body)
    while "{" in body:  # functions
        body = re.sub(r"\{[^{}]*\}", ";", body)
    fields = []
    for statement in re.sub(r"\(\*(\w+)\)\([^)]*\)", r"*\1", body).split(";"):
        declared = re.match(r"\s*(?:const )?(\w+(?: long)?)(?:<\w+>)?(?: const)?([^()]+)$", statement)
        for star, field, count in re.findall(
            r"(\*?)\s*(\w+)(?:\[(\d+)\])?[^,]*", declared[2] if declared else ""
        ):
            assert declared
            if star:
                known = ctypes.c_char_p if declared[1] == "char" else ctypes.c_void_p
            else:
                known = TYPES.get(declared[1]) or structure(file, declared[1])
            fields.append((field, known * int(count) if count else known))
    above = structure(file, base) if base else ctypes.Structure
    return type(name, (above,), {"_fields_": fields, "__doc__": f"struct {name} of {file.name}."})


@functools.cache
def constants(file: Path) -> dict[str, int]:
    """The whole numbers that a file in C++ or WGSL names: macros, constants and members of enums."""
    text = re.sub(r"//.*", "", file.read_text("utf-8"))
    before = r"(?:#define|const|int|int64_t|size_t|[{,])\s+"
    named = re.findall(rf"{before}([A-Z][A-Z\d_]*)(?: =)? (\d+)u?(?=\s*(?:[,;}}]|$))", text, re.M)
    return {name: int(digits) for name, digits in named}


def check(struct: Any, size: int) -> None:
    """Raise BuildError unless a loaded library has as many bytes in a struct."""
    if size != ctypes.sizeof(struct):
        must = f"it must have {ctypes.sizeof(struct)} as {struct.__doc__}"
        raise BuildError(f"struct {struct.__name__} has {size} bytes in the library; {must}")
