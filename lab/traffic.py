"""The traffic of each part by its own loop nest: operations, and bytes that come into a cache.

A stream is one matrix and the loops that read it again. If the data between two reads fits the cache, the
second read costs nothing. Otherwise the matrix comes in again, or the part of it in overfull sets: the least
recently used lines are replaced first. So a stream has the floats that must come in at least, and for each
loop around it the working set (the floats of one iteration) with the floats that come in when the working set
does not fit. Every call starts with an empty cache. Written lines come in too. The counts are for float32.

traffic.json has the formulas, for one head and in floats: sizes by name, then a part's streams, whose `again`
are pairs of a working set and what comes in. The streams of a part without a row are unknown. The page reads
the same file (web/js/traffic.js). A formula has names, whole numbers, + - * / with their usual precedence,
parentheses, min, max and ceil. Its names are the fields of Block and Case, the constants, the sizes before
it, `seen`, the keys that a query sees in the mean, `ruled`, 1 if rules hide keys, else 0, and `crowd`, the
lines that crowd() counts.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.parts import Dtype

SOURCE = Path(__file__).with_name("traffic.json")
FORMULAS = json.loads(SOURCE.read_text(encoding="utf-8"))
COUNTS = FORMULAS["parts"]
LINE = FORMULAS["constants"]["LINE"]  # floats of a cache line
FLOAT_BYTES = FORMULAS["constants"]["FLOAT_BYTES"]
CACHE_WAYS = FORMULAS["constants"]["CACHE_WAYS"]  # lines of a set in most caches
FUNCTIONS = {"__builtins__": {}, "min": min, "max": max, "ceil": math.ceil}


@dataclass(frozen=True)
class Block:
    """Sizes that the kernels are compiled with.

    lanes, panel, rows: block of the SIMD product: floats of a vector, columns of a panel, rows.
    part2_tile, part2_depth: the sides of part 2's tiles. part4_step: keys of one of part 4's strips.
    """

    lanes: int
    panel: int
    rows: int
    part2_tile: int
    part2_depth: int
    part4_step: int


@dataclass(frozen=True)
class Case:
    """One call: q is (heads, Nq, d), k and v are (heads, Nk, d), heads = B H. br, bc: the tile, if any.

    keys: the mean number of keys that a query sees by rules; 0 without rules.
    """

    Nq: int
    Nk: int
    d: int
    heads: int = 1
    causal: bool = False
    br: int = 256
    bc: int = 256
    threads: int = 1
    dtype: Dtype = Dtype.FP32
    keys: float = 0

    @property
    def seen(self) -> float:
        """The mean number of keys that a query sees."""
        unruled = self.Nk - (self.Nq - 1) / 2 if self.causal else self.Nk
        return self.keys if self.keys else unruled

    @property
    def flops(self) -> float:
        """Operations of the two products: 2 d each for every pair of a query and a key that it sees."""
        return 4 * self.heads * self.d * self.Nq * self.seen

    @property
    def Br(self) -> int:
        """Queries of a tile, as the kernel clips it."""
        return min(self.br, self.Nq)

    @property
    def Bc(self) -> int:
        """Keys of a tile, as the kernel clips it."""
        return min(self.bc, self.Nk)

    @property
    def K(self) -> int:
        """Floats of one head's k, or of its v."""
        return self.Nk * self.d


@dataclass(frozen=True)
class Stream:
    """One matrix of all heads and its bytes that come in.

    minimum: the least bytes. again: for each loop its working set and the bytes that come in if it does not
    fit. scratch: whether the same memory serves every head.
    """

    name: str
    minimum: float
    again: Sequence[tuple[float, float]] = ()
    scratch: bool = False

    def traffic(self, cache: float) -> float:
        """Bytes that come into a cache of `cache` bytes."""
        loops = [
            self.minimum + overfull(working_set, cache) * (moved - self.minimum)
            for working_set, moved in self.again
        ]
        return max(0, self.minimum, *loops)


def overfull(working_set: float, cache: float) -> float:
    """The share of a cache's sets that a working set overfills."""
    return min(1, max(0, working_set - cache) / (cache / CACHE_WAYS))


def streams(part: str, case: Case, block: Block) -> list[Stream] | None:
    """The streams of a call of a part in float32, all heads together; None if they are not counted."""
    if part not in COUNTS:
        return None
    names = vars(block) | vars(case) | FORMULAS["constants"]
    names.update(seen=case.seen, ruled=1 if case.keys else 0, crowd=crowd(case.d))
    for sizes in (FORMULAS["sizes"], COUNTS[part]["sizes"]):
        for name, formula in sizes.items():
            names[name] = value(formula, names)
    return [stream_of(row, names) for row in COUNTS[part]["streams"]]


def stream_of(row: dict[str, Any], names: dict[str, Any]) -> Stream:
    """The stream of all heads in bytes, from a row, whose formulas are of one head and in floats."""
    scratch = row.get("scratch", False)
    heads = names["heads"]
    minimum = FLOAT_BYTES * value(row["least"], names) * (1 if scratch else heads)
    again = [
        (FLOAT_BYTES * value(working_set, names), FLOAT_BYTES * heads * value(moved, names))
        for working_set, moved in row.get("again", ())
    ]
    return Stream(row["name"], minimum, again, scratch)


def value(formula: str, names: dict[str, Any]) -> float:
    """The value of a formula of traffic.json."""
    return eval(formula, FUNCTIONS, names)


def crowd(d: int) -> int:
    """Lines of cache that a row of d floats needs in a walk down a column.

    Rows that are 2^k lines apart share one of every 2^k sets of a cache, so they need 2^k times as much.
    """
    stride = d // LINE if d % LINE == 0 else 1
    return stride & -stride


def traffic(counted: Iterable[Stream], cache: float) -> float:
    """Bytes that come into a cache of `cache` bytes in one call with these streams."""
    return sum(stream.traffic(cache) for stream in counted)
