"""Fine-tuning: the model that a run starts from, its new characters and what it forgets."""

import dataclasses

import pytest
import tiny
import torch
from training_texts import TINY, words

from shakespeare.model.checkpoint import load
from shakespeare.model.loss import evaluate
from shakespeare.training.finetuning import fitted, recipe_of
from shakespeare.training.run import train
from shakespeare.training.schedule import Watcher
from shakespeare.training.trainer import Trainer

START = tiny.checkpoint()  # knows a to i, space and line end


def test_new_characters_are_appended_near_the_mean_of_the_others():
    model, tokenizer, new = fitted(START, "bazé\nz", 16, seed=1)
    assert new == "zé" and tokenizer.characters == [*tiny.CHARACTERS, "z", "é"]
    old, rows = START.model.transformer.wte.weight, model.transformer.wte.weight
    assert torch.equal(rows[:11], old) and model.lm_head.weight is rows
    distance = (rows[11:] - old.mean(0)).norm(dim=1)
    assert (0 < distance).all() and (distance < 0.3 * (old - old.mean(0)).norm(dim=1).mean()).all()
    assert not torch.equal(rows[11], rows[12])
    assert torch.equal(rows, fitted(START, "bazé\nz", 16, seed=1)[0].transformer.wte.weight)
    ids = torch.tensor([tokenizer.encode("abc\nhi")])
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[..., :11], START.model(ids))


def test_a_smaller_block_cuts_the_positions():
    model, _, _ = fitted(START, "abc", 8, seed=1)
    assert model.config.block_size == 8
    assert torch.equal(model.transformer.wpe.weight, START.model.transformer.wpe.weight[:8])
    assert recipe_of(TINY, START.model, 8).block_size == 8
    assert recipe_of(TINY, START.model, None).block_size == 16


def test_a_trainer_starts_from_the_model():
    start = tiny.gpt(bias=True)
    recipe = recipe_of(TINY, start, None)
    trainer = Trainer(recipe, 11, torch.arange(500) % 11, torch.device("cpu"), start=start)
    for model in (trainer.model, trainer.averaged):
        for (name, a), b in zip(model.state_dict().items(), start.state_dict().values()):
            assert torch.equal(a, b), name
    trainer.decay.fill_(0.0)
    trainer.step()
    assert all(not torch.equal(a, b) for a, b in zip(trainer.averaged.parameters(), start.parameters()))


def test_it_learns_the_new_text_and_the_record_tells_what_it_forgot(tmp_path):
    old, new = words(4000), words(4000, "ghijkl", seed=1)
    longer = dataclasses.replace(TINY, steps=150, muon_lr=0.05)
    first = train(longer, old, out=tmp_path / "old")
    start = load(str(tmp_path / "old"))
    before = evaluate(start.model, torch.tensor(start.tokenizer.encode(old[3600:])))
    recipe = dataclasses.replace(recipe_of(longer, start.model, None), muon_lr=0.05)
    record = train(recipe, new, out=tmp_path / "new", start=start, old_text=old)
    assert record["curve"][0][:2] == [0, None] and record["curve"][0][2] > record["val_loss"] + 0.3
    assert record["old_loss_before"] == pytest.approx(before, abs=1e-5)
    assert before == pytest.approx((first["val_loss"] + first["test_loss"]) / 2, abs=0.2)
    tuned = load(str(tmp_path / "new"))
    after = evaluate(tuned.model, torch.tensor(tuned.tokenizer.encode(old[3600:])))
    assert record["old_loss_after"] == pytest.approx(after, abs=1e-5) and after > before
    assert tuned.tokenizer.characters[: len(start.tokenizer)] == start.tokenizer.characters


def test_a_fine_tuning_is_resumed_as_another_run_is(tmp_path):
    arguments = dict(recipe=recipe_of(TINY, START.model, None), text=words(4000, "abxy"), start=START)
    whole = train(**arguments, out=tmp_path / "whole")
    stops = iter([False] * 12 + [True])
    with pytest.raises(KeyboardInterrupt):
        train(**arguments, out=tmp_path / "parts", watcher=Watcher(lambda: next(stops)))
    record = train(**arguments, out=tmp_path / "parts", resume=True)
    assert record["curve"] == whole["curve"] and record["test_loss"] == whole["test_loss"]
