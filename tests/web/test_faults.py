"""The page where a model fails or is late, where views are left, and with links that no field can show."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Any

import pytest
from node_process import Node
from support import ROOT

from generation import generate
from model import load

QUERY: dict[str, Any] = {"model": "shakes256", "seed": 7, "length": 60}


def native(model: str, seed: int, length: int, **settings: Any) -> str:
    defaults: dict[str, Any] = {"weights": "bf16", "temperature": 0.8, "top_k": 65}
    made = generate(load(model), "ROMEO:", length, seed=seed, **(defaults | settings))
    assert isinstance(made, str)
    return made


@pytest.mark.full
def test_a_model_that_fails_or_is_late_is_never_replaced_by_another(visit, extension):
    made = visit("models", query=QUERY, broken="shakes1024", late="shakes128")
    assert made["before"] == native(**QUERY)
    assert made["said"] == "Models/shakes1024-bf16.planes.gz was not found (404)."
    assert made["after"] == [made["before"], True, True]
    assert made["text"] == native("shakes128", 8, 60) and "-m shakes128 " in made["command"]


@pytest.mark.full
def test_the_skip_link_stays_in_the_view(visit):
    assert visit("skip") == [False, "main"]


@pytest.mark.full
def test_attention_and_tiles_each_keep_their_text(visit, node: Node, extension):
    head, i, j = 3, 50, 47
    text = "ROMEO:" + native(**QUERY)
    said = visit("both", query=QUERY, head=head, i=i, j=j)
    node.load(precision="bf16")
    node("observe", text=text)
    weight = node("weights", layer=0, head=head)[i * len(text) + j]
    assert said.startswith(f"Layer 1, head {head + 1}: ") and f" at {i + 1} gives " in said
    assert float(said.split()[-1].rstrip(".")) == pytest.approx(weight, abs=2e-5)


@pytest.mark.full
def test_a_long_text_keeps_its_beginning(visit, extension):
    query = QUERY | {"length": 9000, "context": "reset"}
    text, status, position = visit("long", query=query)
    assert text == native("shakes256", 7, 9000, context="reset")
    assert status.startswith("9,000 characters") and position == "1"


@pytest.mark.full
def test_fields_keep_what_a_link_says(visit):
    query = QUERY | {"temperature": 0.77, "topk": 200, "pace": 10, "stop": "\n\n\n\n", "branches": "2:65"}
    made = visit("fields", query=query, names=["pace", "topk", "stop"])
    assert made["shown"] == {"pace": "10", "topk": "65", "stop": "\n\n\n\n"}
    assert (made["temperature"], made["topk"]) == ("0.77", "all") and made["text"][2] == "A"
    assert made["kept"] == [made["text"], True]  # another pace is no other text
    assert " --temperature 0.77 --top-k 200 " in made["command"] and "--stop='\n\n\n\n'" in made["command"]
    assert "pace=0" in made["address"] and "temperature=0.77" in made["address"]
    assert made["stop"] == "\n" * 5  # a line end can be typed


@pytest.mark.full
def test_what_is_left_stops(visit):
    race, text = visit("left", query=QUERY)
    assert race == "Stopped, because another view was shown." and text.endswith(" a second without the pace")


COMMANDS: list[dict[str, Any]] = [
    {"model": "shakes128", "seed": "9223372036854775807", "length": 40, "weights": "fp32"},
    {"length": 300, "context": "reset", "topk": 10, "topp": 0.9, "temperature": 0.77, "prompt": "- it's"},
    {"length": 200, "stop": "\n", "prompt": "", "temperature": 1.5},
]


@pytest.mark.usefixtures("wasm")
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(COMMANDS[0], marks=pytest.mark.full),
        pytest.param(COMMANDS[1], marks=pytest.mark.full),
        COMMANDS[2],
    ],
    ids=["fp32", "reset", "stop"],
)
def test_the_command_writes_the_same_text(node: Node, extension, choices):
    words = shlex.split(node("command", choices=choices)["command"])
    assert words[:2] == ["python", "gpt.py"]
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, env=os.environ, check=True
    )
    node.load(choices.get("model", "shakes256"), precision=choices.get("weights", "bf16"))
    prompt = choices.get("prompt", "ROMEO:") or "\n"
    sampling = {
        "temperature": choices.get("temperature", 0.8),
        "topK": choices.get("topk", 65),
        "topP": choices.get("topp", 1),
    }
    text = node(
        "text",
        prompt=prompt,
        length=choices["length"],
        seed=choices.get("seed", "1337"),
        stop=[choices["stop"]] if "stop" in choices else [],
        context=choices.get("context", "slide"),
        sampling=sampling,
    )
    assert done.stdout == f"{prompt}{text}\n"


@pytest.mark.parametrize(
    "choices, own, why",
    [
        ({}, True, "the checkpoint is your own"),
        ({"where": "server"}, False, "the server chooses"),
        ({"branches": "3:65"}, False, "it has a branch"),
        ({"endless": 1}, False, "it has no end"),
        ({"seed": "9223372036854775808"}, False, "its seeds end at 9223372036854775807"),
    ],
)
def test_no_command_is_shown_where_none_writes_the_same_text(node: Node, choices, own, why):
    made = node("command", choices=choices, own=own)
    assert why in made["why"] and "command" not in made
