"""Limits and rates of GPUs by their architecture, and how many blocks of a kernel fit a multiprocessor.

Source: CUDA C++ Programming Guide, tables of compute capabilities and of arithmetic throughput; NVIDIA's data
sheets of the GPUs in SHEETS.
"""

from dataclasses import dataclass

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

    warps, blocks: resident at a time. shared: bytes of shared memory. block_shared: the most for one block.
    reserved: bytes that each block takes beside its own. fma: fused multiply-adds of float32. tensor: FLOP of
    the tensor cores in bfloat16.
    """

    warps: int
    blocks: int
    shared: int
    block_shared: int
    reserved: int
    fma: int
    tensor: int


KIB = 1024
# By compute capability; a GPU that is not here counts as the next lower one.
ARCHITECTURES = {
    (7, 5): Architecture(32, 16, 64 * KIB, 64 * KIB, 0, 64, 1024),
    (8, 0): Architecture(64, 32, 164 * KIB, 163 * KIB, KIB, 64, 2048),
    (8, 6): Architecture(48, 16, 100 * KIB, 99 * KIB, KIB, 128, 1024),
    (8, 7): Architecture(48, 16, 164 * KIB, 163 * KIB, KIB, 128, 2048),
    (8, 9): Architecture(48, 24, 100 * KIB, 99 * KIB, KIB, 128, 1024),
    (9, 0): Architecture(64, 32, 228 * KIB, 227 * KIB, KIB, 128, 4096),
    (10, 0): Architecture(64, 32, 228 * KIB, 227 * KIB, KIB, 128, 8192),
    (12, 0): Architecture(48, 24, 100 * KIB, 99 * KIB, KIB, 128, 1024),
}


@dataclass(frozen=True)
class Device:
    """A GPU.

    hertz: its highest clock. bandwidth: bytes per second of its memory. l2: bytes of its L2 cache.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    hertz: float
    bandwidth: float
    l2: int

    @property
    def architecture(self) -> Architecture:
        """Its row of ARCHITECTURES."""
        return ARCHITECTURES[max(known for known in ARCHITECTURES if known <= max(self.capability, (7, 5)))]

    def rate(self, each: float) -> float:
        """The rate of all multiprocessors per second, from the rate of each per clock."""
        return each * self.multiprocessors * self.hertz


# What --arch stands for.
SHEETS = {
    "sm_80": Device("A100 (80 GB)", (8, 0), 108, 1.41e9, 2.039e12, 40 << 20),
    "sm_90": Device("H100 (SXM)", (9, 0), 132, 1.98e9, 3.35e12, 50 << 20),
    "sm_100": Device("B200", (10, 0), 148, 1.965e9, 8.0e12, 126 << 20),
}


def here(index: int) -> Device:
    """The GPU with this number, by its driver. Raises BuildError if cuda-bindings is missing."""
    from shakespeare.attention_ext.cuda import gpu as driver

    found = driver.gpu(index)
    clock, memory_clock, bits, l2 = (
        driver.attribute(name, index)
        for name in ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH", "L2_CACHE_SIZE")
    )
    bandwidth = 2e3 * memory_clock * bits / 8  # kHz, and two transfers in a clock
    return Device(found.name, found.capability, found.multiprocessors, 1e3 * clock, bandwidth, l2)


def occupancy(on: Architecture, threads: int, registers: int, shared: int) -> dict[str, int]:
    """The blocks of a kernel that each resource of a multiprocessor allows, which holds the fewest of them.

    threads: of a block. registers: of a thread. shared: bytes of a block, static and dynamic.
    """
    warps = -(-threads // WARP)
    each = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT  # registers of a warp
    by_registers = REGISTERS // QUARTERS // each * QUARTERS // warps if each else on.blocks
    bytes_each = -(-(shared + on.reserved) // SHARED_UNIT) * SHARED_UNIT
    return {
        "registers": by_registers,
        "shared memory": on.shared // bytes_each if bytes_each else on.blocks,
        "threads": on.warps // warps,
        "blocks": on.blocks,
    }
