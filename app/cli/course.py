"""course: exercises from the parts' own sources, and their check."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, to_type

SEED = f"Give each file other inputs; a secret is better in {options.SECRET_SEED}, as others see options."
CHECK_ONLY = ("as_json", "seconds", "gradescope", "junit", "weight", "seed")


@dataclass(frozen=True)
class CheckOptions:
    """The values of the options of check."""

    as_json: bool
    seconds: float
    gradescope: Path | None
    junit: Path | None
    weight: tuple[str, ...]
    seed: int | None


@click.command()
@click.argument("words", nargs=-1, metavar="[check] [DIRECTORY]")
@options.flag("--json", "as_json", "Print points, times and the machine's version as JSON; goes with check.")
@options.number("--seconds", "A call that takes longer is endless.", maximum=3600, above=True, default=10)
@options.file("--gradescope", "Write Gradescope's results.json to this file, or to /dev/fd/N.")
@options.file("--junit", "Write JUnit's XML to this file, or to /dev/fd/N.")
@options.option("--weight", "Points of an exercise: 4-flash=10; may be repeated.", multiple=True)
@options.integer("--seed", SEED, minimum=0, maximum=options.LARGEST_SEED)
@options.gathered("chosen", CheckOptions)
def course(words: tuple[str, ...], chosen: CheckOptions) -> bool:
    """Write exercises into DIRECTORY: attention on the CPU, on a GPU, backward, and a decoder's step.

    Each is a part's source with gaps, and a page. With check: print the stages that each exercise passes; for
    DIRECTORY, or for one file. Exit code 0: all are passed; 1: not all; 2: used wrongly.
    """
    checks = words[:1] == ("check",)
    if len(words) > 1 + checks or not (words or checks):
        raise click.UsageError("the arguments must be DIRECTORY, or check and perhaps DIRECTORY.")
    if not checks:
        options.refuse(CHECK_ONLY, "goes with check only")
        from shakespeare.judge.course import exercises

        files = exercises.write(Path(words[0]))
        command = f"{to_type()} course check {shlex.quote(words[0])}"
        notice(f"Wrote {len(files)} exercises and their pages. Now: {command}")
        return True
    return check(Path(words[1] if words[1:] else "."), chosen)


def check(path: Path, chosen: CheckOptions) -> bool:
    """Check the exercises, print what is done, and write it to files."""
    from shakespeare.judge.course import checks, grade_files

    secret = options.secret_seed(chosen.seed)
    weights = checks.weighted(chosen.weight)
    exercises = checks.named(path, weights)
    checked = []
    files = ((grade_files.gradescope, chosen.gradescope), (grade_files.junit, chosen.junit))
    opened = [(form, open(file, "w")) for form, file in files if file]
    for result, (exercise, _) in zip(checks.check(exercises, chosen.seconds, weights, secret), exercises):
        checked.append((exercise, result))
        if chosen.as_json:
            continue
        note = f"  {result.note}" if result.note else ""
        click.echo(f"{result.name:20}{result.points:g} of {result.full_points:g}{note}")
        if result.failed:
            stage = list(exercise.stages.values())[len(result.passed)]
            click.echo(f"{'':20}next: {stage}\n{'':20}{result.failed}")
    points = sum(result.points for _, result in checked)
    full_points = sum(result.full_points for _, result in checked)
    for form, out in opened:
        with out:
            print(form(checked), file=out)
    if chosen.as_json:
        from shakespeare.lab import machine

        rows = [result.as_json() for _, result in checked]
        shown = {"points": points, "of": full_points, "machine": machine.describe(), "exercises": rows}
        click.echo(json.dumps(shown))
    else:
        click.echo(f"{points:g} of {full_points:g} points")
    return points == full_points
