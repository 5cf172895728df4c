"""Occupancy: known values, and each resource as the limit."""

from shakespeare.attention_ext.cuda.kernels import Gpu
from shakespeare.lab.cuda.architectures import ARCHITECTURES, KIB, architecture, occupancy

# threads, registers, shared bytes, then the blocks by CUDA's occupancy calculator and what limits them
KNOWN = [
    ((7, 5), 128, 64, 16 * KIB, 4, "shared memory"),
    ((8, 0), 256, 33, 0, 6, "registers"),  # a warp gets 1,280 registers
    ((8, 0), 128, 40, 48 * KIB, 3, "shared memory"),
    ((8, 0), 32, 16, 0, 32, "blocks"),
    ((8, 6), 512, 32, 0, 3, "threads"),
    ((9, 0), 128, 168, 0, 3, "registers"),
    ((9, 0), 128, 64, 227 * KIB, 1, "shared memory"),
    ((9, 0), 1024, 16, 0, 2, "threads"),
    ((9, 0), 1024, 65, 0, 0, "registers"),
]


def test_known_occupancies():
    for capability, threads, *asked, blocks, bound in KNOWN:
        found = occupancy(ARCHITECTURES[capability], threads, *asked)
        assert min(found.values()) == blocks, (capability, threads, asked)
        assert [name for name in found if found[name] == blocks] == [bound], (capability, threads, asked)


def test_an_unknown_gpu_counts_as_the_next_lower_one():
    for capability, known in (((9, 0), (9, 0)), ((10, 3), (10, 0)), ((12, 1), (12, 0)), ((7, 0), (7, 5))):
        assert architecture(Gpu("one", capability, 0, 1)) is ARCHITECTURES[known]
