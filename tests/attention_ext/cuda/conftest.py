"""What the tests of the CUDA kernels share. Without a GPU or the packages they skip with a reason."""

import pytest
import torch

from shakespeare.attention_ext.cuda.kernels import KERNELS, Gpu
from shakespeare.attention_ext.parts import Dtype

ROWS = [(name, dtype) for name, kernel in KERNELS.items() for dtype in kernel.dtypes]
if not torch.cuda.is_available():  # one is skipped for all
    ROWS = ROWS[:1]


@pytest.fixture(params=ROWS, ids=lambda row: f"kernel{row[0]}-{row[1]}")
def row(request: pytest.FixtureRequest, gpu: Gpu) -> tuple[str, Dtype]:
    """Run the test for each kernel and each dtype that it takes."""
    name, dtype = request.param
    if not KERNELS[name].runs_on(gpu.capability, dtype):
        pytest.skip(f"kernel {name} does not run on {gpu.name}")
    return name, dtype
