"""Exact attention over one sequence that is spread over processes: five methods.

Each rank holds some rows of q, k and v, and gets the same rows of the output. The kernels are those of PARTS;
reference.merge() merges results over disjoint sets of keys (Rabe & Staats 2021, arXiv:2112.05682).
torch.distributed communicates: gloo between CPUs, NCCL between GPUs, in any process group. expected() has
what each method sends, Traffic counts it. Only the rings overlap sending and computing; zigzag and ulysses
balance causal work.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shakespeare import attention_ext
from shakespeare.attention_ext import layout, reference
from shakespeare.attention_ext.checks import none_is_default, whole_number
from shakespeare.attention_ext.layout import Rows, contiguous, kernel_calls, length, shares, zigzag_rows
from shakespeare.attention_ext.layout import take as take
from shakespeare.attention_ext.parts import one_of

SPIN_SECONDS = 1.0  # for which a wait on CUDA polls


def rows(method: str, N: int, ranks: int) -> Rows:
    """The rows of each rank in equal shares, in the method's layout."""
    one_of("method", method, METHODS)
    return zigzag_rows(N, ranks) if method == "zigzag" else contiguous(shares(N, ranks))


@dataclass
class Traffic:
    """Bytes of tensors that a rank sent, its exchanges and its wait, without the comparison of arguments."""

    sent: int = 0
    exchanges: int = 0
    _seconds: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def count(self, sent: int) -> None:
        """Count an exchange of this many bytes."""
        self.sent += sent
        self.exchanges += 1

    def wait(self, works: Sequence[dist.Work], device: torch.device) -> None:
        """Wait for all of these. On CUDA this process waits too, so that it notices a lost rank."""
        start = time.perf_counter()
        if device.type != "cuda":
            for work in works:
                work.wait()
            self._seconds += time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()  # type: ignore[no-untyped-call]
        for work in works:
            while not work.is_completed() and time.perf_counter() - start < SPIN_SECONDS:
                pass  # NCCL's own wait polls once a millisecond, until the group's timeout
            work.wait()
        after.record()  # type: ignore[no-untyped-call]
        self._events.append((before, after))

    @property
    def waited(self) -> float:
        """Seconds in which the rank, or on CUDA its stream, only waited for others."""
        if self._events:
            torch.cuda.synchronize()
        return self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1e3


@dataclass(frozen=True)
class Call:
    """A method's arguments beside its tensors.

    queries, keys: the rows of each of P ranks. offset: Nk - Nq; with causal, query i sees the keys up to i +
    offset. options: of attention_ext.attention().
    """

    part: str
    causal: bool
    options: dict
    queries: Rows
    keys: Rows
    offset: int
    rank: int
    P: int
    group: dist.ProcessGroup | None
    traffic: Traffic


class Mixture:
    """The output (B, H, n, d) and the logsumexp (B, H, n) of n queries over the keys seen until now."""

    def __init__(self, q: Tensor) -> None:
        self.out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        self.lse = self.out.new_full(q.shape[:3], -torch.inf)

    def add(
        self, call: Call, q: Tensor, queries: Sequence[range], k: Tensor, v: Tensor, keys: Sequence[range]
    ) -> None:
        """Attend from these queries to these keys: q (B, H, n, d), k and v (B, H, m, d)."""
        if not q.numel() or not k.numel():
            return
        for i, j, causal in kernel_calls(queries, keys, call.causal, call.offset):
            tensors = (q[:, :, i], k[:, :, j], v[:, :, j])
            before = (self.out[:, :, i], self.lse[:, :, i])
            out, lse = attention_ext.attention(
                call.part, *tensors, causal=causal, return_lse=True, **call.options
            )
            self.out[:, :, i], self.lse[:, :, i] = reference.merge(*before, out.float(), lse)


def split(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """For decoding: each rank holds some keys and all queries; one merge, whose bytes do not grow with N.

    q: (B, H, Nq, d), equal on all ranks. k, v: (B, H, n, d), a rank's keys. Returns (B, H, Nq, d) on each.
    'Flash-Decoding' (Dao et al. 2023) does the same over a GPU's processors.
    """
    mine = Mixture(q)
    mine.add(call, q, call.queries[call.rank], k, v, call.keys[call.rank])
    packed = torch.cat((mine.out, mine.lse[..., None]), dim=-1)  # (B, H, Nq, d + 1)
    out = torch.zeros_like(mine.out)
    lse = torch.full_like(mine.lse, -torch.inf)
    for partial in _all_gather(call, packed):  # in rank order, so that all ranks have the same bits
        out, lse = reference.merge(out, lse, partial[..., :-1], partial[..., -1])
    return out


def gather(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All keys to all ranks, filled up to equal sizes, then one call of the kernel.

    q, k, v: (B, H, n, d), a rank's rows. Returns (B, H, n, d). Memory: all of K and V on every rank.
    """
    padded = k.new_zeros(2, *k.shape[:2], max(map(length, call.keys)), k.shape[3])
    padded[0, :, :, : k.shape[2]] = k
    padded[1, :, :, : v.shape[2]] = v
    blocks = [block[..., : length(keys), :] for block, keys in zip(_all_gather(call, padded), call.keys)]
    k, v = torch.cat(blocks, dim=3)  # (2, B, H, N, d)
    mixture = Mixture(q)
    mixture.add(call, q, call.queries[call.rank], k, v, [chunk for keys in call.keys for chunk in keys])
    return mixture.out


def ring(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """K and V pass around a ring; the next keys arrive while a rank computes with its current ones.

    q, k, v: (B, H, n, d), a rank's rows. Returns (B, H, n, d). Memory: two ranks' keys.
    With a causal mask and rows in order each turn waits for the slowest rank, so at best (P / 2) / (P - 1/2)
    of the processors' time is used; zigzag_rows() balances the work, as zhuzilin's zigzag_ring_flash_attn.
    Liu, Zaharia & Abbeel 2023, arXiv:2310.01889; Brandon et al. 2023, arXiv:2311.09431 ('striped').
    """
    P = call.P
    rank = call.rank
    mixture = Mixture(q)
    block = torch.stack((k, v))  # (2, B, H, n, d)
    for turn in range(P):
        owner = (rank - turn) % P
        next_owner = (rank - turn - 1) % P
        if turn < P - 1:
            arriving = block.new_empty(*block.shape[:3], length(call.keys[next_owner]), block.shape[4])
            ways = (dist.isend, block, (rank + 1) % P), (dist.irecv, arriving, (rank - 1) % P)
            operations = [  # an empty tensor is not sent
                dist.P2POp(operation, tensor, group=call.group, group_peer=peer)
                for operation, tensor, peer in ways
                if tensor.numel()
            ]
            works = dist.batch_isend_irecv(operations) if operations else []
            call.traffic.count(block.nbytes)
        mixture.add(call, q, call.queries[rank], block[0], block[1], call.keys[owner])
        if turn < P - 1:
            call.traffic.wait(works, q.device)
            block = arriving
    return mixture.out


def ulysses(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads over ranks: each rank exchanges its rows of all heads for all rows of its heads, and back.

    q, k, v: (B, H, n, d), a rank's rows. Returns (B, H, n, d). Ranks beyond the number of heads are idle.
    Jacobs et al. 2023, arXiv:2309.14509.
    """
    B, H, _, d = q.shape
    heads = contiguous(shares(B * H, call.P))
    mine = heads[call.rank][0]
    n = [length(rows) for rows in call.queries]
    m = [length(rows) for rows in call.keys]
    qkv = [t.reshape(B * H, -1, d) for t in (q, k, v)]
    sending = [torch.cat([t[h.start : h.stop] for t in qkv], dim=1) for (h,) in heads]  # (h, n + 2 m, d)
    arrived = _all_to_all(call, sending, [(len(mine), n[r] + 2 * m[r], d) for r in range(call.P)])
    pieces = [part.split((n[r], m[r], m[r]), dim=1) for r, part in enumerate(arrived)]
    q_all, k_all, v_all = (torch.cat(tensors, dim=1)[None] for tensors in zip(*pieces))  # (1, h, N, d)
    mixture = Mixture(q_all)
    mixture.add(call, q_all, [range(sum(n))], k_all, v_all, [range(sum(m))])
    back = [part.contiguous() for part in mixture.out[0].to(q.dtype).split(n, dim=1)]
    return torch.cat(_all_to_all(call, back, [(len(h), n[call.rank], d) for (h,) in heads])).view(q.shape)


def _all_gather(call: Call, tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, all of one shape. Each is sent P - 1 times."""
    if call.P == 1:
        return [tensor]
    arrived = [torch.empty_like(tensor) for _ in range(call.P)]
    if tensor.numel():
        work = dist.all_gather(arrived, tensor, group=call.group, async_op=True)
        call.traffic.wait([work], tensor.device)
    call.traffic.count((call.P - 1) * tensor.nbytes)
    return arrived


def _all_to_all(call: Call, sending: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Send sending[r] to rank r; the tensors that arrive have these shapes."""
    if call.P == 1:
        return sending
    counts = [math.prod(shape) for shape in shapes]
    flat = torch.cat([tensor.flatten() for tensor in sending])
    arrived = flat.new_empty(sum(counts))
    lengths = [tensor.numel() for tensor in sending]
    work = dist.all_to_all_single(arrived, flat, counts, lengths, group=call.group, async_op=True)
    call.traffic.wait([work], flat.device)
    call.traffic.count(flat.nbytes - sending[call.rank].nbytes)
    return [part.view(shape) for part, shape in zip(arrived.split(counts), shapes)]


# A zigzag is a ring with the rows of zigzag_rows(): equal causal work in each turn.
METHODS: dict[str, Callable[[Call, Tensor, Tensor, Tensor], Tensor]]
METHODS = {"split": split, "gather": gather, "ring": ring, "zigzag": ring, "ulysses": ulysses}


def expected(
    method: str, queries: Rows, keys: Rows, rank: int, heads: int, d: int, width: int = 4
) -> tuple[int, int]:
    """The bytes that a rank sends and the exchanges. heads: in all texts. width: bytes of a number."""
    P = len(keys)
    n = [length(rows) for rows in queries]
    m = [length(rows) for rows in keys]
    if P == 1:
        return 0, 0
    if method == "split":
        return 4 * heads * n[rank] * (d + 1) * (P - 1), 1
    if method == "gather":
        return 2 * width * heads * max(m) * d * (P - 1), 1
    if method == "ulysses":
        mine = shares(heads, P)[rank]
        there = (n[rank] + 2 * m[rank]) * (heads - mine)
        return width * d * (there + mine * (sum(n) - n[rank])), 2
    return 2 * width * heads * d * (sum(m) - m[(rank + 1) % P]), P - 1


@none_is_default
def attention(
    method: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Sequence[int] | None = None,
    part: str = "part4",
    causal: bool = False,
    group: dist.ProcessGroup | None = None,
    traffic: Traffic | None = None,
    **options: Any,
) -> Tensor:
    """A rank's rows of softmax(scale * q k^T) v; every rank of the group calls it together.

    method: one of METHODS. q: (B, H, n, d), this rank's queries, in split all of them. k, v: (B, H, m, d),
    its keys. n and m may be 0 and differ between ranks; in zigzag they must be those of zigzag_rows(). The
    sequence is the ranks' rows in order, in zigzag in the order of zigzag_rows().
    lengths: the rows of q and k of every rank, in split those of k. With None the ranks first compare their
    arguments by small messages, so that a wrong one ends all of them.
    part, causal, and as options scale, simd, kernel: as in attention(), over the whole sequence.
    group: the processes; all by default. traffic: counts what this rank sends.
    Returns (B, H, n, d) in q's dtype, in split the same bits on all ranks. Computes no gradients.
    Raises ValueError or TypeError, on all ranks the same unless lengths are given, and RuntimeError if
    another rank is lost, within the group's timeout; with NCCL only under TORCH_NCCL_BLOCKING_WAIT=1
    (ranks.join() sets it).
    """
    # gloo's collectives refuse the tensors of inference_mode
    with torch.inference_mode(False), torch.no_grad():
        rank = dist.get_rank(group)
        P = dist.get_world_size(group)
        mine = layout.describe(method, part, causal, options.get("scale"), q, k, v)
        described: list = [mine for _ in range(P)]
        if lengths is None:
            dist.all_gather_object(described, mine, group=group)
        elif not isinstance(mine, Exception):
            described = [layout.with_rows(mine, whole_number("lengths", n)) for n in lengths]
            if len(lengths) != P or described[rank] != mine:
                raise ValueError(f"lengths is {list(lengths)}; it must have the rows of each of {P} ranks")
        queries, keys, offset = layout.agreed_rows(described)
        one_of("method", method, METHODS)
        causal = described[rank]["causal"]
        options["scale"] = described[rank]["scale"]
        traffic = Traffic() if traffic is None else traffic
        call = Call(part, causal, options, queries, keys, offset, rank, P, group, traffic)
        return METHODS[method](call, q, k, v).to(q.dtype)
