"""Choices that the command line repeats, because their modules import torch, are those of the modules."""

import re

import click
import pytest

from shakespeare.app.cli import COMMANDS, command_of
from shakespeare.attention_ext.parts import CachePrecision, Precision
from shakespeare.generation.engines.table import ENGINES
from shakespeare.generation.request import CONTEXTS
from shakespeare.model.checkpoint import SHIPPED

CHOICES = {"engine": ["auto", *ENGINES], "context": list(CONTEXTS)}
CHOICES |= {"weights": list(Precision), "kv_cache": list(CachePrecision)}


def parameters(name: str) -> list[click.Parameter]:
    """The options or arguments of this name, of all commands."""
    return [p for command in map(command_of, COMMANDS) for p in command.params if p.name == name]


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_those_of_the_modules(name):
    found = parameters(name)
    assert found
    for parameter in found:
        assert sorted(parameter.type.choices) == sorted(CHOICES[name])


def test_the_help_of_model_names_the_shipped_models():
    for option in parameters("model"):
        assert tuple(re.findall(r"shakes\d+", option.help)) == SHIPPED
