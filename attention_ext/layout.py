"""Which rows, in chunks (ranges), a rank holds, which keys its queries see, and whether the ranks agree."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shakespeare.attention_ext.checks import check_tensors, finite, truth
from shakespeare.attention_ext.parts import check_part

# Each rank's chunks of the sequence, in the order of its tensors' rows.
Rows = tuple[tuple[range, ...], ...]


def shares(N: int, count: int) -> list[int]:
    """N rows in `count` shares whose sizes differ by at most one row; the longer ones come first."""
    return [N // count + (i < N % count) for i in range(count)]


def contiguous(lengths: Sequence[int]) -> Rows:
    """Rank r holds the lengths[r] rows that follow those of rank r - 1."""
    return tuple((range(start, start + n),) for start, n in zip(accumulate(lengths, initial=0), lengths))


def zigzag_rows(N: int, ranks: int) -> Rows:
    """Rank r holds chunks r and 2 P - 1 - r of 2 P chunks, an early and a late one: equal causal work."""
    chunks = [chunk for (chunk,) in contiguous(shares(N, 2 * ranks))]
    return tuple((chunks[r], chunks[-1 - r]) for r in range(ranks))


def take(tensor: Tensor, chunks: Sequence[range]) -> Tensor:
    """The rows of (B, H, N, d) in these chunks: (B, H, n, d)."""
    return torch.cat([tensor[:, :, chunk.start : chunk.stop] for chunk in chunks], dim=2)


def length(chunks: Sequence[range]) -> int:
    """The number of rows in these chunks."""
    return sum(map(len, chunks))


def kernel_calls(
    queries: Sequence[range], keys: Sequence[range], causal: bool, offset: int
) -> Iterator[tuple[slice, slice, bool]]:
    """The calls of a kernel by which these queries attend to these keys.

    causal: query i of the sequence sees the keys j <= i + offset. Yields the rows of q and of k in a rank's
    tensors, and whether the call is causal. Two chunks have at most one causal call, on the diagonal.
    """
    if not causal:  # every query sees all keys, whatever their position
        yield slice(0, length(queries)), slice(0, length(keys)), False
        return
    # first, first_key: the rows of a rank's tensors at which a chunk begins
    for first, q in zip(accumulate(map(len, queries), initial=0), queries):
        for first_key, k in zip(accumulate(map(len, keys), initial=0), keys):
            start = q.start + offset
            stop = q.stop + offset  # query i sees the keys up to i + offset
            low = max(start, k.start)
            high = min(stop, k.stop)
            if low < high:
                rows = slice(first + low - start, first + high - start)
                yield rows, slice(first_key, first_key + high - k.start), True
            if max(start, k.stop) < stop and k:
                rows = slice(first + max(start, k.stop) - start, first + len(q))
                yield rows, slice(first_key, first_key + len(k)), False


def describe(
    method: str, part: str, causal: bool, scale: float | None, q: Tensor, k: Tensor, v: Tensor
) -> dict | Exception:
    """A rank's arguments, as the ranks compare them, or what is wrong with them."""
    try:
        check_tensors(check_part(part), q, k, v, causal=False, min_rows=0)
        causal = truth("causal", causal)
        scale = None if scale is None else finite("scale", scale)
    except (TypeError, ValueError) as error:
        return error
    shapes = {name: tuple(t.shape) for name, t in (("q", q), ("k", k), ("v", v))}
    facts = {"method": method, "part": part, "causal": causal, "scale": scale}
    return facts | shapes | {"q.dtype": str(q.dtype), "q.device": q.device.type}


def with_rows(mine: dict, n: object) -> dict:
    """This rank's arguments with n rows, as another rank would describe its own."""
    divided = "kv" if mine["method"] == "split" else "qkv"  # the tensors whose rows are spread over the ranks
    return mine | {name: (*mine[name][:2], n, *mine[name][3:]) for name in divided}


def agreed_rows(described: Sequence[dict | Exception]) -> tuple[Rows, Rows, int]:
    """The rows of q and of k of each rank, and the offset Nk - Nq.

    Raises ValueError or TypeError, naming the rank and the argument, if one is wrong or differs from rank
    0's, if the rows do not fit the method, or if k has too few.
    """
    for rank, mine in enumerate(described):
        if isinstance(mine, Exception):
            raise type(mine)(f"rank {rank}: {mine}")
    everyone: list[dict] = [with_rows(mine, "N") for mine in described]  # type: ignore[misc, arg-type]
    for name, usual in everyone[0].items():
        for rank, mine in enumerate(everyone):
            if mine[name] != usual:
                raise ValueError(f"rank {rank} has {name} {mine[name]}; rank 0 has {usual}".replace("'", ""))
    method = everyone[0]["method"]
    P = len(everyone)
    n, m = ([mine[name][2] for mine in described] for name in "qk")  # type: ignore[index]
    Nq = n[0] if method == "split" else sum(n)
    Nk = sum(m)
    of_both = (Nq, n), (Nk, m)
    queries, keys = (zigzag_rows(N, P) if method == "zigzag" else contiguous(x) for N, x in of_both)
    if method == "split":
        queries = tuple((range(Nq),) for _ in range(P))
    for name, layout, rows_of_ranks in (("q", queries, n), ("k", keys, m)):
        for rank, chunks in enumerate(layout):
            if length(chunks) != rows_of_ranks[rank]:
                must = f"zigzag_rows({sum(rows_of_ranks)}, {P}) gives it {length(chunks)}"
                raise ValueError(f"rank {rank}: {name} has {rows_of_ranks[rank]} rows; {must}")
    if not Nk and Nq:
        raise ValueError("k has no rows on any rank; it must have at least one")
    if everyone[0]["causal"] and Nq > Nk:
        raise ValueError(f"q has Nq={Nq} rows; with causal=True it must have at most Nk={Nk}")
    return queries, keys, Nk - Nq
