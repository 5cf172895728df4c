"""In a copy a sixth part is a file and a row per language, a sampling setting or a rule one field."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT, copy_tree, printed

from shakespeare.attention_ext.build.recipes import CSRC

pytestmark = pytest.mark.full

KERNEL = (CSRC / "cpu" / "part1_naive.cpp").read_text().replace("naive_", "plain_")
CPP_ROW = "    PART(part5, plain, none, none)"
PYTHON_ROW = """\
        Part("part5", "PLAIN ATTENTION", "a part that a test adds", operator="part5_plain"),
"""
# A setting that the torch engine alone does something with.
SETTING = '    gain: float = setting(1.0, "Multiply the logits by this.", above=True)\n'
USE = "    logits = logits * sampling.gain\n"

# A rule that changes nothing, among the others' arguments.
RULE = {
    r"^    sinks: Tensor \| None$": "    shift: float | None\n",
    r"^    bias: Tensor \| None = None$": "    shift: float = 0.0\n",
    r'^    softcap = options.get\("softcap"\)$': '    found["shift"] = options.get("shift", 0)\n',
}
RULED = """
import torch
from shakespeare import attention
tensors = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in "qkv"]
bias, sinks = torch.randn(1, 1, 9, 9, requires_grad=True), torch.randn(2, requires_grad=True)
leaves = [*tensors, bias, sinks]
options = dict(window=(3, 2), softcap=2.0, bias=bias, sinks=sinks, shift=1.5)
outs = [attention(part, *tensors, **options) for part in ("part0", "part4")]
torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), leaves) for out in outs))
"""


def insert(file, before, text):
    content = file.read_text()
    (match,) = re.finditer(before, content, re.M)
    file.write_text(content[: match.start()] + text + content[match.start() :])


@pytest.fixture(scope="module")
def copy(tmp_path_factory, extension):
    """A copy of the repository with a sixth part and another sampling setting."""
    made = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "out", "node_modules")
    copy_tree(ROOT, made, ignore=leave, symlinks=True)
    csrc = made / "attention_ext" / "csrc"
    (csrc / "cpu" / "part5_plain.cpp").write_text(KERNEL)
    rows = (csrc / "parts.h").read_text()
    (last,) = re.findall(r"^ *PART\(part4, flash, flash_decoding, flash_bf16\)", rows, re.M)
    (csrc / "parts.h").write_text(rows.replace(last, f"{last} \\\n{CPP_ROW}"))
    insert(made / "attention_ext" / "parts.py", r"^    \)\n\}$", PYTHON_ROW)
    sampling = made / "generation" / "sampling.py"
    insert(sampling, r"^    logit_bias: tuple", SETTING)
    insert(sampling, r"^    penalty = sampling.repetition_penalty$", USE)
    for before, text in RULE.items():
        insert(made / "attention_ext" / "rules.py", before, text)
    return made


@pytest.fixture
def env(copy):
    builds = str(copy.parent / "sixth-part-builds")
    return {"TORCH_EXTENSIONS_DIR": builds, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


@pytest.fixture
def run(copy, env):
    return lambda *arguments: printed(sys.executable, *arguments, cwd=copy, **env)


def test_the_command_line_has_it(run):
    assert re.search(r"^ +part5 +.*a part that a test adds", run("gpt.py", "--help"), re.M)
    assert "manual attention == pytorch attention True" in run("gpt.py", "part5", "-N", 64)


def test_every_save_is_tested_again(copy, env):
    source = copy / "attention_ext" / "csrc" / "cpu" / "part5_plain.cpp"
    command = [sys.executable, "-u", "gpt.py", "part5", "--watch", "-N", "64"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=copy, env=os.environ | env, **pipes) as watching:
        lines = iter(watching.stdout.readline, "")
        try:
            next(line for line in lines if line.startswith("right, ") and "before" not in line)
            source.write_text(KERNEL.replace("a.scale * s;", "a.scale * s"))
            next(line for line in lines if "part5_plain.cpp:" in line and "error: expected" in line)
            source.write_text(KERNEL + "// saved\n")
            next(line for line in lines if line.startswith("right, ") and line.endswith(" before\n"))
        finally:
            watching.kill()


def test_bench_measures_it_and_explain_tells_what_it_takes(run):
    sizes = ("-N", "32,64", "-d", 16, "-r", 2, "--min-time", 0)
    measured = json.loads(run("gpt.py", "bench", "part4,part5", *sizes, "-o", "json"))
    rows = [row for row in measured["rows"] if row["contender"] == "part5"]
    assert [(row["status"], row["scratch"]) for row in rows] == [("ok", 4096), ("ok", 16384)]
    assert "part5" in run("gpt.py", "bench", "--dry-run")
    assert run("gpt.py", "explain", "part5", "-N", 64).startswith("part5, a part that a test adds: 4 heads")


def test_it_writes_the_text(run):
    common = ("--inference", "-m", "shakes128", "--num-samples", 1, "--max-new-tokens", 60)
    texts = {run("gpt.py", "part5", *common, "--engine", engine) for engine in ("native", "torch")}
    assert texts == {run("gpt.py", "part4", *common)} and len(texts.pop()) == 61
    assert "part5" in run("gpt.py", "race", "part4,part5", "--max-new-tokens", 20)


def test_a_sampling_setting_is_carried_to_every_engine(run):
    """The C++ decoder is compiled with it, the page and the server know it, the torch engine applies it."""
    common = ("gpt.py", "part4", "--inference", "-m", "shakes128", "--num-samples", 1, "--max-new-tokens", 60)
    plain, native, applied = (
        run(*common, *more) for more in ((), ("--gain", 9), ("--gain", 9, "--engine", "torch"))
    )
    assert plain == native != applied
    assert "--gain FLOAT" in run("gpt.py", "part4", "--help")
    program = """
from shakespeare.app.server.requests import CompletionBody
from shakespeare.generation.engines import slots
from shakespeare.web import build
assert CompletionBody(model="", prompt="a", gain=2.0).gain == 2
assert '"gain": 1.0' in build.facts() and "const GAIN: u32 = 8u;" in build.shaders()["decoder"]
"""
    run("-c", program)


def test_a_rule_is_an_argument_of_all_operators(run):
    run("-c", RULED)
