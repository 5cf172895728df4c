"""The notebooks: scripts/make-notebooks.py makes their text from the documents, and executes them."""

import re
import runpy

import pytest
from support import ROOT

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make-notebooks.py"))
NOTEBOOK = SCRIPT["NOTEBOOK"]
PATHS = re.compile(r"/(home|root|tmp|work|usr|opt|content)/|site-packages")


def read(file) -> list:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    return notebook.cells


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


@pytest.mark.parametrize("number", NOTEBOOK)
def test_the_notebooks_are_what_the_script_writes(number, tmp_path):
    """Text, links and outputs; own cells begin with the kernels that `try --new` writes."""
    name = NOTEBOOK[number].name
    SCRIPT["main"].callback(run=None, to=tmp_path)
    cells = read(SCRIPT["NOTEBOOKS"] / name)
    assert read(tmp_path / name) == cells, "run: make docs"
    ran = [cell for cell in cells if cell.cell_type == "code"][1:]
    assert len(ran) > 15 and all(cell.outputs for cell in ran)
    assert sum(output.output_type == "display_data" for cell in ran for output in cell.outputs) >= 3
    assert not any(PATHS.search(printed(cell)) for cell in ran)
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (SCRIPT["NOTEBOOKS"] / link).exists()] == [] and len(links) > 5
    start = (ROOT / "own" / "trial" / "starts" / f"start.{ {1: 'cpp', 2: 'cu'}[number] }").read_text()
    assert any(cell.source.endswith(start[start.index("#include") :].rstrip()) for cell in ran)
    assert f"notebooks/{name}" in (ROOT / "README.md").read_text()


def test_a_section_that_the_document_lacks_is_named():
    with pytest.raises(ValueError, match=r"docs/learn/attention.md has no 'Part 9'"):
        SCRIPT["make"](NOTEBOOK[1], {"Part 9": []})


@pytest.mark.full
def test_the_first_notebook_runs(extension, tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the script changes it
    SCRIPT["main"].callback(run="1", to=tmp_path)
    cells = [cell for cell in read(tmp_path / NOTEBOOK[1].name) if cell.cell_type == "code"][1:]
    said = {cell.source.splitlines()[0]: printed(cell) for cell in cells}
    assert all(said.values())
    assert "mine.cpp is right in" in said["%%attention mine.cpp -N 512"]
    assert "rows.cpp is right in" in said["%%attention rows.cpp -N 512"]
    assert "Nk - Nq is left out" in said["%%attention wrong.py"]
    assert "AddressSanitizer: write of 4 bytes beyond out at crash.cpp:5" in said["%%attention crash.cpp"]
