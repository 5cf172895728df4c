"""A whole run: train() keeps the best weights, the record, and the state from which a run can continue."""

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.checks import finite, none_is_default, whole_number
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.checkpoint import Checkpoint, save, save_record
from shakespeare.model.corpus import split
from shakespeare.training.material import MOST_OLD, Material, divide, fit, windows
from shakespeare.training.recipe import MARGIN, Recipe
from shakespeare.training.schedule import ByTime, Schedule, Watcher
from shakespeare.training.state import FILE, check_state, load_state, only_run, save_state

if TYPE_CHECKING:
    from shakespeare.training.cuda.trainer import CudaTrainer
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
    """Train on `text` but for the end that is held out, and keep the average with the best loss there.

    A recipe that holds nothing out learns all of it and keeps the last average; its losses are None.

    part, dtype: see Trainer. start: the model to fine-tune; the recipe has its sizes (start.recipe_of()).
    old_text: the loss on its last 10 % is measured before and after fine-tuning.
    resume: continue the run whose state is in `out`; the other arguments must be those of that run.
    about: further settings to record.
    Writes a checkpoint directory to `out` at every new best, and a state every STATE_SECONDS. Returns the
    training record: corpus hash, recipe, device, losses (nats per character) and the loss curve as
    [step, training loss, validation loss], the training loss being the mean since the row before.
    Raises BuildError if the device is missing; ValueError if the text does not suit, another process trains
    in `out`, there is nothing to resume, or the loss becomes infinite or NaN; OSError if `out` cannot be
    written; KeyboardInterrupt after the watcher stopped the run, when the state is saved.
    """
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
        from shakespeare.training.finetuning import fitted

        model, tokenizer, new = fitted(start, text, recipe.block_size, recipe.seed)
        if new:
            notes.append(f"the model's vocabulary grows by {len(new)} characters: {new[:20]!r}")
    material = divide(text, recipe, tokenizer)
    for note in notes:
        watcher.note(note)
    out.mkdir(parents=True, exist_ok=True)  # a bad path fails now, not after hundreds of training steps
    trainer = trainer_of(recipe, material, device, part, model, dtype)
    identity = {
        "corpus_sha256": _sha256(text.encode()),
        "characters": len(text),
        "recipe": asdict(recipe),
        **trainer.facts,
        **(about or {}),
    }
    old = None
    if start is not None:
        weights = start.model.state_dict().values()
        identity["init_sha256"] = _sha256(*(t.float().contiguous().numpy() for t in weights))
        if old_text is not None:
            _, held_out = split(start.tokenizer.normal(old_text))
            old = np.array(start.tokenizer.encode(held_out))
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
        watcher.begin(trainer, material.tokenizer)
        if start is not None and recipe.held_out and not run.schedule.done:
            run.measure_start(start)
        run.go()
        return run.end()


def trainer_of(
    recipe: Recipe, material: Material, device: str, part: str, start: Any, dtype: Dtype
) -> "Trainer | CudaTrainer":
    """What trains: for part4 on a GPU by kernels alone, which need no PyTorch, if they take the model.

    start: a GPT of PyTorch with the first weights, or None. Raises BuildError without the device.
    """
    size = len(material.tokenizer)
    if device == "cuda" and part == "part4":
        from shakespeare.attention_ext.cuda import driver
        from shakespeare.training.cuda import step
        from shakespeare.training.cuda.trainer import CudaTrainer

        config = recipe.config(size, start)
        if step.takes(config, dtype, driver.gpu()):
            weights = None if start is None else start.weights
            return CudaTrainer(recipe, config, material.training, dtype, weights)
    import torch

    from shakespeare.training.trainer import Trainer

    if device == "cuda":
        from shakespeare.attention_ext.cuda.driver import check_gpu

        check_gpu()
    ids = torch.from_numpy(material.training)
    return Trainer(recipe, size, ids, torch.device(device), part, start=start, dtype=dtype)


class _Run:
    """A run in progress. best: the weights with the least validation loss. old: of the old text."""

    def __init__(
        self,
        trainer: "Trainer | CudaTrainer",
        material: Material,
        old: NDArray[Any] | None,
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
        self.best: dict[str, NDArray[Any]] = {}
        self.best_loss = math.inf
        self._loss_sum = 0.0  # of batches since the last evaluation, but for those that the trainer has
        self._losses = 0
        self._saved_at = time.monotonic()
        self._save_seconds = 0.0
        self._evaluated_at = -1  # the training steps before the last evaluation
        self._evaluation_seconds = 0.0

    def measure_start(self, start: Checkpoint) -> None:
        """Measure the model that is fine-tuned, before any training step."""
        self._losses = 1
        self._loss_sum = math.nan
        if self.old is not None:
            import torch

            from shakespeare.model.loss import evaluate

            old = torch.from_numpy(self.old)
            block_size = self.trainer.recipe.block_size
            self.record["old_loss_before"] = evaluate(start.model, old, block_size=block_size)
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
            self.trainer.set_averages(self.best)
            self.record["val_loss"] = self._loss(self.material.validation)
            self.record["test_loss"] = self._loss(self.material.test)
            if self.old is not None:
                self.record["old_loss_after"] = self.trainer.evaluate(self.old)
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
        schedule = self.schedule
        start = time.monotonic()
        self.trainer.advance(schedule.rate(), schedule.recipe.average_decay(schedule.done))
        self._losses += 1
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
        self._reserve(self._evaluation_seconds / max(1, self.material.watched.size))
        train_loss = self._total_loss() / max(1, self._losses)
        self._loss_sum = 0.0
        self._losses = 0
        self._evaluated_at = done
        learned = None if math.isnan(train_loss) else round(train_loss, 4)
        held_out = None if loss is None else round(loss, 4)
        self.schedule.curve.append([done, learned, held_out])
        name, decides = ("training", train_loss) if loss is None else ("validation", loss)
        if not math.isfinite(decides):
            raise ValueError(f"the {name} loss is {decides} at step {done}: training diverged")
        best = self.schedule.ended() if loss is None else loss < self.best_loss
        if best:
            self.best_loss = math.inf if loss is None else loss
            self.best = self.trainer.averages()
            self.record.update(self._best_at(loss))
            self._save_best(self.record)
        self.watcher.evaluated(self.schedule)

    def _best_at(self, loss: float | None) -> dict[str, Any]:
        done = self.schedule.done
        seconds = round(self.schedule.seconds)
        return {"val_loss": loss, "best_step": done, "seconds_to_best": seconds}

    def _save_best(self, record: dict) -> None:
        tokenizer = self.material.tokenizer
        checkpoint = Checkpoint(self.trainer.config, self.trainer.averages(), tokenizer)
        save(self.out, checkpoint, tokenizer, record)

    def _loss(self, ids: NDArray[Any]) -> float | None:
        """The average's loss on held-out tokens; None without any."""
        return self.trainer.evaluate(ids) if len(ids) else None

    def _total_loss(self) -> float:
        """The sum of the batches' losses since the last evaluation."""
        self._loss_sum += self.trainer.take_losses()
        return self._loss_sum

    def _reserve(self, seconds_per_char: float) -> None:
        """Tell the schedule how long the end of the run will take."""
        parts = (self.material.validation, self.material.watched, self.material.test, self.old)
        characters = sum({id(part): part.size for part in parts if part is not None}.values())
        self.schedule.finishing = MARGIN * seconds_per_char * characters + self._save_seconds + 0.1

    def _save_state(self) -> None:
        start = time.monotonic()
        total = self._total_loss()
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
            self._loss_sum = finite("the sum of losses", total)
            self._losses = whole_number("the number of losses", count)
            current = self.trainer.averages()
            if progress["best_loss"] is not None:
                self.best_loss = finite("best_loss", progress["best_loss"])
                self.best = {name: tensors[f"best.{name}"] for name in current}
                if any(self.best[name].shape != tensor.shape for name, tensor in current.items()):
                    raise ValueError("the best weights are of a model of other sizes")
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ValueError(f"{self.out / FILE} is damaged ({error}); train without --resume") from None
        if self.best:
            self.trainer.set_averages(self.best)
            self._save_best(self.record)
            self.trainer.set_averages(current)


def _sha256(*data: Any) -> str:
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()
