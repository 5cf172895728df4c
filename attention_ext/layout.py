"""Which rows of a sequence a rank holds, and which keys its queries see.

A chunk is a range of rows; a rank holds one or, in a zigzag, two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# For each rank the chunks of the sequence that it holds, in the order of its tensors' rows.
Rows = tuple[tuple[range, ...], ...]


def shares(N: int, count: int) -> list[int]:
    """N rows in `count` shares whose sizes differ by at most one row; the longer ones come first."""
    return [N // count + (i < N % count) for i in range(count)]


def contiguous(lengths: Sequence[int]) -> Rows:
    """Rank r holds the lengths[r] rows that follow those of rank r - 1."""
    starts = [sum(lengths[:r]) for r in range(len(lengths))]
    return tuple((range(start, start + n),) for start, n in zip(starts, lengths))


def zigzag_rows(N: int, ranks: int) -> Rows:
    """Rank r holds chunks r and 2 P - 1 - r of 2 P chunks.

    A row sees as many keys as there are rows before it. Together, an early chunk and a late one see as many
    keys as every other pair, so the causal work is equal.
    """
    chunks = [chunk for (chunk,) in contiguous(shares(N, 2 * ranks))]
    return tuple((chunks[r], chunks[-1 - r]) for r in range(ranks))


def take(tensor: Tensor, chunks: Sequence[range]) -> Tensor:
    """The rows of (B, H, N, d) in these chunks: (B, H, n, d)."""
    return torch.cat([tensor[:, :, chunk.start : chunk.stop] for chunk in chunks], dim=2)


def length(chunks: Sequence[range]) -> int:
    """The number of rows in these chunks."""
    return sum(map(len, chunks))


def offsets(chunks: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Each chunk with the index of its first row in a rank's tensor."""
    first = 0
    for chunk in chunks:
        yield first, chunk
        first += len(chunk)


def seen(queries: range, keys: range, offset: int) -> Iterator[tuple[range, range, bool]]:
    """The causal mask of a chunk of queries and one of keys as at most two calls of a kernel.

    Yields indices in each chunk, and whether the call is causal. First come the queries on the diagonal; the
    last of them sees the call's last key. Then come those that see the whole chunk.
    """
    start, stop = queries.start + offset, queries.stop + offset  # query i sees the keys up to i + offset
    low, high = max(start, keys.start), min(stop, keys.stop)
    if low < high:
        yield range(low - start, high - start), range(high - keys.start), True
    if max(start, keys.stop) < stop and keys:
        yield range(max(start, keys.stop) - start, stop - start), range(len(keys)), False


def pairs(queries: Sequence[range], keys: Sequence[range], causal: bool, offset: int) -> int:
    """The number of pairs of a query and a key that it sees: the work, in dot products."""
    if not causal:
        return length(queries) * length(keys)
    found = 0
    for q in queries:
        for k in keys:
            for i, j, diagonal in seen(q, k, offset):
                found += len(i) * len(j) - (len(i) * (len(i) - 1) // 2 if diagonal else 0)
    return found
