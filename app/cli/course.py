"""course: exercises from the parts' own sources, and their check."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, to_type

SEED = f"Give each file other inputs; a secret is better in {options.SECRET_SEED}, as others see options."
OF_CHECK = ("as_json", "seconds", "gradescope", "junit", "weight", "seed")


@click.command()
@click.argument("words", nargs=-1, metavar="[check] [DIRECTORY]")
@options.flag("--json", "as_json", "Print points, times and the machine's version as JSON; goes with check.")
@options.number("--seconds", "A call that takes longer is endless.", most=3600, above=True, default=10)
@options.file("--gradescope", "Write Gradescope's results.json to this file, or to /dev/fd/N.")
@options.file("--junit", "Write JUnit's XML to this file, or to /dev/fd/N.")
@options.option("--weight", "Points of an exercise: 4-flash=10; may be repeated.", multiple=True)
@options.whole("--seed", SEED, least=0, most=options.LARGEST_SEED)
def course(words: tuple[str, ...], **asked: Any) -> bool:
    """Write exercises into DIRECTORY: attention on the CPU, on a GPU, backward, and a decoder's step.

    Each is a part's source with gaps, and a page. With check: print the stages that each exercise passes; for
    DIRECTORY, or for one file. Exit code 0: all are passed; 1: not all; 2: used wrongly.
    """
    checks = words[:1] == ("check",)
    if len(words) > 1 + checks or not (words or checks):
        raise click.UsageError("the arguments must be DIRECTORY, or check and perhaps DIRECTORY.")
    if not checks:
        options.refuse(OF_CHECK, "goes with check only")
        from shakespeare.judge.course import exercises

        files = exercises.write(Path(words[0]))
        command = f"{to_type()} course check {shlex.quote(words[0])}"
        notice(f"Wrote {len(files)} exercises and their pages. Now: {command}")
        return True
    return check(Path(words[1] if words[1:] else "."), **asked)


def check(
    path: Path, as_json: bool, seconds: float, weight: tuple[str, ...], seed: int | None, **files: Path | None
) -> bool:
    """Check the exercises, print what is done, and write it to files, by the names of their forms."""
    from shakespeare.judge.course import checks, results

    secret = options.secret_seed(seed)
    weights = checks.weighted(weight)
    exercises = checks.named(path, weights)
    checked = []
    opened = [(getattr(results, form), open(file, "w")) for form, file in files.items() if file]
    for result, (exercise, _) in zip(checks.check(exercises, seconds, weights, secret), exercises):
        checked.append((exercise, result))
        if as_json:
            continue
        note = f"  {result.note}" if result.note else ""
        click.echo(f"{result.name:20}{result.points:g} of {result.of:g}{note}")
        if result.failed:
            stage = list(exercise.stages.values())[len(result.passed)]
            click.echo(f"{'':20}next: {stage}\n{'':20}{result.failed}")
    points, of = (sum(getattr(r, name) for _, r in checked) for name in ("points", "of"))
    for form, out in opened:
        with out:
            print(form(checked), file=out)
    if as_json:
        from shakespeare.lab import machine

        rows = [{**asdict(result), "points": result.points} for _, result in checked]
        shown = {"points": points, "of": of, "machine": machine.describe(), "exercises": rows}
        click.echo(json.dumps(shown))
    else:
        click.echo(f"{points:g} of {of:g} points")
    return points == of
