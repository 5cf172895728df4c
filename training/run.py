"""A whole run: train() keeps the best weights, the record, and the state from which a run can continue."""

import hashlib
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext.checks import finite, none_is_default, whole_number
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.checkpoint import Checkpoint, save, save_record
from shakespeare.model.config import HEAD
from shakespeare.model.corpus import split
from shakespeare.model.gpt import GPT
from shakespeare.model.loss import evaluate
from shakespeare.training.finetuning import fitted
from shakespeare.training.material import MOST_OLD, Material, divide, fit, windows
from shakespeare.training.recipe import MARGIN, Recipe
from shakespeare.training.schedule import ByTime, Schedule, Watcher
from shakespeare.training.state import FILE, check_state, load_state, only_run, save_state
from shakespeare.training.trainer import Trainer

STATE_SECONDS = 8.0  # time between two states, unless writing one takes long
STATE_SHARE = 0.04  # share of the time that writing states may take


@none_is_default
def train(
    recipe: Recipe,
    text: str,
    out: Path,
    device: str = "cpu",
    *,
    watcher: Watcher = Watcher(),
    part: str = "part0",
    dtype: Dtype = Dtype.BF16,
    start: Checkpoint | None = None,
    old_text: str | None = None,
    resume: bool = False,
    about: Mapping[str, str] | None = None,
) -> dict:
    """Train on the first 90 % of `text` and keep the average with the best loss on the validation text.

    A recipe that holds nothing out learns all of it and keeps the last average; its losses are None.

    part, dtype: see Trainer. start: the model to fine-tune; the recipe has its sizes (start.recipe_of()).
    old_text: the loss on its last 10 % is measured before and after fine-tuning.
    resume: continue the run whose state is in `out`; the other arguments must be those of that run.
    about: further settings to record.
    Writes a checkpoint directory to `out` at every new best, and a state every ten seconds. Returns the
    training record: corpus hash, recipe, device, losses (nats per character) and the loss curve as
    [step, training loss, validation loss], the training loss being the mean since the row before.
    Raises ValueError if the device is missing, the text does not suit, another process trains in `out`, there
    is nothing to resume, or the loss becomes infinite or NaN. Raises OSError if `out` cannot be written, and
    KeyboardInterrupt after the watcher stopped the run, when the state is saved.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch finds no GPU here; it must be 'cpu'")
    if old_text is not None and len(old_text) < 11:
        raise ValueError(f"old_text has {len(old_text)} characters; it must have at least 11")
    if resume:
        check_state(out)
    notes: list[str] = []
    if recipe.test_share:
        recipe, notes = fit(text, recipe)
    model = None
    tokenizer = None
    if start is not None:
        model, tokenizer, new = fitted(start, text, recipe.block_size, recipe.seed)
        if new:
            notes.append(f"the model's vocabulary grows by {len(new)} characters: {new[:20]!r}")
    material = divide(text, recipe, tokenizer)
    for note in notes:
        watcher.note(note)
    out.mkdir(parents=True, exist_ok=True)  # a bad path fails now, not after hundreds of training steps
    size = len(material.tokenizer)
    on = torch.device(device)
    trainer = Trainer(recipe, size, material.training, on, part, start=model, dtype=dtype)
    identity = {
        "corpus_sha256": _sha256(text.encode()),
        "characters": len(text),
        "recipe": asdict(recipe),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        **(about or {}),
    }
    old = None
    if start is not None:
        weights = start.model.state_dict().values()
        identity["init_sha256"] = _sha256(*(t.float().cpu().contiguous().numpy() for t in weights))
        if old_text is not None:
            _, held_out = split(start.tokenizer.normal(old_text))
            old = torch.tensor(start.tokenizer.encode(held_out))
            old = windows(old, recipe.block_size, MOST_OLD)
    if old_text is not None:
        identity["old_corpus_sha256"] = _sha256(old_text.encode())
    run = _Run(trainer, material, old, out, watcher, identity)
    with only_run(out):
        if resume:
            run.resume()
        else:
            (out / FILE).unlink(missing_ok=True)  # of a run that this one replaces
        run.schedule.begin(time.monotonic())  # on a GPU the trainer has compiled its training step before
        watcher.begin(trainer.averaged, material.tokenizer)
        if start is not None and recipe.held_out and not run.schedule.done:
            run.measure_start(start.model)
        run.go()
        return run.end()


class _Run:
    """A run in progress. best: the weights with the least validation loss. old: of the old text."""

    def __init__(
        self,
        trainer: Trainer,
        material: Material,
        old: Tensor | None,
        out: Path,
        watcher: Watcher,
        identity: dict,
    ) -> None:
        recipe = trainer.recipe
        self.trainer = trainer
        self.material = material
        self.old = old
        self.out = out
        self.watcher = watcher
        self.identity = identity
        self.schedule = Schedule(recipe) if recipe.minutes is None else ByTime(recipe)
        self.record: dict[str, Any] = identity | {"curve": self.schedule.curve}
        self.best: dict[str, Tensor] = {}
        self.best_loss = math.inf
        self._launched: Any = torch.cuda.Event() if trainer.device.type == "cuda" else None
        self._loss_sum = torch.zeros((), device=trainer.device, dtype=torch.float64)
        self._losses = 0
        self._saved_at = time.monotonic()
        self._save_seconds = 0.0
        self._evaluated_at = -1  # the training steps before the last evaluation
        self._evaluation_seconds = 0.0

    def measure_start(self, model: GPT) -> None:
        """Measure the model that is fine-tuned, before any training step."""
        self._losses = 1
        self._loss_sum.fill_(math.nan)
        self._measure_old("old_loss_before", model)
        self._evaluate()

    def go(self) -> None:
        """Train until the schedule ends. Raises KeyboardInterrupt if the watcher stops the run."""
        if self.schedule.done and self.schedule.evaluation_due():
            self._evaluate()  # not if the run was resumed after it
        while not self.schedule.ended():
            self._step()
            due = self.schedule.evaluation_due()
            without = time.monotonic() - self._saved_at + due * self._evaluation_seconds
            if without > max(STATE_SECONDS, self._save_seconds / STATE_SHARE):
                self._save_state()
            if due:
                self._evaluate()
            self.watcher.stepped(self.schedule)
            if self.watcher.stops():
                self._save_state()  # as that of a continuing run, without a row for this evaluation
                loss = self._loss(self.material.watched)
                if loss is None or loss < self.best_loss:
                    self._save_best(self.record | self._best_at(loss))
                raise KeyboardInterrupt
        self._save_state()
        self._evaluate()

    def end(self) -> dict:
        """Measure the best weights on all held-out text; return the record."""
        recipe = self.trainer.recipe
        if recipe.test_share:
            self._evaluated_weights(self.best)
            self.record["val_loss"] = self._loss(self.material.validation)
            self.record["test_loss"] = self._loss(self.material.test)
            self._measure_old("old_loss_after", self.trainer.averaged)
        if recipe.test_share or not recipe.held_out:
            done = self.schedule.done
            seconds = self.schedule.elapsed()
            self.record["steps"] = done
            self.record["seconds"] = round(seconds, 1)
            self.record["characters_per_second"] = round(done * self.schedule.characters / seconds)
        save_record(self.out, self.record)  # with the whole curve, past the best one
        (self.out / FILE).unlink(missing_ok=True)
        return self.record

    def _step(self) -> None:
        trainer = self.trainer
        schedule = self.schedule
        start = time.monotonic()
        trainer.lr.fill_(schedule.rate())
        trainer.decay.fill_(trainer.recipe.average_decay(schedule.done))
        trainer.step()
        self._loss_sum += trainer.loss
        self._losses += 1
        if trainer.device.type == "cuda" and trainer.recipe.minutes is not None:
            before, self._launched = self._launched, torch.cuda.Event()
            self._launched.record()
            before.synchronize()  # else launches are timed; this step runs while the next one is prepared
        schedule.stepped(time.monotonic() - start)
        if self._evaluated_at < 0:  # a forward pass is a third of a training step
            self._reserve(schedule.step_seconds / 2 / schedule.characters)

    def _evaluate(self) -> None:
        """Add a row to the curve, once for each training step. Keep the average if it is the best.

        Raises ValueError if the loss is infinite or NaN.
        """
        start = time.monotonic()
        done = self.schedule.done
        if self._evaluated_at == done:
            return
        loss = self._loss(self.material.watched)
        self._evaluation_seconds = time.monotonic() - start
        self.schedule.evaluated(self._evaluation_seconds)
        self._reserve(self._evaluation_seconds / max(1, self.material.watched.numel()))
        train_loss = self._loss_sum.item() / max(1, self._losses)
        self._loss_sum.zero_()
        self._losses = 0
        self._evaluated_at = done
        measured = None if math.isnan(train_loss) else train_loss, loss
        self.schedule.curve.append([done, *(each and round(each, 4) for each in measured)])
        name, decides = ("training", train_loss) if loss is None else ("validation", loss)
        if not math.isfinite(decides):
            raise ValueError(f"the {name} loss is {decides} at step {done}: training diverged")
        if self.schedule.ended() if loss is None else loss < self.best_loss:
            self.best_loss = math.inf if loss is None else loss
            self.best = _copied(self.trainer.averaged)
            self.record.update(self._best_at(loss))
            self._save_best(self.record)
        self.watcher.evaluated(self.schedule)

    def _best_at(self, loss: float | None) -> dict[str, Any]:
        done = self.schedule.done
        seconds = round(self.schedule.seconds)
        return {"val_loss": loss, "best_step": done, "seconds_to_best": seconds}

    def _save_best(self, record: dict) -> None:
        save(self.out, self.trainer.averaged, self.material.tokenizer, record)

    def _loss(self, ids: Tensor) -> float | None:
        """The average's loss on held-out tokens; None without any."""
        return (
            None if len(ids) == 0 else evaluate(self.trainer.averaged, ids, self.trainer.recipe.batch_chars)
        )

    def _measure_old(self, name: str, model: GPT) -> None:
        """Record a model's loss on the old text under this name, if there is one."""
        if self.old is not None:
            self.record[name] = evaluate(model, self.old, block_size=self.trainer.recipe.block_size)

    def _reserve(self, seconds_per_char: float) -> None:
        """Tell the schedule how long the end of the run will take."""
        parts = (self.material.validation, self.material.watched, self.material.test, self.old)
        characters = sum({id(part): part.numel() for part in parts if part is not None}.values())
        self.schedule.finishing = MARGIN * seconds_per_char * characters + self._save_seconds + 0.1

    def _save_state(self) -> None:
        start = time.monotonic()
        total = self._loss_sum.item()
        if not math.isfinite(total):  # no run can continue from such weights
            when = f"before step {self.schedule.done}"
            raise ValueError(f"the training loss is {total} {when}: training diverged")
        tensors = self.trainer.state_dict() | {f"best.{name}": t for name, t in self.best.items()}
        progress = {
            "schedule": self.schedule.state(),
            "record": self.record,
            "losses": [total, self._losses],
            "evaluated_at": self._evaluated_at,
            "best_loss": self.best_loss if self.best else None,
        }
        save_state(self.out, tensors, self.identity, progress)
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - start

    def resume(self) -> None:
        """Continue from the state in `out`. The files of the best weights are written again."""
        tensors, progress = load_state(self.out, self.identity)
        try:
            self.trainer.load_state_dict(tensors)
            self.record = progress["record"] | self.identity
            for name in self.record.keys() - self.identity - {"curve"}:
                finite(name, self.record[name])
            self.schedule.load(progress["schedule"], self.record["curve"])
            self._evaluated_at = whole_number("evaluated_at", progress["evaluated_at"])
            total, count = progress["losses"]
            self._loss_sum.fill_(finite("the sum of losses", total))
            self._losses = whole_number("the number of losses", count)
            current = _copied(self.trainer.averaged)
            if progress["best_loss"] is not None:
                self.best_loss = finite("best_loss", progress["best_loss"])
                self.best = {name: tensors[f"best.{name}"] for name in current}
                if any(self.best[name].shape != tensor.shape for name, tensor in current.items()):
                    raise ValueError("the best weights are of a model of other sizes")
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ValueError(f"{self.out / FILE} is damaged ({error}); train without --resume") from None
        if self.best:
            self._evaluated_weights(self.best)
            self._save_best(self.record)
            self._evaluated_weights(current)

    def _evaluated_weights(self, weights: dict[str, Tensor]) -> None:
        """Let the average have these weights."""
        self.trainer.averaged.load_state_dict(weights, strict=False)  # the head's are the embedding's


def _sha256(*data: Any) -> str:
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def _copied(model: GPT) -> dict[str, Tensor]:
    """The model's weights on the CPU, without the head's, which are the embedding's."""
    weights = model.state_dict().items()
    return {name: t.detach().to("cpu", copy=True) for name, t in weights if name != HEAD}
