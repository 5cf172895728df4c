"""Texts by parts 1 to 4 need no PyTorch. What needs it says so in one line."""

import sys

import pytest
from support import finished
from tiny import VOCABULARY, nanogpt_file

EXTRA = ("torch", "pooch", "requests", "rich", "tiktoken", "tokenizers")  # the extra torch of setup.cfg


@pytest.fixture
def without_torch(tmp_path, extension):
    """Run Python with a plain install's packages only."""
    for name in EXTRA:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})\n")
    return lambda *words: finished(sys.executable, *words, PYTHONPATH=str(tmp_path))


TEXT = ("-m", "shakes256", "--max-new-tokens", "60")


def test_the_commands_that_write_texts(without_torch, cli, tmp_path):
    expected = cli("part0", "--inference", *TEXT, "--num-samples", 1).stdout
    for part in ("part1", "part4"):
        assert without_torch("gpt.py", part, "--inference", *TEXT, "--num-samples", 1)[:2] == (0, expected)
    code, shown, _ = without_torch("gpt.py", "race", "part1,part4", *TEXT)
    assert code == 0 and "identical: all 2 texts" in shown and expected.strip() in shown
    out = tmp_path / "texts"
    code, _, said = without_torch("gpt.py", "bulk", "--texts", 2, "--out", out, "--workers", 1, *TEXT)
    assert code == 0 and "2 texts" in said
    assert without_torch("-c", "import shakespeare.lab.doctor")[0] == 0


def test_the_loss_is_that_with_torch(without_torch, cli, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("First Citizen:\nWe are accounted poor citizens.\n" * 60)
    for changed in ((), ("--weights", "int8"), ("--kv-cache", "bf16")):
        expected = cli("eval", "--corpus", text, "--part", "part0", *changed).stdout
        assert without_torch("gpt.py", "eval", "--corpus", text, *changed) == (0, expected, "")


def test_the_server_starts_without_importing_it(without_torch):
    pytest.importorskip("starlette", reason="pip install -e '.[serve]'")
    assert without_torch("-c", "from shakespeare.app.server import app, running, scheduler")[0] == 0


def test_what_needs_it_is_refused_in_one_line(without_torch, tmp_path):
    nanogpt_file(tmp_path / "ckpt.pt")
    VOCABULARY.write_meta_json(tmp_path / "meta.json")
    for words in (
        ("part0", "--inference"),
        ("part4",),
        ("bench",),
        ("eval", "--corpus", "README.md", "--part", "part0"),
        ("part4", "--inference", "-m", tmp_path / "ckpt.pt"),
    ):
        code, shown, said = without_torch("gpt.py", *words)
        assert code == 2 and shown == "" and said.count("\n") == 1 and "needs PyTorch: pip install" in said
    error = "gpt.py: error: this command needs pooch: pip install pooch\n"
    assert without_torch("gpt.py", "prepare") == (2, "", error)
