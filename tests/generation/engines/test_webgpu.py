"""The webgpu engine: its texts beside the CPU's, a device that is lost, what it refuses.

The contract of every engine is tested on it by the fixture `engine`.
"""

import dataclasses
import json
import re
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
from steps import MIXED, SAMPLINGS, forced, prefill
from support import full, naming

from shakespeare.attention_ext.parts import BuildError, CachePrecision, Precision
from shakespeare.attention_ext.webgpu import driver as by_webgpu
from shakespeare.generation.engines import webgpu
from shakespeare.generation.engines.engine import Unfit
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.sampling import Sampling
from shakespeare.model import load
from shakespeare.model.config import GPTConfig

FP32, CACHE = Precision.FP32, CachePrecision.FP32


@pytest.fixture
def no_adapter(monkeypatch) -> str:
    message = "device is 'webgpu', and no adapter was found"
    for module in (webgpu, by_webgpu):
        monkeypatch.setattr(module, "opened", Mock(side_effect=BuildError(message)))
    return message


def limits(**change) -> by_webgpu.Adapter:
    """An adapter with the least limits that every browser has."""
    least = {"max-storage-buffers-per-shader-stage": 8, "max-compute-workgroup-storage-size": 16384}
    least |= {"max-storage-buffer-binding-size": 1 << 27}
    named = {name.replace("_", "-"): number for name, number in change.items()}
    return by_webgpu.Adapter("a GPU", "Vulkan", "DiscreteGPU", frozenset(), least | named)


def test_what_does_not_fit_is_a_sentence():
    wide = GPTConfig(64, 65, 1, 8, 1024)
    for config, weights, on, message in (
        (load("shakes128").config, Precision.INT8, limits(), "has weights in fp32, not int8"),
        (GPTConfig(64, 65, 1, 300, 300), FP32, limits(), "rows of 1024 numbers, not 1200 in all heads"),
        (wide, FP32, limits(), "of workgroup memory; a GPU has 16,384"),
        (GPTConfig(64, 5000, 1, 2, 16), FP32, limits(), "of workgroup memory; a GPU has 16,384"),
        (tiny.gpt().config, FP32, limits(max_storage_buffers_per_shader_stage=7), "needs 8 buffers"),
        (GPTConfig(1 << 22, 65, 3, 1, 8), FP32, limits(), "the keys of a text take"),
    ):
        with naming(message), pytest.raises(Unfit, match=message):
            webgpu.source_for(config, weights, CACHE, config.block_size, on)
    for name in ("shakes128", "shakes256", "shakes1024"):
        webgpu.source_for(load(name).config, FP32, CACHE, 1024, limits())


def test_a_wrong_argument_is_named():
    for change, message in (
        (dict(part="part0"), "part is 'part0'; it must be part4 on WebGPU"),
        (dict(engine="native"), "engine is 'native'; it must be 'webgpu' on WebGPU"),
        (dict(engine="webgpu", device="cpu"), "engine is 'webgpu'; it must be 'native' or 'torch'"),
        (dict(kernel="1"), "kernel is '1'; it must be None with the webgpu engine"),
        (dict(br=64), "br is 64; it must be left out on WebGPU"),
    ):
        with naming(change), pytest.raises(ValueError, match=message):
            open_engine(tiny.gpt(), **{"device": "webgpu"} | change)


def test_without_an_adapter_the_cpu_writes(extension, no_adapter, cli):
    with pytest.warns(UserWarning, match=f"{no_adapter}; the native engine writes on the CPU"):
        assert open_engine(tiny.gpt(), device="webgpu").name == "native"
    with pytest.raises(BuildError, match=no_adapter):
        open_engine(tiny.gpt(), "webgpu", device="webgpu")
    arguments = ("part4", "--inference", "-m", "shakes128", "--max-new-tokens", 5, "--json")
    done = cli(*arguments, "--device", "webgpu")
    assert f"{no_adapter}; the native engine writes on the CPU" in done.stderr
    written = json.loads(done.stdout.splitlines()[0])
    assert (written["engine"], written["device"]) == ("native", "cpu")
    assert written["text"] == json.loads(cli(*arguments).stdout.splitlines()[0])["text"]


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize(
    "change",
    [
        dict(bias=True, n_embd=15, n_head=5, vocab_size=7),
        full(dict(n_embd=99, n_head=3, vocab_size=300, block_size=70)),
        full(dict(n_head=1, n_layer=1, block_size=1, vocab_size=1)),
        full(dict(n_head=32, n_embd=32, n_layer=3)),
        full(dict(n_head=6, n_embd=384, block_size=300)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_cache", ["fp32", full("bf16")])
def test_the_logits_are_the_cpus(extension, change, kv_cache):
    model = tiny.scaled(**change)
    length = model.config.block_size
    ids = [token * token % model.config.vocab_size for token in range(length)]
    on_gpu = open_engine(model, "webgpu", device="webgpu", kv_cache=kv_cache)
    on_cpu = open_engine(model, "native", device="cpu", kv_cache=kv_cache)
    before = max(1, length // 2)
    for engine in (on_gpu, on_cpu):
        prefill(engine, 0, ids[:before])
    # An error of float32 may round a key the other way.
    near = 1e-4 if kv_cache == "fp32" else 3e-2
    for made, right in zip(*(forced(each, 0, ids[before:]) for each in (on_gpu, on_cpu)), strict=True):
        torch.testing.assert_close(made, right, atol=near, rtol=0)


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize("seeds, samplings", [(3, ({}, *SAMPLINGS)), full(16, (MIXED,))], ids=("3", "16"))
def test_its_texts_are_those_of_the_cpu(extension, seeds, samplings):
    length = 12
    checkpoint = load("shakes128")
    on_gpu = open_engine(checkpoint, "webgpu", device="webgpu", slots=seeds)
    on_cpu = open_engine(checkpoint, slots=seeds, draft="off")
    ids = checkpoint.tokenizer.encode("ROMEO:")
    numbers = np.random.default_rng(0).random((length, seeds))
    for settings in samplings:
        texts = []
        for engine in (on_gpu, on_cpu):
            for slot in range(seeds):
                engine.set_sampling(slot, Sampling(**settings))
                prefill(engine, slot, ids)
            texts.append(engine.write(range(seeds), numbers, 1000.0).tolist())
        with naming(settings):
            assert texts[0] == texts[1] and len(texts[0]) == length


@pytest.fixture
def engine_of_tiny(adapter):
    """Opens the webgpu engine of the tiny model; all share a shader."""
    return lambda **options: open_engine(tiny.gpt(), "webgpu", device="webgpu", **options)


def test_slots_are_divided_among_buffers(engine_of_tiny, monkeypatch):
    whole, size = engine_of_tiny(slots=5), engine_of_tiny()._chunks[0].buffers["keys"][1]
    adapter = whole._gpu.adapter
    few = dict(adapter.limits) | {
        "max-storage-buffer-binding-size": max(
            2 * size, webgpu.Shape(whole.config).pack(tiny.gpt().weights).nbytes
        )
    }
    monkeypatch.setattr(whole._gpu, "adapter", dataclasses.replace(adapter, limits=few))
    most = few["max-storage-buffer-binding-size"] // size
    divided = engine_of_tiny(slots=3 * most)
    assert len(divided._chunks) == 3
    last = 3 * most - 1
    for engine in (whole, divided):
        prefill(engine, 0, [1, 2, 3])
        engine.set_sampling(1, Sampling(top_k=3))
    divided.set_sampling(last, Sampling(top_k=3))
    whole.copy(0, 1)
    divided.copy(0, last, most)
    numbers = np.random.default_rng(2).random((5, 2))
    assert whole.write([0, 1], numbers, 10).tolist() == divided.write([0, last], numbers, 10).tolist()
    assert whole.logits(1) == divided.logits(last)


def test_a_lost_device_is_an_error_and_another_engine_has_another(engine_of_tiny):
    lost = engine_of_tiny()
    prefill(lost, 0, [1, 2, 3])
    expected = lost.logits(0)
    lost._gpu.device.destroy()
    with pytest.raises(BuildError, match="the WebGPU device was lost"):
        lost.write([0], [[0.5]])
    engine = engine_of_tiny()
    prefill(engine, 0, [1, 2, 3])
    assert engine.logits(0) == expected


def test_it_races_with_parts_on_the_cpu(adapter, cli):
    done = cli("race", "part3,part4", "-m", "shakes128", "--max-new-tokens", 20, "--device", "webgpu")
    assert done.returncode == 0 and "are the same" in done.stdout  # one that differs gives 1
    assert sorted(re.findall(r"part\d +[a-z]+", done.stdout)) == ["part3  native", "part4  webgpu"]
    assert "native for part3; webgpu for part4" in done.stderr
