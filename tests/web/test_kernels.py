"""The WebAssembly kernels in node: the same texts, weights and numbers as Python's."""

import itertools
import random
from dataclasses import replace
from unittest.mock import Mock

import pytest
import tiny
import torch
from node_process import Refused
from oracle import sample
from steps import choose, counts_of, prefill
from support import ROOT

from shakespeare import generate
from shakespeare.generation.sampling import SETTINGS, Sampling
from shakespeare.lab.traffic import Block, Case, streams, traffic
from shakespeare.model.checkpoint import load, save
from shakespeare.model.gpt import alibi_bias, causal_attention
from shakespeare.training.recipe import OWN_TEXT
from shakespeare.training.run import train
from shakespeare.web import build

WINDOW = 70  # of the model without an end
KERNELS = ("part1", "part2", "part3", "part4")
PROMPT = "ROMEO:"
TEXT = (2 * (ROOT / "README.md").read_text().split("```text\n")[1].split("```")[0])[:200]
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("wasm")]


@pytest.fixture(scope="module")
def native(extension):
    """Return a function that gives the native engine's text; each is written once."""
    known: dict = {}

    def write(name: str = "shakes256", weights: str = "fp32", **settings) -> str:
        key = (name, weights, *sorted((k, str(v)) for k, v in settings.items()))
        if key not in known:
            known[key] = generate(load(name), PROMPT, weights=weights, top_k=200, temperature=0.8, **settings)
        return known[key]

    return write


@pytest.mark.parametrize("kernels", ["simd", "relaxed"])
def test_training_has_the_command_lines_losses(node, extension, tmp_path, kernels):
    """Every row of the curve, and the losses on the held-out parts, some of which are sampled by windows."""
    if kernels == "relaxed" and node("build") != kernels:
        pytest.skip("this node has no relaxed SIMD")
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(40)]
    for length, seed in ((3000, 1337), (240_000, 5)):
        text = " ".join(rng.choices(words, k=length))[:length]
        changes = {"minutes": None, "steps": 24, "eval_every": 8, "n_embd": 64, "n_head": 2, "n_layer": 2}
        changes |= {"block_size": 72, "batch_chars": 512, "seed": seed}
        given = {"text": text, "recipe": changes, "wasm": str(build.compiled(kernels))}
        made = node("train", **given)
        record = train(replace(OWN_TEXT, **changes), text, tmp_path / str(seed), part="part4")
        assert made["record"]["curve"] == [pytest.approx(row, abs=1e-4) for row in record["curve"]]
        for name in ("val_loss", "test_loss", "best_step", "steps"):
            assert made["record"][name] == pytest.approx(record[name], abs=1e-4)
        assert node("train", **given)["sample"] == made["sample"] and len(made["sample"]) >= 240


def test_a_part_that_the_kernels_lack_is_refused(node):
    node.load()
    with pytest.raises(Refused, match="part is part9; the kernels have no such part"):
        node("text", prompt=PROMPT, part="part9", length=1)


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> str:
    directory, tokenizer = tmp_path_factory.mktemp("endless"), load("shakes256").tokenizer
    save(directory, tiny.gpt(vocab_size=65, n_head=4, positions="alibi", window=WINDOW), tokenizer, {})
    return str(directory)


@pytest.mark.parametrize("kernels", ["simd", "relaxed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_text_is_the_native_engines(node, native, endless, precision, kernels):
    """A window that slides, with the largest seed, one that restarts, and a text without an end."""
    texts = ("shakes256", 265, "slide", 2**64 - 1), ("shakes256", 400, "reset", 7), (endless, 200, "slide", 7)
    for name, length, context, seed in texts:
        node.load(name, precision, kernels)
        expected = native(name, precision, seed=seed, max_new_tokens=length, context=context)
        for part in KERNELS:
            made = node("text", prompt=PROMPT, part=part, seed=str(seed), length=length, context=context)
            assert made == expected, part


def test_without_an_end_a_text_is_the_same_without_a_cache_and_read_again(node, native, endless):
    node.load(endless)
    expected = native(endless, seed=7, max_new_tokens=200)
    for part in KERNELS:
        made = node("text", prompt=PROMPT, part=part, seed=7, length=WINDOW + 20, useCache=False)
        assert made == expected[: WINDOW + 20]
    (same,) = load(endless).tokenizer.encode(expected[150])
    assert node("text", prompt=PROMPT, seed=7, length=200, forced=[[150, same]]) == expected


def test_a_text_ends_before_an_eos_token(node, tmp_path, extension):
    tokenizer, text = load("shakes256").tokenizer, ""
    for end in ("", 30, 50):  # where it was without one
        ends = tokenizer.encode(text[end]) if text else ()
        save(tmp_path, tiny.gpt(vocab_size=65, eos_token_id=ends), tokenizer, {})
        node.load(str(tmp_path))
        expected = generate(tmp_path, PROMPT, 200, seed=7)
        assert node("text", prompt=PROMPT, seed=7, length=200) == expected
        text = text or expected
        assert len(expected) <= end if ends else len(expected) == 200


def test_a_branch_goes_on_with_the_seeds_numbers(node, extension):
    """As a text whose prompt ends with the branch, and whose first numbers are skipped."""
    from shakespeare.generation.engines.table import open_engine

    node.load()
    checkpoint, at, length = load("shakes256"), 40, 120
    plain = node("text", prompt=PROMPT, seed=5, length=length)
    other = "z" if plain[at] != "z" else "q"
    (id_of,) = checkpoint.tokenizer.encode(other)
    made = node("text", prompt=PROMPT, seed=5, length=length, forced=[[at, id_of]])
    assert made[: at + 1] == plain[:at] + other

    engine = open_engine(checkpoint, "native", part="part4")
    engine.set_sampling(0, Sampling(top_k=200))
    prefill(engine, 0, checkpoint.tokenizer.encode(PROMPT + made[: at + 1]))
    numbers = torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).tolist()
    tokens = [choose(engine, [0], [u])[0] for u in numbers[at + 1 :]]
    assert made[at + 1 :] == "".join(checkpoint.tokenizer.characters[t] for t in tokens)


def test_the_distribution_shown_is_the_one_drawn_from(node):
    rng = random.Random(0)
    node.load()
    ids, prompt = [5, 7, 7, 9], 2
    for settings in (
        {"top_p": 0.5},
        {"top_k": 12, "top_p": 0.9, "temperature": 1.7},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "min_p": 0.02},
    ):
        logits = torch.tensor([rng.gauss(0, 2) for _ in range(65)])
        sampling = Sampling(**{"top_k": None} | settings)
        settings = {name: getattr(sampling, name) for name in SETTINGS}
        counts = counts_of(ids[:prompt], ids[prompt:], len(logits))
        given = {"sampling": settings, "ids": ids, "prompt": prompt}
        model, filtered = node("distribution", logits=logits.tolist(), **given)
        assert torch.allclose(torch.tensor(model), logits.softmax(-1), atol=1e-6)
        for u in (0, 0.999999, *(rng.random() for _ in range(200))):
            (drawn,) = sample(logits[None], [u], sampling, counts)
            below = sum(filtered[:drawn])
            assert below - 1e-9 <= u <= below + filtered[drawn] + 1e-9


@pytest.mark.parametrize("name", ["shakes256", None])
def test_weights_and_heads_are_pythons(node, endless, name):
    """Every layer and head; the page's weights are in fp32."""
    checkpoint, attend = load(name or endless), Mock(wraps=causal_attention)
    c, model = checkpoint.config, checkpoint.model.with_attention(attend)
    ids = checkpoint.tokenizer.encode(TEXT)
    with torch.no_grad():
        model(torch.tensor([ids]))
    node.load(name or endless)
    seen_by_page = node("observe", text=TEXT, size=25)
    maps, telling, reach = seen_by_page.pop("maps"), seen_by_page.pop("telling"), {}
    assert seen_by_page == {"T": len(TEXT), "layers": c.n_layer, "heads": c.n_head, "d": c.head_dim}
    slopes = torch.tensor(c.alibi_slopes) * c.endless
    bias = alibi_bias(len(ids), len(ids), (c.window or len(ids)) - 1, slopes)
    for layer, head in itertools.product(range(c.n_layer), range(c.n_head)):
        q, k, v = (x[0, head] for x in attend.call_args_list[layer].args)
        for made, expected in zip(node("heads", layer=layer, head=head), (q, k, v)):
            assert torch.allclose(torch.tensor(made).view_as(expected), expected, atol=2e-5)
        expected = (q.double() @ k.double().T / c.head_dim**0.5 + bias[head]).softmax(-1).float()
        reach[layer, head] = expected.tril(-16).amax(-1).sum().item()
        made = torch.tensor(node("weights", layer=layer, head=head)).view_as(expected)
        assert (made - expected).abs().max() < 1e-5
        cells = expected.unfold(0, 8, 8).unfold(1, 8, 8).amax((-1, -2))
        shown = node("online", layer=layer, head=head, T=len(ids), d=c.head_dim, i=20, bc=4)["P"]
        inside = torch.tensor(shown).view_as(expected)[:WINDOW]  # Tiles knows no window
        assert (inside - expected[:WINDOW]).abs().max() < 1e-5
        assert torch.allclose(torch.tensor(maps[4 * layer + head]).view(25, 25), cells, atol=1e-5)
    assert (telling["layer"], telling["head"]) == max(reach, key=lambda head: reach[head])


def test_the_costs_are_explains(node):
    node.load()
    sizes = node("block")
    block = Block(**sizes)
    assert (block.lanes, block.panel) == (4, 12)
    for part, N, d, causal, cache in itertools.product(
        KERNELS, (1, 33, 1024), (24, 64), (False, True), (2048, 2**15, 2**21)
    ):
        call = (N, N, d, 4, causal, 192, 256)
        case = Case(*call)
        counted = streams(part, case, block)
        assert counted
        named = sizes | vars(case) | {"seen": case.seen, "ruled": 0}
        assert node("traffic", part=part, call=named, cache=cache) == pytest.approx(traffic(counted, cache))
