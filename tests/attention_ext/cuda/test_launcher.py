"""What the launcher gives to the kernels, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import ROOT


@pytest.mark.full
@pytest.mark.usefixtures("extension")
def test_every_kernel_gets_its_arguments():
    path = str(ROOT / "tests" / "launcher_process.py")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 3000
