"""A GPU's limits, and how calls on it are timed. Without a GPU nearly all of it is skipped."""

import pytest
import torch
from support import or_skip

from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab.cuda import device


@pytest.fixture(scope="module")
def on():
    with or_skip():
        return device.Gpu()


def test_the_kernels_of_the_limits_compile(nvrtc):
    """The chains must be in registers."""
    for capability in ((8, 0), (9, 0), (10, 0)):
        _, used = driver.source(device.LIMITS, device.LIMITS_TILE, 1, Dtype.FP32, capability).compile()
        assert used.stack == used.spill_stores == used.shared == 0 and used.registers <= 64, capability


def test_limits_are_plausible(on):
    found = on.describe()
    clocks = on.fma_peak() / (2 * found["multiprocessors"])  # times the lanes of a multiprocessor
    assert 64 * 0.5e9 < clocks < 256 * 3e9
    assert on.tensor_peak(Dtype.BF16) > on.fma_peak()
    rates = on.bandwidths()
    assert 1e10 < rates["read"] < 1e14 and 1e10 < rates["copied"] < 1e14
    assert found["name"] == torch.cuda.get_device_name() and 0 < on.free() <= found["memory"]


def test_a_pause_takes_its_time(on):
    assert min(on.time(lambda: on.pause(0.01), 3)) == pytest.approx(0.01, rel=0.05)


def test_memory_is_what_is_allocated(on):
    def function():
        scratch = torch.empty(3 << 20, dtype=torch.uint8, device=on.device)
        return scratch[: 1 << 20].clone()

    out, memory = on.allocated(function)
    assert out.numel() == 1 << 20 and memory == 4 << 20
