"""What the views compute: the frames of Tiles, their caches and costs, the address, the command."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys

import pytest
import torch
from support import ROOT, naming

from generation.sampling import NUMBERS
from web import build

KERNELS = ("part1", "part2", "part3", "part4")
WITH_A_SIXTH = (*KERNELS, "part5")  # it gets the frames of the formula
SIZES = [
    {"N": N, "d": 32, "Br": br, "Bc": bc, "rows": 4}
    for N, br, bc in ((1, 1, 1), (13, 4, 5), (32, 8, 8), (48, 48, 1))
]
PLENTY = 1 << 20


@pytest.mark.parametrize("part", WITH_A_SIXTH)
def test_the_frames_compute_every_score_and_every_output(node, part):
    for sizes in SIZES:
        walk, N = node("walk", part=part, sizes=sizes, l1=PLENTY, l2=PLENTY), sizes["N"]
        moved = [inner for inner, _ in walk["bytes"]]
        with naming(sizes):
            assert walk["scores"] == N * (N + 1) // 2 and walk["rows"] == N
            assert moved == sorted(moved) and moved[-1] >= 4 * 64 * (N * 32 // 16)  # Q, K, V and O come in
            for frame in node("lost", part=part, sizes=sizes):
                assert frame["lost"] == 0, frame["title"]


@pytest.mark.parametrize("part", KERNELS)
def test_the_anchors_are_in_the_source_once(node, part):
    text = build.sources()[part]["text"]
    anchors = node("anchors", part=part, sizes=SIZES[2])
    assert len(anchors) >= 3 and [text.count(anchor) for anchor in anchors] == [1] * len(anchors)


@pytest.mark.parametrize("part", KERNELS)
def test_the_caches_take_in_about_what_explain_counts(node, part):
    """Equal where everything fits, but for what is counted as whole lines; else within a factor of 2.7."""
    for sizes, cache in itertools.product(
        SIZES[2:3] + [{"N": 48, "d": 32, "Br": 16, "Bc": 8, "rows": 4}], (1024, 2048, 4096, 8192, PLENTY)
    ):
        block = {"lanes": 4, "panel": sizes["Br"], "rows": 4}
        block |= {"part2_tile": sizes["Br"], "part2_depth": 64, "part4_step": sizes["Bc"]}
        call = (sizes["N"], sizes["N"], 32, 1, True, sizes["Br"], sizes["Bc"])
        counted = sum(node("traffic", part=part, of=call, block=block, cache=cache))
        came, _ = node("walk", part=part, sizes=sizes, l1=cache, l2=PLENTY)["bytes"][-1]
        low, high = (0.99, 1.07) if cache == PLENTY else (1 / 2.7, 2.7)
        assert low <= came / counted <= high, (sizes, cache, came, counted)


@pytest.mark.usefixtures("wasm")
def test_m_and_l_are_the_rows_maximum_and_sum(node):
    node.load("shakes128")
    text, T, bc = "GLOUCESTER:\nNow is the winter", 29, 4
    node("observe", text=text)
    made = node("online", layer=1, head=2, T=T, d=32, i=20, bc=bc)
    scores = torch.tensor(made["S"], dtype=torch.float64).view(T, T)[20, :21]
    assert len(made["history"]) == 6
    for tile, state in enumerate(made["history"]):
        seen = scores[: (tile + 1) * bc]
        assert state["m"] == pytest.approx(seen.max().item())
        assert state["l"] == pytest.approx((seen - seen.max()).exp().sum().item())
    weights = torch.tensor(node("weights", layer=1, head=2)).view(T, T)
    P = torch.tensor(made["P"]).view(T, T)
    assert torch.allclose(P, weights, atol=1e-6)
    v = torch.tensor(node("heads", layer=1, head=2)[2]).view(T, 32)
    assert torch.allclose(torch.tensor(made["O"]).view(T, 32), P @ v, atol=1e-5)


def test_the_address_keeps_all_choices(node):
    first = node("parse", fragment="")
    assert first["view"] == "write" and node("format", **first) == "#write"
    choices = first["choices"] | {
        "prompt": "To be, & not?\n#",
        "seed": "18446744073709551615",
        "temperature": 0,
        "branches": "3:120",
    }
    address = node("format", view="tiles", choices=choices)
    assert node("parse", fragment=address) == {"view": "tiles", "choices": choices}
    assert node("parse", fragment="#nothing?length=x&foo=1&__proto__=2") == first


def test_a_value_out_of_its_range_is_ignored(node):
    for wrong in """
        seed=-1 seed=18446744073709551616 length=0 length=1.5 length=1e9 temperature=-1 topp=0 window=5000
        l1=60 n=33 br=0 part=flash tempo=soon weights=int8 layer=-2 key=-2 frame=1.5 endless= branches=3:65.5
        branches=0.5:65,:,3
    """.split():
        found = node("parse", fragment=f"#race?{wrong}")["choices"]
        assert found == node("parse", fragment="")["choices"], wrong


RESET = dict(length=300, context="reset", topk=10, topp=0.9, temperature=0.77, prompt="- it's")
STOP = dict(length=200, stop="\n", prompt="", temperature=1.5, seed="9223372036854775807")


@pytest.mark.usefixtures("wasm")
@pytest.mark.parametrize(
    "choices", [pytest.param(RESET, marks=pytest.mark.full), STOP], ids=["reset", "stop"]
)
def test_the_command_writes_the_same_text(node, extension, choices):
    words = shlex.split(node("command", choices=choices)["command"])
    assert words[:2] == ["python", "gpt.py"]
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    node.load(precision="bf16")
    defaults = {"seed": "1337", "context": "slide"}
    chosen = defaults | choices | {"prompt": choices["prompt"] or "\n", "stop": [*choices.get("stop", "")]}
    names = {name: name.replace("_", "") for name in NUMBERS}
    chosen["sampling"] = {name: chosen[choice] for name, choice in names.items() if choice in chosen}
    assert done.stdout == f"{chosen['prompt']}{node('text', **chosen)}\n"


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
def test_no_command_is_shown_where_none_writes_the_same_text(node, choices, own, why):
    made = node("command", choices=choices, own=own)
    assert why in made["why"] and "command" not in made
