"""The lab's test of a part, and the command 4Daccess."""

import re

import pytest
from support import cell

from shakespeare.attention_ext import PARTS, attention
from shakespeare.lab import correctness
from shakespeare.lab.scratch import scratch
from shakespeare.lab.traffic import Case

CAUSAL = pytest.mark.parametrize("causal", [[], ["--causal"]], ids=["full", "causal"])


@CAUSAL
def test_the_labs_test(cli, part, causal):
    done = cli(part, "-N", 200, "-br", 32, "-bc", 64, "--threads", 1, *causal)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "manual attention == pytorch attention True" in lines
    headings = [f"{name} - {PARTS[part].title} statistics" for name in ("REFERENCE", part.upper())]
    assert [line for line in lines if line.endswith("statistics")] == headings
    assert sum(line.startswith("cpu time:  ") for line in lines) == 2
    assert lines[-1].startswith("speed-up over PyTorch:  ")
    _, taken = (int(line.split()[2]) for line in lines if line.startswith("mem usage:"))
    case = Case(200, 200, 32, heads=4, causal=bool(causal), br=32, bc=64)
    assert taken == 4 * 200 * 32 * 4 + scratch(part, case)
    assert any(line.strip().startswith("aten::") for line in lines)  # the profiler's table of operators


@CAUSAL
@pytest.mark.parametrize("part", ["part0", "part4"])
def test_the_gradients(cli, extension, part, causal):
    sizes = ("-N", 90, "-B", 2, "--heads", 3, "-d", 24)
    text = cli(part, "--backward", *sizes, *causal, "--threads", 1).stdout
    assert "manual gradients == float64 gradients True" in text
    assert len(re.findall(r"^d[qkv]: largest error \S+, PyTorch's \S+, allowed \S+$", text, re.M)) == 3
    assert re.search(rf"^{part} backward time:  \S+ms, \S+ GFLOP/s, \d+% of the FMA peak$", text, re.M)
    assert re.search(r"^speed-up over SDPA:  \S+x$", text, re.M)


def test_a_wrong_gradient_exits_1(cli, extension, monkeypatch):
    """The output stays the same; a thousandth of one gradient is missing."""
    for which in range(3):

        def wrong(part, *tensors, which=which, **options):
            tensors = list(tensors)
            tensors[which] = tensors[which].detach() * 1e-3 + tensors[which] * (1 - 1e-3)
            return attention(part, *tensors, **options)

        monkeypatch.setattr(correctness, "attention", wrong)
        done = cli("part4", "--backward", "-N", 64, "-d", 16, "--causal", code=1)
        assert done.stdout.endswith("manual gradients == float64 gradients False\n\n")
    with pytest.raises(ValueError, match="part is 'part2'; it must be part0 or part4 for gradients"):
        correctness.run(cell("part2", backward=True))


def test_4d_access(cli, extension):
    shown = cli("4Daccess").stdout
    assert shown.startswith("Tensor Shape: (2, 4, 16, 32)\n")
    values = dict(re.findall(r"^(Expected|Result): +(\S+)$", shown, re.M))
    assert values["Expected"] == values["Result"]
    assert re.search(r"^4D Tensor Index: \(\d, \d, \d+, \d+\)$", shown, re.M)
