"""gpt.py course: the parts pass every stage of their exercises, and an untouched exercise passes none."""

import dataclasses
import json
import os
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch
from support import full

from shakespeare.app.cli import options
from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge import cases, speed
from shakespeare.judge.course import checks, decoder, grade_files
from shakespeare.judge.course.exercises import EXERCISES, STAGES, write
from shakespeare.judge.speed import Figures

SECONDS = 600  # after which a call is endless
INTERPRETED = 10**6  # multiply-adds of a case at most in Triton's interpreter


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(decoder, "SECONDS", SECONDS)


def results_of(tries: list, folder) -> list[checks.Result]:
    """Of exercises and texts, by one checker."""
    files = [(exercise, folder / str(i) / exercise.file) for i, (exercise, _) in enumerate(tries)]
    for (_, text), (_, file) in zip(tries, files):
        file.parent.mkdir()
        file.write_text(text)
    return list(checks.check(files, SECONDS))


@pytest.mark.full
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda each: each.name)
def test_the_solution_passes_all_stages_and_the_untouched_exercise_none(
    exercise, tmp_path, monkeypatch, extension
):
    """At any speed: the last stage asks for no share of the limit. What a simulator runs has no speed."""
    if exercise.file.endswith(".cu") and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if "triton" in exercise.name:
        pytest.importorskip("triton")
        small = [case for case in cases.CASES if case.work < INTERPRETED]
        monkeypatch.setattr(cases, "seeded", lambda *_: small)
    exercise = dataclasses.replace(exercise, share=0.0)
    tries = [(exercise, exercise.text()), (exercise, exercise.solution())]
    untouched, solved = results_of(tries, tmp_path)
    assert not untouched.passed and untouched.failed == "it is untouched"
    untimed = user_kernel.read(tmp_path / "1" / exercise.file).untimed
    assert solved.passed == list(STAGES)[: -1 if untimed else None], solved
    assert solved.failed == untimed and (solved.note or untimed)


@pytest.mark.full
def test_the_last_stage_is_judged_by_the_share_of_the_limit(tmp_path, extension, monkeypatch):
    (fused,) = (each for each in EXERCISES if each.name == "3-fused")
    shares = [0.99 * fused.share / 100, 1.01 * fused.share / 100]
    slow, fast = (Figures({"own": 1.0}, 1e8 * s, 1e11, 0, "a processor", "cpu") for s in shares)
    calling = dataclasses.replace(fast, library="calls a library")
    monkeypatch.setattr(speed, "measure", Mock(side_effect=[slow, fast, calling]))
    file = tmp_path / fused.file
    file.write_text(fused.solution())
    found = list(checks.check(3 * [(fused, file)], SECONDS))
    assert [each.points for each in found] == [4, 5, 4]
    assert [each.share for each in found] == [*map(pytest.approx, shares), None]
    assert found[0].failed.endswith(f"(100 GFLOP/s), a processor; {fused.share:g} % is asked for")
    assert found[2].failed == "calls a library"
    assert decoder.judged(1.0, 0.202, 20.0).startswith("1e+03 ms, 20.2 % of")
    with pytest.raises(decoder.Failed):
        decoder.judged(1.0, 0.198, 20.0)


def test_exercises_for_a_gpu_compile(nvrtc, tmp_path):
    for exercise in (each for each in EXERCISES if each.file.endswith(".cu")):
        (tmp_path / exercise.file).write_text(exercise.solution())
        kernel = user_kernel.loaded(tmp_path / exercise.file)
        assert isinstance(kernel, user_kernel.OnLadder)
        _, resources = kernel.source(32, Dtype.FP32, "sm_80").compile()
        assert resources.registers > 0


@pytest.mark.parametrize("some", [(0, 2, 6), full((1, 3, 4, 5))])
def test_stages_are_lost_one_by_one(tmp_path, extension, some):
    """A mistake costs the stages from its own on; a crash and an endless loop are sentences."""
    named = {each.name: each for each in EXERCISES}
    naive, backward, window = named["1-naive"], named["9-backward"], named["4-window"]
    rows = (
        (naive, "a.keys(head, i)", "Range{0, a.Nk}", 1, "mask"),
        (naive, "ldK = a.k.row_stride", "ldK = a.d", 2, "row_stride"),
        (naive, "float* S) {", "float* S) {\n    *(volatile int*)8 = 0;", 0, "crashed"),
        (window, "a.change(", "if (0) a.change(", 1, "the window is not applied"),
        (window, "a.change(", "St[0] += 0 * K[-j0 * ldK];\na.change(", 2, "no query sees? They hold NaN"),
        (backward, "dq[:, :, i] += dSij @ Kj", "out += 0.5; dq[:, :, i] += dSij @ Kj", 0, "writes into out"),
        (backward, "Nq, d = q.shape[2:]", "import os; os._exit(0)", 0, "ended the program"),
    )
    assert all(old in exercise.solution() for exercise, old, *_ in rows)
    rows = [rows[i] for i in some]
    tries = [(exercise, exercise.solution().replace(old, new)) for exercise, old, new, *_ in rows]
    for (*_, passed, why), result in zip(rows, results_of(tries, tmp_path)):
        assert result.points == passed and why in result.failed, result


def test_other_programs_read_the_points():
    """Also where a file says what XML has no form for."""
    first, second = EXERCISES[:2]
    done = checks.Result(first.name, 10.0, 5, list(STAGES), [0.5] * 5, "", "2 ms", 2.0, 0.1234, 2.5)
    half = checks.Result(second.name, 5, 5, list(STAGES)[:2], [1.0, 1.0], "a\x1b<b>&\x00\ud800", seconds=3.0)
    checked = [(first, done), (second, half)]
    found = json.loads(grade_files.gradescope(checked))
    assert [test["score"] for test in found["tests"]] == [2] * 5 + [1, 1, 0, 0, 0]
    assert [test["status"] for test in found["tests"]] == ["passed"] * 7 + ["failed"] * 3
    assert {test["max_score"] for test in found["tests"][5:]} == {1}
    assert found["tests"][4]["output"] == "2 ms" and found["tests"][7]["output"] == "a?<b>&??"
    entry = {"name": "1-naive, % of the FMA peak", "value": 12.3, "order": "desc"}
    assert found["leaderboard"] == [entry] and found["execution_time"] == 5.5
    full, part = ElementTree.fromstring(grade_files.junit(checked))
    counts = ("name", "tests", "failures", "errors", "skipped", "time")
    assert [full.get(name) for name in counts] == ["1-naive", "5", "0", "0", "0", "2.500"]
    assert [part.get(name) for name in counts] == ["2-blocked", "5", "1", "0", "2", "3.000"]
    assert full[4].find("system-out").text == "2 ms" and part[2].find("failure").get("message") == "a?<b>&??"
    assert [case.get("time") for case in part] == ["1.000"] * 3 + ["0.000"] * 2


def test_weights(tmp_path):
    """A missing exercise that has one gets no points."""
    weights = checks.weighted(["4-flash=10", "1-naive=0", "4-flash=2.5"])
    assert weights == {"4-flash": 2.5, "1-naive": 0}
    for wrong in ("4-flash", "flash=1", "4-flash=-1", "4-flash=nan", "4-flash=1e9", "4-flash=1=2"):
        with pytest.raises(ValueError, match=f"weight is '{wrong}'; it must be NAME=POINTS"):
            checks.weighted([wrong])
    *_, missing = checks.named(tmp_path, weights)
    (result,) = checks.check([missing], SECONDS, weights)
    assert (result.points, result.full_points, result.failed) == (0, 2.5, "there is no 4-flash.cpp")


def test_each_file_has_inputs_of_its_own_and_the_seed_leaves_the_environment(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    asked = [("a", 7), ("b", 7), ("a", 8), ("a", None)]
    seeds = [cases.seed_of(tmp_path / name, secret) for name, secret in asked]
    assert len({*seeds}) == 4 and seeds[3] == 0
    for given, held, seed in ((None, "12", 12), (3, "12", 3), (None, None, None)):
        if held:
            monkeypatch.setenv(options.SECRET_SEED, held)
        assert options.secret_seed(given) == seed and options.SECRET_SEED not in os.environ
    monkeypatch.setenv(options.SECRET_SEED, "x")
    with pytest.raises(ValueError, match=f"{options.SECRET_SEED} is not a whole number"):
        options.secret_seed(None)


def test_the_command(cli, failed, tmp_path, extension):
    assert "must be DIRECTORY, or check" in failed("course")
    assert "must hold exercises" in failed("course", "check")
    for option in (["--json"], ["--weight", "1-naive=1"], ["--gradescope", "x"], ["--seed", 1]):
        assert f"{option[0]} goes with check only" in failed("course", "work", *option)
    cli("course", "work")
    assert "1-naive.cpp exists there" in failed("course", "work")
    with pytest.raises(ValueError, match="is not replaced"):
        write(tmp_path / "work")
    page = (tmp_path / "work" / "1-naive.md").read_text()
    assert "course check 1-naive.cpp" in page and "% of the FMA peak" in page
    files = ("--gradescope", "results.json", "--junit", "junit.xml")
    weights = ("--weight", "1-naive=0", "--weight", "9-backward=20")
    made = cli("course", "check", "work/1-naive.cpp", "--seed", 5, *files, *weights)
    assert "0 of 0 points" in made.stdout  # it is left out of the sum
    assert "next: right without a mask" in made.stdout
    assert json.loads(Path("results.json").read_text())["tests"][0]["status"] == "failed"
    assert ElementTree.parse("junit.xml").getroot()[0].get("name") == "1-naive"
    made = json.loads(cli("course", "check", "work/9-backward.py", "--json", code=1).stdout)
    assert made["points"] == 0 and made["of"] == 5 and made["machine"]["version"]
    assert made["exercises"][0]["failed"]
