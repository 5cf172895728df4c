"""The top folders are floors: imports point downwards only, also those inside functions."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec

from support import ROOT

FLOORS = "checkpoints attention_ext model generation training lab judge web app benchmarks scripts".split()
FACE = {
    "attention": "attention_ext",
    "generate": "generation",
    "load": "model",
}  # names of shakespeare itself


def imported(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a source that import, and the top folder."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                top = f"{prefix}{alias.name}".removeprefix("shakespeare.").split(".")[0]
                yield node.lineno, FACE.get(top, top)


def test_imports_point_downwards():
    late = "def late():\n    from shakespeare.app.cli import main"
    assert [*imported(late), *imported("from shakespeare import judge as judge")] == [
        (2, "app"),
        (1, "judge"),
    ]
    assert {link.parent.name for link in ROOT.glob("shakespeare/*/__init__.py")} <= {*FLOORS}
    for i, floor in enumerate(FLOORS):
        for file in (ROOT / floor).rglob("*.py"):
            upwards = [(line, top) for line, top in imported(file.read_text()) if top in FLOORS[i + 1 :]]
            assert not upwards, file


def test_modules_that_a_text_names_exist():
    found = 0
    for file in (file for floor in FLOORS for file in (ROOT / floor).rglob("*.py")):
        for name in re.findall(r'"(shakespeare(?:\.\w+){2,})"', file.read_text()):
            assert find_spec(name), f"{file} names {name}"
            found += 1
    assert found > 5
