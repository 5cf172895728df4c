"""Part 4's default tile: the best that `gpt.py bench --tune` found on this machine, else DEFAULT.

A JSON file holds a list for each processor, so machines can share a home directory.
"""

import contextlib
import functools
import itertools
import json
import math
import operator
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from shakespeare.attention_ext import processor
from shakespeare.attention_ext.checks import whole_number

# Within 2 % of the best tile in a sweep at N = 1024, d = 32, 64, 128 (gpt.py bench part4 -br ... -bc ...).
DEFAULT = (192, 256)
# At the end threads wait for the last tile: at most one tile's time in this many.
TILES_PER_THREAD = 8


@dataclass(frozen=True)
class Tuned:
    """The best tile found, (br, bc), for these SIMD helpers, threads, head width, length and mask.

    seconds: the median time of its calls; default_seconds: that of DEFAULT in the same run.
    """

    simd: str
    threads: int
    d: int
    N: int
    causal: bool
    br: int
    bc: int
    seconds: float
    default_seconds: float


@functools.lru_cache(4096)
def tile(
    simd: str, threads: int, d: int, N: int, causal: bool, queries: int | None = None
) -> tuple[int, int]:
    """(br, bc) for N keys: tuned at the nearest length between N/2 and 2N, else DEFAULT.

    A tuned tile is for this simd, threads, d and mask. queries: B H Nq; for few of them DEFAULT shrinks.
    """
    fitting = [tuned for tuned in _fitting(simd, threads, d, causal) if N <= 2 * tuned.N <= 4 * N]
    if fitting:
        nearest = min(fitting, key=lambda tuned: abs(math.log(tuned.N / N)))
        return nearest.br, nearest.bc
    if threads == 1 or queries is None:
        return DEFAULT
    from shakespeare.attention_ext import extension  # the command line starts without it

    # Any multiple of a panel, the queries that are multiplied at a time, gives the same strips and bits.
    panel = extension.size("panel", simd)
    shared = queries // (TILES_PER_THREAD * threads) // panel * panel
    return max(panel, min(DEFAULT[0], shared)), DEFAULT[1]


@functools.cache
def _fitting(simd: str, threads: int, d: int, causal: bool) -> tuple[Tuned, ...]:
    try:
        entries = read()
    except (OSError, ValueError):  # gpt.py doctor reports it; without the file part4 is a few percent slower
        return ()
    return tuple(t for t in entries if (t.simd, t.threads, t.d, t.causal) == (simd, threads, d, causal))


def checked_sides(br: int | None, bc: int | None) -> tuple[int | None, int | None]:
    """Both sides; TypeError or ValueError unless each is None or a whole number of at least 1."""
    br, bc = (None if size is None else whole_number(name, size) for name, size in (("br", br), ("bc", bc)))
    for name, size in (("br", br), ("bc", bc)):
        if size is not None and not 1 <= size < 2**63:
            raise ValueError(f"{name} is {size}; it must be at least 1 and fit 63 bits")
    return br, bc


def path() -> Path:
    """The file: $ATTENTION_TILES, else shakespeare_attention/tiles.json in the user's cache."""
    if chosen := os.environ.get("ATTENTION_TILES"):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("shakespeare_attention", appauthor=False) / "tiles.json"


def read() -> list[Tuned]:
    """The results for this processor. Raises ValueError if the file is not in write()'s format."""
    with contextlib.suppress(RuntimeError):  # no home directory
        return _read_all().get(processor.name(), [])
    return []


def write(results: list[Tuned]) -> None:
    """Add these to the results for this processor; an earlier result for the same case is replaced."""
    import tempfile

    try:
        everything = _read_all()
    except ValueError:  # a broken file is replaced
        everything = {}
    case = operator.attrgetter("simd", "threads", "d", "N", "causal")
    kept = {case(tuned): tuned for tuned in [*everything.get(processor.name(), []), *results]}
    everything[processor.name()] = list(kept.values())
    file = path()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps({cpu: [asdict(t) for t in entries] for cpu, entries in everything.items()}, indent=1)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        unfinished = Path(folder) / file.name
        unfinished.write_text(text)
        unfinished.replace(file)
    forget()


def forget() -> None:
    """Clear the cache, so that the next tile() reads the file again."""
    tile.cache_clear()
    _fitting.cache_clear()


def _read_all() -> dict[str, list[Tuned]]:
    file = path()
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
        everything = {cpu: [Tuned(**entry) for entry in entries] for cpu, entries in content.items()}
        for tuned, field in itertools.product(itertools.chain(*everything.values()), fields(Tuned)):
            value = getattr(tuned, field.name)
            # the exact type: no int for a float, no bool for an int
            if type(value) is not field.type or field.type in (int, float) and not 0 < value < 2**63:
                raise ValueError(f"{field.name} is {value!r}")
        return everything
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is not a file of tile sizes ({error}); delete it") from None
