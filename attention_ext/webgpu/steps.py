"""The table of part 4's steps in WGSL: what each takes, its tiles, its source. wgpu is not imported here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shakespeare.attention_ext.parts import Dtype, one_of
from shakespeare.attention_ext.webgpu.driver import Adapter, Source

WIDEST = 256  # the largest d
MOST_FOURS = 16  # of a thread's numbers of O, in tiles that are preferred: with more, registers spill
AT_ONCE = 16  # columns or keys that a loop takes, at most


@dataclass(frozen=True)
class Tile:
    """A workgroup's threads, `lanes` beside each other and `lines` below, and the scores of each.

    rows: a thread's queries, `lines` apart or, in steps 4 to 6, neighbours. keys: its keys, `lanes` apart.
    """

    lanes: int
    lines: int
    rows: int = 1
    keys: int = 1

    @property
    def threads(self) -> int:
        """Invocations of a workgroup."""
        return self.lanes * self.lines

    @property
    def br(self) -> int:
        """Queries of a tile."""
        return self.rows * self.lines

    @property
    def bc(self) -> int:
        """Keys of a tile."""
        return self.keys * self.lanes

    def width(self, fours: int) -> int:
        """Fours of O in each row of a thread, for rows of so many fours."""
        return ceil_div(fours, self.lanes)


@dataclass(frozen=True, eq=False)
class Step:
    """A row of STEPS.

    name: what --kernel takes. files: its sources in csrc/webgpu/, behind common.wgsl. why: what it improves
    on, and what still limits it. memory: bytes of workgroup memory for a tile and the fours of a row. tiles:
    the best first. needs: the features of driver.OPTIONAL that the adapter must have.
    """

    name: str
    files: tuple[str, ...]
    summary: str
    why: str
    memory: Callable[[Tile, int], int]
    tiles: tuple[Tile, ...]
    needs: tuple[str, ...] = ()

    def lacks(self, adapter: Adapter) -> str:
        """The features that the step needs and the adapter has not, or ''."""
        return " and ".join(sorted({*self.needs} - adapter.features))

    def tile(self, d: int, limits: Mapping[str, int]) -> Tile:
        """The tile for rows of d numbers, at most WIDEST. Raises ValueError if the limits allow none."""
        limit = limits["max-compute-workgroup-storage-size"]
        threads = limits["max-compute-invocations-per-workgroup"]
        fours = ceil_div(d, 4)
        fit = [t for t in self.tiles if self.memory(t, fours) <= limit and t.threads <= threads]
        if not fit:
            needed = min(self.memory(tile, fours) for tile in self.tiles)
            needs = f"{needed} bytes of workgroup memory, and the adapter allows {limit}"
            raise ValueError(f"kernel is {self.name!r}; with d = {d} it needs {needs}")
        return self.best(fit, fours)[0]

    def best(self, tiles: Sequence[Tile], fours: int) -> list[Tile]:
        """Tiles, first those whose lanes, if more than two, all have some of O in registers."""
        return sorted(tiles, key=lambda t: t.lanes > max(2, fours) or t.rows * t.width(fours) > MOST_FOURS)

    def constants(self, fours: int, tile: Tile) -> dict[str, int]:
        """What common.wgsl says that the host puts in front, for rows of so many fours."""
        return {
            "D4": fours,
            "LANES": tile.lanes,
            "LINES": tile.lines,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "WIDTH": tile.width(fours),
            "COLUMNS": math.gcd(AT_ONCE, 4 * fours),
            "SOME": math.gcd(AT_ONCE, max(1, tile.bc // 2)),
        }

    def source(self, d: int, dtype: Dtype, tile: Tile) -> Source:
        """The shader for rows of d numbers in a dtype."""
        half = dtype is Dtype.FP16
        sizes = self.constants(ceil_div(d, 4), tile)
        stored = (("Stored", "vec4<f16>" if half else "vec4<f32>"),)
        needs = sorted({*self.needs} | ({"shader-f16"} if half else set()))
        return Source(("common.wgsl", *self.files), tuple(sizes.items()), stored, tuple(needs))


def ceil_div(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)


# lanes, lines, rows
_SIDES = [(8, 16, 4), (8, 8, 4), (8, 4, 4), (4, 8, 4), (4, 8, 2), (4, 8, 1), (2, 8, 1), (2, 4, 1), (1, 4, 1)]
_FOUR_KEYS = tuple(Tile(*sides, keys=4) for sides in _SIDES)
# lanes, lines, keys; more threads first: memory fits few tiles
_SHAPES = [(8, 32, 8), (16, 16, 4), (8, 16, 8), (8, 16, 4), (8, 12, 4), (8, 8, 4), (8, 4, 4), (4, 64, 8)]
_SHAPES += [(4, 32, 8), (4, 8, 4), (4, 4, 4), (2, 64, 8), (2, 32, 8), (2, 4, 4), (1, 2, 4)]
_BY_COLUMNS = tuple(Tile(lanes, lines, rows=4, keys=keys) for lanes, lines, keys in _SHAPES)


def _weights(tile: Tile) -> int:
    """Fours of half of the weights of a tile, by columns."""
    return tile.bc // 2 * (tile.lines + 1)


STEPS = {
    step.name: step
    for step in (
        Step(
            "1",
            ("step1.wgsl",),
            "a thread for each score, rows read from storage buffers",
            "No thread has more than one score. Each multiply-add reads both of its numbers from storage "
            "buffers, through the caches.",
            lambda t, d4: 4 * t.br * t.bc,
            (Tile(8, 32),),
        ),
        Step(
            "2",
            ("step2.wgsl",),
            "tiles of Q, K and V in workgroup memory",
            "A number comes once from a storage buffer for a whole tile. Each multiply-add still reads both "
            "of its numbers, now from workgroup memory.",
            lambda t, d4: 16 * (t.br + 2 * t.bc) * (d4 + 1) + 4 * t.br * t.bc,
            (Tile(16, 16), Tile(16, 8), Tile(8, 8), Tile(8, 4), Tile(4, 4)),
        ),
        Step(
            "3",
            ("step3.wgsl",),
            "4 x 4 scores a thread in registers",
            "A number from workgroup memory serves four multiply-adds. A dot product of four takes five "
            "instructions, and each tile waits at four barriers.",
            lambda t, d4: 16 * ((t.br + t.bc) * (d4 + 1) + t.bc * d4 + t.br * (t.lanes + 1) + t.threads),
            _FOUR_KEYS,
        ),
        Step(
            "4",
            ("columns.wgsl", "step4.wgsl"),
            "4 x 8 scores a thread, Q, K and P by columns, K and V in the same place",
            "4 numbers of a column of Q and 8 of K serve 32 multiply-adds, and more threads share a tile. "
            "All products are multiply-adds. The rows' maxima still pass through workgroup memory.",
            lambda t, d4: 16 * ((t.br + t.bc) * d4 + _weights(t) + t.threads),
            _BY_COLUMNS,
        ),
        Step(
            "5",
            ("columns.wgsl", "subgroups.wgsl", "step5.wgsl"),
            "the maxima of rows by subgroups",
            "The lanes of a row exchange their maxima without memory. The products through workgroup memory "
            "are what is left.",
            lambda t, d4: 16 * ((t.br + t.bc) * d4 + _weights(t)) + 8,
            _BY_COLUMNS,
            ("subgroup",),
        ),
        Step(
            "6",
            ("columns.wgsl", "subgroups.wgsl", "step6.wgsl"),
            "K, V and P as float16 in workgroup memory",
            "Half the bytes of K, V and P. Sums stay in float32, so each number is converted before it is "
            "multiplied.",
            lambda t, d4: 16 * (t.br * d4 + t.threads) + 8 * (t.bc * d4 + _weights(t)) + 8,
            _BY_COLUMNS,
            ("shader-f16", "subgroup"),
        ),
    )
}

# The first whose features the adapter has is taken; step 6 rounds the weights, so it must be asked for.
FASTEST = ("5", "4")


def choose(kernel: str | None, d: int, dtype: Dtype, adapter: Adapter) -> tuple[Step, Tile]:
    """The step with this name, or the fastest, and its tile. Raises ValueError naming the argument."""
    if dtype is Dtype.FP16 and "shader-f16" not in adapter.features:
        raise ValueError(f"q is float16; it must be float32 on {adapter.name}, which lacks shader-f16")
    if kernel is None:
        step = next(STEPS[name] for name in FASTEST if not STEPS[name].lacks(adapter))
    else:
        one_of("kernel", kernel, STEPS)
        step = STEPS[kernel]
        if lacking := step.lacks(adapter):
            raise ValueError(f"kernel is {kernel!r}; it needs {lacking}, which {adapter.name} lacks")
    return step, step.tile(d, adapter.limits)
