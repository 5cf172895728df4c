"""The help is complete, in sections, quick without torch, and its choices are those of the modules."""

import re
import sys

import click
from support import printed

from shakespeare.app.cli import COMMANDS, command_of, first_sentence
from shakespeare.attention_ext import PARTS
from shakespeare.attention_ext.parallel import METHODS
from shakespeare.attention_ext.parts import CachePrecision, Precision
from shakespeare.generation.engines.table import ENGINES
from shakespeare.generation.request import CONTEXTS
from shakespeare.model.checkpoint import SHIPPED


def test_help_does_not_import_torch():
    code = (
        "import sys; from shakespeare.app.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main(['-h'] if command == 'gpt.py' else [command, '-h'])\n"
        "    except SystemExit: pass\n"
        "print(*{'torch', 'starlette', 'pydantic', 'prometheus_client'} & sys.modules.keys(), 'imported')"
    )
    shown = ["gpt.py", "part4", "train", "bench", "race", "bulk", "serve"]
    said = printed(sys.executable, "-c", code, *shown)
    assert said.count("Usage:") == len(shown)
    assert said.endswith("\nimported\n"), said[-200:]


def test_commands_are_listed_in_sections(cli):
    lines = cli("--help").stdout.splitlines()
    headings = [line for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert headings[:4] == ["Options:", "Write:", "Write many texts:", "Serve:"]
    assert headings[4:] == ["Lab test:", "Your own attention:", "Measure:", "Train:", "Show:"]
    names = [line[2:].split("  ")[0] for line in lines[lines.index("Write:") :] if re.match(r"  \w", line)]
    assert names == [*(f"{part} --inference" for part in PARTS), *COMMANDS]


def test_no_sentence_is_cut(cli, monkeypatch):
    for columns in ("60", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        shown = " ".join(cli("--help").stdout.split())
        assert "..." not in shown.removeprefix("Usage: gpt.py [OPTIONS] COMMAND [ARGS]...")
        for command in map(command_of, COMMANDS):
            assert " ".join(first_sentence(command).split()) in shown
        for name, part in PARTS.items():
            assert f"Write text with {name}: {part.summary}." in shown


CHOICES = {"engine": ["auto", *ENGINES], "context": list(CONTEXTS), "method": list(METHODS)}
CHOICES |= {"weights": list(Precision), "kv_cache": list(CachePrecision)}


def parameters(name: str) -> list[click.Parameter]:
    """The options or arguments of this name, of all commands."""
    return [p for command in map(command_of, COMMANDS) for p in command.params if p.name == name]


def test_choices_and_the_shipped_models_are_those_of_the_modules():
    for name, choices in CHOICES.items():
        assert {tuple(sorted(each.type.choices)) for each in parameters(name)} == {tuple(sorted(choices))}
    helps = [option.help for option in (*parameters("model"), *parameters("models"))]
    for text in (*helps, command_of("train").epilog):
        assert tuple(re.findall(r"shakes[\w-]+", text)) == SHIPPED
