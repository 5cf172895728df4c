"""What the scripts write of the documents and notebooks is in the tree; the first notebook runs."""

import json
import re
import runpy
import sys

import pytest
from support import ROOT, printed

DOCUMENTS = "import json, runpy; print(json.dumps(runpy.run_path('scripts/make-docs.py')['documents']()))"
# Words of the first notebook's commands, and what a test runs instead.
SMALLER = {f"explain part{n}": f"explain part{n} -N 128" for n in (1, 2, 3, 4)}
PATHS = re.compile(r"/(home|root|tmp|work|usr|opt|content)/|site-packages")


def test_the_documents_are_what_the_script_writes():
    """In a process of its own: click keeps the help's option in the form of the first call."""
    documents = json.loads(printed(sys.executable, "-c", DOCUMENTS))
    other = [name for name, text in documents.items() if (ROOT / name).read_text() != text]
    assert other == [], "run: make docs"
    results = {str(file.relative_to(ROOT)) for file in (ROOT / "docs" / "results").iterdir()}
    assert documents.keys() == results | {"README.md", "docs/use/cli.md", "docs/learn/gpu.md"}


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """scripts/make-notebooks.py, and a function that gives a notebook's cells."""
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    return runpy.run_path(
        str(ROOT / "scripts" / "make-notebooks.py")
    ), lambda file: nbformat.read(file, 4).cells


def test_the_notebooks_are_what_the_script_writes(notebooks, tmp_path):
    """Text and outputs, without paths of the machine that made them."""
    script, read = notebooks
    script["main"].callback(run=None, to=tmp_path)
    for notebook in script["NOTEBOOK"].values():
        cells = read(script["NOTEBOOKS"] / notebook.name)
        assert read(tmp_path / notebook.name) == cells, "run: make docs"
        ran = [cell for cell in cells if cell.cell_type == "code"][1:]
        assert all(cell.outputs for cell in ran) and not PATHS.search(json.dumps(ran))


@pytest.mark.full
def test_the_first_notebook_runs(notebooks, extension, tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    script, read = notebooks
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the script changes it
    shorter = script["NOTEBOOK"][1].shorter
    for words, instead in SMALLER.items():
        monkeypatch.setitem(shorter, words, instead)
    monkeypatch.setitem(script["NOTEBOOK"][1].figures, "tiles", "bench part4 -br 32,64 -N 64 -r 3 --plot out")
    script["main"].callback(run="1", to=tmp_path)
    cells = [cell for cell in read(tmp_path / script["NOTEBOOK"][1].name) if cell.cell_type == "code"][1:]
    said = {cell.source.splitlines()[0]: json.dumps(cell.outputs) for cell in cells}
    assert "mine.cpp is right in" in said["%%attention mine.cpp -N 512"]
    assert "Nk - Nq is left out" in said["%%attention wrong.py"]
    assert "AddressSanitizer: write of 4 bytes beyond out at crash.cpp:5" in said["%%attention crash.cpp"]
