"""What the launcher gives to the kernels, without a GPU."""

import sys

import pytest
import torch
from support import ROOT, printed


@pytest.mark.full
@pytest.mark.usefixtures("extension")
def test_every_kernel_gets_its_arguments():
    if torch.cuda.is_available():
        pytest.skip("a driver is here, which the stand-in cannot replace; the other tests run the kernels")
    said = printed(sys.executable, ROOT / "tests" / "launcher_process.py", PYTHONPATH=str(ROOT))
    assert int(said.split()[0]) > 3000
