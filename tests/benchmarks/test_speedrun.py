"""The speedrun trains by its rules, prints its tables, and its records are complete, compared and tested."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import finished, table
from training_texts import words

from benchmarks import speedrun
from shakespeare.lab.eval import Loss

TEXT = words(8000)
RECIPE = "--n-layer 1 --n-head 2 --n-embd 16 --batch-chars 128 --block-size 16"
LOSSES = [1.45, 1.452, 1.446, 1.4699, 1.451]  # of seeds 1 to 5


class Bench:
    """A folder with a text, what was learned and evaluated, and the loss of other seeds than 1 to 5."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.learned: list[tuple] = []
        self.evaluated: list[tuple] = []
        self.other = 1.456
        (folder / "text.txt").write_text(TEXT)

    def run(self, *words: object):
        text = () if "--table" in words else ("--corpus", self.folder / "text.txt")
        return CliRunner().invoke(speedrun.main, [*map(str, (*text, *words))])

    def saved(self) -> Path:
        file = self.folder / "speedrun-mine.json"
        done = self.run("--threads", 2, "--seeds", "1:5+1", "--steps", 20, "--save", file)
        assert done.exit_code == 0, done.output
        return file


@pytest.fixture
def bench(tmp_path: Path, monkeypatch) -> Bench:
    """Training is replaced by a record of it, and the loss by the seed's of LOSSES."""
    bench = Bench(tmp_path)

    def train(seed, steps, arguments, out, **environment):
        file = arguments[arguments.index("--corpus") + 1]
        bench.learned.append((seed, steps, Path(file).read_text(), bool(environment)))
        recipe = {"block_size": 16, "batch_chars": 128, "seed": seed}
        return 2.0 + seed, {"recipe": recipe, "steps": steps, "seconds": 1.0, "curve": [[steps, 1.2, None]]}

    def held_out_loss(out, text, part, between, apart):
        assert apart == 256
        seed = bench.learned[-1][0]
        bench.evaluated.append((seed, text, between))
        return Loss(LOSSES[seed - 1] if seed <= len(LOSSES) else bench.other, 100, 16)

    monkeypatch.setattr(speedrun, "train", train)
    monkeypatch.setattr(speedrun, "held_out_loss", held_out_loss)
    monkeypatch.setattr(speedrun, "drawn_seed", lambda _: 77)
    return bench


def test_the_last_tenth_is_read_once_when_a_run_has_ended(bench):
    """No run learns it, the cold and the untimed one are not evaluated, and another choice never reads it."""
    bench.saved()
    cold, warm, *runs = bench.learned
    assert cold == (1, 20, TEXT[:7200], True) and warm == (0, 1, TEXT[:7200], False)
    assert runs == [(seed, 20, TEXT[:7200], False) for seed in range(1, 6)]
    assert bench.evaluated == [(seed, TEXT, (0.9, 1.0)) for seed in range(1, 6)]
    bench.learned.clear()
    bench.evaluated.clear()
    bench.run("--inner", "--seeds", "1,2")
    assert {text for _, _, text, _ in bench.learned} == {TEXT[: int(0.855 * 8000)]}
    assert bench.evaluated == [(seed, TEXT, speedrun.INNER) for seed in (1, 2)]


def test_a_record_is_complete_and_its_row_is_in_the_table(bench):
    file = bench.saved()
    record = json.loads(file.read_text())
    assert record["class"] == "two CPU cores" and record["cold"] == 3.0
    assert record["p_value"] == pytest.approx(speedrun.p_value(LOSSES, 1.4697))
    (row,) = table(bench.run("--table", bench.folder).output)[1:]
    assert row[0] == "two CPU cores" and row[3:6] == ["5", "5.0 (3.0 to 7.0)", "3.0"]
    assert row[8] == "1.4510 (1.4460 to 1.4699)"
    for names, part in ((speedrun.FIELDS, record), (speedrun.FACTS, record["machine"])):
        for name in names:
            value = part.pop(name)
            file.write_text(json.dumps(record))
            with pytest.raises(ValueError, match=f"speedrun-mine.json has (no '{name}'|format None|0 seeds)"):
                speedrun.read_record(file)
            part[name] = value
    for change, wrong in (
        ({"runs": record["runs"][:4]}, "has 4 seeds; it must have at least 5"),
        ({"runs": record["runs"][:1] * 5}, "has 1 seed; it must have at least 5"),
        ({"runs": [*record["runs"][:4], record["runs"][4] | {"curve": [[10, 1.3, None]]}]}, "has a curve"),
        (
            {"runs": [each | {"loss": each["loss"] + 0.03} for each in record["runs"]]},
            "has losses up to 1.49",
        ),
        ({"target": 1.6}, "has target 1.6; it must be 1.4697"),
    ):
        file.write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=wrong):
            speedrun.read_record(file)
    alone = bench.run("--threads", 2, "--seeds", 1, "--steps", 20, "--save", bench.folder / "other.json")
    assert (
        "has 1 seed; it must have at least 5" in alone.output and not (bench.folder / "other.json").exists()
    )
    file.write_text("[]")
    assert "has format None; it must be 2" in bench.run("--check", file).output
    file.write_text("# A record")
    assert f"{file} is not a record that --save wrote: " in bench.run("--check", file).output
    assert "nowhere: No such file" in bench.run("--corpus", "nowhere").output
    assert "'nowhere' does not exist" in bench.run("--table", "nowhere").output


def test_check_runs_a_records_recipe_on_a_new_seed_and_compares(bench):
    file = bench.saved()
    bench.learned.clear()
    done = bench.run("--check", file)
    assert bench.learned[1][:2] == (77, 20)
    assert "5.0 s from Enter" in done.output and "loss up to 1.4919" in done.output
    assert done.exit_code == 0
    bench.other = 1.6
    assert bench.run("--check", file, "--seeds", 78).exit_code == 1  # a loss that the record's seeds exclude
    assert "--steps does not go with --check" in bench.run("--check", file, "--steps", 3).output


def test_the_p_value_is_students_and_one_sided():
    """By the table of Student's t: 4 degrees of freedom, 3.747 leaves 1 %, and 2.132 leaves 5 %."""
    mean, spread = statistics.mean(LOSSES), statistics.stdev(LOSSES)
    for t, p in ((3.747, 0.01), (2.132, 0.05), (0.0, 0.5), (-2.132, 0.95)):
        assert speedrun.p_value(LOSSES, mean + t * spread / 5**0.5) == pytest.approx(p, rel=1e-3)
    assert speedrun.reached([1.469, 1.4], 1.4697) and not speedrun.reached([1.4697], 1.4697)
    assert speedrun.reached([1.45, 1.451, 1.449, 1.45, 1.47], 1.4697) and not speedrun.reached(
        [1.4, 1.5], 1.4697
    )
    assert speedrun.limit_of_next(LOSSES) == pytest.approx(mean + 3.747 * spread * 1.2**0.5, rel=1e-4)


def test_classes():
    def gpu(name: str, memory: int) -> dict:
        return {"gpu": {"name": name, "memory": memory * 2**30}}

    assert [speedrun.class_of({}, "cpu", threads) for threads in (1, 2, 3)] == [
        *speedrun.CLASSES[:1] * 2,
        None,
    ]
    assert speedrun.class_of(gpu("NVIDIA H200", 141), "cuda", 16) == speedrun.CLASSES[2]
    assert speedrun.class_of(gpu("NVIDIA GeForce RTX 3060", 12), "cuda", 16) == speedrun.CLASSES[1]
    assert speedrun.class_of(gpu("NVIDIA A100", 40), "cuda", 16) is None


@pytest.mark.full
@pytest.mark.usefixtures("extension")
def test_speedrun(tmp_path: Path):
    corpus = tmp_path / "text.txt"
    corpus.write_text(TEXT)
    command = [sys.executable, "-m", "benchmarks.speedrun", "--corpus", corpus, "--seeds", "3,5"]
    done = finished(*command, "--target", "4", "--steps", "20", *RECIPE.split())
    _, *rows = table(done.stdout)
    assert [(row[0], *row[3:5], row[6]) for row in rows] == [(seed, "20", "2,560", "") for seed in "35"]
    assert done.returncode == 0, done.stderr
    failed = finished(*command, "--n-embd", "25", "--n-head", "3")
    assert failed.returncode == 2 and "seed 0: gpt.py: error: n_embd is 25" in failed.stderr
