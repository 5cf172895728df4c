"""race: the order of turns, the picture, the report of the texts, and Ctrl-C."""

import io
import re
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from shakespeare import attention_ext
from shakespeare.attention_ext import PARTS
from shakespeare.generation.engines import pytorch
from shakespeare.lab import race
from shakespeare.model.tokenizer import CharTokenizer

ROW = re.compile(r"^(\d|-) +(part\d) +(torch|native) +(\d+) +([\d.]+) +([\d,]+) +([\d.]+|-)$", re.M)
LETTERS = CharTokenizer(list("\n abcdefghijklmnopqrstuvwxyz[]/\x1b日"))


class Clockwork:
    """A writer of one text. Each token takes `cost` seconds."""

    engine = SimpleNamespace(name="torch")

    def __init__(self, text, cost):
        self.left, self.cost, self.seconds = LETTERS.encode(text), cost, 0.0
        self.texts = [self]

    @property
    def ended(self):
        return not self.left

    def step(self):
        self.seconds += self.cost
        return [(self, [self.left.pop(0)])]


def runner(part, cost=1.0, text="abcdefghij"):
    return race.Runner(part, Clockwork(text, cost), LETTERS, len(text))


def reported(runners, prompt=""):
    lines = []
    same = race.report(runners, prompt, lambda text="": lines.append(text))
    return same, lines


def drawn(runners, prompt="", width=80, height=24):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(race.columns(runners, prompt, console))
    return console.file.getvalue().splitlines()


def test_a_place_is_given_when_none_can_overtake():
    first, second = runner("part0", 1.0), runner("part4", 3.0)
    for _ in range(10):
        first.turn()
    for turns, places in ((0, {}), (3, {}), (1, {"part0": 1}), (6, {"part0": 1, "part4": 2})):
        for _ in range(turns):
            second.turn()
        assert race.places([second, first]) == places


def test_the_same_texts_are_shown_once_below_who_won():
    runners = [runner("part0", 2.0), runner("part1", 4.0), runner("part4", 1.0)]
    list(race.race(runners))
    same, lines = reported(runners, "a prompt: ")
    assert same
    rows = [ROW.match(line).groups() for line in lines[1:4]]
    assert lines[0].split()[-2:] == ["over", "part0"]
    assert rows == [
        ("1", "part4", "torch", "10", "10.000", "1", "2.00"),
        ("2", "part0", "torch", "10", "20.000", "0", "1.00"),
        ("3", "part1", "torch", "10", "40.000", "0", "0.50"),
    ]
    assert lines[4:] == ["", "a prompt: abcdefghij", "", "identical: all 3 texts of 10 tokens are the same"]


def test_the_picture_fits_the_terminal():
    text = "the words of a line and the next\n" * 30 + "the end"
    for width, height in ((200, 60), (30, 8), (9, 3), (80, 24)):
        runners = [runner(part, cost, text) for cost, part in enumerate(PARTS, 1)]
        assert max(map(len, drawn(runners, "", width, height))) <= width  # before the first token
        list(race.race(runners))
        lines = drawn(runners, "", width, height)
        assert len(lines) <= max(height, 6) and max(map(len, lines)) <= width
    assert lines[0].split("│")[0].split() == ["part0", "torch"]
    assert [column.split()[0] for column in lines[2].split("│")] == ["1st", "2nd", "3rd", "4th", "5th"]
    assert lines[-2].count("the end") == 5 and lines[-1] == ""


SHORT = ("--max-new-tokens", 20)


def test_all_parts_write_the_same_text(cli, extension):
    asked = ("--prompt", "ROMEO:\n", "--seed", 7, *SHORT)
    done = cli("race", *asked)
    assert "shakes128, 20 tokens each, with a KV cache" in done.stderr.splitlines()  # after a build's
    assert ", 1 thread\n" in done.stderr
    rows = ROW.findall(done.stdout)
    engines = {part: "native" if PARTS[part].operator else "torch" for part in PARTS}
    assert {row[1]: row[2] for row in rows} == engines
    assert [row[0] for row in rows] == list("12345") and {row[3] for row in rows} == {"20"}
    assert done.stdout.endswith("\n\nidentical: all 5 texts of 20 tokens are the same\n")
    alone = cli("part4", "--inference", "--num-samples", 1, *asked).stdout
    assert f"\n\n{alone}\n" in done.stdout
    recomputed = cli("race", "--no-kv-cache", *asked)
    assert "without a KV cache" in recomputed.stderr and alone in recomputed.stdout
    assert alone not in cli("race", "part0,part4", "--temperature", 9, *asked).stdout


def test_a_part_that_errs_is_found_and_exits_1(cli, extension, monkeypatch):
    def wrong(part, q, k, v, **options):
        out = right(part, q, k, v, **options)
        return out + (part == "part2" and k.shape[2] > 10) * torch.randn(out.shape)

    right = attention_ext.attention
    monkeypatch.setattr(pytorch, "attention", wrong)
    done = cli("race", "part0,part2,part4", "--engine", "torch", "--prompt", "ROMEO:\n", *SHORT, code=1)
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"not identical: part2 differs from part0 at token \d+", last)
    assert int(last.split()[-1]) > 3
    assert "\npart0:\nROMEO:\n" in done.stdout and "\npart4:\nROMEO:\n" in done.stdout


def test_a_terminal_shows_the_race_as_it_runs(capsys, monkeypatch):
    """After Ctrl-C the results so far stand below the last picture."""

    def interrupted(runners):
        yield from islice(right(runners), 9)
        raise KeyboardInterrupt

    right, lines = race.race, []
    monkeypatch.setattr(race, "race", interrupted)
    monkeypatch.setattr(race, "REDRAW_SECONDS", 0)
    monkeypatch.setenv("TERM", "xterm")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        race.run([runner("part0"), runner("part4", 2.0)], "", lambda text="": lines.append(text))
    shown = capsys.readouterr().err
    assert len(re.findall(r"part0 torch.*│.*part4 torch", shown)) >= 9 and "1 tokens/s" in shown
    assert len(ROW.findall("\n".join(lines))) == 2 and lines[-1].startswith("stopped; identical so far")
