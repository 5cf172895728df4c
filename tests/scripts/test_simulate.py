"""scripts/simulate.sh: the inner loops on simulated processors."""

import importlib.util
import re
import shutil

import pytest
from support import ROOT, printed


@pytest.mark.full
def test_products_on_arm_reach_90_percent_of_the_peak():
    if not shutil.which("llvm-mca-22"):
        pytest.skip("llvm-mca-22 is missing")
    if importlib.util.find_spec("ziglang") is None or not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("there is no .venv with ziglang")
    shown = printed(ROOT / "scripts" / "simulate.sh", "apple-m1", "neoverse-v2")
    shares = [int(share) for share in re.findall(r"\d+ products \| [\d.]+ \| (\d+) %", shown)]
    assert len(shares) == 6 and min(shares) >= 90, shown
