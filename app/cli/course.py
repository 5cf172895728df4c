"""course: exercises from the parts' own sources, and their check."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, to_type


@click.command()
@click.argument("words", nargs=-1, metavar="[check] [DIRECTORY]")
@options.flag("--json", "as_json", "Print points, times and the machine's version as JSON; goes with check.")
@options.number("--seconds", "A call that takes longer is endless.", most=3600, above=True, default=10)
def course(words: tuple[str, ...], as_json: bool, seconds: float) -> bool:
    """Write exercises into DIRECTORY: attention on the CPU, on a GPU, backward, and a decoder's step.

    Each is a part's source with gaps, and a page. With check: print the stages that each exercise passes; for
    DIRECTORY, or for one file. Exit code 0: all are passed; 1: not all; 2: used wrongly.
    """
    checks = words[:1] == ("check",)
    if len(words) > 1 + checks or not (words or checks):
        raise click.UsageError("the arguments must be DIRECTORY, or check and perhaps DIRECTORY.")
    if not checks:
        options.refuse(("as_json", "seconds"), "goes with check only")
        from shakespeare.own.course import exercises

        files = exercises.write(Path(words[0]))
        command = f"{to_type()} course check {shlex.quote(words[0])}"
        notice(f"Wrote {len(files)} exercises and their pages. Now: {command}")
        return True
    return check(Path(words[1] if words[1:] else "."), as_json, seconds)


def check(path: Path, as_json: bool, seconds: float) -> bool:
    """Check the exercises and print what is done."""
    from shakespeare.own.course import checks

    results, exercises = [], checks.named(path)
    for result, (exercise, _) in zip(checks.check(exercises, seconds), exercises):
        results.append(result)
        if as_json:
            continue
        click.echo(f"{result.name:16}{result.points} of {result.of}" + f"  {result.note}" * bool(result.note))
        if result.failed:
            stage = list(exercise.stages.values())[result.points]
            click.echo(f"{'':16}next: {stage}\n{'':16}{result.failed}")
    points, of = sum(r.points for r in results), sum(r.of for r in results)
    if as_json:
        from shakespeare.lab import machine

        whole: dict[str, Any] = {"points": points, "of": of, "machine": machine.describe()}
        click.echo(json.dumps(whole | {"exercises": [asdict(r) | {"points": r.points} for r in results]}))
    else:
        click.echo(f"{points} of {of} points")
    return points == of
