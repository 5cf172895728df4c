"""The Tiny Shakespeare speedrun: seconds of `gpt.py train` to nanoGPT's loss on the last tenth of the text.

    python -m benchmarks.speedrun [--threads 2] [--device cuda] [--seeds 1,2,3] [--save]
    python -m benchmarks.speedrun --steps 9000 --batch-chars 1024    # another recipe, by options of `train`

Each seed is a process of its own. 'Enter' is the time from its start until the weights and their losses are
saved: imports, training, evaluation. The draft that follows is not counted. 'Training' is training steps and
evaluations alone. An untimed run of one step comes first: the training step's compiled code and the system's
file cache are warm. The loss over the whole last tenth is then measured as `gpt.py eval` does. A seed that
ends above the target is 'not reached', and the exit code is 1.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.common import show_table
from shakespeare.app.cli import options
from shakespeare.attention_ext import BuildError
from shakespeare.lab import machine, result_files
from shakespeare.lab.cuda.device import Gpu
from shakespeare.lab.eval import held_out_loss
from shakespeare.model import corpus

TARGET = 1.4697  # nats per character: nanoGPT's, in 3 minutes of an A100
# Training steps and further options of `train`, chosen on other seeds than 1337 to 1341. A run of few passes
# over the text takes less weight decay; two cores a narrow model, a GPU a large batch.
RECIPES = {
    "cpu": (4600, "--n-embd 96 --n-head 3 --rates adam_lr=0.0045,position_lr=0.0045,weight_decay=0.05"),
    "cuda": (
        2000,
        "--batch-chars 4096 --rates muon_lr=0.03,adam_lr=0.0045,position_lr=0.004,weight_decay=0.15",
    ),
}
TITLES = "seed | Enter, s | training, s | training steps | characters | loss | "
ROW = "{seed} | {seconds:.1f} | {training_seconds:.1f} | {steps:,} | {characters:,} | {loss:.4f} | "
FORMAT = 1  # of the file that --save writes


def train(seed: int, steps: int, arguments: Sequence[str], out: str) -> tuple[float, dict[str, Any]]:
    """Seconds from the start of a process of `gpt.py train` to its record, and that record, training.json.

    arguments: further options. Raises ClickException with the last line of a run that failed, UsageError for
    an option that `train` refuses.
    """
    words = ("train", "speedrun", "--quiet", "--overwrite", "--out", out, "--seed", str(seed))
    command = [sys.executable, "-m", "shakespeare", *words, "--steps", str(steps), *arguments]
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "train failed").splitlines()[-1]
        raise (click.UsageError if done.returncode == 2 else click.ClickException)(f"seed {seed}: {reason}")
    record = Path(out, "training.json")
    return record.stat().st_mtime - start, json.loads(record.read_text())


def measured(seed: int, steps: int, arguments: Sequence[str], text: str) -> dict[str, Any]:
    """A seed's figures: seconds, training_seconds, steps, characters, loss, and the curve of `train`."""
    with tempfile.TemporaryDirectory() as out:
        seconds, record = train(seed, steps, arguments, out)
        loss = held_out_loss(out, text, part="part4").nats
    block, batch = (record["recipe"][name] for name in ("block_size", "batch_chars"))
    characters = record["steps"] * max(1, batch // block) * block
    return {
        "seed": seed,
        "seconds": round(seconds, 2),
        "training_seconds": record["seconds"],
        "steps": record["steps"],
        "characters": characters,
        "loss": round(loss, 4),
        "curve": record["curve"],
    }


@click.command(context_settings={"show_default": True, "ignore_unknown_options": True})
@options.path("--corpus", "corpus_file", "Text to learn.", show_default="what prepare got")
@options.cpu_or_cuda
@options.threads
@options.numbers("--seeds", "Seeds, each of a run.", maximum=options.LARGEST_SEED, default="1337:1341+1")
@options.number("--target", "Loss to reach, in nats per character.", maximum=100, default=TARGET)
@options.integer("--steps", "Training steps of a run.", show_default="the recipe's", default=None)
@options.save("speedrun", "the runs, with their curves")
@click.argument("others", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF TRAIN]")
def main(corpus_file, device, threads, seeds, target, steps, save, others) -> None:
    """Train from scratch for each seed; print the times to the loss, and their median."""
    try:
        if save:
            result_files.check_file(save)
        text = options.read_corpus(corpus_file)
        file = corpus_file or corpus.INPUT
        facts = machine.describe() | ({"gpu": Gpu().describe()} if device == "cuda" else {})
    except (ValueError, OSError, BuildError) as error:
        raise click.UsageError(str(error)) from None
    usual = RECIPES[device][0]
    recipe = RECIPES[device][1].split()
    threads = options.threads_for(threads)
    arguments = [*recipe, *others, "--corpus", str(file), "--device", device, "--threads", str(threads)]
    where = facts["gpu"]["name"] if device == "cuda" else f"{facts['cpu']}, threads: {threads}"
    asked = " ".join(["--steps", str(steps or usual), *recipe, *others])
    click.echo(f"{where}; PyTorch {facts['torch']}; train {asked}\n")
    with tempfile.TemporaryDirectory() as out:
        train(0, 1, arguments, out)
    load = machine.Load()
    runs = []

    def run(seed: int) -> str:
        runs.append(measured(seed, steps or usual, arguments, text))
        return ROW.format(**runs[-1]) + ("not reached" if runs[-1]["loss"] > target else "")

    show_table(TITLES, map(run, seeds))
    seconds, training = (statistics.median(r[name] for r in runs) for name in ("seconds", "training_seconds"))
    click.echo(f"\nmedian: {seconds:.1f} s from Enter, {training:.1f} s of training")
    busy = machine.busy_text(load.others(), threads)
    for line in busy:
        click.echo(line)
    if save:
        known = {"machine": facts, "device": device, "threads": threads, "target": target, "busy": busy}
        result_files.write({"format": FORMAT} | known | {"options": asked, "runs": runs}, Path(save))
    sys.exit(1 if any(run["loss"] > target for run in runs) else 0)


if __name__ == "__main__":
    main()
