"""A build that takes a second: the decoder's recipe over sources of one line each, in its own process.

small_build.py SOURCES      print the library's answer, or the error like gpt.py
"""

import ctypes
import dataclasses
import sys
from pathlib import Path

from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.build import recipes


def answer(sources: Path) -> int:
    """Build these sources by the library's recipe, and return the built library's answer."""
    whole = recipes.library("decoder", (), "portable")
    small = {"folders": (sources,), "sources": (sources / "answer.cpp",)}
    needs = dataclasses.replace(whole.needs, **small | {"sources": (sources / "other.cpp",)})
    return ctypes.CDLL(str(dataclasses.replace(whole, **small, needs=needs).make())).answer()


if __name__ == "__main__":
    try:
        print(answer(Path(sys.argv[1])))
    except BuildError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
