"""A whole run: train(), which keeps the best weights and the record."""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from model import corpus
from model.checkpoint import save, save_record
from model.gpt import Attend
from model.loss import evaluate
from model.tokenizer import CharTokenizer
from training.recipe import Recipe, learning_rate
from training.trainer import Trainer


def train(
    recipe: Recipe,
    text: str,
    device: str = "cpu",
    out: Path | None = None,
    report: Callable[[str], None] = print,
    attend: Attend | None = None,
) -> dict:
    """Train on the first 90 % of `text`, keep the average with the best loss on the last 10 %.

    attend: as Trainer takes it.
    Writes a checkpoint directory to `out` at every new best. Returns the training record: corpus
    hash, recipe, device, validation loss (nats per character) and the loss curve as
    [step, training loss, validation loss].
    Raises ValueError if the device is missing, the text is shorter than a block or the loss becomes
    infinite or NaN; OSError if `out` cannot be written.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch finds no GPU here; it must be 'cpu'")
    tokenizer = CharTokenizer.from_text(text)
    training, validation = corpus.split(tokenizer.encode(text))
    if len(training) <= recipe.block_size:
        raise ValueError(
            f"text has {len(training)} characters for training; "
            f"it must have more than block_size={recipe.block_size}"
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # a bad path fails now, not after hundreds of steps
    where = torch.device(device)
    trainer = Trainer(recipe, len(tokenizer), torch.tensor(training), where, attend)
    held_out = torch.tensor(validation, device=where)
    record: dict[str, Any] = {
        "corpus_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "characters": len(text),
        "recipe": asdict(recipe),
        "device": torch.cuda.get_device_name() if where.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "curve": [],
    }
    record["val_loss"], started = math.inf, time.monotonic()
    for step in range(recipe.steps):
        trainer.lr.fill_(learning_rate(recipe, step))
        trainer.step()
        done = step + 1
        if done % recipe.eval_every and done != recipe.steps:
            continue
        train_loss, loss = trainer.loss.item(), evaluate(trainer.averaged, held_out)
        seconds = time.monotonic() - started
        record["curve"].append([done, round(train_loss, 4), round(loss, 4)])
        report(f"step {done}/{recipe.steps}  train {train_loss:.4f}  val {loss:.4f}  {seconds:.0f} s")
        if not math.isfinite(loss):
            raise ValueError(f"the validation loss is {loss} at step {done}: training diverged")
        if loss < record["val_loss"]:
            record |= {"val_loss": loss, "best_step": done, "seconds_to_best": round(seconds)}
            if out is not None:
                save(out, trainer.averaged, tokenizer, record)
    if out is not None:
        save_record(out, record)  # with the whole curve, past the best step
    report(f"best validation loss {record['val_loss']:.4f} nats per character, at step {record['best_step']}")
    return record
