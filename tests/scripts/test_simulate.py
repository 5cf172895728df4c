"""scripts/simulate.sh: the inner loops on simulated processors."""

import re

import pytest
from support import ROOT, found_program, printed


@pytest.mark.full
def test_products_on_arm_reach_90_percent_of_the_peak():
    found_program("llvm-mca-22")
    pytest.importorskip("ziglang")
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("there is no .venv")
    shown = printed(ROOT / "scripts" / "simulate.sh", "apple-m1", "neoverse-v2")
    shares = [int(share) for share in re.findall(r"\d+ products \| [\d.]+ \| (\d+) %", shown)]
    assert len(shares) == 6 and min(shares) >= 90, shown
