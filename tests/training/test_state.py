"""A run that is stopped or killed goes on as if it had not been."""

import dataclasses
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from support import ROOT, naming, start_python
from training_texts import TINY, words

from shakespeare.model import files
from shakespeare.model.checkpoint import load
from shakespeare.training.run import train
from shakespeare.training.schedule import Schedule, Watcher
from shakespeare.training.state import FILE, load_state, save_state

TEXT = words(4000)
NATIVE = dataclasses.replace(TINY, dropout=0.0)


def lasting(record: dict, *without: str) -> dict:
    """The record without what depends on the clock, and without these entries."""
    timed = ("seconds", "seconds_to_best", "characters_per_second")
    return {name: value for name, value in record.items() if name not in timed + without}


class StoppedAt(Watcher):
    """A watcher that ends the run at each of these steps, once."""

    def __init__(self, *steps: int) -> None:
        super().__init__(self.stop)
        self.left, self.done = set(steps), 0

    def stepped(self, schedule: Schedule) -> None:
        self.done = schedule.done

    def stop(self) -> bool:
        stops = self.done in self.left
        self.left.discard(self.done)
        return stops


def contents(folder: Path, *without: str) -> dict[str, bytes]:
    """The bytes of each file but those of these names."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in without}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict, Path]:
    """The record and the directory of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    return train(TINY, TEXT, out=out), out


@pytest.mark.parametrize("steps", [(1,), (10,), (17, 18, 39)], ids=str)
def test_a_resumed_run_is_the_run_without_an_interruption(tmp_path, whole, steps):
    record = resumed(tmp_path, steps, recipe=TINY)
    for now, then in zip(record["curve"], whole[0]["curve"], strict=True):
        assert now == pytest.approx(then, rel=1e-5)  # PyTorch's sums may differ in their last bits
    for name in ("val_loss", "test_loss"):
        assert record[name] == pytest.approx(whole[0][name], rel=1e-5)
    assert lasting(record, "curve", "val_loss", "test_loss") == lasting(
        whole[0], "curve", "val_loss", "test_loss"
    )
    torch.testing.assert_close(weights(tmp_path), weights(whole[1]), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def native(tmp_path_factory, extension) -> tuple[dict, Path]:
    """The same of a run by this project's kernels alone, whose bits are always the same."""
    out = tmp_path_factory.mktemp("native")
    return train(NATIVE, TEXT, out=out, part="part4"), out


def test_a_resumed_run_in_cpp_is_too(tmp_path, native):
    record = resumed(tmp_path, (17, 18), recipe=NATIVE, part="part4")
    assert record == lasting(native[0])
    assert (tmp_path / "model.safetensors").read_bytes() == (native[1] / "model.safetensors").read_bytes()


def resumed(out: Path, steps: tuple[int, ...], **arguments) -> dict:
    """The lasting record of a run that is stopped after each of these steps."""
    arguments |= dict(text=TEXT, out=out, watcher=StoppedAt(*steps))
    for attempt in range(len(steps)):
        with pytest.raises(KeyboardInterrupt):
            train(**arguments, resume=attempt > 0)
        torch.rand(5)  # as other code may do
    record = train(**arguments, resume=True)
    assert not (out / FILE).exists()
    return lasting(record)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / "model.safetensors")


KILLED = """
import dataclasses
import sys
from pathlib import Path
from training_texts import TINY, words
from shakespeare.training import run
from shakespeare.training.schedule import Watcher
run.STATE_SECONDS, run.STATE_SHARE = 0.0, 1e9  # a state after each step
class Slowly(Watcher):
    def stepped(self, schedule):
        print(schedule.done, flush=True)
recipe = dataclasses.replace(TINY, dropout=0.0)
resume = len(sys.argv) > 2
run.train(recipe, words(4000), out=Path(sys.argv[1]), part="part4", resume=resume, watcher=Slowly())
"""


@pytest.mark.full
def test_a_killed_run_leaves_a_state_to_go_on_from(tmp_path, native):
    out = tmp_path / "out"
    for attempt, steps in enumerate((7, 12)):
        code = ("-c", KILLED, out, *["resume"] * attempt)
        process = start_python(tmp_path, *code, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        with process:
            for _ in range(steps):
                assert process.stdout.readline(), process.stderr.read()
            time.sleep(0.001 * attempt)  # at another moment of the step
            os.kill(process.pid, signal.SIGKILL)
    record = train(NATIVE, TEXT, out=out, part="part4", resume=True)
    assert lasting(record) == lasting(native[0])
    assert (out / "model.safetensors").read_bytes() == (native[1] / "model.safetensors").read_bytes()


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"a": np.full(1000, value)}


def test_a_failed_write_leaves_the_old_state(tmp_path):
    save_state(tmp_path, arrays(1.0), {"recipe": {}}, {"n": 1})
    full = Mock(side_effect=OSError(28, "No space left on device"))
    for call in ("fsync", "replace"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files.os, call, full)
            with pytest.raises(OSError, match="No space left"):
                save_state(tmp_path, arrays(2.0), {"recipe": {}}, {"n": 2})
        loaded, progress = load_state(tmp_path, {"recipe": {}})
        assert progress == {"n": 1} and np.array_equal(loaded["a"], arrays(1.0)["a"])
        assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_damaged_states_are_refused_in_one_sentence(tmp_path):
    run_ = {"recipe": {"seed": 1}}
    save_state(tmp_path, arrays(1.0), run_, {})
    whole_file = (tmp_path / FILE).read_bytes()
    for length in (0, 1, 7, 8, 50, 200, len(whole_file) - 1):
        (tmp_path / FILE).write_bytes(whole_file[:length])
        with pytest.raises(ValueError, match=r"resume.safetensors is damaged \("):
            load_state(tmp_path, run_)
    for about, message in (
        ("", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": 1, "run": 3, "progress": {}}', "is damaged"),
        ("[" * 10_000, "is damaged"),
        ('{"format": 99, "run": {}, "progress": {}}', "is of format 99; it must be 1"),
    ):
        safetensors.numpy.save_file(arrays(1.0), tmp_path / FILE, {"state": about})
        with pytest.raises(ValueError, match=message):
            load_state(tmp_path, run_)


def test_a_state_with_other_weights_or_without_numbers_is_refused(tmp_path):
    arguments = dict(recipe=TINY, text=TEXT, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(**arguments, watcher=StoppedAt(12))
    about = json.loads(safetensors.safe_open(tmp_path / FILE, "pt").metadata()["state"])
    run_, progress, record = about["run"], about["progress"], about["progress"]["record"]
    stored = safetensors.numpy.load_file(tmp_path / FILE)
    best = next(name for name in stored if name.startswith("best."))
    before = contents(tmp_path, FILE)
    for state, changes in (
        ({name: t for name, t in stored.items() if not name.startswith("best.")}, {}),
        (stored | {best: np.zeros(1)}, {}),
        (stored, {"best_loss": "1"}),
        (stored, {"best_loss": math.nan}),
        (stored, {"losses": ["1", 1]}),
        (stored, {"evaluated_at": None}),
        (stored, {"schedule": progress["schedule"] | {"done": "12"}}),
        (stored, {"record": record | {"curve": [[10, 2.5, "2.5"]]}}),
        (stored, {"record": record | {"curve": {}}}),
        (stored, {"record": record | {"val_loss": "2"}}),
        (stored, {"record": [record]}),
    ):
        save_state(tmp_path, state, run_, progress | changes)
        with naming(changes), pytest.raises(ValueError, match=r"resume.safetensors is damaged \("):
            train(**arguments, resume=True)
        assert contents(tmp_path, FILE) == before


def test_two_writers_of_a_path_have_files_of_their_own(tmp_path):
    path = tmp_path / "file"
    with files.replacing(path) as slow:
        slow.write_bytes(b"slow")
        files.write_file(path, b"quick")
        assert slow.read_bytes() == b"slow" and path.read_bytes() == b"quick"
    assert path.read_bytes() == b"slow" and [*tmp_path.iterdir()] == [path]


def test_a_state_of_another_run_is_refused_and_a_new_run_removes_it(tmp_path):
    arguments = dict(recipe=TINY, text=TEXT, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(**arguments, watcher=StoppedAt(3))  # before the first evaluation
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["best_step"] == 3 and record["curve"] == []
    load(str(tmp_path))
    before = contents(tmp_path)
    for changed, message in (
        (dict(text=TEXT + "a"), "its (characters|corpus_sha256) "),
        (dict(recipe=dataclasses.replace(TINY, muon_lr=0.5)), "its muon_lr was 0.02"),
        (dict(recipe=dataclasses.replace(TINY, steps=41)), "its steps was 40"),
        (dict(about={"part": "part4"}), "its part was None"),
    ):
        with pytest.raises(ValueError, match=f"is of another run: {message}"):
            train(**arguments | changed, resume=True)
    assert contents(tmp_path) == before
    with pytest.raises(SystemExit):
        train(TINY, words(4000, seed=1), out=tmp_path, watcher=Watcher(sys.exit))
    assert not (tmp_path / FILE).exists()
