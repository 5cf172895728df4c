"""--inference: what it writes to stdout and stderr, and that each option takes effect."""

import json
import re

import click
import pytest
import tiny
from support import ROOT, naming
from training_texts import words

from shakespeare.app.cli import options
from shakespeare.attention_ext import PARTS
from shakespeare.generation.sampling import SETTINGS, Sampling
from shakespeare.model.checkpoint import DRAFT, save
from shakespeare.model.tokenizer import CharTokenizer


def test_inference_notices_go_to_stderr_and_text_to_stdout(cli, part, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = cli(part, "--inference", "--prompt", "ROMEO:", "--max-new-tokens", 40, "--num-samples", 3)
    notices = done.stderr.splitlines()
    assert notices[0] == "Running inference using dnn model shakes128"
    assert notices[1] == "number of parameters: 0.80M"
    assert notices[2] == "Loading meta from data/shakespeare_char/meta.json..."
    assert notices[3].startswith("SIMD: " if PARTS[part].operator else "Attention by matmul")
    samples = done.stdout.split("\n---------------\n")
    assert len(samples) == 3 and len(set(samples)) == 3
    assert [len(sample) for sample in samples] == [46, 46, 47]  # the last one has the final newline
    assert all(sample.startswith("ROMEO:") for sample in samples)


def test_the_samplings_options_reach_it():
    settings = dict(temperature=0.5, top_k=3, top_p=0.4, min_p=0.1, typical_p=0.6, repetition_penalty=2.0)
    settings |= dict(presence_penalty=-1.0, frequency_penalty=1.5)
    assert settings.keys() == SETTINGS.keys()
    words = [str(word) for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]
    command = click.command("sampled")(options.sampling(lambda sampling: sampling))
    assert command.main(words, standalone_mode=False) == Sampling(**settings)


def test_json_has_an_object_for_each_sample(cli, extension):
    common = [*"part4 --inference --prompt ROMEO: --max-new-tokens 50 --threads 1 --seed 4".split()]
    done = cli(*common, "--json", "--stop", "the")
    first, second = map(json.loads, done.stdout.splitlines())
    names = "model part engine device simd threads seed prompt text prompt_tokens new_tokens prefill_seconds"
    assert list(first) == f"{names} decode_seconds tokens_per_second finish_reason".split()
    expected = dict(model="shakes128", part="part4", engine="native", simd="portable", threads=1, seed=4)
    expected |= dict(prompt="ROMEO:", prompt_tokens=6)
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
    drawn = cli(*common, "--seed", -1, "--num-samples", 1, "--json")
    assert drawn.stderr.splitlines()[0] == f"--seed {json.loads(drawn.stdout)['seed']}"
    part0 = json.loads(cli("part0", *common[1:], "--json").stdout.splitlines()[0])
    assert part0["engine"] == "torch" and part0["simd"] is None


def test_writing_in_turns(cli, extension):
    common = ("part4", "--inference", "--max-new-tokens", 40)
    first = cli(*common, "--num-samples", 1, "--prompt", "ROMEO:").stdout
    second = cli(*common, "--num-samples", 1, "--seed", 1338, "--prompt", first + "JULIET:").stdout
    done = cli(*common, "--interactive", input="ROMEO:\nJULIET:\n/fresh\nNURSE \u00fc\n")
    assert done.stdout == first + second.removeprefix(first) + "\n"
    assert "/fresh forgets the text" in done.stderr and "1 of the text's characters: 'ü'" in done.stderr
    assert cli(*common, "--interactive", input="/quit\nROMEO:\n").stdout == ""
    done = cli(*common, "--interactive", "--prompt", "ROMEO:", input="\n")
    assert done.stdout == first.replace("ROMEO:", "ROMEO:\n", 1) + "\n"
    again = cli(*common, "--interactive", input="ROMEO:\n/fresh\nROMEO:\n").stdout
    other = cli(*common, "--num-samples", 1, "--seed", 1338, "--prompt", "ROMEO:").stdout
    assert again == first + other + "\n"


def test_an_eos_token_ends_a_sample_and_an_empty_prompt_is_a_line_end(cli, tmp_path, extension):
    save(tmp_path, tiny.gpt(eos_token_id=(3,)), tiny.VOCABULARY, {})
    common = ("part4", "--inference", "-m", tmp_path, "--max-new-tokens", 40, "--json", "--prompt", "")
    whole, cut = (cli(*common, *more).stdout.splitlines() for more in (["--ignore-eos"], []))
    assert "b" in whole[0] + whole[1]
    for first, second in zip(map(json.loads, whole), map(json.loads, cut)):
        assert second["text"] == first["text"].partition("b")[0] and first["prompt"] == "\n"


def test_text_that_stdout_cannot_encode_is_escaped(process, extension, tmp_path):
    save(tmp_path / "model", tiny.gpt(vocab_size=3), CharTokenizer("–日\n"), {})
    written = ("--inference", "-m", "model", "--prompt", "–日", "--max_new_tokens", 0, "--num_samples", 1)
    for encoding, shown, as_json in (("latin-1", r"\u2013\u65e5", []), ("cp1252", "", ["--json"])):
        with naming(encoding):
            done = process(*written, *as_json, PYTHONIOENCODING=encoding)
            out, errors = done.stdout.buffer.read().decode(encoding), done.stderr.read()
            assert done.wait() == 0, errors
            assert json.loads(out)["prompt"] == "–日" if as_json else out == f"{shown}\n"


def test_a_stop_string_that_the_model_cannot_write_and_nanogpt_s_file_are_warned_of(cli, extension):
    for option, said in (
        (["--stop", r"\n"], r"--stop \\n ends no text: .*; in a shell \$'\\n' is a line end$"),
        (["--stop", "日"], r"--stop 日 ends no text: .*'日'$"),
        (["--prompt", "FILE:p q"], r"--prompt is taken as it is; --prompt-file 'p q' continues a file"),
    ):
        with naming(option):
            done = cli("--inference", *option, "--max-new-tokens", 1)
            assert re.search(said, done.stderr, re.M)
    assert "warning" not in cli("--inference", "--stop", "\n", "--max-new-tokens", 1).stderr


def test_prompts_of_files_and_windows_editors_give_the_same_text(cli, extension, tmp_path):
    plain, marked, old = (f"{mark}ROMEO:{end}O" for mark, end in (("", "\n"), ("\ufeff", "\r\n"), ("", "\r")))
    (tmp_path / "prompt.txt").write_bytes(marked.encode())
    common = ("part4", "--inference", "--max-new-tokens", 30)
    expected = cli(*common, "--prompt", plain).stdout
    assert expected.startswith(plain)
    given = ("--prompt", marked), ("--prompt", old), ("--prompt-file", "prompt.txt"), ("--prompt-file", "-")
    for more in given:
        assert cli(*common, *more, input=plain).stdout == expected, more
    stopped = [cli(*common, "--prompt", plain, "--stop", end).stdout for end in ("\n", "\r\n")]
    assert stopped[0] == stopped[1] != expected
    turns = cli(*common, "--interactive", input=b"R\xf6\n" + plain.encode())  # the next line is answered
    assert turns.stdout == cli(*common, "--interactive", input=marked).stdout and "not know" in turns.stderr


def test_a_draft_is_made_and_changes_no_text(cli, extension, tmp_path):
    tiny_model = tmp_path / "mine"
    save(tiny_model, tiny.gpt(), tiny.VOCABULARY, {})
    (tmp_path / "text.txt").write_text(words(3000))
    write = ("part4", "--inference", "-m", "mine", "--num-samples", 2, "--max-new-tokens", 30)
    expected = cli(*write).stdout
    for more in (("--corpus", "text.txt"), ()):
        done = cli("draft", "-m", "mine", *more)
        assert re.fullmatch(r"wrote mine/draft.safetensors: [\d,]+ bytes, \d+\.\d s\n", done.stdout)
        assert DRAFT in (tiny_model / "SHA256SUMS").read_text()
        for draft in ("auto", "off", "mine"):
            assert cli(*write, "--draft", draft).stdout == expected
    done = cli(*write, "--draft", "shakes128", code=2)
    assert done.stderr.endswith("it is for another vocabulary\n")
