"""The notebooks: scripts/make-notebooks.py makes their text from the documents, and executes them."""

from __future__ import annotations

import dataclasses
import re
import runpy
import subprocess
import sys

import pytest
from support import ROOT

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make-notebooks.py"))
NOTEBOOK = SCRIPT["NOTEBOOK"]
PATHS = re.compile(r"/(home|root|tmp|work|usr|opt|content)/|site-packages")


def read(path):
    """A notebook from a file, after a check of its form."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def printed(cell) -> str:
    """What a cell prints."""
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.parametrize("number", NOTEBOOK)
def test_the_notebooks_are_what_the_script_writes(number):
    kept = read(SCRIPT["NOTEBOOKS"] / NOTEBOOK[number].name)
    made = SCRIPT["made"](NOTEBOOK[number])
    told = [(cell.cell_type, cell.source) for cell in made.cells]
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == told, "run: make docs"
    assert len(told) > 20
    assert not any(PATHS.search(printed(cell)) for cell in kept.cells if cell.cell_type == "code")
    assert f"notebooks/{NOTEBOOK[number].name}" in (ROOT / "README.md").read_text()


def test_the_first_notebook_has_outputs():
    cells = read(SCRIPT["NOTEBOOKS"] / NOTEBOOK[1].name).cells
    run = [cell for cell in cells if cell.cell_type == "code"][1:]
    assert run and all(cell.outputs for cell in run)
    assert sum(output.output_type == "display_data" for cell in run for output in cell.outputs) >= 3


@pytest.mark.parametrize("number", NOTEBOOK)
def test_every_linked_file_exists(number):
    text = "\n".join(c.source for c in SCRIPT["made"](NOTEBOOK[number]).cells if c.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert len(links) > 5
    assert [link for link in links if not (SCRIPT["NOTEBOOKS"] / link).exists()] == []


def test_what_the_document_has_not_is_named():
    for field, value in (("shorter", {"-N 7": ""}), ("figures", {"none": ""}), ("left_out", ("Part 9",))):
        changed = dataclasses.replace(NOTEBOOK[1], **{field: value})
        with pytest.raises(ValueError, match=r"docs/learn/attention.md has no '(-N 7|none|Part 9)'"):
            SCRIPT["made"](changed)


def test_outputs_are_kept_where_the_source_is_the_same(tmp_path):
    old, new = SCRIPT["made"](NOTEBOOK[1]), SCRIPT["made"](NOTEBOOK[1])
    codes = [cell for cell in old.cells if cell.cell_type == "code"]
    for cell in codes:
        cell.outputs = [nbformat.v4.new_output("stream", text="kept")]
    codes[2].source += " "
    nbformat.write(old, tmp_path / "old.ipynb")
    SCRIPT["keep_outputs"](new, tmp_path / "old.ipynb")
    kept = [printed(cell) for cell in new.cells if cell.cell_type == "code"]
    assert kept.count("kept") == len(kept) - 1 and kept[2] == ""


@pytest.mark.full
def test_the_first_notebook_runs(extension, tmp_path):
    pytest.importorskip("nbclient")
    script = ROOT / "scripts" / "make-notebooks.py"
    command = [sys.executable, script, "--run", "1", "--to", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [c for c in read(tmp_path / NOTEBOOK[1].name).cells if c.cell_type == "code"][1:]
    said = {cell.source.splitlines()[0]: printed(cell) for cell in cells}
    assert all(said.values()) and len(said) > 10
    assert "mine.cpp is right in" in said["%%attention mine.cpp -N 512"]
    assert "rows.cpp is right in" in said["%%attention rows.cpp -N 512"]
    assert "Nk - Nq is left out" in said["%%attention wrong.py"]
    assert "AddressSanitizer: write of 4 bytes beyond out at crash.cpp:5" in said["%%attention crash.cpp"]
    assert {file.name for file in tmp_path.iterdir()} == {each.name for each in NOTEBOOK.values()}
