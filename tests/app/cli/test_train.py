"""The command train: the user's own text, the end of a run, Ctrl-C and SIGTERM, refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
from support import naming
from training_texts import words

from shakespeare.attention_ext import BuildError, extension
from shakespeare.model.checkpoint import DRAFT, SUMMED, SUMS, load, save

SMALL = ("--block-size", 16, "--batch-chars", 128, "--corpus", "text.txt")
ENDING = re.compile(
    r"validation loss (\d\.\d{4}), test loss (\d\.\d{4}) nats per character \(step \d+\); "
    r"([\d,]+) steps, [\d,]+ characters/s, (\d+\.\d) s\n"
)


@pytest.fixture(autouse=True)
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(words(4000))
    return tmp_path / "text.txt"


@pytest.fixture
def start(tmp_path: Path) -> str:
    save(tmp_path / "start", tiny.gpt(), tiny.VOCABULARY, {})
    return "start"


def test_a_text_of_ones_own_by_time(cli, extension):
    done = cli("train", "mine", *SMALL, "--minutes", 0.05)
    validation, test, steps, seconds = ENDING.match(done.stdout).groups()
    assert done.stdout.endswith("python gpt.py part4 --inference -m out/mine\n")
    assert float(seconds) >= 1  # of three
    assert {*os.listdir("out/mine")} == {*SUMMED, DRAFT, SUMS, "training.json"}
    record = json.loads(Path("out/mine/training.json").read_text())
    assert record["steps"] == int(steps.replace(",", "")) and record["part"] == "part4"
    assert f"{record['val_loss']:.4f} {record['test_loss']:.4f}" == f"{validation} {test}"
    assert re.search(r"^step \d+/\d+  train .*  val .* characters/s  \d+ s, \d+ s left$", done.stderr, re.M)
    done = cli("eval", "-m", "out/mine", "--corpus", "text.txt")
    nats = float(re.search(r"out/mine: (\S+) nats", done.stdout)[1])
    assert nats == pytest.approx((float(validation) + float(test)) / 2, abs=0.15)


def test_a_whole_text_is_learned_and_other_parts_of_it_are_evaluated(cli, failed, extension):
    words = ("train", "mine", *SMALL, "--steps", 20, "--whole-text")
    done = cli(*words)
    assert re.search(r"^training loss [\d.]+; 20 steps, ", done.stdout, re.M) and " val " not in done.stderr
    assert "--whole-text does not go with --init" in failed(*words, "--init", "shakes128")
    losses = [
        cli("eval", "-m", "out/mine", "--corpus", "text.txt", "--between", a, 1).stdout for a in (0, 0.9)
    ]
    assert losses[0] != losses[1] == cli("eval", "-m", "out/mine", "--corpus", "text.txt").stdout
    for shares, why in (((0.5, 0.5), "must be two shares"), ((0.5, 0.5001), "0.5 to 0.5001, which are")):
        assert why in failed("eval", "--corpus", "text.txt", "--between", *shares)


def test_a_checkpoint_is_replaced_only_if_that_is_asked_for(cli, failed):
    arguments = ("train", "mine", *SMALL, "--steps", 1, "--part", "part0")
    cli(*arguments)
    hint = "give --overwrite to replace it, or --out for another directory"
    assert failed(*arguments) == f"gpt.py: error: out/mine holds a checkpoint; {hint}\n"
    assert "out/mine holds a finished run, so there is nothing to resume" in failed(*arguments, "--resume")
    cli(*arguments, "--overwrite")


def test_a_text_of_one_line_ends_with_a_command_that_works(cli, tmp_path):
    """--inference begins with a line end, which the vocabulary of such a text lacks."""
    line = tmp_path / "line.txt"
    line.write_text(words(3000).replace("\n", " "))
    done = cli("train", "mine", "--corpus", line, "--steps", 1, "--block-size", 8, "--part", "part0")
    command = shlex.split(done.stdout.split("write text with it: python gpt.py ")[1])
    cli(*command, "--num-samples", 1, "--max-new-tokens", 5)


def test_small_blocks_train_and_have_a_draft_of_their_own_or_none(cli, failed, extension):
    for block in (1, 2, 7):
        own = ("--corpus", "text.txt", "--steps", 1, "--batch-chars", 64, "--block-size", block, "--quiet")
        with naming(block):
            done = cli("train", f"b{block}", *own)
            assert ("block size is 1; a draft needs one of at least 2" in done.stderr) == (block == 1)
            assert Path(f"out/b{block}/draft.safetensors").is_file() == (block > 1)
            common = ("--inference", "-m", f"out/b{block}", "--max-new-tokens", 12)
            texts = {cli(part, *common, "--prompt", "ab").stdout for part in ("part0", "part4")}
            assert len(texts) == 1 and len(texts.pop()) > 2 * 12
    Path("old.txt").write_text("abcabcabca")
    wrong = ("train", "fine", *SMALL, "--init", "out/b7", "--block-size", 7, "--old-corpus", "old.txt")
    assert "old_text has 10 characters; it must have at least 11" in failed(*wrong)
    assert not Path("out/fine").exists()


def test_without_a_compiler_it_trains_with_part0(cli, monkeypatch):
    missing = Mock(side_effect=BuildError("no C++ compiler was found"))
    monkeypatch.setattr(extension, "load_module", missing)
    done = cli("train", "mine", *SMALL, "--steps", 1)
    assert "gpt.py: warning: no C++ compiler was found; training with part0\n" in done.stderr
    assert json.loads(Path("out/mine/training.json").read_text())["part"] == "part0"


def test_fine_tuning_reports_what_was_forgotten(cli, start, tmp_path):
    (tmp_path / "old.txt").write_text(words(2000))
    (tmp_path / "text.txt").write_text(words(4000, "xyzabc"))
    arguments = ("--init", start, "--old-corpus", "old.txt", "--steps", 3, "--part", "part0")
    done = cli("train", "mine", *SMALL[4:], *arguments)
    assert re.match(r"loss on the old corpus: \d\.\d{4} before, \d\.\d{4} after\n", done.stdout)
    assert "the model's vocabulary grows by 3 characters: 'xyz'" in done.stderr
    assert "before the first step: val " in done.stderr
    assert load("out/mine").tokenizer.characters == [*tiny.CHARACTERS, "x", "y", "z"]


def test_a_model_of_another_size(cli, failed, extension):
    Path("short.txt").write_text(words(2100))
    sizes = ("--n-layer", 1, "--n_head=3", "--n-embd", 24, "--rates", "muon_lr=0.03,weight_decay=0")
    for name, more, part in ("small", (), "part4"), ("large", ("--n_layer=2", "--dropout", 0.1), "part0"):
        done = cli("train", name, *SMALL[:4], "--corpus", "short.txt", "--steps", 1, *sizes, *more)
        record = json.loads(Path(f"out/{name}/training.json").read_text())
        assert record["part"] == part and record["recipe"]["n_head"] == 3, done
        assert (record["recipe"]["muon_lr"], record["recipe"]["weight_decay"]) == (0.03, 0)
        config = load(f"out/{name}").config
        assert (config.n_layer, config.n_head, config.n_embd) == (1 + (part == "part0"), 3, 24)
        assert "parameters, more than the text's 2,100 characters: in a long run it learns" in done.stderr
    assert len(cli("part4", "--inference", "-m", "out/small", "--max-new-tokens", 20).stdout) > 40
    wrong = failed("train", "a", *SMALL, *sizes, "--n-embd", 25)
    assert "n_embd is 25; it must be a multiple of n_head=3" in wrong
    assert "--n-layer does not go with --init" in failed("train", "a", *SMALL, "--init", "shakes128", *sizes)


def test_models_of_transformers_and_of_nanogpt_are_fine_tuned(cli, tmp_path):
    tiny.huggingface_directory(tmp_path / "hf", tiny.gpt())
    tiny.huggingface_directory(tmp_path / "other", tiny.gpt(tanh_gelu=True, untied_head=True))
    (tmp_path / "nano").mkdir()
    tiny.nanogpt_file(tmp_path / "nano" / "ckpt.pt", bias=True)
    tiny.VOCABULARY.write_meta_json(tmp_path / "nano" / "meta.json")
    for init, untied in (("hf", False), ("other", True), ("nano/ckpt.pt", False)):
        own = ("--init", init, "--steps", 2, "--part", "part0", "--overwrite")
        cli("train", "mine", *SMALL[4:], *own)
        config = load("out/mine").config
        assert config.untied_head == untied and config.bias, init


def test_a_short_text_is_refused_in_one_line(failed, text):
    text.write_text(words(1999))
    assert "text has 1,999 characters; it must have at least 2,000" in failed("train", "mine", *SMALL)
    assert not Path("out").exists()


STEPS = (*SMALL, "--steps", 160, "--part", "part0", "--out", "a b")


@pytest.fixture
def running(process):
    """A run in a process of its own, after its first evaluation."""
    started = process("train", "mine", *STEPS)
    while not started.stderr.readline().startswith("step 8/160"):
        assert started.poll() is None
    return started


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_say_how_to_go_on_and_that_command_goes_on(running, cli, number):
    running.send_signal(number)
    running.send_signal(signal.SIGTERM)  # `timeout` sends it twice
    out, errors = running.communicate()
    assert running.returncode == 130 and out == "" and "Traceback" not in errors
    assert load("a b").model.config.block_size == 16
    message = errors.splitlines()[-2]
    assert message.startswith("stopped; to go on: python gpt.py train mine --corpus text.txt ")
    words = shlex.split(message.split("gpt.py ")[1])
    done = cli(*words[:-1], code=2)
    assert "holds a run that was stopped; give --resume to go on" in done.stderr
    stopped = json.loads(Path("a b/training.json").read_text())["curve"]
    cli(*words)
    curve = json.loads(Path("a b/training.json").read_text())["curve"]
    assert curve[: len(stopped)] == stopped and curve[-1][0] == 160


@pytest.mark.full
def test_a_directory_has_one_run_and_a_killed_one_leaves_it(running, failed, cli):
    taken = f"gpt.py: error: another process ({running.pid}) trains in a b\n"
    for option in ((), ("--resume",), ("--overwrite",)):
        assert failed("train", "mine", *STEPS, *option) == taken
    running.kill(), running.wait()
    cli("train", "mine", *SMALL, "--steps", 1, "--out", "a b", "--overwrite")


@pytest.mark.full
def test_a_closed_stderr_does_not_end_a_run(process):
    running = process("train", "mine", *STEPS)
    running.stderr.close()
    assert "validation loss" in running.communicate()[0]
    assert running.returncode == 0
