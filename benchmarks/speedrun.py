"""The Tiny Shakespeare speedrun: seconds of `gpt.py train` to nanoGPT's loss on the last tenth of the text.

    python -m benchmarks.speedrun [--threads 2] [--device cuda] [--seeds 1,2,3] [--save]
    python -m benchmarks.speedrun --inner --steps 3000 --batch-chars 1024   # choose another recipe
    python -m benchmarks.speedrun --check FILE    # a record's recipe on a new seed
    python -m benchmarks.speedrun --table FOLDER  # the records of a folder

docs/results/speedrun.md has the rules. Each seed is a process of its own with an empty folder. It learns the
text up to the part that is evaluated: the last tenth, or with --inner 85.5 to 90 %. 'Enter' is the time from
its start until the weights are saved: imports and training. The draft that follows is not counted. An untimed
run of one step comes first: the compiled code and the system's file cache are warm. With --save another one
before it is timed, without any compiled code: 'cold'. The loss is measured once, when a run has ended, as
`gpt.py eval` does. The exit code is 1 if the losses do not reach the target.
"""

import json
import os
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
from shakespeare.generation.sampling import RANDOM, drawn_seed
from shakespeare.lab import machine, result_files
from shakespeare.lab.cuda.device import Gpu
from shakespeare.lab.eval import held_out_loss
from shakespeare.lab.formats import counted, markdown
from shakespeare.model.corpus import LAST_TENTH

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
TARGET = 1.4697  # nats per character: nanoGPT's, in 3 minutes of an A100
WINDOW = 256  # characters that a loss may depend on
# Shares of the text between which recipes are chosen; a record is evaluated on LAST_TENTH.
INNER = (0.855, 0.9)
FEWEST = 5  # seeds of a record
LEAST_P = 0.01  # a mean below the target with a larger p-value may be chance
CLASSES = ("two CPU cores", "a GPU of up to 12 GB", "an H100 or H200")
# Training steps and further options of `train`. Few passes over the text take less weight decay; two cores a
# narrow model, a GPU a large batch. ALiBi has no positions to learn, and steep slopes know what is near.
RECIPES = {
    "cpu": (
        2400,
        "--n-embd 96 --n-head 3 --positions alibi --window 64 --rates adam_lr=0.0045,weight_decay=0.05",
    ),
    "cuda": (
        1200,
        "--n-head 8 --positions alibi --window 128 --batch-chars 4096 "
        "--rates muon_lr=0.03,adam_lr=0.0045,weight_decay=0.15",
    ),
}
TITLES = "seed | Enter, s | training, s | training steps | characters | loss | "
ROW = "{seed} | {seconds:.1f} | {training_seconds:.1f} | {steps:,} | {characters:,} | {loss:.4f} | "
FORMAT = 2  # of the file that --save writes
FIELDS = "format class machine device threads target busy options recipe cold p_value runs".split()
OF_RUN = "seed seconds training_seconds steps characters loss curve".split()
FACTS = "cpu os python torch compiler version commit date".split()


def class_of(facts: dict[str, Any], device: str, threads: int) -> str | None:
    """The class of CLASSES that a machine is in; None if it is in none. facts: machine.describe()'s."""
    if device == "cpu":
        return CLASSES[0] if threads <= 2 else None
    name = facts["gpu"]["name"]
    if "H100" in name or "H200" in name:
        return CLASSES[2]
    return CLASSES[1] if facts["gpu"]["memory"] <= 12 * 2**30 else None


def p_value(losses: Sequence[float], target: float) -> float:
    """Student's t-test, one-sided: how likely such a mean is if that of all seeds is the target or more."""
    from scipy import stats

    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def reached(losses: Sequence[float], target: float) -> bool:
    """Whether all losses are below the target, or their mean with a p-value below LEAST_P."""
    below = max(losses) < target
    return below or len(losses) > 1 and p_value(losses, target) < LEAST_P


def limit_of_next(losses: Sequence[float]) -> float:
    """What another seed's loss exceeds once in a hundred times: the prediction interval's upper end."""
    from scipy import stats

    n = len(losses)
    spread = statistics.stdev(losses) * (1 + 1 / n) ** 0.5
    return statistics.mean(losses) + float(stats.t.ppf(0.99, n - 1)) * spread


def checked(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The record. Raises ValueError unless it is complete and reaches its target; name: of its file."""
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise ValueError(f"{name} has format {found!r}; it must be {FORMAT}")
    runs = record.get("runs", [])
    parts = [(record, FIELDS), (record.get("machine", {}), FACTS), *((run, OF_RUN) for run in runs)]
    for part, fields in parts:
        for field in fields:
            if field not in part:
                raise ValueError(f"{name} has no {field!r}")
    seeds = len({run["seed"] for run in runs})
    if seeds < FEWEST:
        raise ValueError(f"{name} has {counted(seeds, 'seed')}; it must have at least {FEWEST}")
    if any(run["curve"][-1][0] != run["steps"] for run in runs):
        raise ValueError(f"{name} has a curve that ends before the last training step")
    losses = [run["loss"] for run in runs]
    if not reached(losses, record["target"]):
        worst = f"losses up to {max(losses)} and a mean with p = {p_value(losses, record['target']):.2g}"
        raise ValueError(f"{name} has {worst}; all must be below {record['target']}, or p below {LEAST_P}")
    return record


def read_record(file: Path) -> dict[str, Any]:
    """The record in a file of --save. Raises ValueError as checked(), without JSON and for another target."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not a record that --save wrote: {error}") from None
    record = checked(content, str(file))
    if record["target"] != TARGET:
        raise ValueError(f"{file} has target {record['target']}; it must be {TARGET}")
    return record


def train(
    seed: int, steps: int, arguments: Sequence[str], out: str, **environment: str
) -> tuple[float, dict[str, Any]]:
    """Seconds from the start of a process of `gpt.py train` to its record, and that record, training.json.

    arguments: further options. environment: the process's own variables. Raises ClickException with the last
    line of a run that failed, UsageError for an option that `train` refuses.
    """
    words = ("train", "speedrun", "--quiet", "--whole-text", "--overwrite", "--out", out, "--seed", str(seed))
    command = [sys.executable, "-m", "shakespeare", *words, "--steps", str(steps), *arguments]
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        reason = (done.stderr.strip() or "train failed").splitlines()[-1]
        raise (click.UsageError if done.returncode == 2 else click.ClickException)(f"seed {seed}: {reason}")
    record = Path(out, "training.json")
    return record.stat().st_mtime - start, json.loads(record.read_text())


def measured(
    seed: int, steps: int, arguments: Sequence[str], text: str, between: tuple[float, float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A seed's figures, OF_RUN, and its recipe. The loss is that of the text between two shares of it."""
    with tempfile.TemporaryDirectory() as out:
        seconds, record = train(seed, steps, arguments, out)
        loss = held_out_loss(out, text, part="part4", between=between, apart=WINDOW).nats
    recipe = record["recipe"]
    block = recipe["block_size"]
    characters = record["steps"] * max(1, recipe["batch_chars"] // block) * block
    figures = seed, round(seconds, 2), record["seconds"], record["steps"], characters, round(loss, 4)
    return dict(zip(OF_RUN, (*figures, record["curve"]))), recipe


def table(folder: Path) -> str:
    """A table in Markdown of the records in a folder: by class, the fastest first."""
    records = [read_record(file) for file in folder.glob("speedrun*-*.json")]
    order = (*CLASSES, None)
    records.sort(key=lambda record: (order.index(record["class"]), median(record, "seconds")))
    titles = ["class", "machine", "options of `train`", "seeds", "Enter, s", "cold, s", "training, s"]
    return markdown([*titles, "characters", "loss", "p", "commit"], map(row, records))


def median(record: dict[str, Any], name: str) -> float:
    """The median of a figure of all runs."""
    return statistics.median(run[name] for run in record["runs"])


def row(record: dict[str, Any]) -> list[str]:
    """A record's cells: medians, with the smallest and the largest."""

    def spread(name: str, form: str) -> str:
        values = [run[name] for run in record["runs"]]
        return f"{median(record, name):{form}} ({min(values):{form}} to {max(values):{form}})"

    on = record["machine"]
    name = on.get("gpu", {}).get("name", on["microarchitecture"] or on["cpu"])
    if record["device"] == "cpu":
        name += f", {record['threads']} threads"
    if record["busy"]:
        name += ", busy"
    cells = [record["class"] or "none", name, f"`{record['options']}`", str(len(record["runs"]))]
    cells += [spread("seconds", ".1f"), f"{record['cold']:.1f}", spread("training_seconds", ".1f")]
    cells += [f"{record['runs'][0]['characters']:,}", spread("loss", ".4f"), f"{record['p_value']:.1g}"]
    return [*cells, on["commit"] or ""]


@click.command(context_settings={"show_default": True, "ignore_unknown_options": True})
@options.path("--corpus", "corpus_file", "Text to learn.", show_default="what prepare got")
@options.cpu_or_cuda
@options.threads
@options.numbers("--seeds", "Seeds, each of a run.", maximum=options.LARGEST_SEED, default="1337:1341+1")
@options.number("--target", "Loss to reach, in nats per character.", maximum=100, default=TARGET)
@options.integer("--steps", "Training steps of a run.", show_default="the recipe's", default=None)
@options.flag("--inner", "Evaluate on 85.5 to 90 % of the text, to choose a recipe.")
@options.file("--check", "file", "Run a record's recipe on a new seed, and compare.", exists=True)
@options.option("--table", "folder", "Print the table of the records in this folder.", type=FOLDER)
@options.save("speedrun", "the runs as a record")
@click.argument("others", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF TRAIN]")
def main(corpus_file, device, threads, seeds, target, steps, inner, file, folder, save, others) -> None:
    """Train from scratch for each seed; print the times to the loss, and their median."""
    if file:
        options.refuse(("device", "steps", "target", "inner", "save", "others"), "does not go with --check")
    if inner:
        options.refuse(("save",), "does not go with --inner")
    try:
        if folder:
            click.echo(table(folder))
            return
        if save:
            result_files.check_file(save)
        old = read_record(file) if file else None
        device = old["device"] if old else device
        text = options.read_corpus(corpus_file)
        facts = machine.describe() | ({"gpu": Gpu().describe()} if device == "cuda" else {})
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, BuildError) as error:
        raise click.UsageError(str(error)) from None
    if old:
        _, words, *others = old["options"].split()
        steps = int(words)
        threads = threads or old["threads"]
        seeds = seeds if options.is_given("seeds") else [drawn_seed(RANDOM)]
    else:
        steps = steps or RECIPES[device][0]
        others = [*RECIPES[device][1].split(), *others]
    threads = options.threads_for(threads)
    between = INNER if inner else LAST_TENTH
    asked = " ".join(["--steps", str(steps), *others])
    where = facts["gpu"]["name"] if device == "cuda" else f"{facts['cpu']}, threads: {threads}"
    click.echo(f"{where}; PyTorch {facts['torch']}; train {asked}\n")
    with tempfile.TemporaryDirectory() as work:
        learned = Path(work, "learned.txt")
        learned.write_text(text[: int(between[0] * len(text))], newline="")
        arguments = [*others, "--corpus", str(learned), "--device", device, "--threads", str(threads)]
        cold = 0.0
        if save:
            compiled = {"TORCH_EXTENSIONS_DIR": str(Path(work, "compiled"))}
            cold, _ = train(seeds[0], steps, arguments, str(Path(work, "cold")), **compiled)
        train(0, 1, arguments, str(Path(work, "warm")))
        load = machine.Load()
        runs = []
        recipe: dict[str, Any] = {}

        def run(seed: int) -> str:
            figures, known = measured(seed, steps, arguments, text, between)
            recipe.update(known, seed=None)
            runs.append(figures)
            return ROW.format(**figures) + ("" if figures["loss"] < target else "not reached")

        show_table(TITLES, map(run, seeds))
    seconds, training = (statistics.median(r[name] for r in runs) for name in ("seconds", "training_seconds"))
    click.echo(f"\nmedian: {seconds:.1f} s from Enter, {training:.1f} s of training")
    busy = machine.busy_text(load.others(), threads)
    losses = [each["loss"] for each in runs]
    chance = 1.0
    if len(runs) > 1:
        chance = p_value(losses, target)
        click.echo(f"mean loss {statistics.mean(losses):.4f}; p = {chance:.2g} that it is {target} or more")
    for line in busy:
        click.echo(line)
    if old:
        limit = limit_of_next([each["loss"] for each in old["runs"]])
        click.echo(
            f"record: {median(old, 'seconds'):.1f} s from Enter on {row(old)[1]}, loss up to {limit:.4f}"
        )
        sys.exit(max(losses) > limit)
    if save:
        record = {
            "format": FORMAT,
            "class": class_of(facts, device, threads),
            "machine": facts,
            "device": device,
            "threads": threads,
            "target": target,
            "busy": busy,
            "options": asked,
            "recipe": recipe,
            "cold": round(cold, 2),
            "p_value": chance,
            "runs": runs,
        }
        try:
            result_files.write(checked(record, save), Path(save))
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    sys.exit(not reached(losses, target))


if __name__ == "__main__":
    main()
