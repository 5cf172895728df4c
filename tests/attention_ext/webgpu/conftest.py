"""What the tests of WebGPU share. Without the package wgpu or an adapter they skip with a reason."""

import pytest
from support import or_skip

from shakespeare.attention_ext.webgpu.gpu import Gpu, opened
from shakespeare.attention_ext.webgpu.steps import STEPS


@pytest.fixture  # a test may lose the device, and the next one has another
def gpu() -> Gpu:
    """The device; skip the test if there is none."""
    with or_skip():
        return opened()


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest, gpu: Gpu) -> str:
    """Run the test for each step that the adapter can run."""
    if lacking := STEPS[request.param].lacks(gpu.adapter):
        pytest.skip(f"{gpu.adapter.name} lacks {lacking}")
    return request.param
