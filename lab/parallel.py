"""The lab's test of attention over processes: its error, the bytes that it sends, the time that it waits.

Every rank makes its own rows from a seed for each block of rows, so no rank holds more than its method needs.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shakespeare.attention_ext import PARTS, attention, operator, parallel, processor, reference
from shakespeare.attention_ext.layout import Rows, length, take
from shakespeare.attention_ext.parallel import Traffic
from shakespeare.attention_ext.ranks import Ranks, join, meet
from shakespeare.lab import machine
from shakespeare.lab.correctness import mismatch
from shakespeare.lab.formats import counted
from shakespeare.lab.timing import Clock

BLOCK = 4096  # rows of one seed
CHECKED = 16  # rows of each rank that are compared with float64
MAX_NUMBERS = 2**30  # most numbers of K to make again for the comparison with float64; about ten seconds
ROUNDS = 5  # rounds of the measurement, unless one takes longer than LONG seconds
LONG = 2.0


@dataclass(frozen=True)
class Setup:
    """The arguments of the test: one sequence of N keys, and queries at its end."""

    method: str
    N: int
    queries: int
    heads: int
    d: int
    causal: bool
    part: str
    device: str
    timeout: float

    @property
    def scale(self) -> float:
        return self.d**-0.5

    @property
    def offset(self) -> int:
        """Query i sees the keys j <= i + offset."""
        return self.N - self.queries


def rows_of(name: str, setup: Setup, chunks: Sequence[range]) -> Tensor:
    """Rows of q, k or v, (1, H, n, d): standard normal, the same for every number of ranks."""
    pieces = [torch.empty(1, setup.heads, 0, setup.d)]
    for chunk in filter(len, chunks):
        for block in range(chunk.start // BLOCK, -(-chunk.stop // BLOCK)):
            generator = torch.Generator().manual_seed(3 * block + "qkv".index(name))
            rows = torch.randn(1, setup.heads, BLOCK, setup.d, generator=generator)
            first = block * BLOCK
            pieces.append(rows[:, :, max(0, chunk.start - first) : chunk.stop - first])
    return torch.cat(pieces, dim=2)


def layout(setup: Setup, count: int) -> tuple[Rows, Rows]:
    """The rows of q and of k of each rank."""
    keys = parallel.rows(setup.method, setup.N, count)
    if setup.method == "split":
        return tuple((range(setup.queries),) for _ in range(count)), keys
    return parallel.rows(setup.method, setup.queries, count), keys


def exact(setup: Setup, chunks: Sequence[range]) -> tuple[list[int], Tensor]:
    """Some rows in float64 by the definition: their indices among the rank's rows, and (1, H, rows, d)."""
    n = length(chunks)
    checked = sorted({i * (n - 1) // max(1, CHECKED - 1) for i in range(CHECKED)}) if n else []
    q = rows_of("q", setup, chunks)[:, :, checked].double()
    position = torch.tensor([i for chunk in chunks for i in chunk], dtype=torch.long)[checked]
    position += setup.offset
    out = torch.zeros(1, setup.heads, len(checked), setup.d, dtype=torch.float64)
    lse = out.new_full(out.shape[:3], -torch.inf)
    for first in range(0, setup.N if checked else 0, BLOCK):
        keys = [range(first, min(first + BLOCK, setup.N))]
        k = rows_of("k", setup, keys).double()
        v = rows_of("v", setup, keys).double()
        s = setup.scale * (q @ k.mT)
        if setup.causal:
            s = s.masked_fill(torch.arange(first, keys[0].stop) > position[:, None], -torch.inf)
        block_lse = s.logsumexp(-1)
        out, lse = reference.merge(out, lse, (s - block_lse[..., None]).exp().nan_to_num() @ v, block_lse)
    return checked, out


def synchronize(ranks: Ranks) -> None:
    """Wait for the GPU, if there is one."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def run(setup: Setup, echo: Callable[[str], None] = print) -> bool:
    """Run the test on all ranks; rank 0 prints. False if any is wrong. Raises BuildError, LostRank."""
    if PARTS[setup.part].operator:
        operator(setup.part, "cuda" if setup.device == "cuda" else "auto")  # compiled before any rank waits
    with join(setup.device, setup.timeout) as ranks:
        return _run(setup, ranks, echo if ranks.rank == 0 else lambda line: None)


def _run(setup: Setup, ranks: Ranks, echo: Callable[[str], None]) -> bool:
    queries, keys = layout(setup, ranks.count)
    mine = queries[ranks.rank]
    here = keys[ranks.rank]
    echo(describe(setup, ranks))
    q = rows_of("q", setup, mine).to(ranks.device)
    k, v = (rows_of(name, setup, here).to(ranks.device) for name in "kv")
    options: dict = {"part": setup.part, "causal": setup.causal, "scale": setup.scale}
    out = parallel.attention(setup.method, q, k, v, **options)  # compares the arguments, and warms up

    seconds: list[float] = []
    waited = 0.0
    total = 0.0
    traffic = Traffic()
    known = [length(rows) for rows in keys] if setup.method == "split" or setup.queries == setup.N else None
    while len(seconds) < ROUNDS and sum(seconds) < LONG:
        traffic = Traffic()
        meet()
        start = time.perf_counter()
        out = parallel.attention(setup.method, q, k, v, **options, lengths=known, traffic=traffic)
        synchronize(ranks)
        took = time.perf_counter() - start
        total += took
        waited += traffic.waited
        longest = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        seconds.append(longest.item())

    formula = parallel.expected(setup.method, queries, keys, ranks.rank, setup.heads, setup.d)
    wrong = []
    error = None
    if setup.N * setup.heads * setup.d <= MAX_NUMBERS:
        checked, expected = exact(setup, mine)
        got = out[:, :, checked].cpu()
        error = float((got.double() - expected).abs().max()) if checked else 0.0
        difference = mismatch(expected, got) if checked else None
        if difference:
            wrong.append(f"float64: {difference}")
    alone = compare_with_one_process(setup, ranks, queries, out, min(seconds), wrong)
    if (traffic.sent, traffic.exchanges) != formula:
        wrong.append(f"sent {traffic.sent} bytes in {traffic.exchanges} exchanges; by the formula {formula}")
    sent, exchanges = zip((traffic.sent, traffic.exchanges), formula)
    everyone: list = [None for _ in range(ranks.count)]
    row = (ranks.rank, length(mine), length(here), *sent, *exchanges, waited / total)
    dist.all_gather_object(everyone, (row, error, wrong))
    rows, errors, all_wrong = zip(*everyone)
    echo("rank   queries      keys     bytes sent   by formula  exchanges  by formula  communicating")
    for row in rows:
        echo("{:4}{:10,}{:10,}{:15,}{:13,}{:11}{:12}{:14.0%}".format(*row))
    echo("")
    compared = f"not compared: K has more than {MAX_NUMBERS:,} numbers"
    if error is not None:
        compared = f"largest error {max(errors):.1e}, in {CHECKED} rows of each rank"
    waiting = statistics.mean(row[-1] for row in rows)
    for title, text in ({"float64": compared} | conclusions(seconds, alone, waiting)).items():
        echo(f"{title:16}{text}")
    lines = [f"rank {rank}: {reason}" for rank, reasons in enumerate(all_wrong) for reason in reasons]
    echo(f"\nattention over {counted(ranks.count, 'rank')} == attention {not lines}")
    for line in lines:
        echo(line)
    return not lines


def compare_with_one_process(
    setup: Setup, ranks: Ranks, queries: Rows, out: Tensor, seconds: float, wrong: list[str]
) -> float | None:
    """Compare with rank 0 alone; its seconds, or None if too much. seconds: all ranks'. Adds to `wrong`."""
    need = 8 * setup.heads * setup.d * (setup.N + setup.queries)
    if PARTS[setup.part].name in ("part0", "part1", "part2"):
        need += 12 * setup.heads * setup.N * setup.queries
    available = machine.available_memory()
    if ranks.device.type == "cuda":
        available = torch.cuda.mem_get_info()[0]
    fits = seconds * ranks.count < setup.timeout / 4 and (available is None or 2 * need < available)
    if not broadcast(float(fits)):
        return None
    everyone: list = [None for _ in range(ranks.count)]
    dist.gather_object(out.cpu(), None if ranks.rank else everyone)
    if ranks.rank:
        return broadcast(0.0)
    tensors = [rows_of(n, setup, [range(setup.queries if n == "q" else setup.N)]) for n in "qkv"]
    q, k, v = (t.to(ranks.device) for t in tensors)

    computed: list[Tensor] = []

    def compute() -> None:
        computed[:] = [attention(setup.part, q, k, v, causal=setup.causal, scale=setup.scale)]
        synchronize(ranks)

    alone = min(Clock().time(compute, 2))
    for rank, (chunks, got) in enumerate(zip(queries, everyone)):
        difference = mismatch(take(computed[0].cpu(), chunks), got) if got.numel() else None
        if difference:
            wrong.append(f"one process, rows of rank {rank}: {difference}")
    return broadcast(alone)


def broadcast(number: float) -> float:
    """Rank 0's number, on each rank."""
    sent = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(sent, 0)
    return sent.item()


def describe(setup: Setup, ranks: Ranks) -> str:
    """Two lines on the test and its machine."""
    mask = "causal" if setup.causal else "no mask"
    backend = "NCCL" if setup.device == "cuda" else f"gloo, {counted(torch.get_num_threads(), 'thread')} each"
    name = torch.cuda.get_device_name() if setup.device == "cuda" else processor.name()
    case = f"{setup.heads} heads of N = {setup.N}, {setup.queries} queries, d = {setup.d}, {mask}"
    over = f"{counted(ranks.count, 'rank')} over {backend}\n{name}, {processor.cores()} cores\n"
    return f"{setup.method}: {case}, {setup.part}; {over}"


def conclusions(seconds: Sequence[float], alone: float | None, waiting: float) -> dict[str, str]:
    """The measured times beside one process's. waiting: a share."""
    count = dist.get_world_size()
    fastest = min(seconds)
    median = statistics.median(seconds)
    one = "not compared: it would take too much memory or more than a quarter of --timeout"
    if alone is not None:
        faster = alone / fastest
        one = f"{duration(alone)}; with {counted(count, 'rank')} {faster:.2f} times as fast, "
        one += f"{faster / count:.0%} of ideal"
    measured = f"{duration(fastest)}, the fastest of {len(seconds)} (median {duration(median)}); "
    return {"one process": one, "measured": f"{measured}{waiting:.0%} of the ranks' time communicating"}


def duration(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
