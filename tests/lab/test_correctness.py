"""The lab's test: its numbers, its memory column, and wrong kernels, which it detects."""

import sys

import pytest
import torch
from support import cell, printed

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab import correctness


def lines_of(part, **change):
    lines = []
    passed = correctness.run(cell(part, **change), lines.append)
    return passed, "\n".join(lines).splitlines()


def test_the_labs_inputs_and_first_row(part):
    q, k, v = correctness.synthetic_qkv(1024)
    assert q.shape == k.shape == v.shape == (1, 4, 1024, 32)
    assert q[0, 3, 100, 7].item() == pytest.approx(0.0002 * 100 + 0.0001 * 7)
    assert k[0, 2, 100, 7].item() == pytest.approx(0.0006 * 100 + 0.0003 * 7)
    assert v[0, 1, 100, 7].item() == pytest.approx(0.00015 * 100 + 0.0008 * 7)
    row = attention(part, q, k, v, scale=1.0)[0, 0, 0]
    assert [f"{x:.4f}" for x in row[:3].tolist()] == ["0.0771", "0.0779", "0.0787"]
    assert f"{row[-1]:.4f}" == "0.1019"


def test_the_test_imports_no_compiler():
    """torch._dynamo takes longer to import than the test."""
    code = (
        "import sys; from shakespeare.app.cli import main\n"
        "try: main(['part4', '-N', '64'])\n"
        "except SystemExit as end: sys.exit(end.code or 'torch._dynamo' in sys.modules)"
    )
    printed(sys.executable, "-c", code)


def test_a_wrong_kernel_is_caught_and_located(cli, extension, monkeypatch):
    def wrong(part, q, k, v, **options):
        out = attention("part0", q, k, v, causal=options["causal"], scale=options["scale"])
        if part == "part4":
            out[0, 2, 5, 7] += 0.5
            out[0, 1, 3, 3] += 0.1
            out[0, 0, 0, 0] = torch.nan if options["causal"] else out[0, 0, 0, 0]
        return out

    monkeypatch.setattr(correctness, "attention", wrong)
    lines = cli("part4", "-N", 32, code=1).stdout.splitlines()
    assert "manual attention == pytorch attention False" in lines
    assert lines[-1].startswith("largest difference at index (0, 2, 5, 7): expected 0.0")
    assert lines[-1].endswith("2 of 4096 elements are off")
    passed, lines = lines_of("part4", N=32, causal=True)
    assert "index (0, 0, 0, 0)" in lines[-1] and "got nan; 3 of 4096" in lines[-1]


@pytest.mark.parametrize("dtype", Dtype)
def test_the_fastest_kernel_passes(gpu, dtype):
    for causal in (False, True):
        arguments = dict(N=300, br=None, bc=None, dtype=dtype, batch=3, device="cuda", causal=causal)
        passed, lines = lines_of("part4", **arguments)
        assert passed, lines[-1]
    assert any(line.startswith("kernel ") for line in lines)
    assert sum(line.startswith("cuda time:  ") for line in lines) == 2
    assert any("CUDA total" in line for line in lines)
    taken = [int(line.split()[2]) for line in lines if line.startswith("mem usage:")]
    assert taken[1] >= 3 * 4 * 300 * 32 * dtype.bytes
