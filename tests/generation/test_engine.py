"""The native engine against the PyTorch model, and the arguments that it refuses."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from functools import partial

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_ext import SIMD, BuildError
from attention_ext.extension import load as load_extension
from attention_ext.extension import load_decoder
from attention_ext.parts import CachePrecision, Precision
from attention_ext.processor import Cache
from generation.engine import DTYPES, ROUNDINGS, open_engine, rounded, with_rounded_cache
from generation.sampling import Sampling
from model import load

GREEDY = Sampling(temperature=0)
EXACT = dict(rtol=0, atol=0)  # of our own engine; PyTorch's sums may depend on the row

# Extreme nanoGPT configurations: biases, one head, odd widths, vocabularies of 1 and of thousands
CONFIGS = [
    dict(bias=False),
    dict(bias=True),
    dict(n_head=1, n_layer=1, block_size=1),
    dict(n_head=5, n_embd=15, vocab_size=1),
    dict(n_head=3, n_embd=99, vocab_size=300, block_size=70),
    dict(n_head=8, n_embd=8, n_layer=3),
    dict(n_head=12, n_embd=768, vocab_size=5000, n_layer=1, block_size=40),  # GPT-2's shapes
]


def model(**change):
    """A model whose logits are a few units large, like those of trained models."""
    made = tiny.gpt(**change)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2:
                parameter *= min(1, 4 / parameter.shape[1] ** 0.5)
    return made


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


@pytest.fixture(params=SIMD[1:])
def simd(request, extension):
    try:
        load_extension(request.param)
    except BuildError as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_logits_are_the_models(kernel, config):
    gpt = model(**config)
    tokens = ids(gpt, gpt.config.block_size)
    exact = expected(gpt, tokens)
    engine = open_engine(gpt, "native", part=kernel, bc=16)
    for prompt in {1, 2, 3, 4, 5, len(tokens) - 1, len(tokens)} & set(range(1, len(tokens) + 1)):
        engine.prefill(0, tokens[:prompt])
        for i in range(prompt, len(tokens)):
            torch.testing.assert_close(engine.logits(0).double(), exact[i - 1], atol=1e-4, rtol=0)
            engine.push(0, tokens[i])
        torch.testing.assert_close(engine.logits(0).double(), exact[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_every_simd_helper_gives_the_same_logits(kernel, simd, weights):
    gpt = load("shakes256").model
    tokens = ids(gpt, 200)
    native, by_torch = (
        open_engine(gpt, name, part=kernel, simd=simd, weights=weights) for name in ("native", "torch")
    )
    for engine in (native, by_torch):
        engine.prefill(0, tokens)
    torch.testing.assert_close(native.logits(0), by_torch.logits(0), atol=1e-4, rtol=0)
    for u in torch.rand(30, generator=torch.Generator().manual_seed(5)).tolist():
        assert native.next([0], [u]) == by_torch.next([0], [u])
        torch.testing.assert_close(native.logits(0), by_torch.logits(0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rounded_weights_are_those_of_the_rounded_model(config, weights):
    gpt = model(**config)
    tokens = ids(gpt, gpt.config.block_size)
    exact = expected(rounded(gpt, weights), tokens)[-1]
    native, by_torch = (open_engine(gpt, name, weights=weights, slots=3) for name in ("native", "torch"))
    for engine in (native, by_torch):
        engine.prefill(0, tokens)
        torch.testing.assert_close(engine.logits(0).double(), exact, atol=1e-4, rtol=0)
    if len(tokens) > 1:
        for slot in range(3):
            native.prefill(slot, tokens[:-1])
        native.push(0, tokens[-1])
        torch.testing.assert_close(native.logits(0).double(), exact, atol=1e-4, rtol=0)
        for slot in range(3):
            native.set_sampling(slot, GREEDY)
        assert len(set(native.next([0, 1, 2], [0.5] * 3)[1:])) == 1
    if gpt.config.vocab_size > 1:
        assert (exact - expected(gpt, tokens)[-1]).abs().max() > 1e-4  # the rounding has an effect


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_bf16_cache_holds_rounded_keys_and_values(kernel, simd, name, config):
    """An error of float32 may round a number the other way: that is a small part of what rounding changes."""
    gpt = model(**config)
    tokens = ids(gpt, gpt.config.block_size)
    exact, right = (expected(gpt, tokens, kv_cache) for kv_cache in ("fp32", "bf16"))
    allowed = 1e-4 + 0.3 * (exact - right).abs().max()
    engine = open_engine(gpt, name, part=kernel, simd=simd, bc=16, kv_cache="bf16", slots=2)
    for prompt in {1, 2, len(tokens) - 1, len(tokens)} & set(range(1, len(tokens) + 1)):
        engine.prefill(0, tokens[:prompt])
        engine.copy(0, 1)
        for i in range(prompt, len(tokens)):
            assert (engine.logits(1) - right[i - 1]).abs().max() < allowed
            engine.push(1, tokens[i])
        assert (engine.logits(1) - right[-1]).abs().max() < allowed


@pytest.mark.parametrize(
    "weights, kv_cache", [("fp32", "fp32"), ("fp32", "bf16"), ("int8", "fp32"), ("int8", "bf16")]
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_neither_batch_nor_threads_change_a_bit(kernel, threads, count, weights, kv_cache):
    precisions = {"weights": weights, "kv_cache": kv_cache}
    gpt = model(block_size=250, n_embd=48, n_head=3, vocab_size=150)
    prompts = [ids(gpt, 1 + 53 * i, seed=i) for i in range(5)]  # up to 213 tokens, read 64 at a time
    uniforms = torch.rand(5, 20, generator=torch.Generator().manual_seed(0)).tolist()

    threads(1)
    alone = []
    for prompt, numbers in zip(prompts, uniforms):
        engine = open_engine(gpt, "native", part=kernel, **precisions)
        engine.prefill(0, prompt)
        alone.append([(engine.next([0], [u]), engine.logits(0)) for u in numbers])

    threads(count)
    for together in (1, 2, 5):  # work is divided differently if there are fewer texts than threads
        engine = open_engine(gpt, "native", part=kernel, slots=5, **precisions)
        for slot, prompt in enumerate(prompts):
            engine.prefill(slot, prompt)
        for step in range(20):
            for start in range(0, 5, together):
                slots = list(range(start, min(start + together, 5)))
                tokens = engine.next(slots, [uniforms[s][step] for s in slots])
                for slot, token in zip(slots, tokens):
                    assert [token] == alone[slot][step][0]
                    assert torch.equal(engine.logits(slot), alone[slot][step][1])


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # of a busy machine
)
@given(
    temperature=st.sampled_from([0.0, 1e-3, 0.5, 1.0, 30.0]),
    top_k=st.sampled_from([None, 1, 2, 7, 300, 2**62]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 1e6]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, 2, -1.1]),
    logit_bias=st.sampled_from([(), ((3, 1.5), (49, -2)), ((0, -100.0), (7, 100))]),
    seed=st.integers(0, 2**32),
)
def test_both_engines_choose_the_same_tokens(extension, seed, **chosen):
    gpt, sampling = model(vocab_size=50), Sampling(**chosen)
    native, by_torch = (open_engine(gpt, name) for name in ("native", "torch"))
    uniforms = torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    prompt = ids(gpt, 5, seed)
    texts = []
    for engine in (native, by_torch):
        engine.set_sampling(0, sampling)
        engine.prefill(0, prompt)
        text = [engine.next([0], [u])[0] for u in uniforms]
        engine.prefill(0, text[-3:], continues=True)  # earlier tokens still count for the penalty
        text += [engine.next([0], [u])[0] for u in uniforms]
        engine.prefill(0, text[-3:])
        texts.append(text + [engine.next([0], [u])[0] for u in uniforms])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["native", "torch"])
def test_what_was_written_counts_until_a_new_prompt(extension, name):
    """Not the prompt; also after a window is read again, in a copy, and if it was pushed."""
    gpt = model(vocab_size=50)
    with torch.no_grad():
        gpt.transformer.wte.weight *= 0.01  # nearly equal logits: a penalty decides
    engine = open_engine(gpt, name, slots=2)
    for slot in range(2):
        engine.set_sampling(slot, Sampling(temperature=0, presence_penalty=2.0))
    engine.prefill(0, [0, 1, 2])
    first = [engine.next([0], [0.5])[0] for _ in range(10)]
    assert len(set(first)) == 10 and set(first) & {0, 1, 2} == set(first) & set(range(3))
    engine.prefill(0, first[-3:], continues=True)
    engine.copy(0, 1)
    second = [engine.next([0], [0.5])[0] for _ in range(10)]
    assert [engine.next([1], [0.5])[0] for _ in range(10)] == second
    assert not set(first) & set(second)
    engine.prefill(0, [0, 1, 2])
    assert [engine.next([0], [0.5])[0] for _ in range(10)] == first
    engine.prefill(0, [0, 1, 2])
    engine.push(0, first[1])
    assert first[1] not in [engine.next([0], [0.5])[0] for _ in range(10)]
    frequency = Sampling(temperature=0, frequency_penalty=2.0)
    engine.set_sampling(0, frequency)
    engine.prefill(0, [0], continues=False)
    rounds = [engine.next([0], [0.5])[0] for _ in range(10)]
    engine.prefill(0, rounds[-3:], continues=True)
    for token in rounds:
        engine.push(0, token)  # each has occurred twice, so another one follows
    assert engine.next([0], [0.5])[0] not in rounds


def test_a_prompt_with_tiles_of_any_size(extension):
    gpt = model(block_size=6500, n_embd=8, n_head=1, n_layer=1)
    tokens = ids(gpt, 6500)
    logits = []
    for tile in (dict(), dict(br=4, bc=6500), dict(br=6500, bc=4), dict(br=1, bc=2**62)):
        engine = open_engine(gpt, "native", **tile)
        engine.prefill(0, tokens)
        logits.append(engine.logits(0))
        torch.testing.assert_close(logits[-1], logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_copied_slot_goes_on_as_its_source(kernel, name):
    gpt = model(block_size=300)
    engine = open_engine(gpt, name, part=kernel, slots=2)
    engine.prefill(0, ids(gpt, 200))
    engine.next([0], [0.3])
    engine.prefill(1, [1, 2, 3])
    engine.copy(0, 1)
    for slot in range(2):
        engine.set_sampling(slot, Sampling(repetition_penalty=1.5))
    for u in (0.1, 0.5, 0.9):
        first, second = engine.next([0, 1], [u, u])
        assert first == second
        torch.testing.assert_close(engine.logits(0), engine.logits(1), **EXACT if name == "native" else {})


@pytest.mark.parametrize("name", ["native", "torch"])
def test_slots_of_any_length_go_on_as_if_alone(kernel, name):
    gpt = model(block_size=60)
    lengths = [9, 9, 20, 20, 9, 9, 1]
    uniforms = torch.rand(7, 12, generator=torch.Generator().manual_seed(1)).tolist()
    together = open_engine(gpt, name, part=kernel, slots=7)
    for slot, length in enumerate(lengths):
        together.prefill(slot, ids(gpt, length, slot))
    texts = {slot: [] for slot in range(7)}
    for step in range(12):
        slots = [5, 0, 1, 2, 4, 6] if step % 3 else [6, 4, 3]  # in any order, not always all
        tokens = together.next(slots, [uniforms[slot][step] for slot in slots])
        for slot, token in zip(slots, tokens):
            texts[slot].append((step, token))
    for slot, length in enumerate(lengths):
        alone = open_engine(gpt, name, part=kernel)
        alone.prefill(0, ids(gpt, length, slot))
        for step, token in texts[slot]:
            assert alone.next([0], [uniforms[slot][step]]) == [token]
        torch.testing.assert_close(together.logits(slot), alone.logits(0))


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_penalty_that_overflows_is_refused(extension, name, temperature):
    engine = open_engine(model(), name)
    engine.set_sampling(0, Sampling(temperature, repetition_penalty=1e-320))
    engine.prefill(0, list(range(11)))
    with pytest.raises(ValueError, match="the largest is infinite"):
        engine.next([0], [0.5])


@pytest.mark.parametrize("name", ["native", "torch"])
def test_each_slot_has_its_own_sampling(kernel, name):
    """Neighbours' settings have no effect. A copied text takes the settings of its new slot."""
    gpt = model(block_size=80)
    samplings = [Sampling(), GREEDY, Sampling(30.0, top_k=None), Sampling(0.8, 5, 0.9, 0.01, 1.3)]
    rows = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)).tolist()
    together = open_engine(gpt, name, part=kernel, slots=4)
    for slot, sampling in enumerate(samplings):
        together.set_sampling(slot, sampling)
    together.prefill(0, ids(gpt, 10))
    for slot in range(1, 4):
        together.copy(0, slot)
    texts = list(zip(*(together.next(range(4), row) for row in rows)))
    assert len(set(texts)) == 4
    for slot, sampling in enumerate(samplings):
        alone = open_engine(gpt, name, part=kernel)
        alone.set_sampling(0, sampling)
        alone.prefill(0, ids(gpt, 10))
        assert tuple(alone.next([0], [row[slot]])[0] for row in rows) == texts[slot]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_can_use_and_drop_the_engine(extension, threads):
    threads(2)
    engine = open_engine(model(block_size=300), "native")
    engine.prefill(0, [1] * 100)
    expected = [engine.next([0], [i / 50]) for i in range(50)]
    child = os.fork()
    if child == 0:
        engine.prefill(0, [1] * 100)
        same = [engine.next([0], [i / 50]) for i in range(50)] == expected
        engine = None
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)
    engine.prefill(0, [1] * 100)
    assert [engine.next([0], [i / 50]) for i in range(50)] == expected


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_slot_ends_with_its_capacity(extension, name):
    gpt = model()
    engine = open_engine(gpt, name, capacity=4)
    engine.set_sampling(0, GREEDY)
    engine.prefill(0, [1, 2])
    for _ in range(3):  # two enter the cache, the third is only chosen
        engine.next([0], [0.5])
    with pytest.raises(ValueError):
        engine.next([0], [0.5])
    with pytest.raises(ValueError):
        engine.prefill(0, [1] * 5)
    engine.prefill(0, [1] * 4)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_several_tokens_at_once_are_those_of_one_at_a_time(kernel, name, monkeypatch):
    gpt = model(block_size=50)
    rows = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).tolist()
    sampling = Sampling(repetition_penalty=1.2)
    alone, together = (open_engine(gpt, name, part=kernel, slots=2) for _ in range(2))
    for engine in (alone, together):
        for slot in range(2):
            engine.set_sampling(slot, sampling)
        engine.prefill(0, [1, 2])
        engine.prefill(1, [3, 4, 5])
    expected = [alone.next([0, 1], row) for row in rows[:48]]  # slot 1 is full after these
    monkeypatch.setattr("generation.native.BATCH_SECONDS", 0)
    written = together.write([0, 1], rows)
    assert len(written) == 1
    monkeypatch.setattr("generation.native.BATCH_SECONDS", 60)
    while len(written) < 48:
        written += together.write([0, 1], rows[len(written) :])
    assert written == expected
    with pytest.raises(ValueError):
        together.write([0, 1], rows)


@pytest.mark.parametrize("cache_bytes", [1, 3 << 20, 6 << 20, 1 << 40])
@pytest.mark.parametrize("threads_used", [1, 2])
def test_a_batch_in_groups_of_any_size_is_written_as_each_text_alone(
    extension, threads, threads_used, cache_bytes, monkeypatch
):
    """The size of the processor's last cache decides how many slots are stepped together."""
    threads(threads_used)
    monkeypatch.setattr("generation.native.BATCH_SECONDS", 60)
    monkeypatch.setattr("attention_ext.processor.caches", lambda: (Cache(3, cache_bytes, 16, 64),))
    gpt = model(n_embd=64, block_size=500)
    texts, steps = 25, 6
    rows = torch.rand(steps, texts, generator=torch.Generator().manual_seed(0)).tolist()
    batch, alone = open_engine(gpt, "native", slots=texts), open_engine(gpt, "native")
    for i in range(texts):
        batch.prefill(i, ids(gpt, 380 + i, seed=i))
    order = [*range(1, texts), 0]
    written = batch.write(order, rows)
    assert len(written) == steps and all(len(row) == texts for row in written)
    for i, slot in enumerate(order):
        alone.prefill(0, ids(gpt, 380 + slot, seed=slot))
        assert [alone.next([0], [row[i]])[0] for row in rows] == [row[i] for row in written]


def test_write_returns_when_its_time_is_over(extension):
    engine = open_engine(load("shakes2048").model, "native", capacity=2048)
    engine.prefill(0, [1] * 1500)
    made = engine.write([0], [[0.5]] * 500)  # each takes at least tens of microseconds
    assert 1 <= len(made) < 100


def test_the_weights_are_the_engines_own(extension):
    gpt = model()
    engine = open_engine(gpt, "native")
    engine.prefill(0, [1, 2, 3])
    before = engine.logits(0)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
    engine.prefill(0, [1, 2, 3])
    assert torch.equal(engine.logits(0), before) and before.abs().max() > 0


def test_threads_of_python_take_turns(extension):
    gpt = model(block_size=400)
    engine = open_engine(gpt, "native", slots=2)
    texts = [[], []]

    def write(slot):
        engine.prefill(slot, [1])
        texts[slot] = [engine.next([slot], [i / 300])[0] for i in range(300)]

    for _ in range(3):
        running = [threading.Thread(target=write, args=(slot,)) for slot in range(2)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert texts[0] == texts[1] and len(set(texts[0])) > 3


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(part="part5"), "part is 'part5'"),
        (dict(engine="numpy"), "engine is 'numpy'"),
        (dict(engine="native", part="part0"), "engine is 'native'; it must be 'torch' with part0"),
        (dict(slots=0), "slots is 0"),
        (dict(capacity=0), "capacity is 0; it must be from 1 to block_size=16"),
        (dict(capacity=17), "capacity is 17"),
        (dict(br=0), "br is 0"),
        (dict(bc=2**63), "bc is 9223372036854775808"),
        (dict(simd="neon"), "simd is 'neon'"),
        (dict(weights="int4"), "weights is 'int4'; it must be one of fp32, bf16, int8"),
        (dict(kv_cache="int8"), "kv_cache is 'int8'; it must be one of fp32, bf16"),
    ],
)
def test_wrong_arguments_are_named(extension, change, message):
    with pytest.raises(ValueError, match=message):
        open_engine(model(), **change)


def test_every_cache_precision_has_its_dtype():
    assert set(DTYPES) == set(CachePrecision)
    assert all(DTYPES[each].itemsize == each.bytes for each in CachePrecision)
    attend = _exact
    assert with_rounded_cache(attend, "fp32") is attend and with_rounded_cache(attend, "bf16") is not attend
    with pytest.raises(ValueError, match="kv_cache is 'int8'; it must be one of fp32, bf16"):
        with_rounded_cache(attend, "int8")


def test_every_precision_has_its_rounding():
    gpt = model()
    assert rounded(gpt, "fp32") is gpt
    assert all(rounded(gpt, weights) is not gpt for weights in Precision if weights != Precision.FP32)
    assert set(ROUNDINGS) == set(Precision)
    with pytest.raises(ValueError, match="weights is 'int4'; it must be one of fp32, bf16, int8"):
        rounded(gpt, "int4")


@pytest.mark.parametrize("name, value", [("slots", 1.0), ("capacity", "4"), ("bc", True)])
def test_arguments_of_a_wrong_type_are_named(name, value):
    with pytest.raises(TypeError, match=f"{name} is a {type(value).__name__}; it must be a whole number"):
        open_engine(model(), **{name: value})


def test_the_decoder_checks_what_it_is_given(extension):
    """Wrong calls of the class below NativeEngine."""
    gpt = model()
    sizes = dict(block_size=16, vocab_size=11, n_layer=2, n_head=2, n_embd=16)
    rest = dict(precision="fp32", kv_cache="fp32", part="part4_flash", br=16, bc=16, slots=2, capacity=16)
    rest |= dict(threads=1, cache_bytes=1 << 20)
    tensors = {n: t.detach().numpy() for n, t in gpt.state_dict().items()}
    Decoder = load_decoder()

    def refused(message, **change):
        weights = tensors | change.pop("tensors", {})
        with pytest.raises(ValueError, match=message):
            Decoder({n: t for n, t in weights.items() if t is not None}, **sizes | rest | change)

    refused("n_head is 0", n_head=0)
    refused("n_embd is 16; it must be a multiple of n_head=3", n_head=3)
    refused("the size of transformer.wte.weight is 176; it must be 192", vocab_size=12)
    refused("part is part5; it must be a part's operator", part="part5")
    refused("precision is 'int4'; it must be one of fp32, bf16, int8", precision="int4")
    refused("kv_cache is 'int8'; it must be one of fp32, bf16", kv_cache="int8")
    refused("cache_bytes is 0", cache_bytes=0)
    refused("slots is 0", slots=0)
    refused("capacity is 17; it must be from 1 to 16", capacity=17)
    refused("threads is 0", threads=0)
    refused("bc is 0", bc=0)
    wte = tensors["transformer.wte.weight"]
    refused("tensors has no transformer.wte.weight", tensors={"transformer.wte.weight": None})
    refused("transformer.wte.weight has another type", tensors={"transformer.wte.weight": wte.astype("f8")})
    refused("transformer.wte.weight has gaps", tensors={"transformer.wte.weight": wte.T})

    decoder = Decoder(tensors, **sizes | rest)
    for call, message in [
        (lambda: decoder.write([0], [[0.5]], 0), "slot is 0; it must be prefilled first"),
        (lambda: decoder.prefill(2, [0]), "slot is 2; it must be from 0 to 1"),
        (lambda: decoder.prefill(0, []), "the number of ids is 0; it must be from 1 to 16"),
        (lambda: decoder.prefill(0, [0] * 17), "the number of ids is 17"),
        (lambda: decoder.prefill(0, [11]), "an id is 11; it must be from 0 to 10"),
        (lambda: decoder.logits(-1), "slot is -1"),
        (lambda: decoder.prefill(0, [0], top=6), "top is 6; it must be from -1 to 5"),
        (lambda: decoder.prefill_begin(2, [0]), "slot is 2; it must be from 0 to 1"),
        (lambda: decoder.prefill_begin(0, [0] * 17), "the number of ids is 17"),
        (lambda: decoder.prefill_some(0, 0), r"slot is 0; it must be given a prompt by prefill_begin\(\)"),
        (lambda: decoder.prefill_some(2, 0), "slot is 2"),
        (lambda: decoder.prefill_drop(-1), "slot is -1"),
        (lambda: decoder.set_logprobs(0, 6), "top is 6"),
        (lambda: decoder.take_logprobs(2), "slot is 2"),
        (
            lambda: decoder.set_sampling(0, 1, 0, 1, 0, 1, 0, 0, [(11, 1)]),
            "a token of logit_bias is 11; it must be from 0 to 10",
        ),
        (lambda: decoder.push(0, 0), "slot is 0; it must be prefilled first"),
        (lambda: decoder.copy(2, 0), "from is 2; it must be from 0 to 1"),
        (lambda: decoder.copy(0, -1), "to is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    decoder.prefill_begin(0, [0] * 16)
    for call in (
        lambda: decoder.write([0], [[0.5]], 0),
        lambda: decoder.push(0, 0),
        lambda: decoder.prefill_some(0, float("nan")),
    ):
        with pytest.raises(ValueError, match="must be prefilled first|seconds must be at least 0"):
            call()
    decoder.prefill(0, [0] * 16)
    assert len(decoder.write([0], [[0.5]], 0)) == 1
    for slots, uniforms, message in [
        ([0], [0.5], "slot is 0; it must be prefilled again: it is full"),
        ([5], [0.5], "slot is 5"),
        ([0, 1], [0.5], "the number of uniforms is 1; it must be the number of slots, 2"),
        ([1], [0.5], "slot is 1; it must be prefilled first"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoder.write(slots, [uniforms], 0)
    decoder.prefill(1, [0])
    with pytest.raises(ValueError, match="token is 11; it must be from 0 to 10"):
        decoder.push(1, 11)
    for uniform in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="a uniform is outside"):
            decoder.write([1], [[0.5], [uniform]], 0)
    with pytest.raises(ValueError, match="slot is 1; it must be named once"):
        decoder.write([1, 1], [[0.5, 0.5]], 0)
    assert decoder.write([], [[]], 0) == [[]]
    assert open_engine(model(), "native").write([], [[], []]) == [[], []]
