"""Which rows of a sequence a rank holds, and which keys its queries see.

A chunk is a range of rows; a rank holds one or, in a zigzag, two.
"""

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


def kernel_calls(
    queries: Sequence[range], keys: Sequence[range], causal: bool, offset: int
) -> Iterator[tuple[slice, slice, bool]]:
    """The calls of a kernel by which these queries attend to these keys.

    causal: query i of the sequence sees the keys j <= i + offset. Yields the rows of q and of k in a rank's
    tensors, and whether the call is causal: then its last query sees its last key. A chunk of queries and one
    of keys need two calls at most: for the queries on the diagonal, and for those that see the whole chunk.
    """
    if not causal:  # every query sees all keys, whatever their position
        yield slice(0, length(queries)), slice(0, length(keys)), False
        return
    for first, q in _with_first_row(queries):
        for first_key, k in _with_first_row(keys):
            start, stop = q.start + offset, q.stop + offset  # query i sees the keys up to i + offset
            low, high = max(start, k.start), min(stop, k.stop)
            if low < high:
                rows = slice(first + low - start, first + high - start)
                yield rows, slice(first_key, first_key + high - k.start), True
            if max(start, k.stop) < stop and k:
                rows = slice(first + max(start, k.stop) - start, first + len(q))
                yield rows, slice(first_key, first_key + len(k)), False


def _with_first_row(chunks: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Each chunk with the index of its first row in a rank's tensor."""
    first = 0
    for chunk in chunks:
        yield first, chunk
        first += len(chunk)


def pairs(queries: Sequence[range], keys: Sequence[range], causal: bool, offset: int) -> int:
    """The number of pairs of a query and a key that it sees: the work, in dot products."""
    found = 0
    for i, j, diagonal in kernel_calls(queries, keys, causal, offset):
        rows = i.stop - i.start
        found += rows * (j.stop - j.start) - (rows * (rows - 1) // 2 if diagonal else 0)
    return found
