"""Makes a model's draft from a text: what the model itself expects after each context of the text.

A text has each context a few times only, so the draft holds the model's mean probabilities, not counts.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.generation.engines.native import Decoder
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.writer import Writer
from shakespeare.model import draft as drafts
from shakespeare.model.checkpoint import Checkpoint

Table = NDArray[Any]
LEAST_COUNT = 3  # occurrences of a context; rarer ones could be passages of the text
MOST_CONTEXTS = 60_000  # of a length; a file cannot hold more
SMOOTHING = 0.5  # occurrences that the shorter context counts for
SHARPNESS = 1.4  # a guess takes the probabilities to about this power, so errors count after it
MOST_READ, PIECE = 2**20, 2**14  # characters of a text, and of the pieces that a longer one gives
OWN_TOKENS = 2**18  # of own_text(): seconds
AT_ONCE = 32  # texts
LIKELIEST = 5  # tokens after each place of the text
WINDOW = 256  # tokens that the model reads at once; three quarters of them see at least the first quarter
START = 4  # bytes of a bucket
MOST_LISTED = 63  # tokens of a record
IN_BUCKET = 4  # records
TRIES = 9  # sizes that are tried
HEADER = 500  # bytes of the file beside the tables
# Of no contexts: hashes, numbers of tokens, factors; and of all records the tokens and their codes.
NO_RECORDS = (np.empty(0, np.uint64), np.empty(0, np.int64), *3 * (np.empty(0, np.uint8),))


class NoDraft(ValueError):
    """The model's vocabulary is too large for a draft, or it sees one token only."""


def make(checkpoint: Checkpoint, ids: Sequence[int], seconds: float = math.inf) -> drafts.Draft:
    """The draft of a model from a text's tokens, at most MOST_BYTES.

    seconds: the limit of the model's reading; of the rest of the text only the tokens count. Raises NoDraft
    if the vocabulary is not of at most MOST_VOCABULARY characters, or the block size is 1; ValueError without
    a text.
    """
    vocabulary = drafts.code_points(checkpoint.tokenizer)
    if not 0 < len(vocabulary) <= drafts.MOST_VOCABULARY:
        has = f"the model's vocabulary has {checkpoint.config.vocab_size} tokens"
        raise NoDraft(f"{has}; a draft needs one of at most {drafts.MOST_VOCABULARY} characters")
    if checkpoint.config.block_size < 2:
        raise NoDraft("the model's block size is 1; a draft needs one of at least 2")
    if len(ids) == 0:
        raise ValueError("the text is empty; a draft needs one")
    text = np.array(ids, np.int64)
    levels = _levels(text, *_expected(checkpoint, text, seconds), len(vocabulary))
    # What a token must change, in tokens of the text. A file of `low` is too large, one of `high` small.
    low, high = 0.1, max(1.0, len(text) / 100)
    best = _pruned(levels, high)
    for _ in range(TRIES):
        middle = math.sqrt(low * high)
        tables = _pruned(levels, middle)
        if sum(table.nbytes for table in tables) + vocabulary.nbytes + HEADER <= drafts.MOST_BYTES:
            best, high = tables, middle
        else:
            low = middle
    return drafts.Draft(vocabulary, *best)


def excerpt(text: str) -> str:
    """At most MOST_READ characters of a text, from all of it: make() takes 100 bytes of memory for each."""
    if len(text) <= MOST_READ:
        return text
    starts = np.linspace(0, len(text) - PIECE, MOST_READ // PIECE).astype(int)
    return "".join(text[start : start + PIECE] for start in starts)


def own_text(checkpoint: Checkpoint, count: int = OWN_TOKENS) -> list[int]:
    """At least so many tokens that the model writes, for make() where its training text is not there."""
    rng, block = np.random.default_rng(0), checkpoint.config.block_size
    writer = Writer(open_engine(checkpoint, "native", slots=AT_ONCE, draft="off"))
    ids: list[int] = []
    while len(ids) < count:
        firsts = rng.integers(checkpoint.config.vocab_size, size=AT_ONCE).tolist()
        for i, first in enumerate(firsts):
            asked: Any = {"seed": len(ids) + i, "max_new_tokens": max(1, block - 1)}
            writer.join(Request([first], **asked, ignore_eos=True))
        written = np.array(firsts)[:, None]
        while step := writer.step():
            written = np.hstack([written, [tokens for _, tokens in step]])
        ids += written.ravel().tolist()
        for text in list(writer.texts):
            writer.leave(text)
    return ids


def _expected(
    checkpoint: Checkpoint, text: NDArray[np.int64], seconds: float
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The likeliest tokens and their probabilities, (N, top); unread places have the text's own only."""
    top = min(LIKELIEST, checkpoint.config.vocab_size)
    tokens, shares = (np.zeros((len(text), top), kind) for kind in (np.uint8, np.float32))
    tokens[:, 0], shares[:, 0] = text, 1
    size = min(WINDOW, checkpoint.config.block_size)
    engine = open_engine(checkpoint, "native", slots=1, capacity=size, draft="off")
    assert isinstance(engine, Decoder)
    starts = np.arange(0, max(1, len(text) - size // 4), max(1, size * 3 // 4))
    end = time.monotonic() + seconds
    for start in np.random.default_rng(0).permutation(starts):
        if time.monotonic() > end:
            break
        ids = text[start : start + size].tolist()
        if len(ids) == 1:
            continue  # nothing follows it
        engine.begin(0, ids, top=top)
        engine.read(0)
        likeliest, logprobs = engine.take_logprob_arrays(0)
        skipped = max(0, size // 4 - 1) if start else 0
        at = slice(start + 1 + skipped, start + len(ids))
        tokens[at] = likeliest[skipped:, 1:]
        shares[at] = np.exp(logprobs[skipped:, 1:])
    return tokens, shares


@dataclass(frozen=True)
class _Level:
    """Contexts of one length: their keys, ascending; the place of each one's shorter context in the level
    before; how often each occurs; and the sums of the tokens' probabilities after it (contexts, V)."""

    keys: NDArray[np.int64]
    shorter: NDArray[np.int64]
    counts: NDArray[np.float64]
    sums: NDArray[np.float32]


def _levels(
    text: NDArray[np.int64], tokens: NDArray[np.uint8], shares: NDArray[np.float32], V: int
) -> list[_Level]:
    levels: list[_Level] = []
    for n in range(drafts.ORDER + 1):
        keys = _context_keys(text, n, V)
        known, place, counts = np.unique(keys[n:], return_inverse=True, return_counts=True)
        if n:
            before = levels[-1].keys
            shorter = np.minimum(np.searchsorted(before, known % V ** (n - 1)), len(before) - 1)
            keep = (counts >= LEAST_COUNT) & (before[shorter] == known % V ** (n - 1))
            if keep.sum() > MOST_CONTEXTS:
                keep &= counts > np.partition(counts, -MOST_CONTEXTS)[-MOST_CONTEXTS]
        else:
            shorter, keep = np.zeros(1, np.int64), np.ones(1, bool)
        if not keep.any():
            break
        number = np.where(keep, np.cumsum(keep) - 1, -1)[place]
        size = int(keep.sum())
        sums: Table = np.zeros(size * V)
        for start in range(0, len(number), PIECE):
            rows = start + np.flatnonzero(number[start : start + PIECE] >= 0)
            flat = number[rows, None] * V + tokens[n + rows]
            np.add.at(sums, flat.ravel(), shares[n + rows].ravel().astype(float))
        sums = sums.astype(np.float32).reshape(size, V)
        levels.append(_Level(known[keep], shorter[keep], counts[keep].astype(float), sums))
    return levels


def _context_keys(text: NDArray[np.int64], n: int, V: int) -> NDArray[np.int64]:
    """The number of the n tokens before each place of a text, of which the first n places lack some."""
    keys = np.zeros(len(text), np.int64)
    for i in range(1, n + 1):
        keys[n:] += text[n - i : len(text) - i] * V ** (i - 1)
    return keys


def _pruned(levels: list[_Level], least: float) -> tuple[Table, ...]:
    """The tables `first`, `starts` and `records` of what changes at least so many of the text's tokens."""
    V = levels[0].sums.shape[1]
    uniform = SMOOTHING / V
    p = (levels[0].sums + uniform) / (levels[0].sums + uniform).sum()
    first = np.clip(np.rint(255 * np.sqrt(p)), 1, 255).astype(np.uint8)[0]
    Q = drafts.share(first)[None]
    Q /= Q.sum()
    columns: list[tuple[Table, ...]] = [NO_RECORDS]
    for n, level in enumerate(levels[1:], 1):
        lower = Q[level.shorter]
        counts = level.counts[:, None]
        # What the model gave to other tokens than its likeliest is shared out like after the shorter context.
        rest = np.maximum(counts - level.sums.sum(1, keepdims=True), 0) + SMOOTHING
        p = ((level.sums + rest * lower) / (counts + SMOOTHING)).astype(np.float32)
        gain = counts * np.abs(_sharp(p) - _sharp(lower))
        listed = gain >= least
        crowded = listed.sum(1) > MOST_LISTED
        if crowded.any():
            listed[crowded] &= gain[crowded] > np.sort(gain[crowded], 1)[:, -MOST_LISTED][:, None]
        amount = listed.sum(1)
        kept = (gain * listed).sum(1) >= least * (amount + (drafts.HEAD + START / IN_BUCKET) / drafts.PAIR)
        kept &= amount > 0
        listed &= kept[:, None]
        code = np.rint(255 * np.sqrt(np.clip(p, 0, 1))).astype(np.uint8)
        left = np.maximum(1 - (p * listed).sum(1), 1e-6)
        factor = np.clip(np.rint(128 * np.sqrt(left / np.maximum(1 - (lower * listed).sum(1), 1e-6))), 0, 255)
        factor[~kept] = 128
        Q = np.where(listed, drafts.share(code), (factor[:, None] / 128) ** 2 * lower).astype(np.float32)
        Q /= Q.sum(1, keepdims=True)
        rows, tokens = np.nonzero(listed)
        heads = _hashes(level.keys[kept], n, V), listed[kept].sum(1), factor[kept].astype(np.uint8)
        columns.append((*heads, tokens.astype(np.uint8), code[rows, tokens]))
    return first, *_packed(*map(np.concatenate, zip(*columns)))


def _sharp(p: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = p**SHARPNESS
    return powers / powers.sum(1, keepdims=True)


def _hashes(keys: NDArray[np.int64], n: int, V: int) -> NDArray[np.uint64]:
    """The hashes of contexts: the latest token first."""
    hashes = drafts.first_hashes(len(keys))
    for _ in range(n):
        hashes, keys = drafts.extended(hashes, keys % V), keys // V
    return hashes


def _packed(
    hashes: Table, number: Table, factors: Table, tokens: Table, codes: Table
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """The tables `starts` and `records`, from the parts of the records."""
    bits = max(1, math.ceil(math.log2(max(1, len(hashes) / IN_BUCKET))))
    bucket = (hashes >> np.uint64(64 - bits)).astype(np.int64)
    order = np.argsort(bucket, kind="stable")
    size = drafts.HEAD + drafts.PAIR * number
    at = np.zeros(len(hashes), np.int64)
    at[order] = np.cumsum(size[order]) - size[order]
    records = np.zeros(int(size.sum()), np.uint8)
    tag = (hashes >> np.uint64(20) & np.uint64(1023)).astype(np.int64)
    records[at] = tag & 255
    records[at + 1] = tag >> 8 | number << 2
    records[at + 2] = factors
    # The place of each pair: its record's, and its number in the record.
    within = np.arange(int(number.sum())) - np.repeat(np.cumsum(number) - number, number)
    pair = np.repeat(at + drafts.HEAD, number) + drafts.PAIR * within
    records[pair], records[pair + 1] = tokens, codes
    starts = np.zeros(2**bits + 1, np.uint32)
    starts[1:] = np.cumsum(np.bincount(bucket, size, 2**bits))
    return starts, records
