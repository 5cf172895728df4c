"""What a CUDA kernel moves: through shared memory by its tile's accesses, through global memory by its loops.

Shared memory serves a warp's access in wavefronts of 128 bytes, one number of each of 32 banks. Lanes that
read the same number share it; numbers of one bank at different addresses take a wavefront each, a conflict.
Global memory is counted as what the kernel asks for, and by lab.traffic.Stream as what the L2 cache misses.
"""

import math
from dataclasses import dataclass

from shakespeare.attention_ext.cuda.kernels import BACKWARD
from shakespeare.attention_ext.cuda.launches import Compiled, Sizes
from shakespeare.attention_ext.cuda.tiles import Access
from shakespeare.lab.traffic import Case, Stream

BANKS = 32  # banks of shared memory, and lanes of a warp
WAVEFRONT = 4 * BANKS  # bytes


@dataclass(frozen=True)
class Shared:
    """The wavefronts of one matrix in shared memory, and the fewest without bank conflicts."""

    name: str
    wavefronts: float
    fewest: float


@dataclass(frozen=True)
class Count:
    """The counts of a call, over all launches. shared: empty if it is left to a profiler."""

    launches: int
    blocks: int
    exponentials: float
    shared: list[Shared]
    streams: list[Stream]

    @property
    def wavefronts(self) -> float:
        """All wavefronts through shared memory."""
        return sum(each.wavefronts for each in self.shared)

    def from_memory(self, l2: int) -> float:
        """Bytes that come from the GPU's memory, or go there, with an L2 cache of `l2` bytes.

        With one byte of cache they are those that the kernel asks for.
        """
        return sum(stream.traffic(l2) for stream in self.streams)


def counts(case: Case, kernel: Compiled, resident: int) -> Count:
    """The counts of a call. resident: blocks that the GPU holds at a time.

    A tile counts whole, also its part that is masked or past the end. The tiles that are masked altogether
    count nothing, though kernel 1's last launch computes them.
    """
    tile = kernel.tile
    plan = kernel.row.plan(kernel, Sizes(case.heads, case.Nq, case.Nk))
    tiles = -(-case.Nq // tile.br)
    met = visits(case, tile.br, tile.bc)
    matrices: dict[str, Shared] = {}
    for access in tile.accesses:
        times = case.heads * access.times * (tiles if access.once else met)
        before = matrices.get(access.matrix, Shared(access.matrix, 0, 0))
        needed, fewest = wavefronts(access)
        wider = before.wavefronts + times * needed, before.fewest + times * fewest
        matrices[access.matrix] = Shared(access.matrix, *wider)
    together = min(case.heads, -(-resident // tiles) + 1)  # heads that are computed at a time
    streams = global_streams(case, kernel, met, together, plan.scratch, plan.repeats)
    blocks = plan.repeats * sum(plan.launches[i].blocks for i in range(plan.count))
    exponentials = case.heads * met * tile.br * tile.bc * tile.exponentials
    return Count(plan.count * plan.repeats, blocks, exponentials, list(matrices.values()), streams)


def visits(case: Case, br: int, bc: int) -> int:
    """How often a tile of br queries meets one of bc keys in a head."""
    ends = (min(end, case.Nq) for end in range(br, case.Nq + br, br))
    seen = (end + case.Nk - case.Nq if case.causal else case.Nk for end in ends)
    return sum(-(-keys // bc) for keys in seen)


def wavefronts(access: Access) -> tuple[int, int]:
    """The wavefronts of one access by a warp, and how many would do if there were no bank conflicts.

    Accesses of two numbers are served by halves of a warp, those of four by quarters; two of these at once if
    each lane has its neighbour's address.
    """
    vector = access.vector
    banks = BANKS // vector
    if access.rows < BANKS and not access.scattered:
        passes = max(1, vector // 2)
        rows = -(-access.rows // passes)
    else:
        passes = vector
        rows = min(access.rows, banks)
    stride = (access.stride or vector) // vector
    conflicts = -(-rows * math.gcd(stride, banks) // banks)
    return passes * conflicts, -(-access.rows // banks)


def global_streams(
    case: Case, kernel: Compiled, met: int, together: int, scratch: int, repeats: int
) -> list[Stream]:
    """Each tile of queries passes K and V; for gradients each tile of keys passes Q and dO too.

    With five products tiles of keys alone pass Q and dO, and read and write dQ in float32; or for wide heads
    tiles of queries pass K and V, and read and write dK and dV.

    scratch, repeats: those of the launches' plan.
    """
    tile = kernel.tile
    backward = kernel.row.name in BACKWARD
    row = float(case.dtype.bytes * case.heads * kernel.width)  # bytes of all heads
    tiles = -(-case.Nq // tile.br)

    def passed(name: str, length: int, rows: int, at_a_time: int) -> Stream:
        """The stream of a matrix that is read again. at_a_time: its rows between two readings."""
        # between two passes over a head's rows, those of two matrices of all heads that are worked on
        working_set = 2 * row / case.heads * at_a_time * together
        moved = min(met * rows, tiles * length) + (length if backward else 0)
        return Stream(name, row * length, [(working_set, row * moved)])

    if "TURN_ROWS" in tile.sizes:
        shares = {"Q": (1, 1), "dO": (2, 1), "O": (1, 0), "dQ": (1, 0), "sums of dQ": (4, 4)}
        kept = dict.fromkeys(("K", "V", "dK", "dV"), 1)
        length = case.Nq
        other = case.Nk
        rows = tile.br
        held = 4  # Q and dO in 16 bits, dQ in 32
        if tile.sizes["WIDTH"] > 128:
            shares = {"K": (1, 1), "V": (1, 1), "dK": (1, 0), "dV": (1, 0), "sums of dK and dV": (8, 8)}
            kept = {"Q": 1, "dO": 2, "O": 1, "dQ": 1}
            length = case.Nk
            other = case.Nq
            rows = tile.bc
            held = 6
        working_set = held * row / case.heads * length * together
        passes = max(1, met * rows / length)
        streams = [Stream(name, row * other * times) for name, times in kept.items()]
        for name, (least, each) in shares.items():  # in rows of 16-bit numbers
            moved = row * length * (least + each * (passes - 1))
            streams.append(Stream(name, row * length * least, [(working_set, moved)]))
        return streams
    at_a_time = case.Nk if repeats == 1 else tile.bc
    streams = [passed(name, case.Nk, tile.bc, at_a_time) for name in "KV"]
    Q = row * case.Nq
    state = 4.0 * scratch
    if backward:
        streams += [passed(name, case.Nq, tile.br, case.Nq) for name in ("Q", "dO")]
        return [*streams, Stream("O", Q), Stream("dQ, dK, dV", Q + 2 * row * case.Nk)]
    streams.append(Stream("O", Q))
    if repeats == 1:
        streams.append(Stream("Q", Q))
    else:
        streams.append(Stream("Q", Q, [(Q + state, Q * met / tiles)]))  # read by each launch
    if scratch > 1:  # the state between launches, or the results of splits
        passes = max(0.5, met / tiles - 1) if repeats > 1 else 1
        streams.append(Stream("m, l, O", state, [(Q + state, 2 * state * passes)]))
    return streams
