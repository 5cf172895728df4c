"""A draft's contexts with whole distributions, for a GPU: one look-up gives all tokens' probabilities."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shakespeare.model.draft import ORDER, Draft, extended, first_hashes, share

BUCKETS = 4  # on the GPU for each of the draft's
WAYS = 4  # contexts of a bucket, as in csrc/cuda/guess.h
TAGS = 1024  # of the draft
SIEVE = 1 << 20  # most names that are not the draft's are not here either
MOST_CONTEXTS = 100_000  # with those that only have the name of another; a shipped draft has 24,000


class Distributions(NamedTuple):
    """Tables of all contexts of a draft; the upper `bits` bits of a context's hash name its bucket.

    contexts (buckets, WAYS, 2): the lower half of a hash, and its row of `codes`; 0 for none. codes (rows,
    V): the probabilities, coded as in NgramTables; row 0 is that of no context.
    """

    contexts: NDArray[np.uint32]
    codes: NDArray[np.uint8]
    bits: int


def distributions(draft: Draft) -> Distributions:
    """All contexts of a draft that follow from shorter ones. Raises ValueError if the tables are damaged.

    A record does not tell its context, so all with one more token in front are tried, in buckets with room.
    """
    records, V = draft.unpacked(), len(draft.first)
    names, record = np.unique(records.bucket * TAGS + records.tag, return_index=True)
    sieve = np.zeros(SIEVE, bool)
    sieve[names % SIEVE] = True
    hashes = [first_hashes(1)]  # of the contexts of each length
    shares: list[NDArray[Any]] = [share(draft.first)[None]]
    for _ in range(ORDER if len(names) else 0):
        longer = extended(hashes[-1][:, None], np.arange(V)).ravel()
        name = (longer >> np.uint64(64 - records.bits)).astype(np.int64) * TAGS
        name += (longer >> np.uint64(20)).astype(np.int64) % TAGS
        at = np.flatnonzero(sieve[name % SIEVE])
        place = np.minimum(np.searchsorted(names, name[at]), len(names) - 1)
        held = names[place] == name[at]
        at, of = at[held], record[place[held]]
        if (fits := sum(map(len, hashes)) + len(at)) > MOST_CONTEXTS:  # nearly all tags are taken
            raise ValueError(f"the draft fits {fits:,} contexts; it must be at most {MOST_CONTEXTS:,}")
        factor = np.square(records.factor[of] / np.float32(128), dtype=np.float32)
        longer_shares = shares[-1][at // V] * factor[:, None]
        count = records.pairs[of]
        pair = np.repeat(records.first[of] - np.cumsum(count) + count, count) + np.arange(count.sum())
        longer_shares[np.repeat(np.arange(len(of)), count), records.tokens[pair]] = share(records.codes[pair])
        hashes.append(longer[at])
        shares.append(longer_shares)
    all_hashes, all_shares = np.concatenate(hashes), np.concatenate(shares)
    bits = records.bits + BUCKETS.bit_length() - 1
    bucket = (all_hashes[1:] >> np.uint64(64 - bits)).astype(np.int64)
    order = np.argsort(bucket, kind="stable")
    way = np.arange(len(order)) - np.searchsorted(bucket[order], bucket[order])
    order, way = order[way < WAYS], way[way < WAYS]
    contexts = np.zeros((1 << bits, WAYS, 2), np.uint32)
    contexts[bucket[order], way, 0] = all_hashes[1:][order] & np.uint64(0xFFFFFFFF)
    contexts[bucket[order], way, 1] = order + 1
    codes = np.rint(255 * np.sqrt(np.clip(all_shares, 0, 1))).astype(np.uint8)
    return Distributions(contexts, codes, bits)
