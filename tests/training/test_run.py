"""Training on a text of a few characters: the model learns, and the recorded losses are right."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import naming
from training_texts import TINY, words

from shakespeare.attention_ext.parts import BuildError
from shakespeare.model import corpus
from shakespeare.model.checkpoint import load
from shakespeare.model.loss import evaluate
from shakespeare.training import run
from shakespeare.training.material import windows
from shakespeare.training.recipe import OWN_TEXT, Recipe
from shakespeare.training.run import train
from shakespeare.training.trainer import Trainer

TEXT = "abcdefgh" * 100
RECIPE = replace(TINY, block_size=8, steps=80, eval_every=30, average=0.8, covered=0.0, test_share=0.0)


def test_it_learns_and_what_it_saves_has_the_loss_it_records(tmp_path):
    record = train(RECIPE, TEXT, out=tmp_path)
    assert record["curve"][0][0] == 30 and record["curve"][-1][0] == 80
    assert record["val_loss"] < 1.0 < record["curve"][0][2]
    assert json.loads((tmp_path / "training.json").read_text()) == json.loads(json.dumps(record))
    loaded = load(str(tmp_path))
    held_out = torch.tensor(loaded.tokenizer.encode(corpus.split(TEXT)[1]))
    assert evaluate(loaded.model, held_out) == pytest.approx(record["val_loss"], abs=1e-5)


def test_the_best_so_far_survives_an_interruption_and_a_divergence(tmp_path, monkeypatch):
    losses = iter([2.0, 1.5, float("nan")])
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: next(losses))
    with pytest.raises(ValueError, match="the validation loss is nan at step 80: training diverged"):
        train(RECIPE, TEXT, out=tmp_path)
    record = json.loads((tmp_path / "training.json").read_text())
    assert (record["val_loss"], record["best_step"]) == (1.5, 60)
    load(str(tmp_path))


def test_the_record_has_the_whole_curve_and_the_weights_are_the_best(tmp_path, monkeypatch):
    losses = iter([2.0, 1.5, 1.7])
    seen = []

    def evaluate(trainer, _):
        seen.append(trainer.averaged.transformer.wte.weight.detach().clone())
        return next(losses)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    record = train(RECIPE, TEXT, out=tmp_path)
    assert [(step, loss) for step, _, loss in record["curve"]] == [(30, 2.0), (60, 1.5), (80, 1.7)]
    assert (record["val_loss"], record["best_step"]) == (1.5, 60)
    assert torch.equal(load(str(tmp_path)).model.transformer.wte.weight, seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_the_ingredients_of_the_recipe():
    trainer = Trainer(RECIPE, 8, torch.arange(100) % 8, torch.device("cpu"))
    wpe = trainer.model.transformer.wpe.weight
    assert {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)} == {RECIPE.dropout}
    assert all(group["weight_decay"] == RECIPE.weight_decay for group in trainer.muon.param_groups)
    assert all(group["weight_decay"] == RECIPE.weight_decay for group in trainer.adam.param_groups)
    matrices = {p for group in trainer.muon.param_groups for p in group["params"]}
    assert matrices == {p for n, p in trainer.model.named_parameters() if p.ndim == 2 and ".h." in n}
    before = wpe.detach().clone()
    average = trainer.averaged.transformer.wte.weight.detach().clone()
    trainer.lr.fill_(0.5)
    trainer.step()
    # Adam's first step has the size of its learning rate.
    assert (wpe - before).abs().max().item() == pytest.approx(0.5 * RECIPE.position_lr, rel=0.1)
    moved = trainer.averaged.transformer.wte.weight - average
    raw = trainer.model.transformer.wte.weight - average
    torch.testing.assert_close(moved.detach(), 0.2 * raw.detach())
    gradients = torch.stack([p.grad.norm() for p in trainer.model.parameters()])
    assert gradients.norm() <= 1.0001


def test_a_run_with_a_test_part_measures_the_best_weights_on_all_held_out_text(tmp_path, monkeypatch):
    """While it runs, it watches a part of the validation text only."""
    monkeypatch.setattr("shakespeare.training.material.MOST_WATCHED", 96)
    text = words(8000)
    record = train(TINY, text, out=tmp_path)
    loaded = load(str(tmp_path))
    ids = torch.tensor(loaded.tokenizer.encode(text))
    validation, test = ids[7200:7600], ids[7600:]
    assert evaluate(loaded.model, validation) == pytest.approx(record["val_loss"], abs=1e-5)
    assert evaluate(loaded.model, test) == pytest.approx(record["test_loss"], abs=1e-5)
    watched = min(loss for _, _, loss in record["curve"])
    assert evaluate(loaded.model, torch.from_numpy(windows(validation.numpy(), 16, 96))) == pytest.approx(
        watched, abs=1e-4
    )
    assert record["val_loss"] != pytest.approx(watched, abs=1e-4)


def test_a_run_without_a_held_out_part_learns_all_and_keeps_the_last_weights(tmp_path, monkeypatch):
    recipe = replace(RECIPE, held_out=0.0)
    record = train(recipe, TEXT, tmp_path)
    assert [row[::2] for row in record["curve"]] == [[30, None], [60, None], [80, None]]
    assert (record["val_loss"], record["steps"]) == (None, 80)
    trainer = Trainer(recipe, 8, torch.arange(100) % 8, torch.device("cpu"))
    schedule = run.Schedule(recipe)
    trainer.ids = torch.tensor(load(str(tmp_path)).tokenizer.encode(TEXT))
    for _ in range(80):
        trainer.lr.fill_(schedule.rate())
        trainer.decay.fill_(recipe.average_decay(schedule.done))
        trainer.step()
        schedule.done += 1
    loaded = load(str(tmp_path)).model.state_dict()
    for name, weight in trainer.averaged.state_dict().items():
        assert torch.equal(weight, loaded[name]), name
    monkeypatch.setattr(Trainer, "_step", lambda trainer: trainer.loss.fill_(torch.nan))
    with pytest.raises(ValueError, match="the training loss is nan at step 30: training diverged"):
        train(recipe, TEXT, tmp_path / "diverged")


def test_a_text_shorter_than_a_block_is_refused(tmp_path):
    with pytest.raises(ValueError, match="text has 7 characters for training; .* more than block_size=8"):
        train(RECIPE, "abcdefgh", tmp_path)


def test_a_recipe_keeps_numbers_of_python_and_names_a_wrong_one():
    kept = Recipe(np.int64(8), torch.tensor(3), np.float32(0.5), warmup=None, minutes=np.array(2))
    assert repr(kept) == repr(Recipe(8, 3, 0.5, minutes=2.0))
    for change, error in (
        (dict(steps=2.5), TypeError),
        (dict(n_embd=True), TypeError),
        (dict(dropout="0"), TypeError),
        (dict(seed=-1), ValueError),
        (dict(minutes=np.inf), ValueError),
        (dict(decay="none"), ValueError),
    ):
        with naming(change), pytest.raises(error, match=f"{next(iter(change))} is "):
            replace(OWN_TEXT, **change)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("part", ["part0", "part4"])
def test_a_missing_gpu_is_named(tmp_path, part):
    with pytest.raises(BuildError, match="device is 'cuda', and "):
        train(RECIPE, TEXT, tmp_path, device="cuda", part=part)
