"""What the views compute: the frames of Tiles, their caches and costs, the address, the command."""

import itertools
import random
import re
import shlex
import sys
from statistics import fmean

import pytest
import torch
from support import full, naming, printed

from shakespeare.generation.sampling import SETTINGS
from shakespeare.lab import rule_options
from shakespeare.web import build

KERNELS = ("part1", "part2", "part3", "part4")
WITH_A_SIXTH = (*KERNELS, "part5")  # it gets the frames of the formula
SIZES = [
    {"N": N, "d": 32, "Br": br, "Bc": bc, "rows": 4}
    for N, br, bc in ((1, 1, 1), (13, 4, 5), (32, 8, 8), (48, 48, 1))
]
SIZES += [sizes | {"left": left} for sizes in SIZES[1:3] for left in (0, 5, 31)]
PLENTY = 1 << 20


@pytest.mark.parametrize("part", WITH_A_SIXTH)
def test_the_frames_compute_every_score_and_every_output(node, part):
    for sizes in SIZES:
        walk, N = node("walk", part=part, sizes=sizes, l1=PLENTY, l2=PLENTY), sizes["N"]
        moved = [inner for inner, _ in walk["bytes"]]
        with naming(sizes):
            seen = sum(min(i, sizes.get("left", i)) + 1 for i in range(N))
            assert walk["computed"] == [seen, seen, N, N]
            assert moved == sorted(moved) and moved[-1] >= 4 * 64 * (N * 32 // 16)  # Q, K, V and O come in
            for frame in node("lost", part=part, sizes=sizes):
                assert frame["lost"] == 0, frame["title"]


@pytest.mark.parametrize("part", KERNELS)
def test_the_anchors_are_in_the_source_once(node, part):
    (text,) = (path.read_text() for path in build.sources() if path.stem.startswith(part))
    anchors = node("anchors", part=part, sizes=SIZES[2])
    assert len(anchors) >= 3 and [text.count(anchor) for anchor in anchors] == [1] * len(anchors)


@pytest.mark.parametrize("part", KERNELS)
def test_the_caches_take_in_about_what_explain_counts(node, part):
    """Equal where everything fits, but for what is counted as whole lines; else within a factor of 2.7."""
    for sizes, cache in itertools.product(
        SIZES[2:3] + [{"N": 48, "d": 32, "Br": 16, "Bc": 8, "rows": 4, "left": n} for n in (20, 47)],
        (1024, 2048, 4096, 8192, PLENTY),
    ):
        block = {"lanes": 4, "panel": sizes["Br"], "rows": 4}
        block |= {"part2_tile": sizes["Br"], "part2_depth": 64, "part4_step": sizes["Bc"]}
        N, ruled = sizes["N"], sizes.get("left") == 20  # its count knows no whole lines and no edges
        seen = fmean(map(len, rule_options.seen(48, True, 20))) if ruled else (N + 1) / 2
        call = {"Nq": N, "Nk": N, "d": 32, "heads": 1, "br": sizes["Br"], "bc": sizes["Bc"]}
        call |= {"threads": 1, "seen": seen, "ruled": int(ruled)}
        counted = node("traffic", part=part, call=block | call, cache=cache)
        came, _ = node("walk", part=part, sizes=sizes, l1=cache, l2=PLENTY)["bytes"][-1]
        low, high = (0.99, 1.07) if cache == PLENTY and not ruled else (1 / 2.7, 2.7)
        assert low <= came / counted <= high, (sizes, cache, came, counted)


SMALL = {"N": 5, "d": 4, "Br": 2, "Bc": 2, "rows": 2}
LINE_EACH = """
for i of tiles(Q, Br)
    read Q[i, 1:]
    if 3 - end(i)  # the first tile
        write O[i, :2]
"""


def test_a_script_without_frames_has_one_for_each_line(node):
    made = node("script", script=LINE_EACH, sizes=SMALL)
    first = ["read Q[i, 1:]: queries 1 to 2", "write O[i, :2]: queries 1 to 2"]
    assert made["titles"] == [*first, "read Q[i, 1:]: queries 3 to 4", "read Q[i, 1:]: query 5"]
    assert made["computed"] == [0, 15, 2, 5]
    assert made["bytes"] == [2 * 64 + 64] * 2  # the lines of Q, and one of O
    assert list(made["parts"]) == list(KERNELS)


WRONG = [
    ("", "A line that reads, writes or multiplies was expected."),
    ("x = 3", "A line that reads, writes or multiplies was expected."),
    ("read Q\nfor i in Q", "Line 2: “of” was expected, not “in”."),
    ("for i of Q", "Line 1: after “for i of Q” a line was expected with more spaces before it."),
    ("read Q\n  read K", "Line 2: 0 spaces before it were expected, not 2."),
    ("  read Q\nread K", "Line 2: the spaces of the first line were expected before it."),
    ("read", "Line 1: a matrix was expected, not the end of the line."),
    ("read Q K", "Line 1: the end of the line was expected, not “K”."),
    ("read N", "Line 1: a matrix was expected, not “N”."),
    ("read P", "Line 1: a known name was expected, not “P”."),
    ("read Q[]", "Line 1: a row, a column or “:” was expected, not “]”."),
    ("read Q[4:6]", "Line 1: rows and columns of Q, 5 × 4, were expected, not 4:6, 0:4."),
    ("read Q[Q + 1]", "Line 1: a number was expected, not the matrix Q."),
    ("read Q[1 / (N - 5)]", "Line 1: a divisor that is not 0 was expected."),
    ("read Q[seen(3)]", "Line 1: queries, as in seen(i), were expected."),
    ("read Q[K in 1]", "Line 1: a part of 1:2 was expected before “in”, not 0:5."),
    ("for i of tiles(Q, 0)\n read Q", "Line 1: tiles of 1 or more were expected, not of 0."),
    ("Q = 3", "Line 1: a new name was expected, not “Q”."),
    ("read Q\nS = matrix(1, 1)", "Line 2: matrix() was expected above all loops and frames."),
    ("multiply O = Q * K", "Line 1: as many columns before “*” as rows behind it were expected, not 4"),
    ("multiply O = Q * K'", "Line 1: a place of 5 × 5 was expected for the product, not of 5 × 4."),
    ("multiply O = Q' * K'", "Line 1: at most one “'” was expected."),
    # what a hostile link may hold
    ("x = alert(1)", "Line 1: the end of the line was expected, not “(”."),
    ("__proto__ = 1", "Line 1: for, if, frame, read, write, multiply or a name was expected, not “_”."),
    ("read constructor", "Line 1: a known name was expected, not “constructor”."),
    ("S = matrix(9999, 9999)", "Line 1: at most 16384 numbers were expected in a matrix, not"),
    ("for i of 9 * 99999999\n if 0\n  read Q", "steps was expected, and this one goes on."),
    ("for i of 9999\n read Q[0, 0]", "Line 2: at most 5,000 frames were expected"),
    ("x = " + "(" * 1990, "Line 1: a value in at most 30 parentheses was expected, not “(”."),
    ("x = 1" + "+1" * 1990 + "\nread Q[x]", "Line 2: rows and columns of Q, 5 × 4, were expected"),
]


def test_a_wrong_script_gets_a_sentence_with_its_line(node):
    for script, why in WRONG:
        made = node("script", script=script, sizes=SMALL)
        assert why in made.get("why", ""), script[:80]


def test_no_script_does_anything_but_walk_or_get_a_sentence(node):
    """Our scripts with pieces lost, doubled and exchanged, and with names that JavaScript's objects have."""
    chance = random.Random(1)
    scripts = list(build.nests().values())
    pieces = [piece for script in scripts for piece in re.findall(r"\w+|\n *|\S", script)]
    pieces += ["constructor", "toString", "valueOf", "hasOwnProperty", "99999999999999999999", "0"]
    walked = 0
    for _ in range(200):
        script = re.findall(r"\w+|\n *|\S| ", chance.choice(scripts))
        for _ in range(chance.choice([0, 1, 1, 2, 5])):
            script[chance.randrange(len(script))] = chance.choice(["", chance.choice(pieces)])
        made = node("script", script="".join(script), sizes=SMALL)
        walked += "titles" in made
        assert "titles" in made or made["why"].endswith(".")
    assert 20 < walked < 180


@pytest.mark.full
@pytest.mark.usefixtures("wasm")
def test_m_and_l_are_the_rows_maximum_and_sum(node):
    node.load("shakes128")
    text, T, bc = "GLOUCESTER:\nNow is the winter", 29, 4
    node("observe", text=text)
    for left, tiles, first in ((2, 2, 14), (T, 6, 0)):  # the first key of queries 16 to 23
        made = node("online", layer=1, head=2, T=T, d=32, i=20, Br=8, Bc=bc, left=left)
        scores = torch.tensor(made["S"], dtype=torch.float64).view(T, T)[20, :21]
        assert len(made["history"]) == tiles
        for tile, state in enumerate(made["history"]):
            seen = scores[max(first, 20 - left) : first + (tile + 1) * bc]
            if not len(seen):  # the row's window has not begun
                assert (state["l"], state["correction"]) == (0, 1)
                continue
            assert state["m"] == pytest.approx(seen.max().item())
            assert state["l"] == pytest.approx((seen - seen.max()).exp().sum().item())
    P = torch.tensor(made["P"]).view(T, T)
    v = torch.tensor(node("heads", layer=1, head=2)[2]).view(T, 32)
    assert torch.allclose(torch.tensor(made["O"]).view(T, 32), P @ v, atol=1e-5)


DEFAULTS = dict(model="shakes256", weights="bf16", where="browser", prompt="ROMEO:", seed="1337", length=250)
DEFAULTS |= dict(context="slide", stop="", branches="")
DEFAULTS |= {name.replace("_", ""): known.default for name, known in SETTINGS.items() if known.slider}
RESET = dict(length=300, context="reset", topk=10, topp=0.9, temperature=0.77, prompt="- it's")
STOP = dict(length=200, stop="\n", prompt="", temperature=1.5, seed="9223372036854775807")


@pytest.mark.full
@pytest.mark.usefixtures("wasm")
@pytest.mark.parametrize("choices", [full(RESET), STOP], ids=["reset", "stop"])
def test_the_command_writes_the_same_text(node, extension, choices):
    words = shlex.split(node("command", choices=DEFAULTS | choices)["command"])
    assert words[:2] == ["python", "gpt.py"]
    shown = printed(sys.executable, *words[1:])
    node.load(precision="bf16")
    defaults = {"seed": "1337", "context": "slide"}
    chosen = defaults | choices | {"prompt": choices["prompt"] or "\n"}
    names = {name: name.replace("_", "") for name in SETTINGS}
    chosen["sampling"] = {name: chosen[choice] for name, choice in names.items() if choice in chosen}
    assert shown == f"{chosen['prompt']}{node('text', **chosen)}\n"


def test_no_command_is_shown_where_none_writes_the_same_text(node):
    for choices, own, why in (
        ({}, True, "the checkpoint is your own"),
        ({"where": "server"}, False, "the server chooses"),
        ({"branches": "3:65"}, False, "it has a branch"),
        ({"seed": "9223372036854775808"}, False, "its seeds end at 9223372036854775807"),
    ):
        made = node("command", choices=DEFAULTS | choices, own=own)
        assert why in made["why"] and "command" not in made
