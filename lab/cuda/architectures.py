"""Limits and rates of GPUs by their architecture, and how many blocks of a kernel fit a multiprocessor.

Source: CUDA C++ Programming Guide, tables of compute capabilities and of arithmetic throughput; NVIDIA's data
sheets of the GPUs in SHEETS.
"""

from dataclasses import dataclass

from shakespeare.attention_ext.cuda.launches import Gpu

WARP = 32  # threads
REGISTERS = 65536  # 32-bit registers of a multiprocessor
REGISTER_UNIT = 256  # a warp gets a multiple of this many registers
QUARTERS = 4  # parts of a multiprocessor; each has a quarter of the registers, and a warp stays in one
SHARED_UNIT = 128  # bytes; a block gets a multiple of it
SHARED_BYTES = 128  # through shared memory in a clock
EXPONENTIALS = 16  # in a clock


@dataclass(frozen=True)
class Architecture:
    """The limits of a multiprocessor of a compute capability, and its rates per clock.

    warps, blocks: resident at a time. shared: bytes of shared memory. reserved: bytes that each block takes
    beside its own. fma: fused multiply-adds of float32. tensor: FLOP of the tensor cores in bfloat16.
    """

    warps: int
    blocks: int
    shared: int
    reserved: int
    fma: int
    tensor: int


KIB = 1024
# By compute capability; a GPU that is not here counts as the next lower one.
ARCHITECTURES = {
    (7, 5): Architecture(32, 16, 64 * KIB, 0, 64, 1024),
    (8, 0): Architecture(64, 32, 164 * KIB, KIB, 64, 2048),
    (8, 6): Architecture(48, 16, 100 * KIB, KIB, 128, 1024),
    (8, 7): Architecture(48, 16, 164 * KIB, KIB, 128, 2048),
    (8, 9): Architecture(48, 24, 100 * KIB, KIB, 128, 1024),
    (9, 0): Architecture(64, 32, 228 * KIB, KIB, 128, 4096),
    (10, 0): Architecture(64, 32, 228 * KIB, KIB, 128, 8192),
    (12, 0): Architecture(48, 24, 100 * KIB, KIB, 128, 1024),
}


# What --arch stands for.
SHEETS = {
    "sm_80": Gpu("A100 (80 GB)", (8, 0), 163 * KIB, 108, 40 << 20, 1.41e9, 2.039e12),
    "sm_90": Gpu("H100 (SXM)", (9, 0), 227 * KIB, 132, 50 << 20, 1.98e9, 3.35e12),
    "sm_100": Gpu("B200", (10, 0), 227 * KIB, 148, 126 << 20, 1.965e9, 8.0e12),
}


def architecture(on: Gpu) -> Architecture:
    """A GPU's row of ARCHITECTURES."""
    return ARCHITECTURES[max(known for known in ARCHITECTURES if known <= max(on.capability, (7, 5)))]


def rate(on: Gpu, clock: float) -> float:
    """The rate of all multiprocessors per second, from that of one per clock."""
    return clock * on.multiprocessors * on.hertz


def occupancy(on: Architecture, threads: int, registers: int, shared: int) -> dict[str, int]:
    """The blocks of a kernel that each resource of a multiprocessor allows, which holds the fewest of them.

    threads: a block's. registers: a thread's. shared: bytes of a block, static and dynamic.
    """
    warps = -(-threads // WARP)
    each = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT  # registers of a warp
    bytes_each = -(-(shared + on.reserved) // SHARED_UNIT) * SHARED_UNIT
    return {
        "registers": REGISTERS // QUARTERS // each * QUARTERS // warps if each else on.blocks,
        "shared memory": on.shared // bytes_each if bytes_each else on.blocks,
        "threads": on.warps // warps,
        "blocks": on.blocks,
    }
