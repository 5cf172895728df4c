"""What a CUDA kernel is, and how its functions are launched for a call: the Plan that launcher.cpp has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import Structure
from dataclasses import dataclass, field
from typing import Any

from shakespeare.attention_ext.build.structs import CSRC, constants, structure
from shakespeare.attention_ext.cuda import tiles
from shakespeare.attention_ext.cuda.tiles import LARGE, Capability, Queries, Tile, Tiles
from shakespeare.attention_ext.parts import Dtype

EARLY_LAUNCH = (9, 0)  # the least compute capability of programmatic dependent launches
PADDING_OF_ROWS = constants(CSRC / "cuda" / "backward.h")["PADDING_OF_ROWS"]
# What RULES is a sum of, by name. Those of a bias and a user's header are the largest.
RULES = constants(CSRC / "cuda" / "arguments.h")
MOST_WAVES = 8  # of blocks, among which splits() chooses
WAVE_COST = 0.02


@dataclass(frozen=True)
class Gpu:
    """A GPU's properties; 0 or '' is unknown, and decides no kernel.

    shared: the most bytes of shared memory for a block. l2: bytes of its L2 cache. hertz: its highest clock.
    bandwidth: bytes per second of its memory. memory: its bytes. identity: no other GPU's.
    """

    name: str
    capability: Capability
    shared: int
    multiprocessors: int
    l2: int = 0
    hertz: float = 0
    bandwidth: float = 0
    memory: int = 0
    identity: str = ""


LAUNCHER = CSRC / "bindings" / "launcher.cpp"
Launch = structure(LAUNCHER, "Launch")
Plan = structure(LAUNCHER, "Plan")


@dataclass(frozen=True)
class Sizes:
    """A call's. heads: of all batches; group: that share k and v. uneven: queries see different keys."""

    heads: int
    Nq: int
    Nk: int
    group: int = 1
    uneven: bool = False


Planner = Callable[["Compiled", Sizes], Structure]


def once(kernel: Compiled, call: Sizes) -> Structure:
    """A block for each tile of queries of each head."""
    return _plan(kernel, _launch(kernel, _tiles(kernel, call.heads, call.Nq)))


def for_each_tile_of_keys(kernel: Compiled, call: Sizes) -> Structure:
    """Kernel 1: as many launches as tiles of keys, with the state of all rows in global memory."""
    bc = kernel.tile.bc
    d = kernel.width
    launch = _launch(kernel, _tiles(kernel, call.heads, call.Nq))
    return _plan(kernel, launch, scratch=call.heads * call.Nq * (d + 2), repeats=-(-call.Nk // bc), step=bc)


def persistent(kernel: Compiled, call: Sizes) -> Structure:
    """Kernel 6: persistent blocks, at most one for each multiprocessor, which take one tile after the other.

    Where tiles differ, a counter in the scratch gives the next one to whoever is done. Q is copied by 64
    rows, those of a warpgroup.
    """
    tiles = _tiles(kernel, call.heads, call.Nq)
    blocks = min(tiles, kernel.on.multiprocessors)
    uneven = call.uneven or call.Nq % kernel.tile.br > 0
    scratch = int(uneven and blocks < tiles)
    box = kernel.tile.sizes["BOX"]
    return _plan(kernel, _launch(kernel, blocks), br=64, box=box, scratch=scratch)


def for_each_key(kernel: Compiled, call: Sizes) -> Structure:
    """documents.cu: a thread for each key of each batch, of which there is one head. scratch: the extents."""
    blocks = call.heads * -(-call.Nk // kernel.tile.threads)
    return _plan(kernel, _launch(kernel, blocks), scratch=2 * call.heads * (1 + call.Nk))


def split(kernel: Compiled, call: Sizes) -> Structure:
    """Flash-decoding: a block for each split of the keys, then one for each row, which merges the results.

    The queries of heads that share k and v are rows of the same tiles.
    """
    rows = _tiles(kernel, call.heads // call.group, call.Nq * call.group)
    sizes = kernel.tile.sizes
    count = splits(rows, call.Nk, kernel.tile.bc, kernel.on.multiprocessors * sizes["BLOCKS"])
    attend = _launch(kernel, rows * count)
    merge = _launch(kernel, call.heads * call.Nq, 1)
    merge.x = sizes["MERGE_THREADS"]
    merge.shared = 0
    merge.early = kernel.on.capability >= EARLY_LAUNCH
    return _plan(
        kernel, attend, merge, scratch=call.heads * call.Nq * count * (kernel.width + 2), number=count
    )


def backward(kernel: Compiled, call: Sizes) -> Structure:
    """The gradients: lanes for each row, then a block for each tile of keys, then for each of queries."""
    rows, launches = _of_gradients(kernel, call, _tiles(kernel, call.heads, call.Nq))
    return _plan(kernel, *launches, scratch=2 * rows)


def added_in_turns(kernel: Compiled, call: Sizes) -> Structure:
    """backward4: a block takes one tile of keys after the other, or of queries for wide heads.

    The scratch has dQ, or for wide heads dV and dK, in float32 after the rows, and the counters. The last
    launch rounds them. The copy engine takes 64 rows.
    """
    sizes = kernel.tile.sizes
    width = sizes["WIDTH"]
    wide = width > 128
    rows, (first, *both) = _of_gradients(kernel, call, _tiles(kernel, call.heads, call.Nq))
    last, main = both if wide else reversed(both)
    turns = last.blocks if wide else rows // sizes["TURN_ROWS"]
    main.blocks = min(main.blocks, kernel.on.multiprocessors)
    last.blocks = -(-turns * (4 * width if wide else 256) // kernel.tile.threads)
    last.shared = 0
    scratch = 2 * rows + turns * (sizes["TURN_ROWS"] * width * (1 + wide) + 1) + 1
    return _plan(kernel, first, main, last, scratch=scratch, br=64, bc=64, box=sizes["BOX"])


def _of_gradients(kernel: Compiled, call: Sizes, last: int) -> tuple[int, list[Structure]]:
    """The padded rows, and launches for them, for the tiles of keys, and of `last` blocks."""
    rows = call.heads * tiles.round_up(call.Nq, PADDING_OF_ROWS)
    lanes = kernel.tile.sizes.get("ROW_LANES", 32)
    keys = call.heads // call.group * -(-call.Nk // kernel.tile.bc)
    blocks = -(-lanes * rows // kernel.tile.threads), keys, last
    launches = [_launch(kernel, count, number) for number, count in enumerate(blocks)]
    launches[0].shared = 0
    return rows, launches


def _tiles(kernel: Compiled, heads: int, Nq: int) -> int:
    return heads * -(-Nq // kernel.tile.br)


def _launch(kernel: Compiled, blocks: int, function: int = 0) -> Structure:
    tile = kernel.tile
    named = kernel.functions[kernel.row.functions[function]]
    return Launch(int(named), blocks, tile.threads // tile.threads_y, tile.threads_y, tile.shared)


def _plan(kernel: Compiled, *launches: Structure, repeats: int = 1, **others: int) -> Structure:
    row = kernel.row
    tile = kernel.tile
    sizes = {"width": kernel.width, "vectors": row.multiple > 1, "br": tile.br, "bc": tile.bc, **others}
    return Plan((Launch * 3)(*launches), len(launches), repeats, **sizes)


def splits(rows: int, keys: int, together: int, slots: int) -> int:
    """The number of splits of the keys: more of them fill the last wave of blocks, and cost more merging.

    rows: blocks for one split. together: keys that a block takes at a time. slots: blocks that run at once.
    """
    limit = -(-keys // together)
    best = -1.0
    chosen = 1
    for waves in range(1, MOST_WAVES + 1):
        count = min(limit, max(1, waves * slots // rows))
        used = rows * count / (-(-rows * count // slots) * slots) - WAVE_COST * waves
        if used > best + 1e-9:
            best = used
            chosen = count
    return chosen


@dataclass(frozen=True, eq=False)
class Kernel:
    """A row of kernels.KERNELS.

    name: what --kernel takes. sources: its file in csrc/cuda/ for each dtype that it takes. functions: those
    that the files define; by default attention_kernel and its number. why: what it improves on; its limit.
    tiles: the best first; the first that fits shared memory is taken. plan: of a call's launches. multiple: d
    is padded to a multiple of it; above 1, rows are read 16 bytes at a time, and other inputs copied first.
    capability: the least; earlier: that of some dtypes. only: it runs on this major capability alone. ruled:
    it takes rules, and fewer heads of k and v. without: of RULES, those that it does not take.
    """

    name: str
    sources: Mapping[Dtype, str]
    summary: str
    why: str
    tiles: Tiles
    plan: Planner = once
    functions: tuple[str, ...] = ()
    multiple: int = 1
    capability: Capability = (7, 5)
    earlier: Mapping[Dtype, Capability] = field(default_factory=dict)
    only: bool = False
    ruled: bool = False
    without: int = 0

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """The dtypes that it takes."""
        return tuple(self.sources)

    def least_capability(self, dtype: Dtype) -> Capability:
        """The least compute capability for a dtype."""
        return self.earlier.get(dtype, self.capability)

    def takes(self, rules: int) -> bool:
        """Whether the kernel takes these rules, a sum of RULES."""
        return not rules or self.ruled and not rules & self.without

    def runs_on(self, capability: Capability, dtype: Dtype) -> bool:
        """Whether a GPU of this compute capability can run the kernel in a dtype."""
        return capability >= self.least_capability(dtype) and not (
            self.only and capability[0] != self.capability[0]
        )

    def padded(self, d: int) -> int:
        """The width of the heads that the kernel is compiled for."""
        return tiles.round_up(d, self.multiple)

    def tile(self, d: int, dtype: Dtype, on: Gpu, queries: Queries = LARGE) -> Tile:
        """The tile for queries of width d. Raises ValueError, naming the argument, if there is none."""
        if dtype not in self.sources:
            raise ValueError(f"kernel is {self.name!r}; it takes {', '.join(self.sources)}, not {dtype}")
        if not self.runs_on(on.capability, dtype):
            major, minor = self.least_capability(dtype)
            needs = f"{major}.x" if self.only else f"{major}.{minor} or more"
            needs += f" in {dtype}" if self.earlier else ""
            needs += f"; {on.name} has {'.'.join(map(str, on.capability))}"
            raise ValueError(f"kernel is {self.name!r}; it needs compute capability {needs}")
        needed = 0
        for tile in self.tiles(self.padded(d), dtype, queries, on.capability):
            if tile.shared <= on.shared:
                return tile
            needed = tile.shared
        raise ValueError(
            f"kernel is {self.name!r}; with d = {d} it needs {needed} bytes of shared memory, and this GPU "
            f"gives a block {on.shared}; choose another kernel"
        )


@dataclass(frozen=True)
class Compiled:
    """A kernel on a GPU. width: of padded heads. library: keeps `functions`, by their source names, alive."""

    row: Kernel
    tile: Tile
    width: int
    on: Gpu
    library: object
    functions: dict[str, Any]
