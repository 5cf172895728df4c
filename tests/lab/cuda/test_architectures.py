"""Occupancy: known values, and each resource as the limit."""

from __future__ import annotations

import pytest

from attention_ext.cuda.steps import STEPS
from lab.cuda.architectures import ARCHITECTURES, KIB, SHEETS, Device, occupancy

# threads, registers, shared bytes, the blocks by CUDA's occupancy calculator
KNOWN = [
    ((8, 0), 256, 32, 0, 8),
    ((8, 0), 256, 64, 0, 4),
    ((8, 0), 256, 33, 0, 6),  # a warp gets 1,280 registers
    ((8, 0), 128, 40, 48 * KIB, 3),
    ((8, 0), 1024, 32, 0, 2),
    ((8, 0), 32, 16, 0, 32),
    ((8, 6), 256, 64, 0, 4),
    ((8, 6), 512, 32, 0, 3),
    ((8, 6), 128, 32, 33 * KIB, 2),
    ((9, 0), 128, 80, 0, 6),
    ((9, 0), 128, 168, 0, 3),
    ((9, 0), 256, 128, 100 * KIB, 2),
    ((9, 0), 128, 64, 227 * KIB, 1),
    ((9, 0), 96, 80, 0, 8),
    ((9, 0), 384, 168, 0, 1),
    ((9, 0), 1024, 65, 0, 0),
    ((7, 5), 128, 64, 16 * KIB, 4),
]


def test_known_occupancies():
    for capability, *asked, blocks in KNOWN:
        assert occupancy(ARCHITECTURES[capability], *asked).blocks == blocks, (capability, asked)


def test_the_limit_is_named():
    for threads, registers, shared, bound in (
        (128, 168, 0, ("registers",)),
        (128, 32, 100 * KIB, ("shared memory",)),
        (1024, 16, 0, ("threads",)),
        (32, 16, 0, ("blocks",)),
        (1024, 32, 0, ("registers", "threads")),
    ):
        found = occupancy(ARCHITECTURES[9, 0], threads, registers, shared)
        assert found.bound == bound and found.share(found.blocks) == found.blocks * threads / 2048


def test_an_unknown_gpu_counts_as_the_next_lower_one():
    for capability, known in (((9, 0), (9, 0)), ((10, 3), (10, 0)), ((12, 1), (12, 0)), ((7, 0), (7, 5))):
        device = Device("one", capability, 1, 1e9, 1e12, 1 << 20)
        assert device.architecture is ARCHITECTURES[known]


def test_the_data_sheets_peaks():
    """TFLOP/s of float32 and bfloat16: 19.5 and 312 of an A100, 67 of an H100."""
    a100, h100 = SHEETS["sm_80"], SHEETS["sm_90"]
    assert a100.rate(2 * a100.architecture.fma) == pytest.approx(19.5e12, rel=0.01)
    assert a100.rate(a100.architecture.tensor) == pytest.approx(312e12, rel=0.01)
    assert h100.rate(2 * h100.architecture.fma) == pytest.approx(67e12, rel=0.01)


def test_each_gpu_runs_steps():
    for device in SHEETS.values():
        assert any(step.runs_on(device.capability) for step in STEPS.values())
