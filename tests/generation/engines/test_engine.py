"""The native engine against the PyTorch model, and the arguments that it refuses."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import re
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import safetensors.numpy
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import choose, forced, logits, prefill
from support import full, naming

from shakespeare.attention_ext import SIMD, BuildError, processor
from shakespeare.attention_ext.extension import load as load_extension
from shakespeare.generation.engines.pytorch import rounded
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.sampling import Sampling
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.files import tensors_of

GREEDY = Sampling(temperature=0)

# Extreme nanoGPT configurations: biases, one head, odd widths, vocabularies of 1 and of thousands
CONFIGS = [
    dict(bias=False),
    dict(bias=True),
    dict(n_head=1, n_layer=1, block_size=1),
    dict(n_head=5, n_embd=15, vocab_size=1),
    dict(n_head=3, n_embd=99, vocab_size=300, block_size=70),
    dict(n_head=8, n_embd=8, n_layer=3),
]
GPT2 = dict(n_head=12, n_embd=768, vocab_size=5000, n_layer=1, block_size=40)  # its shapes
EACH_CONFIG = pytest.mark.parametrize("config", [*CONFIGS, full(GPT2)], ids=str)


def ids(gpt, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(gpt.config.vocab_size, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected(gpt, tokens, kv_cache="fp32"):
    """The logits after each token, in float64, with keys and values as a cache keeps them: (T, V)."""
    exact = copy.deepcopy(gpt).double()
    attend = partial(_exact, gpt.config.head_dim**-0.5)
    if kv_cache == "bf16":
        attend = partial(_over_bf16, attend)
    for block in exact.transformer.h:
        block.attn.attend = attend
    return exact(torch.tensor([tokens]))[0]


def _exact(scale, q, k, v):
    scores = (scale * q @ k.mT).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1) == 1, -torch.inf)
    return scores.softmax(-1) @ v


def _over_bf16(attend, q, k, v):
    return attend(q, k.bfloat16().double(), v.bfloat16().double())


ALL_SIMD = {simd: [pytest.mark.full] * (simd != "portable") for simd in SIMD if simd != "auto"}


@pytest.fixture(params=[pytest.param(simd, marks=marks) for simd, marks in ALL_SIMD.items()])
def simd(request, extension):
    """Run the test over each SIMD helper, whose vectors may differ in width from the cache's."""
    try:
        load_extension(request.param)
    except BuildError as error:  # no ispc
        pytest.skip(str(error))
    return request.param


@EACH_CONFIG
def test_the_logits_are_the_models(kernel, simd, config):
    gpt = tiny.scaled(**config)
    tokens = ids(gpt, gpt.config.block_size)
    exact = expected(gpt, tokens)
    engine = open_engine(gpt, "native", part=kernel, simd=simd, bc=16)
    for prompt in {1, 2, 3, 4, 5, len(tokens) - 1, len(tokens)} & set(range(1, len(tokens) + 1)):
        prefill(engine, 0, tokens[:prompt])
        for made, right in zip(forced(engine, 0, tokens[prompt:]), exact[prompt - 1 :], strict=True):
            torch.testing.assert_close(made.double(), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@EACH_CONFIG
def test_rounded_weights_are_those_of_the_rounded_model(extension, config, weights):
    gpt = tiny.scaled(**config)
    tokens = ids(gpt, gpt.config.block_size)
    exact = expected(rounded(gpt, weights), tokens)[-1]
    native, by_torch = (open_engine(gpt, name, weights=weights, slots=3) for name in ("native", "torch"))
    for engine in (native, by_torch):
        prefill(engine, 0, tokens)
        torch.testing.assert_close(logits(engine).double(), exact, atol=1e-4, rtol=0)
    if len(tokens) > 1:
        for slot in range(3):
            prefill(native, slot, tokens[:-1])
        *_, last = forced(native, 0, tokens[-1:])
        torch.testing.assert_close(last.double(), exact, atol=1e-4, rtol=0)
        for slot in (1, 2):
            native.set_sampling(slot, GREEDY)
        assert len(set(choose(native, [1, 2], [0.5] * 2))) == 1
    if gpt.config.vocab_size > 1:
        assert (exact - expected(gpt, tokens)[-1]).abs().max() > 1e-4  # the rounding has an effect


def test_a_prompt_with_tiles_of_any_size(extension):
    gpt = tiny.scaled(block_size=4000, n_embd=64, n_head=1, n_layer=1)
    tokens = ids(gpt, 4000)
    made = []
    # br=512: only the last chunk is small enough for its keys to be divided.
    for tile in ({}, dict(br=512, bc=256), dict(br=4, bc=4000), dict(br=4000, bc=4)):
        engine = open_engine(gpt, "native", **tile)
        prefill(engine, 0, tokens)
        made.append(logits(engine))
        with naming(tile):
            torch.testing.assert_close(made[-1], made[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_bf16_cache_holds_rounded_keys_and_values(kernel, simd, name):
    """An error of float32 may round a number the other way: that is a small part of what rounding changes."""
    for config in CONFIGS:
        gpt = tiny.scaled(**config)
        tokens = ids(gpt, gpt.config.block_size)
        exact, right = (expected(gpt, tokens, kv_cache) for kv_cache in ("fp32", "bf16"))
        allowed = 1e-4 + 0.3 * (exact - right).abs().max()
        engine = open_engine(gpt, name, part=kernel, simd=simd, bc=16, kv_cache="bf16", slots=2)
        for prompt in {1, 2, len(tokens) - 1, len(tokens)} & set(range(1, len(tokens) + 1)):
            prefill(engine, 0, tokens[:prompt])
            engine.copy(0, 1)
            for i, made in enumerate(forced(engine, 1, tokens[prompt:]), prompt):
                with naming(config, prompt, i):
                    assert (made - right[i - 1]).abs().max() < allowed


@pytest.mark.parametrize("weights, kv_cache", [*itertools.product(("fp32", "int8"), ("fp32", "bf16"))])
@pytest.mark.parametrize("count", [1, 3])
def test_neither_batch_nor_threads_change_a_bit(kernel, threads, count, weights, kv_cache):
    precisions = {"weights": weights, "kv_cache": kv_cache}
    gpt = tiny.scaled(block_size=250, n_embd=48, n_head=3, vocab_size=150)
    prompts = [ids(gpt, 1 + 53 * i, seed=i) for i in range(5)]  # up to 213 tokens, read 64 at a time
    uniforms = torch.rand(5, 20, generator=torch.Generator().manual_seed(0)).tolist()

    threads(1)
    alone = []
    for prompt, numbers in zip(prompts, uniforms):
        engine = open_engine(gpt, "native", part=kernel, **precisions)
        prefill(engine, 0, prompt)
        alone.append([(choose(engine, [0], [u]), logits(engine)) for u in numbers])

    threads(count)
    for together in (1, 2, 5):  # work is divided differently if there are fewer texts than threads
        engine = open_engine(gpt, "native", part=kernel, slots=5, **precisions)
        for slot, prompt in enumerate(prompts):
            prefill(engine, slot, prompt)
        for step in range(20):
            for start in range(0, 5, together):
                slots = list(range(start, min(start + together, 5)))
                tokens = choose(engine, slots, [uniforms[s][step] for s in slots])
                for slot, token in zip(slots, tokens):
                    assert [token] == alone[slot][step][0]
                    assert torch.equal(logits(engine, slot), alone[slot][step][1])


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # of a busy machine
)
@given(
    temperature=st.sampled_from([0.0, 1e-3, 0.5, 1.0, 30.0]),
    top_k=st.sampled_from([None, 1, 2, 7, 300, 2**62]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    typical_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 1e6]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, 2, -1.1]),
    logit_bias=st.sampled_from([(), ((3, 1.5), (49, -2)), ((0, -100.0), (7, 100))]),
    seed=st.integers(0, 2**32),
)
def test_both_engines_choose_the_same_tokens(extension, seed, **chosen):
    gpt, sampling = tiny.scaled(vocab_size=50), Sampling(**chosen)
    native, by_torch = (open_engine(gpt, name) for name in ("native", "torch"))
    uniforms = torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    prompt = ids(gpt, 5, seed)
    texts = []
    for engine in (native, by_torch):
        engine.set_sampling(0, sampling)
        prefill(engine, 0, prompt)
        text = [choose(engine, [0], [u])[0] for u in uniforms]
        prefill(engine, 0, text[-3:], continues=True)  # earlier tokens still count for the penalty
        text += [choose(engine, [0], [u])[0] for u in uniforms]
        prefill(engine, 0, text[-3:])
        texts.append(text + [choose(engine, [0], [u])[0] for u in uniforms])
    assert texts[0] == texts[1]


def test_a_penalty_that_overflows_is_refused(extension):
    for name, temperature in itertools.product(("native", "torch"), (0, 0.8)):
        engine = open_engine(tiny.scaled(), name)
        engine.set_sampling(0, Sampling(temperature, repetition_penalty=1e-320))
        prefill(engine, 0, list(range(11)))
        with naming(name, temperature), pytest.raises(ValueError, match="the largest is infinite"):
            choose(engine, [0], [0.5])


def test_logits_that_are_no_numbers_are_refused(engine):
    model = tiny.gpt()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.nan
    opened = engine(model)
    prefill(opened, 0, [1])
    with pytest.raises(ValueError, match="logits hold NaN"):
        opened.write([0], [[0.5]])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_can_use_and_drop_the_engine(extension, threads):
    threads(2)
    engine = open_engine(tiny.scaled(block_size=300), "native")
    prefill(engine, 0, [1] * 100)
    expected = [choose(engine, [0], [i / 50]) for i in range(50)]
    child = os.fork()
    if child == 0:
        prefill(engine, 0, [1] * 100)
        same = [choose(engine, [0], [i / 50]) for i in range(50)] == expected
        engine = None
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0) == (child, 0)
    prefill(engine, 0, [1] * 100)
    assert [choose(engine, [0], [i / 50]) for i in range(50)] == expected


def test_several_tokens_at_once_are_those_of_one_at_a_time(engine):
    gpt = tiny.scaled(block_size=50)
    rows = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).tolist()
    sampling = Sampling(repetition_penalty=1.2)
    alone, together = (engine(gpt, slots=2) for _ in range(2))
    for each in (alone, together):
        for slot in range(2):
            each.set_sampling(slot, sampling)
        prefill(each, 0, [1, 2])
        prefill(each, 1, [3, 4, 5])
    expected = [choose(alone, [0, 1], row) for row in rows[:48]]  # slot 1 is full after these
    for slots, shape in (([], (1, 0)), ([0, 1], (0, 2))):
        assert together.write(slots, torch.empty(shape).numpy()).shape == shape
    written = together.write([0, 1], rows, 0).tolist()
    assert len(written) == 1
    while len(written) < 48:
        written += together.write([0, 1], rows[len(written) :], 60).tolist()
    assert written == expected
    with pytest.raises(ValueError):
        together.write([0, 1], rows)
    with pytest.raises(ValueError):
        prefill(together, 0, [1] * 51)
    prefill(together, 0, [1] * 50)


def test_a_text_is_copied_to_any_slots(engine):
    """To none, to neighbours and others, and to itself; what is not named keeps its text."""
    opened = engine(tiny.scaled(), slots=9)
    for slot in range(9):
        prefill(opened, slot, [slot] * (1 + slot % 3))
    kept = [opened.logits(slot) for slot in range(9)]
    opened.copy(2)
    opened.copy(2, 4, 8, 5, 2, 6, 0)
    for slot in range(9):
        assert opened.logits(slot) == kept[2 if slot in (0, 2, 4, 5, 6, 8) else slot]
    prefill(opened, 7, [5])
    prefill(opened, 1, [7, 8])
    opened.copy(1, 3, 7)  # of a prompt that an engine may not have read yet, over one of the same kind
    assert opened.logits(7) == opened.logits(3) == opened.logits(1) not in (kept[7], kept[1])
    alike = choose(opened, [0, 2, 4, 8], [0.5] * 4)
    assert len(set(alike)) == 1
    assert len(set(choose(opened, [0, 2, 4, 8], [0.7] * 4))) == 1


@pytest.mark.parametrize("cache_bytes", [1, 3 << 20, full(6 << 20), 1 << 40])
@pytest.mark.parametrize("threads_used", [full(1), 2])
def test_a_batch_in_groups_of_any_size_is_written_as_each_text_alone(
    extension, threads, threads_used, cache_bytes, monkeypatch
):
    """The size of the processor's last cache decides how many slots are stepped together."""
    threads(threads_used)
    monkeypatch.setattr(processor, "caches", lambda: (processor.Cache(3, cache_bytes, 16, 64),))
    gpt = tiny.scaled(n_embd=64, block_size=500)
    texts, steps = 25, 6
    rows = torch.rand(steps, texts, generator=torch.Generator().manual_seed(0)).tolist()
    batch, alone = open_engine(gpt, "native", slots=texts), open_engine(gpt, "native")
    for i in range(texts):
        prefill(batch, i, ids(gpt, 380 + i, seed=i))
    order = [*range(1, texts), 0]
    written = batch.write(order, rows, 60)
    assert len(written) == steps and all(len(row) == texts for row in written)
    for i, slot in enumerate(order):
        prefill(alone, 0, ids(gpt, 380 + slot, seed=slot))
        assert [choose(alone, [0], [row[i]])[0] for row in rows] == [row[i] for row in written]


def test_the_weights_are_the_engines_own(extension):
    gpt = tiny.scaled()
    engine = open_engine(gpt, "native")
    prefill(engine, 0, [1, 2, 3])
    before = logits(engine)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
    prefill(engine, 0, [1, 2, 3])
    assert torch.equal(logits(engine), before) and before.abs().max() > 0


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_weights_of_a_mapped_file_are_packed_in_either_order_and_released(extension, tmp_path, weights):
    gpt = tiny.scaled(n_layer=1, n_head=4, n_embd=512, vocab_size=33_000)  # too large for two copies in fp32
    turned = {name: w.T.copy() if ".c_" in name else w for name, w in gpt.weights.items()}
    (file := tmp_path / "weights").write_bytes(safetensors.numpy.save(turned))
    tensors = {name: array() for name, (_, array) in tensors_of(file)[0].items()}
    tensors |= {name: w.T for name, w in tensors.items() if ".c_" in name}
    engines = [
        open_engine(Checkpoint(gpt.config, of, tiny.VOCABULARY), "native", weights=weights, threads=2)
        for of in (gpt.weights, tensors)
    ]
    made = []
    for engine in engines:
        prefill(engine, 0, [1, 2])
        made.append(list(forced(engine, 0, [32_999, 3]))[-1])
    assert torch.equal(*made)
    exact = expected(rounded(gpt, weights), [1, 2, 32_999, 3])[-1]
    torch.testing.assert_close(made[0].double(), exact, atol=1e-4, rtol=0)
    if sys.platform == "linux":
        _, _, after = Path("/proc/self/smaps").read_text().partition(str(file))
        assert int(re.search(r"Rss: +(\d+) kB", after)[1]) < 1024


def test_threads_of_python_take_turns(extension):
    gpt = tiny.scaled(block_size=400)
    engine = open_engine(gpt, "native", slots=2)
    texts = [[], []]

    def write(slot):
        prefill(engine, slot, [1])
        texts[slot] = [choose(engine, [slot], [i / 300])[0] for i in range(300)]

    for _ in range(3):
        running = [threading.Thread(target=write, args=(slot,)) for slot in range(2)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert texts[0] == texts[1] and len(set(texts[0])) > 3


def test_wrong_arguments_are_named(extension):
    for change, message in (
        (dict(part="part5"), "part is 'part5'"),
        (dict(engine="numpy"), "engine is 'numpy'"),
        (dict(capacity=17), "capacity is 17"),
        (dict(bc=2**63), "bc is 9223372036854775808"),
        (dict(weights="int4"), "weights is 'int4'; it must be one of fp32, bf16, int8"),
        (dict(kv_cache="int8"), "kv_cache is 'int8'; it must be one of fp32, bf16"),
    ):
        with naming(change), pytest.raises(ValueError, match=message):
            open_engine(tiny.scaled(), **change)
    with pytest.raises(TypeError, match="slots is a float; it must be a whole number"):
        open_engine(tiny.scaled(), slots=1.0)


def test_the_decoder_checks_what_it_is_given(extension):
    checkpoint = tiny.checkpoint()
    weights = checkpoint.weights
    wider = dataclasses.replace(checkpoint.config, vocab_size=12)
    for wrong, change, message in (
        (dict(config=wider), {}, "the size of transformer.wte.weight is 176; it must be 192"),
        (dict(weights={}), {}, "tensors has no transformer.wte.weight"),
        ({}, dict(threads=2**32 + 1), "threads is 4294967297; it must be from 1 to 1024"),
    ):
        with naming(wrong, change), pytest.raises(ValueError, match=message):
            open_engine(dataclasses.replace(checkpoint, **wrong), **change)

    name = "transformer.wte.weight"
    for wrong, message in (
        (weights[name].astype("f8"), f"{name} is float64; it must be float32"),
        (weights[name].astype("f2"), f"{name} is float16; it must be float32"),
        (weights[name][:, ::2], f"{name} has gaps; it or its transpose must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            open_engine(dataclasses.replace(checkpoint, weights=weights | {name: wrong}))

    decoder = open_engine(checkpoint, capacity=16, slots=2)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(decoder)

    def refused(message, call, *arguments):
        with naming(call, arguments), pytest.raises(ValueError, match=message):
            getattr(decoder, call)(*arguments)

    refused("slot is 0; it must be read first", "write", [0], [[0.5]])
    refused("slot is 2; it must be from 0 to 1", "begin", 2, [0])
    refused("the number of ids is 0; it must be from 1 to 16", "begin", 0, [])
    refused("an id is 11; it must be from 0 to 10", "begin", 0, [11])
    refused("top is 21; it must be from 0 to 20", "begin", 0, [1], False, 21)
    refused("top is -3; it must be from 0 to 20", "begin", 0, [1], False, -3)
    refused("does not fit 64 bits", "begin", 0, [2**64 + 1])
    refused(r"slot is 0; it must be given ids by begin\(\) first", "read", 0)
    refused("a token of logit_bias is 11", "set_sampling", 0, Sampling(logit_bias=((11, 1),)))
    refused("from is 2; it must be from 0 to 1", "copy", 2, 0)
    refused("logprobs is 21; it must be from 0 to 20", "set_sampling", 0, Sampling(), 21)
    decoder.begin(0, [0] * 16)
    refused("must be read first", "write", [0], [[0.5]])
    refused("seconds must be at least 0", "read", 0, float("nan"))
    refused("seconds must be at least 0", "write", [0], [[0.5]], float("nan"))
    assert decoder.read(0) and len(decoder.write([0], [[0.5]])) == 1
    refused("slot is 0; it must be read again: it is full", "write", [0], [[0.5]])
    refused("the number of uniforms is 1; it must be the number of slots, 2", "write", [0, 1], [[0.5]])
    prefill(decoder, 1, [0])
    for uniform in (1.0, -0.1, float("nan")):
        refused("a uniform is outside", "write", [1], [[0.5], [uniform]])
    refused("slot is 1; it must be named once", "write", [1, 1], [[0.5, 0.5]])
    assert decoder.write([], [[]]).shape == (1, 0)
