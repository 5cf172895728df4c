"""compute-sanitizer watches every CUDA kernel: bad accesses, races in shared memory, wrong barriers."""

import re
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, found_program, printed

from shakespeare.generation.engines import layouts

pytestmark = pytest.mark.full

# The order follows from what other blocks of a cluster have sent, which racecheck does not see.
NOT_SEEN = ("cluster", "drafts")
NEEDS = {"grid": layouts.CAPABILITY, **dict.fromkeys(NOT_SEEN, layouts.CLUSTER_CAPABILITY)}
# The Python code checks every call of the driver. A cluster has more barriers than are tracked by default.
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "synccheck": ("--num-cuda-barriers", "65536")}
KERNELS = {"attention": "kernel_substring=attention_", "graph": "kernel_name=attend"}


@pytest.mark.parametrize("cases", ["attention", "grid", "cluster", "drafts", "graph"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool, cases):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    sanitizer = found_program("compute-sanitizer")  # of the CUDA toolkit
    if tool == "racecheck" and cases in NOT_SEEN:
        pytest.skip("racecheck does not see how blocks of a cluster wait for each other")
    if torch.cuda.get_device_capability() < NEEDS.get(cases, (7, 5)):
        pytest.skip(f"{torch.cuda.get_device_name()} has no kernel for {cases}")
    command = [
        *(sanitizer, "--tool", tool, "--error-exitcode", "9"),
        *("--kernel-name", KERNELS.get(cases, "kernel_name=decode"), *OPTIONS.get(tool, ())),
        *(sys.executable, str(Path(__file__).with_name("cuda_cases.py")), cases),
    ]
    shown = printed(*command, PYTHONPATH=str(ROOT))
    results = re.search(r"(\d+) results", shown)
    assert results and int(results[1]) > 20
    assert "0 errors" in shown or "0 hazards" in shown
