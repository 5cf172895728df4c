"""The top folders are floors: imports point downwards only, also those inside functions."""

import ast
from collections.abc import Iterator

import pytest
from support import ROOT

FLOORS = [  # from the bottom
    "checkpoints",
    "attention_ext",
    "model",
    "generation",
    "training",
    "lab",
    "own",
    "web",
    "app",
    "benchmarks",
    "scripts",
]
FACE = {"attention": "attention_ext", "generate": "generation", "load": "model"}  # of shakespeare itself


def imported(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a source that import one of FLOORS, and its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                top = name.removeprefix("shakespeare.").split(".")[0]
                if FACE.get(top, top) in FLOORS:
                    yield node.lineno, FACE.get(top, top)


def test_every_package_has_a_floor():
    assert {link.parent.name for link in (ROOT / "shakespeare").glob("*/__init__.py")} <= {*FLOORS}
    sources = [
        "def late():\n    from shakespeare.app.cli import main",
        "from shakespeare import own as judge",
    ]
    assert [[*imported(source)] for source in sources] == [[(2, "app")], [(1, "own")]]


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_point_downwards(floor):
    above = FLOORS[FLOORS.index(floor) + 1 :]
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((ROOT / floor).rglob("*.py"))
        for line, name in imported(file.read_text())
        if name in above
    ]
    assert found == []
