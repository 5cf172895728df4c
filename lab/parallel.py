"""The lab's test of attention over processes: its error, the bytes that it sends, the time that it waits.

Every rank makes its own rows from a seed for each block of rows, so no rank holds more than its method needs.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shakespeare.attention_ext import PARTS, attention, operator, parallel, processor, reference
from shakespeare.attention_ext.layout import Rows, length, pairs, shares, take
from shakespeare.attention_ext.parallel import Traffic
from shakespeare.attention_ext.ranks import Ranks, join, meet
from shakespeare.lab import machine
from shakespeare.lab.correctness import mismatch
from shakespeare.lab.text import counted
from shakespeare.lab.timing import seconds_of

BLOCK = 4096  # rows of one seed
CHECKED = 16  # rows of each rank that are compared with float64
MOST_NUMBERS = 2**30  # most numbers of K to make again for the comparison with float64; about ten seconds
ROUNDS = 5  # rounds of the measurement, unless one takes longer than LONG seconds
LONG = 2.0
SAMPLE = {"cpu": 2**26, "cuda": 2**34}  # pairs for the measurement of one rank's speed, some 0.1 s
LEAST = 64  # queries of that measurement, at least
PIECES = (1 << 20, 64 << 20)  # least and most bytes with which the bandwidth is measured
# https://github.com/zhuzilin/ring-flash-attention: eight H800, forward, % of eight times one GPU
PUBLISHED = {"ring": 52, "striped": 74, "zigzag": 85}


@dataclass(frozen=True)
class Question:
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

    def work(self, queries: Sequence[range], keys: Sequence[range]) -> int:
        """Pairs of a query and a key that it sees, in all heads."""
        return self.heads * pairs(queries, keys, self.causal, self.offset)


class Speeds(NamedTuple):
    """The speeds that a prediction uses.

    work: pairs of a query and a key in one head that one rank computes in a second while the others wait.
    bandwidth: bytes that each rank sends in a second while all ranks send. latency: seconds of an exchange of
    almost nothing. crowd: threads of the ranks for each core of this host, at least 1.
    """

    work: float
    bandwidth: float
    latency: float
    crowd: float

    def computing(self, work: float) -> float:
        """Seconds to compute `work` pairs."""
        return self.crowd * work / self.work

    def sending(self, sent: float) -> float:
        """Seconds of an exchange of `sent` bytes."""
        return self.latency + sent / self.bandwidth if sent else 0.0


def rows_of(name: str, asked: Question, chunks: Sequence[range]) -> Tensor:
    """Rows of q, k or v, (1, H, n, d): standard normal, the same for every number of ranks."""
    found = [torch.empty(1, asked.heads, 0, asked.d)]
    for chunk in filter(len, chunks):
        for block in range(chunk.start // BLOCK, -(-chunk.stop // BLOCK)):
            generator = torch.Generator().manual_seed(3 * block + "qkv".index(name))
            made = torch.randn(1, asked.heads, BLOCK, asked.d, generator=generator)
            first = block * BLOCK
            found.append(made[:, :, max(0, chunk.start - first) : chunk.stop - first])
    return torch.cat(found, dim=2)


def layout(asked: Question, count: int) -> tuple[Rows, Rows]:
    """The rows of q and of k of each rank."""
    keys = parallel.rows(asked.method, asked.N, count)
    if asked.method == "split":
        return ((range(asked.queries),),) * count, keys
    return parallel.rows(asked.method, asked.queries, count), keys


def exact(asked: Question, chunks: Sequence[range]) -> tuple[list[int], Tensor]:
    """Some rows in float64 by the definition: their indices among the rank's rows, and (1, H, rows, d)."""
    n = length(chunks)
    which = sorted({i * (n - 1) // max(1, CHECKED - 1) for i in range(CHECKED)}) if n else []
    q = rows_of("q", asked, chunks)[:, :, which].double()
    position = torch.tensor([i for chunk in chunks for i in chunk], dtype=torch.long)[which]
    position += asked.offset
    out = torch.zeros(1, asked.heads, len(which), asked.d, dtype=torch.float64)
    lse = out.new_full(out.shape[:3], -torch.inf)
    for first in range(0, asked.N if which else 0, BLOCK):
        keys = [range(first, min(first + BLOCK, asked.N))]
        k, v = rows_of("k", asked, keys).double(), rows_of("v", asked, keys).double()
        s = asked.scale * (q @ k.mT)
        if asked.causal:
            masked = torch.arange(first, keys[0].stop) > position[:, None]
            s = s.masked_fill(masked, -torch.inf)
        of_block = s.logsumexp(-1)
        p = (s - of_block[..., None]).exp().nan_to_num()
        out, lse = reference.merge(out, lse, p @ v, of_block)
    return which, out


def measure_speeds(asked: Question, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, sent: int) -> Speeds:
    """Measure rank 0's speed while the others wait, and the bandwidth of all ranks round the ring."""
    found = torch.zeros(3, dtype=torch.float64)
    if ranks.rank == 0:
        few = q[:, :, : max(LEAST, SAMPLE[asked.device] // max(1, asked.heads * k.shape[2]))]
        seconds = best(lambda: k.numel() and attention(asked.part, few, k, v, scale=asked.scale), ranks)
        found[0] = asked.heads * max(1, few.shape[2] * k.shape[2]) / seconds
    meet()
    if ranks.count > 1:
        size = min(max(PIECES[0], sent // (ranks.count - 1)), PIECES[1]) // 8
        for place, numbers, count in ((1, size, 5), (2, 1, 50)):
            half = torch.zeros(numbers, device=ranks.device)

            def turn() -> None:  # as in the ring: copied together, received into new memory
                pair = torch.stack((half, half))
                operations = [
                    dist.P2POp(dist.isend, pair, (ranks.rank + 1) % ranks.count),
                    dist.P2POp(dist.irecv, torch.empty_like(pair), (ranks.rank - 1) % ranks.count),
                ]
                Traffic().wait(dist.batch_isend_irecv(operations), ranks.device)

            # a fixed number of turns: the ranks wait for each other
            found[place] = best(turn, ranks, count, limit=math.inf)
    dist.broadcast(found, 0)
    work, transfer, latency = found.tolist()
    bandwidth = 8 * size / max(1e-9, transfer - latency) if ranks.count > 1 else math.inf
    crowd = 1.0
    if asked.device == "cpu":
        crowd = max(1.0, ranks.local * torch.get_num_threads() / processor.cores())
    return Speeds(work, bandwidth, latency, crowd)


def best(function: Callable[[], object], ranks: Ranks, count: int = 5, limit: float = LONG) -> float:
    """Seconds of the fastest of `count` calls, after one to warm up."""

    def finished() -> None:
        function()
        synchronize(ranks)

    synchronize(ranks)
    found = [seconds_of(finished)]
    while len(found) <= count and sum(found) <= limit:
        found.append(seconds_of(finished))
    return min(found[1:] or found)


def synchronize(ranks: Ranks) -> None:
    """Wait for the GPU, if there is one."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def predict(asked: Question, queries: Rows, keys: Rows, speeds: Speeds) -> tuple[float, float, float]:
    """Seconds of the call, of the computation on the busiest rank, and of sending without overlap."""
    P = len(keys)
    if asked.method not in ("ring", "zigzag"):
        sent = [
            parallel.expected(asked.method, queries, keys, rank, asked.heads, asked.d)[0] for rank in range(P)
        ]
        everything = [chunk for chunks in keys for chunk in chunks]
        work = [asked.work(mine, everything) for mine in queries]
        if asked.method == "split":
            work = [asked.work(queries[0], mine) for mine in keys]
        if asked.method == "ulysses":
            whole = asked.work([range(asked.queries)], [range(asked.N)]) // asked.heads
            work = [share * whole for share in shares(asked.heads, P)]
        computing, sending = speeds.computing(max(work)), speeds.sending(max(sent))
        return computing + sending, computing, sending
    # A turn of rank r begins when it has computed the turn before and its keys have arrived, which rank r - 1
    # began to send in its own turn before.
    began, ended = [0.0] * P, [0.0] * P
    busy, sending = [0.0] * P, 0.0
    for turn in range(P):
        if turn:
            owners = [(rank - turn) % P for rank in range(P)]
            send = [speeds.sending(8 * asked.heads * asked.d * length(keys[owner])) for owner in owners]
            arrived = [max(began[rank], began[rank - 1]) + send[rank] for rank in range(P)]
            began = [max(ended[rank], arrived[rank]) for rank in range(P)]
            sending += max(send)
        for rank in range(P):
            seconds = speeds.computing(asked.work(queries[rank], keys[(rank - turn) % P]))
            busy[rank] += seconds
            ended[rank] = began[rank] + seconds
    return max(ended), max(busy), sending


def run(asked: Question, echo: Callable[[str], None] = print) -> bool:
    """Run the test on every rank; rank 0 prints. False if the result is wrong on any rank.

    Raises BuildError if a kernel cannot be compiled, and LostRank.
    """
    if PARTS[asked.part].operator:
        operator(asked.part, "cuda" if asked.device == "cuda" else "auto")  # compiled before any rank waits
    with join(asked.device, asked.timeout) as ranks:
        return _run(asked, ranks, echo if ranks.rank == 0 else lambda line: None)


def _run(asked: Question, ranks: Ranks, echo: Callable[[str], None]) -> bool:
    queries, keys = layout(asked, ranks.count)
    mine, here = queries[ranks.rank], keys[ranks.rank]
    echo(describe(asked, ranks))
    q = rows_of("q", asked, mine).to(ranks.device)
    k, v = (rows_of(name, asked, here).to(ranks.device) for name in "kv")
    options: dict = {"part": asked.part, "causal": asked.causal, "scale": asked.scale}
    out = parallel.attention(asked.method, q, k, v, **options)  # compares the arguments, and warms up

    seconds: list[float] = []
    waited, total, traffic = 0.0, 0.0, Traffic()
    counts = [length(rows) for rows in keys]
    known = counts if asked.method == "split" or asked.queries == asked.N else None
    while len(seconds) < ROUNDS and sum(seconds) < LONG:
        traffic = Traffic()
        meet()
        start = time.perf_counter()
        out = parallel.attention(asked.method, q, k, v, **options, lengths=known, traffic=traffic)
        synchronize(ranks)
        took = time.perf_counter() - start
        total, waited = total + took, waited + traffic.waited
        longest = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        seconds.append(longest.item())

    formula = parallel.expected(asked.method, queries, keys, ranks.rank, asked.heads, asked.d)
    speeds = measure_speeds(asked, ranks, q, k, v, formula[0])
    wrong = []
    error = None
    if asked.N * asked.heads * asked.d <= MOST_NUMBERS:
        which, expected = exact(asked, mine)
        got = out[:, :, which].cpu()
        error = float((got.double() - expected).abs().max()) if which else 0.0
        wrong += [f"float64: {found}" for found in [mismatch(expected, got)] if which and found]
    alone = compare_with_one_process(asked, ranks, queries, out, speeds, wrong)
    if (traffic.sent, traffic.exchanges) != formula:
        wrong.append(f"sent {traffic.sent} bytes in {traffic.exchanges} exchanges; by the formula {formula}")
    sent, exchanges = zip((traffic.sent, traffic.exchanges), formula)
    everyone: list = [None] * ranks.count
    row = (ranks.rank, length(mine), length(here), *sent, *exchanges, waited / total)
    dist.all_gather_object(everyone, (row, error, wrong))
    rows, errors, all_wrong = zip(*everyone)
    echo("rank   queries      keys     bytes sent   by formula  exchanges  by formula  communicating")
    for row in rows:
        echo("{:4}{:10,}{:10,}{:15,}{:13,}{:11}{:12}{:14.0%}".format(*row))
    echo("")
    found = {"float64": f"not compared: K has more than {MOST_NUMBERS:,} numbers"}
    if error is not None:
        found["float64"] = f"largest error {max(errors):.1e}, in {CHECKED} rows of each rank"
    waiting = statistics.mean(row[-1] for row in rows)
    found |= conclusions(asked, speeds, seconds, alone, waiting, predict(asked, queries, keys, speeds))
    for title, text in found.items():
        echo(f"{title:16}{text}")
    lines = [f"rank {rank}: {each}" for rank, found in enumerate(all_wrong) for each in found]
    echo(f"\nattention over {counted(ranks.count, 'rank')} == attention {not lines}")
    for line in lines:
        echo(line)
    return not lines


def compare_with_one_process(
    asked: Question, ranks: Ranks, queries: Rows, out: Tensor, speeds: Speeds, wrong: list[str]
) -> float | None:
    """Compute everything on rank 0 and compare. Returns its seconds, None if too much. Adds to `wrong`."""
    work = asked.work([range(asked.queries)], [range(asked.N)])
    need = 8 * asked.heads * asked.d * (asked.N + asked.queries)
    if PARTS[asked.part].name in ("part0", "part1", "part2"):
        need += 12 * asked.heads * asked.N * asked.queries
    available = machine.available_memory()
    if ranks.device.type == "cuda":
        available = torch.cuda.mem_get_info()[0]
    fits = work / speeds.work < asked.timeout / 4 and (available is None or 2 * need < available)
    if not of_rank_0(float(fits)):
        return None
    everyone: list = [None] * ranks.count
    dist.gather_object(out.cpu(), None if ranks.rank else everyone)
    if ranks.rank:
        return of_rank_0(0.0)
    whole = [rows_of(n, asked, [range(asked.queries if n == "q" else asked.N)]) for n in "qkv"]
    q, k, v = (t.to(ranks.device) for t in whole)
    held: list[Tensor] = []

    def compute() -> None:
        held[:] = [attention(asked.part, q, k, v, causal=asked.causal, scale=asked.scale)]

    seconds = best(compute, ranks, count=2)
    for rank, (chunks, got) in enumerate(zip(queries, everyone)):
        different = mismatch(take(held[0].cpu(), chunks), got) if got.numel() else None
        if different:
            wrong.append(f"one process, rows of rank {rank}: {different}")
    return of_rank_0(seconds)


def of_rank_0(number: float) -> float:
    """Rank 0's number, on each rank."""
    sent = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(sent, 0)
    return sent.item()


def describe(asked: Question, ranks: Ranks) -> str:
    """Two lines on the test and its machine."""
    mask = "causal" if asked.causal else "no mask"
    backend = "NCCL" if asked.device == "cuda" else f"gloo, {counted(torch.get_num_threads(), 'thread')} each"
    name = torch.cuda.get_device_name() if asked.device == "cuda" else processor.name()
    return (
        f"{asked.method}: {asked.heads} heads of N = {asked.N}, {asked.queries} queries, d = {asked.d}, "
        f"{mask}, {asked.part}; "
        f"{counted(ranks.count, 'rank')} over {backend}\n{name}, {processor.cores()} cores\n"
    )


def conclusions(
    asked: Question,
    speeds: Speeds,
    seconds: Sequence[float],
    alone: float | None,
    waiting: float,
    predicted: tuple[float, float, float],
) -> dict[str, str]:
    """The measured times beside one process's, predict()'s and published ones. waiting: a share."""
    count, fastest, median = dist.get_world_size(), min(seconds), statistics.median(seconds)
    ranks, (total, computing, sending) = counted(count, "rank"), predicted
    overlap = max(0.0, computing + sending - total)
    found = {
        "one process": "not compared: it would take too much memory or more than a quarter of --timeout",
        "measured": f"{duration(fastest)}, the fastest of {len(seconds)} (median {duration(median)}); "
        f"{waiting:.0%} of the ranks' time communicating",
        "predicted": f"{duration(total)}: computing {duration(computing)}, sending {duration(sending)}, "
        f"less overlap {duration(overlap)}",
    }
    if alone is not None:
        faster = alone / fastest
        ideal = f"{faster / count:.0%} of ideal"
        found["one process"] = f"{duration(alone)}; with {ranks} {faster:.2f} times as fast, {ideal}"
    if count > 1:
        found[""] = (
            f"from {speeds.work / 1e9:.3g} G pairs/s alone, {speeds.bandwidth / 1e9:.3g} GB/s and "
            f"{speeds.latency * 1e6:.0f} us between ranks, {speeds.crowd:.3g} threads for a core"
        )
    if asked.causal and asked.method in ("ring", "zigzag"):
        figures, names = " / ".join(map(str, PUBLISHED.values())), ", ".join(PUBLISHED)
        found["published"] = f"{figures} % of ideal: {names}; ring-flash-attention, eight H800"
    if asked.causal and asked.method == "ring":
        found["at most"] = f"{count / 2 / (count - 0.5):.0%} of ideal for a causal ring of {ranks}"
    return found


def duration(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
