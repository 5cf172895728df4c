"""The lab's test of attention over processes: its error, the bytes that it sends, the time that it waits.

Every rank makes its own rows from a seed for each block of rows, so no rank holds more than its method needs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from attention_ext import PARTS, attention, operator, parallel, processor
from attention_ext.parallel import Call, Mixture, Rows, Traffic, length, pairs
from attention_ext.ranks import Ranks, join, meet
from lab import machine
from lab.correctness import mismatch

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


@dataclass(frozen=True)
class Speeds:
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
    for chunk in chunks:
        for block in range(chunk.start // BLOCK, -(-chunk.stop // BLOCK)):
            if not len(chunk):
                continue
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
    position += asked.N - asked.queries
    total = torch.zeros(1, asked.heads, len(which), asked.d, dtype=torch.float64)
    most = torch.full(total.shape[:3], -torch.inf, dtype=torch.float64)
    weight = torch.zeros_like(most)
    for first in range(0, asked.N if which else 0, BLOCK):
        keys = [range(first, min(first + BLOCK, asked.N))]
        k, v = rows_of("k", asked, keys).double(), rows_of("v", asked, keys).double()
        s = asked.scale * (q @ k.mT)
        if asked.causal:
            masked = torch.arange(first, keys[0].stop) > position[:, None]
            s = s.masked_fill(masked, -torch.inf)
        m = torch.maximum(most, s.amax(-1))
        p = torch.exp(s - m[..., None]).nan_to_num()
        change = torch.exp(most - m).nan_to_num()
        total, weight, most = change[..., None] * total + p @ v, change * weight + p.sum(-1), m
    return which, total / weight[..., None]


def measure_speeds(asked: Question, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, sent: int) -> Speeds:
    """Measure rank 0's speed while the others wait, and the bandwidth of all ranks round the ring."""
    found = torch.zeros(3, dtype=torch.float64)
    if ranks.rank == 0:
        few = q[:, :, : max(LEAST, SAMPLE[asked.device] // max(1, asked.heads * k.shape[2]))]
        chunks = [range(few.shape[2])], [range(k.shape[2])]
        call = Call(asked.part, False, asked.scale, {}, (), (), 0, 0, None, Traffic())
        seconds = best(lambda: Mixture(few).add(call, few, chunks[0], k, v, chunks[1]), ranks)
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
    found = []
    for _ in range(count + 1):
        synchronize(ranks)
        start = time.perf_counter()
        function()
        synchronize(ranks)
        found.append(time.perf_counter() - start)
        if sum(found) > limit:
            break
    return min(found[1:] or found)


def synchronize(ranks: Ranks) -> None:
    """Wait for the GPU, if there is one."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def predict(asked: Question, queries: Rows, keys: Rows, speeds: Speeds) -> tuple[float, float, float]:
    """Seconds of the call, of the computation on the busiest rank, and of sending without overlap."""
    P, offset = len(keys), asked.N - asked.queries
    sent = [
        parallel.expected(asked.method, queries, keys, rank, asked.heads, asked.d)[0] for rank in range(P)
    ]
    if asked.method not in ("ring", "zigzag"):
        everything = [chunk for chunks in keys for chunk in chunks]
        work = [asked.heads * pairs(mine, everything, asked.causal, offset) for mine in queries]
        if asked.method == "split":
            work = [asked.heads * pairs(queries[0], mine, asked.causal, offset) for mine in keys]
        if asked.method == "ulysses":
            whole = pairs([range(asked.queries)], [range(asked.N)], asked.causal, offset)
            work = [share * whole for share in parallel.shares(asked.heads, P)]
        computing, sending = speeds.computing(max(work)), speeds.sending(max(sent))
        return computing + sending, computing, sending
    # A step of rank r begins when it has computed the step before and its keys have arrived, which rank r - 1
    # began to send in its own step before.
    began, ended = [0.0] * P, [0.0] * P
    busy, sending = [0.0] * P, 0.0
    for step in range(P):
        if step:
            owners = [(rank - step) % P for rank in range(P)]
            send = [speeds.sending(8 * asked.heads * asked.d * length(keys[owner])) for owner in owners]
            arrived = [max(began[rank], began[rank - 1]) + send[rank] for rank in range(P)]
            began = [max(ended[rank], arrived[rank]) for rank in range(P)]
            sending += max(send)
        for rank in range(P):
            found = pairs(queries[rank], keys[(rank - step) % P], asked.causal, offset)
            seconds = speeds.computing(asked.heads * found)
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
        total += time.perf_counter() - start
        waited += traffic.waited
        longest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        seconds.append(longest.item())
    measured = min(seconds)

    formula = parallel.expected(asked.method, queries, keys, ranks.rank, asked.heads, asked.d)
    speeds = measure_speeds(asked, ranks, q, k, v, formula[0])
    predicted, computing, sending = predict(asked, queries, keys, speeds)
    wrong = []
    if asked.N * asked.heads * asked.d <= MOST_NUMBERS:
        which, expected = exact(asked, mine)
        got = out[:, :, which].cpu()
        error = float((got.double() - expected).abs().max()) if which else 0.0
        wrong += [f"float64: {found}" for found in [mismatch(expected, got)] if which and found]
    else:
        error = math.nan
    alone = compare_with_one_process(asked, ranks, queries, out, speeds, wrong)
    if (traffic.sent, traffic.steps) != formula:
        wrong.append(f"sent {traffic.sent} bytes in {traffic.steps} steps; by the formula {formula}")
    everyone: list = [None] * ranks.count
    own = (length(mine), length(here), traffic.sent, traffic.steps, formula, waited / total, error, wrong)
    dist.all_gather_object(everyone, own)

    for line in table(everyone):
        echo(line)
    echo("")
    errors = [each[6] for each in everyone]
    if math.isnan(errors[0]):
        echo(f"float64         not compared: K has more than {MOST_NUMBERS:,} numbers")
    else:
        echo(f"float64         largest error {max(errors):.1e}, in {CHECKED} rows of each rank")
    if alone is None:
        echo(
            "one process     not compared: it would take too much memory or more than a quarter of --timeout"
        )
    else:
        share = alone / measured / ranks.count
        echo(
            f"one process     {duration(alone)}; with {counted(ranks.count, 'rank')} "
            f"{alone / measured:.2f} times as fast, {share:.0%} of ideal"
        )
    waiting = statistics.mean(each[5] for each in everyone)
    echo(
        f"measured        {duration(measured)}, the fastest of {len(seconds)} (median "
        f"{duration(statistics.median(seconds))}); {waiting:.0%} of the ranks' time communicating"
    )
    overlap = max(0.0, computing + sending - predicted)
    echo(
        f"predicted       {duration(predicted)}: computing {duration(computing)}, "
        f"sending {duration(sending)}, less overlap {duration(overlap)}"
    )
    if ranks.count > 1:
        echo(
            f"                from {speeds.work / 1e9:.3g} G pairs/s alone, "
            f"{speeds.bandwidth / 1e9:.3g} GB/s and {speeds.latency * 1e6:.0f} us between ranks, "
            f"{speeds.crowd:.3g} threads for a core"
        )
    for line in published(asked, ranks.count):
        echo(line)
    lines = [f"rank {rank}: {each}" for rank, found in enumerate(everyone) for each in found[7]]
    echo(f"\nattention over {counted(ranks.count, 'rank')} == attention {not lines}")
    for line in lines:
        echo(line)
    return not lines


def compare_with_one_process(
    asked: Question, ranks: Ranks, queries: Rows, out: Tensor, speeds: Speeds, wrong: list[str]
) -> float | None:
    """Compute everything on rank 0 and compare. Returns its seconds, None if too much. Adds to `wrong`."""
    everything = [range(asked.queries)], [range(asked.N)]
    work = asked.heads * pairs(*everything, asked.causal, asked.N - asked.queries)
    need = 8 * asked.heads * asked.d * (asked.N + asked.queries)
    if PARTS[asked.part].name in ("part0", "part1", "part2"):
        need += 12 * asked.heads * asked.N * asked.queries
    available = machine.available_memory()
    if ranks.device.type == "cuda":
        available = torch.cuda.mem_get_info()[0]
    fits = work / speeds.work < asked.timeout / 4 and (available is None or 2 * need < available)
    agreed = torch.tensor(int(fits))
    dist.broadcast(agreed, 0)
    if not agreed.item():
        return None
    seconds = 0.0
    if ranks.rank == 0:
        whole = [rows_of(n, asked, [range(asked.queries if n == "q" else asked.N)]) for n in "qkv"]
        q, k, v = (t.to(ranks.device) for t in whole)
        held: list[Tensor] = []

        def compute() -> None:
            held[:] = [attention(asked.part, q, k, v, causal=asked.causal, scale=asked.scale)]

        seconds = best(compute, ranks, count=2)
        for rank, chunks in enumerate(queries):
            got = out
            if rank:
                got = out.new_empty(1, asked.heads, length(chunks), asked.d)
                hand_over(dist.irecv, got, rank)
            different = mismatch(parallel.take(held[0], chunks), got) if got.numel() else None
            if different:
                wrong.append(f"one process, rows of rank {rank}: {different}")
    else:
        hand_over(dist.isend, out, 0)
    time_of_one = torch.tensor(seconds, dtype=torch.float64)
    dist.broadcast(time_of_one, 0)
    return time_of_one.item()


def hand_over(operation: Callable, tensor: Tensor, peer: int) -> None:
    """Send a tensor to a rank, or receive it. An empty tensor is not sent."""
    if tensor.numel():
        works = dist.batch_isend_irecv([dist.P2POp(operation, tensor.contiguous(), peer)])
        Traffic().wait(works, tensor.device)


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


def counted(count: int, what: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{count} {what}{'s' * (count != 1)}"


def table(everyone: Sequence[tuple]) -> Iterator[str]:
    """A line for each rank."""
    yield "rank   queries      keys     bytes sent   by formula  steps  by formula  communicating"
    for rank, (n, m, sent, steps, formula, waited, *_) in enumerate(everyone):
        yield (
            f"{rank:4}{n:10,}{m:10,}{sent:15,}{formula[0]:13,}{steps:7}{formula[1]:12}{waited:14.0%}"
        ).rstrip()


def published(asked: Question, count: int) -> Iterator[str]:
    """Published figures, and the bound of a ring."""
    if not asked.causal or asked.method not in ("ring", "zigzag"):
        return
    figures = " / ".join(map(str, PUBLISHED.values()))
    names = ", ".join(PUBLISHED)
    yield f"published       {figures} % of ideal: {names}; ring-flash-attention, eight H800"
    if asked.method == "ring":
        most = count / 2 / (count - 0.5)
        yield f"at most         {most:.0%} of ideal for a causal ring of {counted(count, 'rank')}"


def duration(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
