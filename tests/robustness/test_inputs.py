"""Prompts of every size and script, and every option of every command at its bounds and beyond."""

import math
from pathlib import Path

import click
import pytest
import tiny
from training_texts import words

from shakespeare.app import cli as commands
from shakespeare.app.cli.options import Numbers, TileSize
from shakespeare.lab import machine
from shakespeare.model.checkpoint import save
from shakespeare.model.tokenizer import CharTokenizer

pytestmark = pytest.mark.full

BLOCK = 16
SEPARATOR = "\n---------------\n"
# A character of each Unicode plane, and characters that terminals or decoders treat specially.
PLANES = [chr(plane << 16 | 0x61) for plane in range(17)]
ODD = ["\n", "\r", "\x00", "\x1b", "\u0301", "\u2028", "\u202e", "\ufeff", "\ufffd", "\uffff"]


@pytest.fixture
def model(tmp_path) -> Path:
    gpt = tiny.gpt(vocab_size=len(PLANES + ODD))
    save(tmp_path / "model", gpt, CharTokenizer(PLANES + ODD), {})
    return tmp_path / "model"


@pytest.fixture
def written(cli, model):
    """Return a function that writes text after a prompt on standard input; it returns what is printed."""
    common = ("part4", "--inference", "-m", model, "--max-new-tokens", 3, "--prompt-file", "-")
    return lambda prompt, *arguments: cli(*common, *arguments, input=prompt).stdout


@pytest.fixture(params=["native", "torch"])
def engine(request, extension) -> str:
    return request.param


def test_prompts_of_every_size_and_plane(written, engine):
    sizes = ["a" * n for n in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 1000)]
    for prompt in (*PLANES, *ODD, "".join(PLANES + ODD), *sizes):
        text = written(prompt, "--engine", engine, "--num-samples", 1)
        assert text.startswith(prompt) and len(text) == len(prompt) + 4, prompt


def test_a_prompt_of_ten_million_characters(written, engine, full):
    prompt = "a" * (10_000_000 if full else 1_000_000)
    texts = written(prompt, "--engine", engine)[:-1].split(SEPARATOR)
    window = written(prompt[:BLOCK], "--engine", engine)[:-1].split(SEPARATOR)
    assert [text[len(prompt) :] for text in texts] == [text[BLOCK:] for text in window]
    assert len(texts) == 2 and all(text.startswith(prompt) for text in texts)


# Arguments that make each command quick. The option under test comes after them and so counts. Other tests
# try the other commands.
WRITES = ("--inference", "-m", "model", "--max-new-tokens", 1, "--num-samples", 1, "--prompt", "a")
COMMANDS = {
    "part0": [("-N", 8), WRITES],
    "part4": [("-N", 8), WRITES],
    "eval": [("-m", "model", "--corpus", "text.txt")],
    "race": [("part0,part4", "-m", "model", "--max-new-tokens", 1, "--prompt", "a")],
    "bench": [
        ("part4", "-N", 8, "-d", 8, "-r", 2, "--min-time", 0),
        ("part4", "-N", 8, "-d", 8, "--dry-run"),
        ("--tune", "-N", 8, "-d", 8, "--budget", 0.01),
    ],
    "explain": [("part4", "-N", 8, "-d", 8)],
    "profile": [
        ("part4", "-m", "model", "--prompt-tokens", 1, "--tokens", 1),
        ("part4", "-m", "model", "--train", "--batch", 1),
    ],
    "prepare": [()],
    "train": [("mine", "--corpus", "own.txt", "--steps", 1, "--part", "part0", "--overwrite")],
}
NO_NUMBERS = ("", " ", "text", "nan", "inf", "-inf", "1e3", "1.5", "0x10", "\u0663", "--", "1,", "\x1b[31m")
LISTS = ("2,1", "1:5", "5:1", "1:9+0", "1:9*1", "1:999999999", "1:2:3", "1,,2", ":", "\xb2", "auto")
TEXTS = ("", " ", "\n", "text", "a" * 5000, "\u65e5", "\udcff", "\x1b[31m", "-", ".", "/")
# Tokens, samples and steps have no upper bound. Large values would run for days.
ENDLESS = {"--max-new-tokens", "--num-samples", "--steps"}
LONG = {"1024", "1:5", "1:999999999"}  # numbers of threads that take long
# Only the sizes of commands that measure are tried. A dry run parses the other options in the same way.
SIZES = {"-N", "-d", "-br", "-bc", "--queries"}


def values(option: click.Parameter) -> list[str]:
    """Values for an option: at its bounds, beyond them, and of other types."""
    kind = option.type
    if isinstance(kind, click.FloatRange):
        low, high = kind.min, math.inf if kind.max is None else kind.max
        beside = [math.nextafter(low, -1), math.nextafter(low, 1), math.nextafter(high, math.inf)]
        return [*map(str, [low, high, *beside, 5e-324, 1e308, -1e308, "1e400"]), *NO_NUMBERS]
    if isinstance(kind, click.IntRange | TileSize | Numbers):
        low = kind.min if isinstance(kind, click.IntRange) else 1
        high = {TileSize: 2**31 - 1, Numbers: getattr(kind, "maximum", None)}.get(type(kind)) or kind.max
        numbers = [low - 1, low, low + 1, -(10**30)]
        if high is not None:
            numbers += [high, high + 1, 2**63, 10**30]
        elif option.opts[0] not in ENDLESS:
            numbers += [2**31, 2**63, 10**30]
        lists = LISTS if isinstance(kind, Numbers) else ()
        return [*map(str, numbers), *NO_NUMBERS, *lists]
    if isinstance(kind, click.Choice):
        return [*kind.choices, "", "text", "\x1b[31m"]
    return [] if getattr(option, "is_flag", False) else list(TEXTS)


CASES = [(name, base) for name, bases in COMMANDS.items() for base in bases]


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("name, base", CASES, ids=[f"{n} {' '.join(map(str, b[:2]))}" for n, b in CASES])
@pytest.mark.usefixtures("extension", "model")
def test_options_at_and_beyond_their_bounds(cli, tmp_path, monkeypatch, threads, name, base, full):
    """Each value is accepted, or refused in one line. Options of another mode are refused."""
    monkeypatch.setattr(machine, "fma_peak", lambda simd="auto", threads=1: 1e11)
    monkeypatch.setattr(machine, "read_bandwidth", lambda size, threads=1: 1e10)
    monkeypatch.setattr("shakespeare.model.corpus.INPUT", tmp_path / "data" / "input.txt")
    (tmp_path / "text.txt").write_text("aaa\n" * 50)
    (tmp_path / "own.txt").write_text(words(2000))
    measures = name in ("bench", "explain") and "--dry-run" not in base
    outcomes = set()
    for option in commands.command_of(name).params:
        if not isinstance(option, click.Option):
            continue
        flag = option.opts[0]
        for value in values(option):
            if option.name == "threads" and value in LONG:
                continue
            if flag == "--out" and value == "/":  # which root could write to
                continue
            if measures and not (flag in SIZES and value.isdecimal()):
                continue
            if name == "explain" and not full and not (flag == "-N" and int(value) > 2**30):  # takes seconds
                continue
            threads(1)
            done = cli(name, *base, flag, value, code=None)
            if done.returncode:
                assert done.returncode == 2, (flag, value, done)
                assert done.stderr.splitlines()[-1].startswith("gpt.py: error: "), (flag, value, done)
                assert "Traceback" not in done.stderr
            outcomes.add(done.returncode)
    assert 2 in outcomes
