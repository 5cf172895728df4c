"""What each step in WGSL does by its own count: operations, and bytes asked of each memory."""

from shakespeare.attention_ext.parts import Dtype
from shakespeare.attention_ext.webgpu.steps import Step, Tile, ceil_div
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.cuda.traffic import visits

FOUR = 16  # bytes of four float32 numbers


def step_counts(step: Step, tile: Tile, cell: Cell, subgroup: int) -> dict[str, int]:
    """A step's own count, with the parts of tiles that are masked or past the end.

    subgroup: lanes whose common read of workgroup memory counts once.
    """
    d4 = ceil_div(cell.d, 4)
    element = 4 * Dtype(cell.dtype).bytes  # bytes of four numbers in a storage buffer
    line = min(tile.lanes, subgroup)  # lanes that read one number, beside each other
    column = max(1, subgroup // tile.lanes)  # and below
    threads = tile.threads
    heads = cell.batch * cell.heads
    rows = ceil_div(cell.queries, tile.br)
    pairs = heads * visits(cell.case(), tile.br, tile.bc)  # tiles of queries with tiles of keys
    width = ceil_div(d4, tile.lanes)
    scores = tile.br * tile.bc
    storage = heads * cell.queries * (d4 * element + 4)  # the output and the logsumexp
    once = 0  # bytes of workgroup memory outside the loop over keys
    if step.name in "12":
        exponentials = threads * (tile.bc + 1)
        through = threads * 4 * (1 + 2 * tile.bc / line)  # S
        fours = threads * (2 * d4 + tile.bc * width)  # of Q, K and V
        if step.name == "2":
            read = threads * (d4 / line + (d4 + tile.bc * width) / column)
            through += FOUR * (2 * tile.bc * d4 + read)
    else:
        half = FOUR // 2 if step.name == "6" else FOUR  # of four numbers of K, V or P
        exponentials = scores + 4 * threads
        through = 2.0 * tile.bc * d4 * half  # K and V stored
        if step.name == "3":
            through += threads * d4 * (4 * FOUR / column + tile.rows * FOUR / line)  # S
            through += threads * tile.rows * FOUR * (1 + tile.lanes / line)  # P
        else:
            through += threads * d4 * 4 * (FOUR / line + tile.keys / 4 * half / column)  # S
            through += threads * half * (tile.keys + tile.bc / line)  # P
        through += threads * tile.bc * width * half / column  # V
        if step.name in "34" or subgroup < 2 * tile.lanes:
            through += threads * FOUR * (1 + tile.lanes / line)  # the maxima
    if step.name != "1":  # a group stores tiles of Q, K and V in workgroup memory
        once = heads * rows * tile.br * d4
        storage += element * once
        fours = 2 * tile.bc * d4
    return {
        "multiply-adds": pairs * 4 * scores * (d4 + width * tile.lanes),
        "exp2": pairs * exponentials,
        "workgroup memory": int(pairs * through) + FOUR * once,
        "storage": storage + pairs * element * fours,
    }
