"""The picture of a run: its losses and its samples, which change nothing in the run."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console
from rich.live import Live
from support import full
from training_texts import TINY, words

from shakespeare.app.cli import train_display as display
from shakespeare.app.cli.train_display import LOSS_ROWS, Picture, losses, picture
from shakespeare.training.run import train
from shakespeare.training.schedule import Schedule

CURVE = [[10, 3.0, 2.9], [20, 2.0, 2.1], [40, 1.0, 1.5]]


def test_the_picture_has_the_figures_the_losses_and_the_sample():
    run = Schedule(dataclasses.replace(TINY, steps=80))
    run.done, run.seconds, run.curve = 40, 75.0, CURVE
    console = Console(file=io.StringIO(), width=100, height=40)
    console.print(picture("mine", run, "to [b]be\x1b[31m or\tnot", console))
    text = console.file.getvalue()
    head, bar, *_ = text.splitlines()
    assert head.rstrip() == "mine  step 40 of 80  68 characters/s  learning rate 55%  0:01:15 left"
    assert bar.rstrip() == 34 * "━"
    assert re.search(r"^ *40 +1.0000 +1.5000 +█", text, re.M) and "to [b]be?[31m or not" in text
    many = losses([[step, None, 9 - step / 10] for step in range(81)], 60)
    steps = [int(step) for step in many.columns[0].cells]
    assert len(steps) == LOSS_ROWS and (steps[0], steps[-1]) == (0, 80)


@pytest.mark.parametrize("part", [full("part0"), "part4"])
def test_a_watched_run_is_the_same_run(tmp_path, monkeypatch, extension, part):
    """Samples and pictures after every step change no random number and no weight."""
    for name, value in (("SAMPLE_SECONDS", 0.0), ("SAMPLE_SHARE", 1e9), ("REDRAW_SECONDS", 0.0)):
        monkeypatch.setattr(display, name, value)
    samples = []

    class Own(Picture):
        tokens = 20

        def write(self):
            samples.append(super().write())
            return samples[-1]

    Own.part = part
    out = io.StringIO()
    with Live(console=Console(file=out, force_terminal=True, width=100, height=40)) as live:
        train(TINY, words(4000), out=tmp_path / "watched", watcher=Own("mine", live))
    train(TINY, words(4000), out=tmp_path / "alone")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("watched", "alone")]
    assert files[0] == files[1]
    assert len(samples) == TINY.steps and len(set(samples)) > 1 and "a sample" in out.getvalue()
