"""Write the notebooks of notebooks/ from the documents: their text, and a cell for each block of output.

python scripts/make-notebooks.py [--run NUMBER] [--to FOLDER]

A cell whose source has not changed keeps its output. --run also executes notebook 1, or 2, which needs a GPU.
--to: where they are written, by default notebooks/. What a cell runs instead of the document's command, and
the cells that no document has, are the tables below. The packages are those of the extra `notebook`.
"""

import copy
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import click
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shakespeare.attention_ext import PARTS  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
# On GitHub; to be replaced by the project's address. No account's name begins with a hyphen.
REPOSITORY = "-OWNER-/shakespeare-attention"
CELL_SECONDS = 600  # that a cell may take

# A document in pieces: a block with a command of gpt.py, another block, a figure, a heading.
PIECE = re.compile(
    r"^```text\n\$ python gpt\.py (?P<command>[^\n]+)\n.*?^```$|^```.*?^```$"
    r"|^!\[[^\]\n]*\]\(figures/(?P<figure>[\w-]+)\.svg\)$|^#+ (?P<heading>[^\n]+)$",
    re.DOTALL | re.MULTILINE,
)
HEAD = """\
{title}

[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})

The text of [{document}](../{document}), with its commands as cells, some of them shorter. An output is of the
processor that it names; the figures in the text are the document's.
"""
INSTALL = """\
# Colab has no copy of the project, so it is installed. The first command then compiles the kernels.
import importlib.util

if importlib.util.find_spec("attention_ext") is None:
    %pip install --quiet "shakespeare-attention[{extras}] @ git+https://github.com/{repository}"

%load_ext lab.magic"""

# What is said before the cells that no document has.
OWN = """\
### A kernel of your own

A cell that begins with `%%attention` is saved as a file, compiled{by} and [tried](../docs/try.md): is it
right, how fast is it, what bounds it? The file's suffix is its language. This is {this}. Change it, and run
the cell again.
"""
FIND = "This is NumPy, with a mistake. Find it before you read the diagnosis."
CRASH = "A crash ends neither the trial nor the notebook, and AddressSanitizer names the line."
ROWS = """\
### Your next step

This is `mine.cpp` with one loop changed, as its hint says: V is read along its rows.
"""
TILES = """\
### Your next step

The same with an online softmax: the keys are read once, in tiles that the block shares, and a row's state is
in registers.
"""
TEXT = "-m shakes256 --num-samples 1 --max-new-tokens 200"

START = (ROOT / "lab" / "trial" / "starts" / "start.cpp").read_text()
START_ON_GPU = (ROOT / "lab" / "trial" / "starts" / "start.cu").read_text()
DOWN_A_COLUMN = """\
                for (int64_t c = 0; c < d; c++) {
                    float o = 0;
                    for (int64_t j = 0; j < n; j++) o += S[i * Nk + j] * V[j * ldV + c];
                    O[i * d + c] = o;
                }
"""
ALONG_A_ROW = """\
                std::fill_n(O + i * d, d, 0.0f);
                for (int64_t j = 0; j < n; j++) {
                    for (int64_t c = 0; c < d; c++) O[i * d + c] += S[i * Nk + j] * V[j * ldV + c];
                }
"""
SHIFTED = """\
import numpy as np


def attention(q, k, v, causal, scale):
    S = scale * q @ k.swapaxes(2, 3)  # (B, H, Nq, Nk)
    if causal:
        S = np.where(np.tri(*S.shape[2:], dtype=bool), S, -np.inf)
    P = np.exp(S - S.max(-1, keepdims=True))
    return P / P.sum(-1, keepdims=True) @ v
"""
BEYOND = """\
#include "attention.h"

void attention(const Attention& a, float*) {
    float* O = a.out_at(0, 0);
    for (int64_t i = 0; i <= a.B * a.H * a.Nq * a.d; i++) O[i] = 0;
}
"""
ONLINE = """\
#include "call.h"

#define BR 64       // queries of a block
#define THREADS 64  // of a block: one for each query
#define BC 32       // keys of a tile
#define SHARED (2 * BC * HEAD_DIM * 4)

extern "C" __global__ void attention(const Call call) {
    extern __shared__ float tile[];
    float *K = tile, *V = tile + BC * HEAD_DIM;
    const Block block = block_of(call, BR);
    const int i = block.first_query + threadIdx.x, row = min(i, call.Nq - 1);
    const int n = keys_seen(call, row);                                           // of this query
    const int most = keys_seen(call, min(block.first_query + BR, call.Nq) - 1);  // of any in the block

    float q[HEAD_DIM], o[HEAD_DIM] = {}, m = -INF, l = 0;
    UNROLLED(c, HEAD_DIM) q[c] = call.scale * to_float(block.q[row * call.q_strides.row + c]);
    for (int j0 = 0; j0 < most; j0 += BC) {
        __syncthreads();  // the tile before is not read any more
        for (int t = threadIdx.x; t < BC * HEAD_DIM; t += THREADS) {
            const int j = min(j0 + t / HEAD_DIM, call.Nk - 1), c = t % HEAD_DIM;
            K[t] = to_float(block.k[j * call.k_strides.row + c]);
            V[t] = to_float(block.v[j * call.v_strides.row + c]);
        }
        __syncthreads();
        for (int j = 0; j < min(BC, n - j0); ++j) {
            float s = 0;
            UNROLLED(c, HEAD_DIM) s += q[c] * K[j * HEAD_DIM + c];
            const float m_new = fmaxf(m, s), old = exp2_approx(m - m_new), p = exp2_approx(s - m_new);
            l = old * l + p;
            UNROLLED(c, HEAD_DIM) o[c] = old * o[c] + p * V[j * HEAD_DIM + c];
            m = m_new;
        }
    }
    if (i >= call.Nq) return;
    Element* out = call.out + (block.head * call.Nq + i) * HEAD_DIM;
    UNROLLED(c, HEAD_DIM) out[c] = to_element(o[c] / l);
}
"""
TRITON = """\
import torch
import triton
import triton.language as tl


@triton.jit
def flash(q, k, v, out, q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, H, Nq, Nk, d, scale,
          CAUSAL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, D: tl.constexpr):  # fmt: skip
    head, i = tl.program_id(1), tl.program_id(0) * BR + tl.arange(0, BR)
    b, h, c = head // H, head % H, tl.arange(0, D)
    rows = (i[:, None] < Nq) & (c[None, :] < d)
    Q = tl.load(q + b * q_b + h * q_h + i[:, None] * q_row + c[None, :], mask=rows, other=0.0)
    O = tl.zeros([BR, D], tl.float32)
    m, l = tl.full([BR], float("-inf"), tl.float32), tl.zeros([BR], tl.float32)
    for j0 in range(0, Nk, BC):
        j = j0 + tl.arange(0, BC)
        keys = (j[:, None] < Nk) & (c[None, :] < d)
        K = tl.load(k + b * k_b + h * k_h + j[:, None] * k_row + c[None, :], mask=keys, other=0.0)
        V = tl.load(v + b * v_b + h * v_h + j[:, None] * v_row + c[None, :], mask=keys, other=0.0)
        S = scale * tl.dot(Q, tl.trans(K), input_precision="ieee")
        seen = j[None, :] < Nk
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None] + Nk - Nq)
        S = tl.where(seen, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1))
        old, P = tl.exp(m - m_new), tl.exp(S - m_new[:, None])
        l = old * l + tl.sum(P, 1)
        O = old[:, None] * O + tl.dot(P, V, input_precision="ieee")
        m = m_new
    tl.store(out + (head * Nq + i[:, None]) * d + c[None, :], O / l[:, None], mask=rows)


def attention(q, k, v, causal, scale):
    (B, H, Nq, d), Nk = q.shape, k.shape[2]
    out = torch.empty(B, H, Nq, d, device=q.device)
    strides = [stride for t in (q, k, v) for stride in t.stride()[:3]]
    sizes = {"BR": 64, "BC": 32, "D": max(16, triton.next_power_of_2(d))}
    flash[triton.cdiv(Nq, 64), B * H](q, k, v, out, *strides, H, Nq, Nk, d, scale, causal, **sizes)
    return out
"""


@dataclass(frozen=True)
class Notebook:
    """A notebook of a document.

    extras: what Colab installs. as_text: words of commands whose blocks stay as they are. shorter: words of
    commands, and what a cell has instead. figures: the command that draws a figure; the others are drawn by
    an earlier one. more: (text, code) of cells after a section. left_out: sections.
    """

    name: str
    document: str
    extras: str
    as_text: tuple[str, ...] = ()
    shorter: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    more: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    metadata: dict = field(default_factory=dict)

    def colab(self) -> str:
        """The link that opens it in Colab."""
        return f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{self.name}"


def own(file: str, options: str, text: str) -> str:
    """A cell that tries a kernel; what stands before its first #include is left out."""
    return f"%%attention {file} {options}".rstrip() + "\n" + text[max(0, text.find("#include")) :].rstrip()


NOTEBOOK = {
    1: Notebook(
        "1-attention-on-a-cpu.ipynb",
        "docs/learn/attention.md",
        "lab",
        as_text=("--cachegrind",),
        shorter={
            "-N 64:1024*4 -r 5": "-N 64:1024*4 -r 3 --min-time 0.03",
            "-t 1,2": "-t 1,2 -r 5",
            "--simd off,portable -r 5": "--simd off,portable -N 512 -r 3 --min-time 0.03",
        },
        figures={
            "tiles": "bench part4 -br 32,64,192 -bc 64,256 -r 3 --min-time 0.03 --plot out",
            "time": f"bench {','.join(PARTS)},sdpa,rows.cpp -N 64:1024*4 -r 3 --min-time 0.03 --plot out",
        },
        more={
            "Part 1: the textbook": [
                (
                    OWN.format(by="", this="part 1, as `gpt.py try --new` writes it"),
                    own("mine.cpp", "-N 512", START),
                ),
                (FIND, own("wrong.py", "", SHIFTED)),
                (CRASH, own("crash.cpp", "", BEYOND)),
            ],
            "Part 2: blocks": [(ROWS, own("rows.cpp", "-N 512", START.replace(DOWN_A_COLUMN, ALONG_A_ROW)))],
            "In the model": [
                ("Your kernel writes too:", f"%gpt try rows.cpp --inference {TEXT} --prompt ROMEO:")
            ],
        },
    ),
    2: Notebook(
        "2-attention-on-a-gpu.ipynb",
        "docs/learn/gpu.md",
        "cuda,lab",
        shorter={
            " --save benchmarks/results/bench_cuda-nvidia-h200.json": "",
            ",sdpa-math --device cuda -d 32,64,128": " --device cuda -d 32,128",
            "-d 160,192,224,256": "-d 256",
            "--heads 32 -d 64,128": "--heads 32 -d 64",
            "--dtype bf16 --queries 1 ": "--dtype bf16 --queries 1 --plot out ",
        },
        more={
            "Kernel 1: a launch for each tile of keys": [
                (
                    OWN.format(by=" by NVRTC", this="what `gpt.py try --new` writes"),
                    own("mine.cu", "", START_ON_GPU),
                )
            ],
            "Kernel 3: where a row's state is": [
                (TILES, own("online.cu", "", ONLINE)),
                (
                    "PyTorch, Numba and Triton launch kernels from a `.py` file. Triton:",
                    own("flash.py", "", TRITON),
                ),
            ],
            "From one call to a whole text": [
                (
                    "The engine `cuda`, and a text by your kernel in PyTorch's model:",
                    "%gpt part4 --inference --device cuda -m shakes256 --num-samples 2 --max-new-tokens 250\n"
                    "%gpt race part0,part4 --device cuda -m shakes256\n"
                    "%gpt profile part4 --device cuda -m shakes256 --texts 1024\n"
                    f"%gpt try online.cu --inference {TEXT}",
                ),
                ("[The document](../docs/learn/gpu.md#few-texts-a-cluster) goes on, into the one launch.", ""),
            ],
        },
        left_out=("Few texts: a cluster", "Many texts, and prompts: the grid", "What is left"),
        metadata={"accelerator": "GPU", "colab": {"gpuType": "T4"}},
    ),
}


def made(notebook: Notebook) -> nbformat.NotebookNode:
    """The notebook without outputs. Raises ValueError if a table names what the document has not."""
    document = (ROOT / notebook.document).read_text()
    cells: list[nbformat.NotebookNode] = []
    of_blocks, of_pieces = [*notebook.as_text, *notebook.shorter], [*notebook.figures, *notebook.more]
    found = [piece.groupdict() for piece in PIECE.finditer(document)]
    commands = "\n".join(piece["command"] or "" for piece in found)
    names = {name for piece in found for name in piece.values()}
    for missing in (
        *(words for words in of_blocks if words not in commands),
        *(name for name in (*of_pieces, *notebook.left_out) if name not in names),
    ):
        raise ValueError(f"{notebook.document} has no {missing!r}")
    text, at, heading = "", 0, ""

    def add(source: str, code: bool = False) -> None:
        if source.strip():
            make = new_code_cell if code else new_markdown_cell
            cells.append(make(source.strip(), id=f"{len(cells):02}"))

    def end_section() -> None:
        if heading not in notebook.left_out:
            add(links(text, notebook.document))
            for said, code in notebook.more.get(heading, ()):
                add(said)
                add(code, code=True)

    for piece in PIECE.finditer(document):
        text, at = text + document[at : piece.start()], piece.end()
        command, figure = piece["command"], piece["figure"]
        if piece["heading"]:
            end_section()
            text, heading = piece[0], piece["heading"]
            if not cells:
                head = HEAD.format(title=text, colab=notebook.colab(), document=notebook.document)
                add(head)
                add(INSTALL.format(extras=notebook.extras, repository=REPOSITORY), code=True)
                text = ""
        elif heading in notebook.left_out:
            continue
        elif words := in_cell(notebook, command) or notebook.figures.get(figure):
            add(links(text, notebook.document))
            text = ""
            add(f"%gpt {words}", code=True)
        elif not figure:
            text += piece[0]
    text += document[at:]
    end_section()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}} | notebook.metadata
    return new_notebook(cells=cells, metadata=metadata)


def in_cell(notebook: Notebook, command: str | None) -> str | None:
    """What a cell runs instead of a block's command; None if there is none."""
    if command is None or any(words in command for words in notebook.as_text):
        return None
    for words, instead in notebook.shorter.items():
        command = command.replace(words, instead)
    return command


def links(text: str, document: str) -> str:
    """A document's text with its links as seen from notebooks/."""
    text = re.sub(r"\]\(#", f"](../{document}#", text)
    return re.sub(r"\]\((?!\.\./|https?:)", "](../docs/", text)


def keep_outputs(new: nbformat.NotebookNode, file: Path) -> None:
    """Give cells the outputs that cells of the same source have in the file."""
    old = nbformat.read(file, as_version=4).cells if file.exists() else []
    known = {cell.source: cell for cell in old if cell.cell_type == "code"}
    for cell in new.cells:
        if cell.cell_type == "code" and cell.source in known:
            cell.outputs, cell.execution_count = (
                known[cell.source].outputs,
                known[cell.source].execution_count,
            )


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in an empty folder. Outputs name the project's files as from its folder.

    Raises nbclient's CellExecutionError for a cell that fails, and ValueError for an output with an error of
    a command or a path of this machine.
    """
    from nbclient import NotebookClient

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    metadata = copy.deepcopy(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    notebook.metadata = metadata
    for cell in notebook.cells:
        for output in (each for each in cell.get("outputs", ()) if "text" in each):
            output.text = output.text.replace(f"{ROOT}/", "")
            for found in (folder, str(ROOT), sys.prefix, str(Path.home()), "gpt.py: error"):
                if found in output.text:
                    named = cell.source.splitlines()[0]
                    raise ValueError(f"the output of {named!r} has {found!r}:\n{output.text}")


@click.command()
@click.option("--run", type=click.Choice([str(number) for number in NOTEBOOK]), help="Execute this one.")
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), default=NOTEBOOKS, help="A folder.")
def main(run: str | None, to: Path) -> None:
    """Write the notebooks from the documents."""
    to.mkdir(exist_ok=True)
    for number, notebook in NOTEBOOK.items():
        new, file = made(notebook), to / notebook.name
        try:
            if run == str(number):
                execute(new)
            else:
                keep_outputs(new, file)
        finally:  # what was executed before an error shows its cause
            nbformat.write(new, file)


if __name__ == "__main__":
    main()
