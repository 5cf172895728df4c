"""What the launcher gives to the kernels, without a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from support import ROOT


@pytest.mark.full
@pytest.mark.usefixtures("extension")
def test_every_kernel_gets_its_arguments():
    if torch.cuda.is_available():
        pytest.skip("a driver is here, which the stand-in cannot replace; the other tests run the kernels")
    path = str(ROOT / "tests" / "launcher_process.py")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 3000
