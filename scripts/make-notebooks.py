"""Write the notebooks of notebooks/ from the walks of docs/learn: their text, and a cell for each command.

python scripts/make-notebooks.py [--run NUMBER] [--to FOLDER]

A cell with the tag `own` is the notebook's: it stays as it is, at the end of its section. A cell whose source
has not changed keeps its output. --run also executes notebook 1, or 2, which needs a GPU. --to: where they
are written, by default notebooks/. The packages are those of the extra `notebook`.
"""

import copy
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_SECONDS = 600  # that a cell may take

# In a section: a block with a command of gpt.py, without the pipe that shortens its output; a figure.
PIECE = re.compile(
    r"^```text\n\$ python gpt\.py (?P<command>[^\n|]+)[^\n]*\n.*?^```$"
    r"|^!\[[^\]\n]*\]\(\.\./figures/(?P<figure>[\w-]+)\.svg\)$",
    re.DOTALL | re.MULTILINE,
)
HEAD = """
The text of [{document}](../{document}), with its commands as cells, some of them shorter. An output is of the
processor that it names; the figures in the text are the document's.
"""
INSTALL = """\
# In a clone: pip install -c constraints.txt -e '.[{extras},notebook]'. The first command compiles kernels.
%load_ext shakespeare.lab.magic"""


@dataclass(frozen=True)
class Notebook:
    """A notebook of a document.

    extras: what it needs beside 'notebook'. shorter: words of commands, and what a cell has instead.
    figures: the command that draws a figure; the others are drawn by an earlier one.
    """

    name: str
    document: str
    extras: str
    shorter: dict[str, str]
    figures: dict[str, str]
    metadata: dict = field(default_factory=dict)


NOTEBOOK = {
    1: Notebook(
        "1-attention-on-a-cpu.ipynb",
        "docs/learn/attention.md",
        "lab",
        shorter={},
        figures={
            "tiles": "bench part4 -br 32,64,192 -bc 64,256 -r 3 --min-time 0.03 --plot out",
            "time": "bench part0,part1,part2,part3,part4,sdpa,rows.cpp -N 64:1024*4"
            " -r 3 --min-time 0.03 --plot out",
        },
    ),
    2: Notebook(
        "2-attention-on-a-gpu.ipynb",
        "docs/learn/gpu.md",
        "cuda,lab",
        shorter={
            "--queries 1 -N 8192:131072*4 --batch 1 --heads 32 -d 64,128": (
                "--queries 1 --plot out -N 8192:131072*4 --batch 1 --heads 32 -d 64"
            ),
        },
        figures={"ladder": "bench --device cuda --l2 warm -r 5 --plot out"},
        metadata={"accelerator": "GPU", "colab": {"gpuType": "T4"}},
    ),
}


def make(notebook: Notebook, tagged: dict[str, list]) -> nbformat.NotebookNode:
    """The notebook without outputs. tagged: the cells that end its sections, by heading.

    Raises ValueError if the document lacks a section, a figure or words that the notebook names.
    """
    document = (ROOT / notebook.document).read_text()
    tagged = dict(tagged)
    cells: list[nbformat.NotebookNode] = []
    for section in re.split(r"^(?=#+ )", document, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        if not cells:
            head = HEAD.format(document=notebook.document)
            install = INSTALL.format(extras=notebook.extras)
            cells = [new_markdown_cell(f"{title}\n{head}".strip()), new_code_cell(install)]
            section = text
        cells += [*cells_of(notebook, section), *tagged.pop(title.lstrip("# "), ())]
    for missing in [
        *(name for name in (*notebook.shorter, *notebook.figures) if name not in document),
        *tagged,
    ]:
        raise ValueError(f"{notebook.document} has no {missing!r}")
    for number, cell in enumerate(cells):
        cell.id = f"{number:02}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}} | notebook.metadata
    return new_notebook(cells=cells, metadata=metadata)


def cells_of(notebook: Notebook, section: str) -> Iterator[nbformat.NotebookNode]:
    """A section's text, cut at its commands."""
    at = 0
    for piece in PIECE.finditer(section):
        command = piece["command"] or notebook.figures.get(piece["figure"], "")
        for words, instead in notebook.shorter.items():
            command = command.replace(words, instead)
        text = section[at : piece.start()].strip()
        if text:
            yield new_markdown_cell(links(text, notebook.document))
        if command:
            yield new_code_cell(f"%gpt {command.strip()}")
        at = piece.end()
    text = section[at:].strip()
    if text:
        yield new_markdown_cell(links(text, notebook.document))


def links(text: str, document: str) -> str:
    """A document's text with its links as seen from notebooks/."""
    folder = (ROOT / document).parent

    def link(match: re.Match) -> str:
        file = folder / match[1] if match[1] else ROOT / document
        return f"]({os.path.relpath(os.path.normpath(file), NOTEBOOKS)}"

    return re.sub(r"\]\((?!https?:)([^)#]*)", link, text)


def own_cells(notebook: nbformat.NotebookNode) -> dict[str, list]:
    """The cells with the tag `own`, by the heading of their section."""
    cells: dict[str, list] = {}
    heading = ""
    for cell in notebook.cells:
        if "own" in cell.metadata.get("tags", ()):
            cells.setdefault(heading, []).append(cell)
        elif cell.cell_type == "markdown" and cell.source.startswith("#"):
            heading = cell.source.splitlines()[0].lstrip("# ")
    return cells


def keep_outputs(new: nbformat.NotebookNode, old: nbformat.NotebookNode) -> None:
    """Give cells the outputs that cells of the same source have in the old notebook."""
    known = {cell.source: cell for cell in old.cells if cell.cell_type == "code"}
    for cell in new.cells:
        if cell.cell_type == "code" and cell.source in known:
            before = known[cell.source]
            cell.outputs = before.outputs
            cell.execution_count = before.execution_count


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in an empty folder; outputs name the project's files as from its folder.

    Raises nbclient's CellExecutionError, and ValueError for a command's error or a path of this machine.
    """
    from nbclient import NotebookClient

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    metadata = copy.deepcopy(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    notebook.metadata = metadata
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            text = output.get("text", "").replace(f"{ROOT}/", "")
            if "text" in output:
                output.text = text
            for words in (folder, str(ROOT), sys.prefix, str(Path.home()), "gpt.py: error"):
                if words in text:
                    raise ValueError(f"the output of {cell.source.splitlines()[0]!r} has {words!r}:\n{text}")


@click.command()
@click.option("--run", type=click.Choice([str(number) for number in NOTEBOOK]), help="Execute this one.")
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), default=NOTEBOOKS, help="A folder.")
def main(run: str | None, to: Path) -> None:
    """Write the notebooks from the documents."""
    to.mkdir(exist_ok=True)
    for number, notebook in NOTEBOOK.items():
        old = nbformat.read(NOTEBOOKS / notebook.name, as_version=4)
        new = make(notebook, own_cells(old))
        try:
            if run == str(number):
                execute(new)
            else:
                keep_outputs(new, old)
        finally:  # what was executed before an error shows its cause
            nbformat.write(new, to / notebook.name)


if __name__ == "__main__":
    main()
