"""Results that try saves: their places, their ranking, and lines that are refused."""

import csv
import json
from pathlib import Path
from typing import Any

from planted import TORCH

from shakespeare.judge import ranking
from shakespeare.judge.speed import Figures, Size
from shakespeare.judge.verdict import Verdict


def keep(into: Path, ms: float, text: str = "", N: int = 64, cpu: str = "a CPU", library: str = "") -> str:
    mine = into.parent / "mine.cpp"
    mine.write_text(text)
    figures = Figures({"own": ms}, 1e6, 1e9, 0, cpu, "cpu")
    return ranking.keep(mine, Verdict(library=library, figures=figures), Size(N), into)


def test_a_result_is_placed_among_those_of_the_same_call(tmp_path):
    file = tmp_path / "class.jsonl"
    given: list[Any] = [
        ({"ms": 2.0}, "the best of 1 on a CPU: saved"),
        ({"ms": 9.0, "N": 128}, "the best of 1 on a CPU: saved"),
        ({"ms": 9.0, "cpu": "another"}, "the best of 1 on another: saved"),
        ({"ms": 0.5, "library": "calls a library"}, "saved, without a place: calls a library"),
        ({"ms": 1.0}, "the best of 2 on a CPU: saved"),
        ({"ms": 1.5}, "number 2 of 3 on a CPU: saved"),
    ]
    for asked, said in given:
        assert keep(file, **asked) == said
        file.write_text(file.read_text().rstrip("\n"))  # as an editor may leave it
    file.write_text(file.read_text().replace(', "dtype": "fp32"', ""))  # as files were before
    assert [entry["ms"] for entry in ranking.entries(file)] == [asked["ms"] for asked, _ in given]


def test_the_ranking_of_a_folder(tmp_path):
    """By call; the best of a text in a file; what calls a library has no rank."""
    ada, bob = tmp_path / "ada.jsonl", tmp_path / "bob.jsonl"
    for ms, N in ((3.0, 64), (2.0, 64), (8.0, 1024)):
        keep(ada, ms, N=N)
    keep(bob, 4.0)
    keep(bob, 0.5, text="another", library="calls a library")
    rows = ranking.ranking(ranking.entries(tmp_path))
    assert [(e["rank"], e["over_best"], e["of"], e["ms"]) for e in rows] == [
        *((1, 1, "ada", 2.0), (2, 0.5, "bob", 4.0), (None, None, "bob", 0.5)),
        (1, 1, "ada", 8.0),
    ]
    lines = ranking.text(rows, "md").splitlines()
    assert lines[0] == "a CPU: 4 heads of N = 64, d = 32, no mask, 1 thread"
    assert lines[5].startswith("| 2 | mine.cpp | bob | 4 | 25 | 0.5 | 20")
    assert lines[6].startswith("| calls a library |") and "N = 1024" in lines[8]
    read = csv.DictReader(ranking.text(rows, "csv").splitlines())
    assert [row["of"] for row in read] == [e["of"] for e in rows]
    assert json.loads(ranking.text(rows, "json"))["rows"] == rows


def test_other_lines_are_refused(failed, cli, tmp_path):
    file = tmp_path / "class.jsonl"
    keep(file, 2.0)
    line = file.read_text()
    good = json.loads(line)
    wrong = {"ms": float("nan"), "N": -1, "causal": 1, "file": "a\x1b[2J", "cpu": 1}
    for text, why in (
        ("{", "Expecting property name"),
        ("[1]", "it lacks file"),
        ("[" * 100_000, "recursion"),
        (json.dumps({name: value for name, value in good.items() if name != "ms"}), "it lacks ms"),
        (json.dumps(good | {"right": False}), "right is False"),
        *((json.dumps(good | {name: value}), f"{name} is ") for name, value in wrong.items()),
    ):
        file.write_text(f"{line}\n{text}\n")
        said = failed("bench", "--load", file)
        assert "class.jsonl, line 3, is not one of try --save: " in said and why in said, said
    file.write_text(line)
    assert "--compare does not go with a ranking" in failed("bench", "--load", file, "--compare", file)
    assert "| 1 | mine.cpp | class |" in cli("bench", "--load", tmp_path).stdout


def test_try_saves(failed, cli, extension, tmp_path):
    Path("mine.py").write_text(TORCH)
    for given, said in (
        (["a.json"], "save is 'a.json'; it must end with .jsonl"),
        (["a.jsonl", "--inference"], "--save does not go with --inference"),
    ):
        assert said in failed("try", "mine.py", "--save", *given)
    call = ("try", "mine.py", "-N", 64, "--heads", 1, "--seconds", 600)
    assert "the best of 1 on " in cli(*call, "--seed", 3, "--save", "a.jsonl").stdout
    (entry,) = ranking.entries(Path("a.jsonl"))
    assert (entry["file"], entry["N"], entry["heads"]) == ("mine.py", 64, 1)
