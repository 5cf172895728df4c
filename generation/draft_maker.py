"""Makes a model's draft from a text: what the model itself expects after each context of the text.

A text has each context a few times only, so the draft holds the model's mean probabilities, not counts.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.generation.engines.native import Decoder
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.writer import Writer
from shakespeare.model import draft as drafts
from shakespeare.model.checkpoint import Checkpoint

LEAST_COUNT = 3  # occurrences of a context; rarer ones could be passages of the text
MOST_CONTEXTS = 60_000  # of a length; a file holds fewer
SMOOTHING = 0.5  # occurrences that the shorter context counts for
SHARPNESS = 1.4  # a guess takes the probabilities to about this power, so errors count after it
MOST_READ = 2**20  # characters of a text
PIECE = 2**14  # characters of the pieces that a longer text gives
OWN_TOKENS = 2**18  # of own_text(): seconds
AT_ONCE = 32  # texts
LIKELIEST = 5  # tokens after each place of the text
WINDOW = 256  # tokens that the model reads at once; three quarters of them see at least the first quarter


class NoDraft(ValueError):
    """The model's vocabulary is too large for a draft, or it sees one token only."""


def make(checkpoint: Checkpoint, ids: Sequence[int], seconds: float = math.inf) -> drafts.Draft:
    """The draft of a model from a text's tokens: in each bucket the contexts that change the most guesses.

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
    corpus = np.array(ids, np.int64)
    found = _contexts(corpus, *_expected(checkpoint, corpus, seconds), len(vocabulary))
    hashes, gains, pairs = map(np.concatenate, zip(*found))
    tags = np.zeros((drafts.BUCKETS, drafts.WAYS), np.uint32)
    table = np.zeros((*tags.shape, drafts.LISTED, 2), np.uint8)
    bucket = (hashes >> np.uint64(drafts.BUCKET_SHIFT)).astype(np.int64)
    order = np.lexsort((-gains, bucket))
    way = np.arange(len(order)) - np.searchsorted(bucket[order], bucket[order])
    order = order[way < drafts.WAYS]
    way = way[way < drafts.WAYS]
    tags[bucket[order], way] = hashes[order] >> np.uint64(drafts.TAG_SHIFT)
    table[bucket[order], way] = pairs[order]
    return drafts.Draft(vocabulary, tags, table)


def excerpt(text: str) -> str:
    """At most MOST_READ characters of a text, from all of it: make() takes much memory for each."""
    if len(text) <= MOST_READ:
        return text
    starts = np.linspace(0, len(text) - PIECE, MOST_READ // PIECE).astype(int)
    return "".join(text[start : start + PIECE] for start in starts)


def own_text(checkpoint: Checkpoint, count: int = OWN_TOKENS) -> list[int]:
    """At least so many tokens that the model writes, for make() where its training text is not there."""
    writer = Writer(open_engine(checkpoint, "native", slots=AT_ONCE, draft="off"))
    for seed in range(AT_ONCE):
        first = [seed % checkpoint.config.vocab_size]
        share = -(-count // AT_ONCE)
        writer.join(Request(first, seed=seed, max_new_tokens=share, context="reset", ignore_eos=True))
    written = []
    while step := writer.step():
        written.append([tokens for _, tokens in step])
    return np.hstack(written).ravel().tolist()


def _expected(
    checkpoint: Checkpoint, corpus: NDArray[np.int64], seconds: float
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The likeliest tokens and their probabilities, (N, top); unread places have the text's own only."""
    top = min(LIKELIEST, checkpoint.config.vocab_size)
    tokens = np.zeros((len(corpus), top), np.uint8)
    shares = np.zeros((len(corpus), top), np.float32)
    tokens[:, 0] = corpus
    shares[:, 0] = 1
    size = min(WINDOW, checkpoint.config.block_size)
    engine = open_engine(checkpoint, "native", slots=1, capacity=size, draft="off")
    assert isinstance(engine, Decoder)
    starts = np.arange(0, max(1, len(corpus) - size // 4), max(1, size * 3 // 4))
    end = time.monotonic() + seconds
    for start in np.random.default_rng(0).permutation(starts):
        if time.monotonic() > end:
            break
        ids = corpus[start : start + size].tolist()
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


def _contexts(
    corpus: NDArray[np.int64], tokens: NDArray[np.uint8], shares: NDArray[np.float32], V: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """The frequent contexts of each length: hashes, the guesses that each changes, and the pairs."""
    before = np.zeros(1, np.int64)
    threshold = LEAST_COUNT
    lower = np.bincount(tokens.ravel(), shares.ravel(), V)[None] + SMOOTHING / V
    lower = (lower / lower.sum()).astype(np.float32)  # (contexts before, V), their probabilities
    # the tokens before each place, a byte each, the latest one lowest
    recent = np.zeros(len(corpus), np.int64)
    for n in range(1, drafts.ORDER + 1):
        recent[n:] += corpus[:-n] << 8 * (n - 1)
        known, place, occurrences = np.unique(recent[n:], return_inverse=True, return_counts=True)
        if len(known) > MOST_CONTEXTS:
            threshold = max(threshold, 1 + int(np.partition(occurrences, -MOST_CONTEXTS)[-MOST_CONTEXTS]))
        frequent = occurrences >= threshold  # so is each one's shorter context
        place = np.where(frequent, np.cumsum(frequent) - 1, -1)[place]
        at = n + np.flatnonzero(place >= 0)
        known = known[frequent]
        counts = occurrences[frequent, None]
        flat = place[at - n, None] * V + tokens[at]
        sums = np.bincount(flat.ravel(), shares[at].ravel(), len(known) * V).reshape(-1, V)
        # What the model gave to other tokens than its likeliest is shared out like after the shorter context.
        lower = lower[np.searchsorted(before, known & (1 << 8 * (n - 1)) - 1)]
        rest = np.maximum(counts - sums.sum(1, keepdims=True), 0) + SMOOTHING
        p = ((sums + rest * lower) / (counts + SMOOTHING)).astype(np.float32)
        gains = (counts * np.abs(_sharp(p) - _sharp(lower))).sum(1)
        likeliest = np.sort(np.argsort(-p, 1, "stable")[:, : drafts.LISTED], 1)
        pairs = np.zeros((len(p), drafts.LISTED, 2), np.uint8)
        pairs[:, : likeliest.shape[1], 0] = likeliest
        pairs[:, : likeliest.shape[1], 1] = np.rint(255 * np.sqrt(np.take_along_axis(p, likeliest, 1)))
        yield drafts.hashes(known, n), gains, pairs
        before = known
        lower = p


def _sharp(p: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = p**SHARPNESS
    return powers / powers.sum(1, keepdims=True)
