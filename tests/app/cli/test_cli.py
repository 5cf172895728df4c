"""The command line as its users meet it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from support import ROOT

import attention_ext
from attention_ext import PARTS, BuildError, build
from lab import correctness
from model import corpus, engine

TEXT = "First Citizen:\nWe are accounted poor citizens.\n" * 60


def failed(done):
    """A request that was wrong: one line on stderr, nothing on stdout, exit code 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("gpt.py: error: ")
    return done.stderr


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['gpt.py', {!r}, '--help'][:{}]; import gpt\n"
        "try: gpt.cli.main(standalone_mode=False)\n"
        "finally: print('torch' in sys.modules)"
    )
    for arguments in (("part4", 3), ("--help", 2), ("train", 3)):
        done = subprocess.run(
            [sys.executable, "-c", code.format(*arguments)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout.startswith("Usage:") and done.stdout.endswith("False\n"), done.stderr


def test_no_command_shows_the_help(cli):
    done = cli()
    assert done.returncode == 2
    assert "Usage: gpt.py" in done.stderr + done.stdout and "part4" in done.stderr + done.stdout


def test_help_has_a_sentence_for_every_option(cli):
    done = cli("part4", "-h")
    assert done.returncode == 0
    for option in (
        "-N",
        "-br",
        "-bc",
        "--threads",
        "--causal",
        "--inference",
        "-m",
        "--prompt",
        "--prompt-file",
        "--max-new-tokens",
        "--num-samples",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--repetition-penalty",
        "--stop",
        "--seed",
        "--context",
        "--no-kv-cache",
        "--engine",
        "--weights",
        "--json",
        "--interactive",
    ):
        assert re.search(rf"^  {option}[ ,].*\n?.* ([A-Z][a-z]|\.\.\. )", done.stdout, re.M), option


def test_the_labs_test(cli, part):
    done = cli(part, "-N", 128, "-br", 32, "-bc", 64, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "manual attention == pytorch attention True" in done.stdout
    assert f"REFERENCE - {PARTS[part].title} statistics" in done.stdout
    assert f"{part.upper()} - {PARTS[part].title} statistics" in done.stdout
    assert done.stderr == ""


def test_a_mismatch_exits_1(extension):
    code = (
        "import sys; sys.argv = ['gpt.py', 'part4', '-N', '32']\n"
        "import gpt; from lab import correctness; right = correctness.attention\n"
        "correctness.attention = lambda part, **k: right(part, **k) + (part == 'part4')\n"
        "gpt.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "manual attention == pytorch attention False" in done.stdout
    assert "4096 of 4096 elements are off" in done.stdout


def test_4d_access(cli, extension):
    done = cli("4Daccess")
    assert done.returncode == 0
    values = dict(re.findall(r"^(Expected|Result): +(\S+)$", done.stdout, re.M))
    assert values["Expected"] == values["Result"]
    assert re.search(r"^4D Tensor Index: \(\d, \d, \d+, \d+\)$", done.stdout, re.M)


def test_inference_notices_go_to_stderr_and_text_to_stdout(cli, part):
    done = cli(part, "--inference", "--prompt", "ROMEO:", "--max-new-tokens", 40, "--num-samples", 3)
    assert done.returncode == 0, done.stderr
    notices = done.stderr.splitlines()
    assert notices[0] == "Running inference using dnn model shakes128"
    assert notices[1] == "number of parameters: 0.80M"
    assert re.fullmatch(r"Vocabulary of 65 tokens from .*meta\.json", notices[2])
    assert notices[3].startswith("SIMD: " if PARTS[part].operator else "Attention by matmul")
    samples = done.stdout.split("\n---------------\n")
    assert len(samples) == 3 and len(set(samples)) == 3
    assert [len(sample) for sample in samples] == [46, 46, 47]  # the last has the final line end
    assert all(sample.startswith("ROMEO:") for sample in samples)


def test_the_same_seed_gives_the_same_text_in_every_part(cli, extension):
    texts = {
        cli(part, "--inference", "-m", "shakes256", "--seed", 5, "--num-samples", 1, *more).stdout
        for part in PARTS
        for more in ([], ["--no-kv-cache"])
    }
    assert len(texts) == 1
    (text,) = texts
    assert len(text) == 256 + 1


def test_options_reach_what_they_are_for(cli, extension, monkeypatch):
    calls = []

    def recorded(part, q, k, v, **options):
        threads = torch.get_num_threads()
        calls.append((part, options["br"], options["bc"], options["causal"], q.shape[2], threads))
        return right(part, q, k, v, **options)

    right = attention_ext.attention
    monkeypatch.setattr(engine, "attention", recorded)
    common = ("part4", "--inference", "-br", 5, "-bc", 7, "--threads", 1, "--num-samples", 1, "--seed", 3)
    short = (*common, "--prompt", "abcd", "--max-new-tokens", 3)
    cached = cli(*short, "--engine", "torch")
    assert set(calls) == {("part4", 5, 7, True, rows, 1) for rows in (4, 1)}
    calls.clear()
    assert cli(*short, "--engine", "torch", "--no-kv-cache").stdout == cached.stdout
    assert set(calls) == {("part4", 5, 7, True, rows, 1) for rows in (4, 5, 6)}
    calls.clear()
    assert cli(*short).stdout == cached.stdout
    assert calls == []  # the native engine calls the kernels itself


def test_the_samplings_options_reach_it_in_both_engines(cli, extension):
    hot = ("part4", "--inference", "--num-samples", 1, "--temperature", 30, "--max-new-tokens", 60)
    texts = {}
    for more in [
        (),
        ("--top-k", 1),
        ("--top-k", 3),
        ("--top-p", 0.5),
        ("--min-p", 0.9),
        ("--repetition-penalty", 100),
        ("--seed", 3),
    ]:
        native, by_torch = (cli(*hot, *more, "--engine", name).stdout for name in ("native", "torch"))
        assert native == by_torch, more
        texts[native] = more
    assert len(texts) == 7
    greedy = cli(*hot, "--temperature", 0).stdout
    assert texts[greedy] == ("--top-k", 1)


def test_samples_end_before_a_stop_string(cli, extension):
    common = ("part4", "--inference", "--max-new-tokens", 200, "--num-samples", 3)
    whole = cli(*common).stdout.removesuffix("\n").split("\n---------------\n")
    done = cli(*common, "--stop", "the", "--stop", "you")
    ended = done.stdout.removesuffix("\n").split("\n---------------\n")
    assert [re.split("the|you", text)[0] for text in whole] == ended
    assert ended != whole


def test_json_has_an_object_for_each_sample(cli, extension):
    common = (
        "part4",
        "--inference",
        "--prompt",
        "ROMEO:",
        "--max-new-tokens",
        50,
        "--threads",
        1,
        "--seed",
        4,
    )
    done = cli(*common, "--json", "--stop", "the")
    first, second = map(json.loads, done.stdout.splitlines())
    assert list(first) == [
        "model",
        "part",
        "engine",
        "simd",
        "threads",
        "seed",
        "prompt",
        "text",
        "prompt_tokens",
        "new_tokens",
        "prefill_seconds",
        "decode_seconds",
        "tokens_per_second",
        "finish_reason",
    ]
    expected = dict(
        model="shakes128",
        part="part4",
        engine="native",
        simd="portable",
        threads=1,
        seed=4,
        prompt="ROMEO:",
        prompt_tokens=6,
    )
    assert {name: first[name] for name in expected} == expected
    assert second["seed"] == 5 and second["text"] != first["text"]
    for sample in (first, second):
        assert "the" not in sample["text"]
        assert sample["finish_reason"] == ("length" if len(sample["text"]) == 50 else "stop")
        assert sample["new_tokens"] >= len(sample["text"])
        rate = sample["new_tokens"] / sample["decode_seconds"]
        assert sample["tokens_per_second"] == pytest.approx(rate)
        assert sample["prefill_seconds"] > 0
    plain = cli(*common, "--stop", "the").stdout
    assert plain == "---------------\n".join(f"ROMEO:{s['text']}\n" for s in (first, second))
    part0 = json.loads(cli("part0", *common[1:], "--json").stdout.splitlines()[0])
    assert part0["engine"] == "torch" and part0["simd"] is None


def test_the_last_line_counts_the_tokens(cli, extension):
    done = cli("part4", "--inference", "--max-new-tokens", 10, "--num-samples", 40)
    assert re.fullmatch(
        r"400 tokens in \d+\.\d\d s with part4, native engine: [\d,]+ tokens/s", done.stderr.splitlines()[-1]
    )
    assert len(set(done.stdout.split("\n---------------\n"))) == 40


def test_a_batch_gives_the_texts_of_one_at_a_time(cli, extension):
    common = ("part4", "--inference", "-m", "shakes256", "--max-new-tokens", 300)  # beyond the block
    batch = cli(*common, "--num-samples", 5, "--seed", 20).stdout
    alone = [cli(*common, "--num-samples", 1, "--seed", 20 + i).stdout for i in range(5)]
    assert batch == "---------------\n".join(alone)


def test_a_reset_context_is_another_text_past_the_block_size(cli, extension):
    common = ("part4", "--inference", "--max-new-tokens", 200, "--num-samples", 1)
    slide, reset = (cli(*common, "--context", c).stdout for c in ("slide", "reset"))
    assert slide != reset and slide[:129] == reset[:129] and len(slide) == len(reset) == 201


def test_writing_in_turns(cli, extension):
    common = ("part4", "--inference", "--max-new-tokens", 40)
    first = cli(*common, "--num-samples", 1, "--prompt", "ROMEO:").stdout
    second = cli(*common, "--num-samples", 1, "--seed", 1338, "--prompt", first + "JULIET:").stdout
    done = cli(*common, "--interactive", input="ROMEO:\nJULIET:\n/fresh\nNURSE \u00fc\n")
    assert done.returncode == 0
    assert done.stdout == first + second.removeprefix(first) + "\n"
    assert "/fresh forgets the text" in done.stderr and "1 of the text's characters: 'ü'" in done.stderr
    done = cli(*common, "--interactive", input="/quit\nROMEO:\n")
    assert done.stdout == ""
    done = cli(*common, "--interactive", "--prompt", "ROMEO:", input="\n")
    assert done.stdout == first.replace("ROMEO:", "ROMEO:\n", 1) + "\n"
    again = cli(*common, "--interactive", input="ROMEO:\n/fresh\nROMEO:\n").stdout
    other = cli(*common, "--num-samples", 1, "--seed", 1338, "--prompt", "ROMEO:").stdout
    assert again == first + other + "\n"


def test_without_pythons_header_the_torch_engine_writes(cli, extension, monkeypatch):
    common = ("part4", "--inference", "--max-new-tokens", 10, "--num-samples", 1)
    expected = cli(*common).stdout
    monkeypatch.setattr(build, "has_python_header", lambda: False)
    done = cli(*common)
    assert done.stdout == expected and "torch engine" in done.stderr.splitlines()[-1]
    message = failed(cli(*common, "--engine", "native"))
    assert "install it (Debian, Ubuntu: apt install python3-dev)" in message


def test_the_tests_options_reach_the_kernels(cli, extension, monkeypatch):
    calls = []

    def recorded(part, *tensors, **options):
        calls.append((part, options["br"], options["bc"], options["causal"], torch.get_num_threads()))
        return right(part, *tensors, **options)

    right = attention_ext.attention
    monkeypatch.setattr(correctness, "attention", recorded)
    assert cli("part3", "-N", 32, "-br", 5, "-bc", 7, "--causal", "--threads", 1).returncode == 0
    assert set(calls) == {("part0", 5, 7, True, 1), ("part3", 5, 7, True, 1)}
    calls.clear()
    assert cli("part4", "-N", 32, "--threads", 2).returncode == 0
    assert set(calls) == {("part0", 256, 256, False, 2), ("part4", 256, 256, False, 2)}
    calls.clear()
    assert cli("part4", "-N", 32, "--threads", 1, "--br", "auto", "-bc", "auto").returncode == 0
    assert set(calls) == {("part0", None, None, False, 1), ("part4", None, None, False, 1)}


def test_sample_i_has_the_seed_plus_i(cli):
    common = ("part0", "--inference", "--max-new-tokens", 30)
    two = cli(*common, "--seed", 7).stdout
    alone = [cli(*common, "--num-samples", 1, "--seed", seed).stdout for seed in (7, 8)]
    assert two == "---------------\n".join(alone)


def test_defaults_are_two_samples_of_the_block_size(cli):
    done = cli("part0", "--inference")
    assert [len(sample) for sample in done.stdout.split("---------------\n")] == [129, 129]


def test_temperature_zero_ignores_the_seed(cli):
    common = ("part0", "--inference", "--temperature", 0, "--max-new-tokens", 20, "--num-samples", 1)
    texts = [cli(*common, "--seed", seed).stdout for seed in (1, 2)]
    assert texts[0] == texts[1] and len(texts[0]) == 21


def test_prompts_from_a_file_and_from_standard_input(cli, tmp_path):
    (tmp_path / "prompt.txt").write_text("Now is\n")
    common = ("part0", "--inference", "--max-new-tokens", 10, "--num-samples", 1)
    outputs = {
        cli(*common, "--prompt-file", tmp_path / "prompt.txt").stdout,
        cli(*common, "--prompt-file", "-", input="Now is\n").stdout,
        cli(*common, "--prompt", "Now is\n").stdout,
    }
    assert len(outputs) == 1 and outputs.pop().startswith("Now is\n")


def test_a_prompt_longer_than_the_block(cli):
    prompt = "O Romeo, Romeo! wherefore art thou Romeo? " * 5
    done = cli("part0", "--inference", "--prompt", prompt, "--max-new-tokens", 3, "--num-samples", 1)
    assert done.returncode == 0 and len(done.stdout) == len(prompt) + 4


WRONG = [
    (["part9"], "No such command 'part9'"),
    (["4Daccess", "more"], "unexpected extra argument"),
    (["part4", "-N", "0"], "'-N': 0 is not in the range"),
    (["part4", "-N", "many"], "'-N': 'many' is not a valid integer"),
    (["part4", "-br", "0"], "0 is not in the range"),
    (["part4", "-bc", "some"], "'some' is not a valid integer"),
    (["part4", "--threads", "0"], "'--threads': 0 is not in the range"),
    (["part4", "--colour"], "No such option"),
    (["part4", "-br", "99999999999999999999"], "99999999999999999999 is not in the range"),
    (["part4", "--prompt", "To be"], "--prompt goes with --inference only"),
    (["part4", "--inference", "--causal"], "--causal does not go with --inference"),
    (["part4", "-N", "10000000"], "N is 10000000; the reference would need"),
    (["part0", "--inference", "-m", "shakes512"], "model 'shakes512' was not found"),
    (
        ["part0", "--inference", "--prompt", "naïve 日本"],
        "not know 3 of the text's characters: 'ï' '日' '本'",
    ),
    (["part0", "--inference", "--prompt", ""], "prompt is empty"),
    (["part0", "--inference", "--prompt-file", "nowhere.txt"], "nowhere.txt: No such file"),
    (["part0", "--inference", "--prompt-file", "."], "Is a directory"),
    (["part0", "--inference", "--prompt", "a", "--prompt-file", "b"], "exclude each other"),
    (["part0", "--inference", "--temperature", "-1"], "'--temperature': -1.0 is not in the range"),
    (["part0", "--inference", "--temperature", "nan"], "temperature is nan"),
    (["part0", "--inference", "--top-k", "0"], "'--top-k': 0 is not in the range"),
    (["part0", "--inference", "--num-samples", "0"], "'--num-samples': 0 is not in the range"),
    (["part0", "--inference", "--top-p", "0"], "'--top-p': 0.0 is not in the range"),
    (["part0", "--inference", "--min-p", "1.5"], "'--min-p': 1.5 is not in the range"),
    (["part0", "--inference", "--repetition-penalty", "inf"], "repetition_penalty is inf"),
    (["part0", "--inference", "--stop", ""], "stop is ['']"),
    (["part0", "--inference", "--seed", str(2**63 - 1)], "seed is 9223372036854775807; the last sample's"),
    (["part0", "--inference", "--engine", "native"], "engine is 'native'; it must be 'torch' with part0"),
    (["part0", "--inference", "--interactive", "--json"], "--json does not go with --interactive"),
    (["part0", "--inference", "--interactive", "--num-samples", "7"], "--num-samples does not go with"),
    (["part0", "--inference", "--interactive", "--prompt-file", "-"], "--prompt-file - does not go with"),
    (["part0", "--json"], "--json goes with --inference only"),
    (["eval", "--corpus", "nowhere.txt"], "nowhere.txt: No such file"),
    (["eval", "-m", "shakes512", "--corpus", __file__], "model 'shakes512' was not found"),
    (["prepare", "--corpus", "nowhere.txt"], "nowhere.txt: No such file"),
    (["train", "shakes512"], "'shakes512' is not one of"),
    (["train", "shakes128", "--corpus", "nowhere.txt"], "nowhere.txt: No such file"),
]


@pytest.mark.parametrize("arguments, message", WRONG, ids=[" ".join(w[0])[:40] for w in WRONG])
def test_what_is_wrong_is_said_in_one_line(cli, arguments, message):
    assert message in failed(cli(*arguments))


def test_a_file_that_is_no_text_is_named(cli, tmp_path):
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    for arguments in (["eval", "--corpus", "binary"], ["part0", "--inference", "--prompt-file", "binary"]):
        assert "binary is not UTF-8 at byte 3" in failed(cli(*arguments))
    done = cli("part0", "--inference", "--prompt-file", "-", input=b"\xff")
    assert "standard input is not UTF-8 at byte 0" in failed(done)


@pytest.mark.parametrize("arguments", [["-N", 16], ["--inference", "--max-new-tokens", 3]], ids=str)
def test_without_a_compiler_part0_works_and_the_others_say_what_to_install(cli, monkeypatch, arguments):
    def no_compiler(*_):
        raise BuildError(build.NO_COMPILER)

    monkeypatch.setattr(build, "load", no_compiler)
    monkeypatch.setattr(build, "load_decoder", no_compiler)
    monkeypatch.setattr(attention_ext, "_operators", {})
    assert cli("part0", *arguments).returncode == 0
    for part in list(PARTS)[1:]:
        done = cli(part, *arguments)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "parts 1 to 4 need a C++ compiler" in done.stderr and "apt install g++" in done.stderr


def test_a_machine_without_a_compiler(process, tmp_path):
    """The same, from outside: nothing on PATH, an empty cache."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'ziglang' else find(name, *a)\n"
    )
    here = str(tmp_path)
    bare = dict(PATH=here, CXX="", TORCH_EXTENSIONS_DIR=here, PYTHONPATH=here)
    out, err = process("part4", "-N", 16, **bare).communicate(timeout=60)
    assert err.startswith("gpt.py: error: parts 1 to 4 need a C++ compiler") and err.count("\n") == 1


ENDLESS = ("part0", "--inference", "-m", "shakes2048", "--max-new-tokens", 1_000_000)


def test_text_is_flushed_as_it_is_made_and_ctrl_c_keeps_it(process):
    running = process(*ENDLESS, "--prompt", "ROMEO:")
    start = os.read(running.stdout.fileno(), 100)  # while it still writes
    running.send_signal(signal.SIGINT)
    rest, errors = running.communicate(timeout=60)
    assert start.startswith(b"ROMEO:"[: len(start)])
    assert running.returncode == 130
    assert "Traceback" not in errors


def test_a_closed_pipe_ends_it_quietly(process):
    running = process(*ENDLESS)
    os.read(running.stdout.fileno(), 10)
    running.stdout.close()
    assert running.wait(timeout=60) == 0
    errors = running.stderr.read()
    assert "Traceback" not in errors and "Broken" not in errors and "Exception" not in errors


def test_prepare_counts(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "data" / "input.txt")
    (tmp_path / "text.txt").write_text(TEXT)
    done = cli("prepare", "--corpus", "text.txt")
    assert done.returncode == 0, done.stderr
    assert "not Tiny Shakespeare" in done.stdout
    assert f"length of dataset in characters: {len(TEXT):,}" in done.stdout
    assert f"vocabulary: {len(set(TEXT))} characters" in done.stdout
    assert (tmp_path / "data" / "input.txt").read_text() == TEXT
    assert cli("eval").returncode == 0  # finds what prepare left


def test_without_a_corpus_train_and_eval_say_how_to_get_one(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "input.txt")
    for command in (["eval"], ["train", "shakes128"]):
        assert "give --corpus FILE or run `gpt.py prepare`" in failed(cli(*command))


def test_a_failed_download_says_what_to_do(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "URL", "http://localhost:1/input.txt")
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "input.txt")
    done = cli("prepare")
    assert done.returncode == 2
    assert "could not be downloaded (ConnectionError); --corpus takes a file" in done.stderr.splitlines()[-1]


def test_train_eval_and_write_with_an_own_checkpoint(cli, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    done = cli("train", "shakes128", "--corpus", "text.txt", "--steps", 2, "--out", "mine")
    assert done.returncode == 0, done.stderr
    assert "python gpt.py part4 --inference -m mine" in done.stdout
    loss = float(re.search(r"best validation loss (\S+) nats", done.stderr)[1])
    done = cli("eval", "-m", "mine", "--corpus", "text.txt")
    nats, bits = map(float, re.search(r"mine: (\S+) nats = (\S+) bits per character", done.stdout).groups())
    assert nats == pytest.approx(loss, abs=1e-3)
    assert bits == pytest.approx(nats * 1.442695, abs=1e-3)
    done = cli("part0", "--inference", "-m", "mine", "--max-new-tokens", 5, "--num-samples", 1)
    assert done.returncode == 0 and len(done.stdout) == 6


def test_eval_is_the_same_through_every_part(cli, extension, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    losses = {cli("eval", "--corpus", "text.txt", "--part", part).stdout for part in PARTS}
    assert len(losses) == 1 and "nats" in losses.pop()


def test_eval_goes_through_the_part(cli, extension, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    parts = set()
    right = attention_ext.attention
    monkeypatch.setattr(attention_ext, "attention", lambda p, *a, **k: parts.add(p) or right(p, *a, **k))
    assert cli("eval", "--corpus", "text.txt", "--part", "part2").returncode == 0
    assert parts == {"part2"}
