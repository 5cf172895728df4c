"""The plan of a sweep: which contender is timed at which size, tile, mask and number of threads."""

import importlib.util
import itertools
from collections.abc import Sequence

from shakespeare.attention_ext import PARTS, SIMD, default_tile
from shakespeare.attention_ext.cuda.kernels import MOST_SPLIT
from shakespeare.attention_ext.parts import DEVICES, Dtype, check_compatible, is_file, one_of, resolve_simd
from shakespeare.lab import machine, rule_options
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.contenders import GRADIENTS, ONLY_GRADIENTS, SPLIT, contenders
from shakespeare.lab.bench.sweep import L2, Sweep


def plan(names: Sequence[str], sweep: Sweep) -> list[Cell]:
    """The cells of a sweep of these contenders. Raises ValueError naming the wrong argument."""
    check(names, sweep)
    on_cpu = sweep.device == "cpu"
    cells = []
    rules = (None if rule == "none" else rule for rule in sweep.rules)
    counts = sweep.threads if on_cpu else (1,)
    l2s = sweep.l2s if sweep.device == "cuda" else (None,)
    all_of = itertools.product(sweep.lengths, sweep.widths, sweep.masks, rules, counts, l2s, names)
    for N, d, causal, rule, threads, l2, name in all_of:
        part = PARTS.get(name) if on_cpu else None
        tiled = part is not None and part.tiled
        queries = sweep.queries or N
        causal = causal and sweep.queries != 1  # one query sees all keys
        if causal and queries != N:
            must = f"with a causal mask it must be 1 or N={N}: PyTorch's mask differs"
            raise ValueError(f"queries is {queries}; {must}")
        batch = sweep.tokens // N if sweep.tokens else sweep.batch
        heads = sweep.columns // d if sweep.columns else sweep.heads
        shape = (N, queries, d, batch, heads, causal)
        sides = itertools.product(sweep.br, sweep.bc) if tiled else ((None, None),)
        for simd, (br, bc) in itertools.product(sweep.simds if part and part.operator else (None,), sides):
            if tiled:
                rows = batch * heads * queries
                tuned = default_tile.tile(resolve_simd(simd or "auto"), threads, d, N, causal, rows)
                br = br or tuned[0]
                bc = bc or tuned[1]
            where = sweep.dtype, sweep.device, l2, rule, sweep.backward
            cells.append(Cell(name, simd, *shape, br, bc, threads, *where))
    return list(dict.fromkeys(cells))


def check(names: Sequence[str], sweep: Sweep) -> None:
    """Raise ValueError for an unknown or repeated name, a dtype that a contender lacks, or too few tokens."""
    one_of("device", sweep.device, DEVICES)
    where = "with backward " if sweep.backward else ""
    where += "" if sweep.device == "cpu" else f"on {DEVICES[sweep.device]} "
    named = ("contender", names, known_on(sweep.device, sweep.backward))
    for what, chosen, known in (named, ("simd", sweep.simds, SIMD), ("l2", sweep.l2s, L2)):
        for name in chosen:
            if name not in known and not is_file(name):
                raise ValueError(f"{what} is {name!r}; {where}it must be one of {', '.join(known)}")
        if len(set(chosen)) < len(chosen) or not chosen:
            raise ValueError(f"{what} is {','.join(chosen)!r}; it must name one or more, each once")
    totals = ("tokens", sweep.tokens, "N", sweep.lengths), ("columns", sweep.columns, "d", sweep.widths)
    for what, total, option, each in totals:
        if total and total < max(each):
            raise ValueError(f"{what} is {total}; it must be at least {option}={max(each)}")
    ruled = [rule for rule in sweep.rules if rule_options.parse(rule)]
    takes = sweep.device == "cuda" or (sweep.device, sweep.dtype) == ("cpu", Dtype.FP32)
    if ruled and not (takes and sweep.queries is None):
        where = "on the CPU in fp32 and on CUDA, without queries"
        raise ValueError(f"rule is {ruled[0]!r}; it must be none but {where}")
    if sweep.backward and sweep.queries is not None:
        raise ValueError("backward is True; it must be False with queries")
    for name in names:
        taken = contenders()[name].dtypes.get(sweep.device, ())
        if name in PARTS or is_file(name):
            check_compatible(name, sweep.device, sweep.dtype)
        elif sweep.dtype not in taken:
            who = f"contender {name!r} takes {' and '.join(taken)} only"
            raise ValueError(f"dtype is {sweep.dtype!r}; {who}")


def known_on(device: str, backward: bool = False) -> tuple[str, ...]:
    """The contenders on a device of DEVICES. backward: those with gradients."""
    able = (name for name in contenders() if (name in GRADIENTS if backward else name not in ONLY_GRADIENTS))
    return tuple(name for name in able if device in contenders()[name].dtypes)


def default_names(dtype: str, device: str, queries: int | None, backward: bool) -> tuple[str, ...]:
    """The contenders by default; on CUDA all that are installed, each once.

    queries: as in plan(); SPLIT is for few. Raises ValueError if no contender takes the dtype.
    """
    # on a GPU part4 is one of the kernels, and sdpa one of the backends
    without = {"onnx", "flex"} if device == "cpu" else {"part4", "sdpa", "flex"}
    if queries is None or queries > MOST_SPLIT:
        without.add(SPLIT)
    taken = tuple(
        name
        for name, contender in contenders().items()
        if name not in without
        and name in known_on(device, backward)
        and dtype in contender.dtypes[device]
        and (contender.package is None or importlib.util.find_spec(contender.package))
    )
    if not taken:
        what = "it backward" if backward else "it"
        raise ValueError(f"dtype is {dtype!r}; no part takes {what} on {DEVICES[device]}")
    return taken


def check_memory(cells: Sequence[Cell], available: int | None = None) -> None:
    """Raise ValueError if a cell's inputs and outputs need more memory than is available, in bytes."""
    for cell in cells:
        sizes = f"N={cell.N}, queries={cell.queries}, d={cell.d}, heads={cell.heads}, batch={cell.batch}"
        machine.check_memory(sizes, cell.memory, available)
