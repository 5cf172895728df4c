"""The torch engine on another device: what it holds there, the arguments that it refuses, texts on a GPU."""

from __future__ import annotations

import pytest
import tiny
import torch
from support import naming

from attention_ext import BuildError, attention
from attention_ext.cuda import kernels
from attention_ext.cuda.steps import STEPS
from attention_ext.parts import CachePrecision, Dtype, Precision
from generation.engine import open_engine
from generation.generate import generate
from generation.pytorch import TorchEngine
from lab import loss
from model import load
from model.checkpoint import causal_attention

PROMPT = [1, 2, 3]


@pytest.fixture
def gpu() -> None:
    """Skip the test without a GPU and what compiles for it."""
    try:
        kernels.check_gpu()
        torch.cuda.synchronize()  # makes the GPU's context current
        kernels.kernel_for("1", 1, 16, 16, 16, Dtype.FP32, torch.cuda.current_device())
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_gpu(monkeypatch) -> str:
    """A machine without a GPU; the error that says so."""
    message = "device is 'cuda', and there is no GPU"

    def check_gpu() -> None:
        raise BuildError(message)

    monkeypatch.setattr(kernels, "check_gpu", check_gpu)
    return message


def test_all_is_on_the_models_device():
    seen = []
    model = tiny.gpt().with_attention(causal_attention).to("meta")
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].device.type))
    engine = TorchEngine(model, 3, 8, torch.bfloat16)
    engine.prefill(0, PROMPT)
    engine.copy(0, 2)
    engine.push(2, 4)
    assert seen == ["meta", "meta"]
    held = [engine._logits, *(t for cache in engine._caches for t in (cache.k, cache.v))]
    assert {t.device.type for t in held} == {"meta"}
    assert {t.dtype for t in held[1:]} == {torch.bfloat16}


def test_the_cpu_is_the_default():
    engine = open_engine(tiny.gpt(), "torch", part="part0")
    engine.prefill(0, PROMPT)
    again = open_engine(tiny.gpt(), "torch", part="part0", device="cpu")
    again.prefill(0, PROMPT)
    assert torch.equal(engine.logits(0), again.logits(0)) and engine.logits(0).device.type == "cpu"


REFUSED = [
    (dict(device="tpu"), "device is 'tpu'; it must be one of cpu, cuda"),
    (dict(device="cuda", part="part1"), "device is 'cuda'; part1 does not run there, only part0 and part4"),
    (dict(device="cuda", part="part3"), "part3 does not run there"),
    (dict(device="cuda", engine="native"), "engine is 'native'; it must be 'torch' on CUDA"),
    (dict(device="cuda", simd="off"), "simd is 'off'; it must be 'auto' on CUDA"),
    (dict(device="cuda", br=64), "br is 64; it must be None on CUDA"),
    (dict(device="cuda", bc=64), "bc is 64; it must be None on CUDA"),
    (dict(device="cuda", step="0"), "step is '0'; it must be one of 1,"),
    (dict(device="cuda", step=1, part="part0"), "step is 1; it must be None with part0"),
    (dict(step="1"), "step is '1'; it must be None on the CPU"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_a_wrong_argument_is_named(no_gpu, change, message):
    with pytest.raises(ValueError) as error:
        open_engine(tiny.gpt(), **change)
    assert message in str(error.value)


def test_heads_that_are_too_wide_are_named(no_gpu):
    wide = tiny.gpt(n_head=1, n_embd=257, n_layer=1)
    with pytest.raises(ValueError, match="model has heads of d=257; d must be at most 256 on CUDA in part4"):
        open_engine(wide, device="cuda")
    with pytest.raises(BuildError, match=no_gpu):  # part0 has no such limit
        open_engine(wide, device="cuda", part="part0")


@pytest.mark.parametrize("part", ["part0", "part4"])
def test_without_a_gpu_one_error_says_so(no_gpu, part):
    for call in (
        lambda: open_engine(tiny.gpt(), device="cuda", part=part),
        lambda: loss.held_out("shakes128", "First Citizen:\n" * 20, part, device="cuda"),
        lambda: generate(load("shakes128"), device="cuda", part=part, max_new_tokens=1),
    ):
        with pytest.raises(BuildError, match=no_gpu):
            call()


def test_the_command_line_refuses(failed, no_gpu):
    for arguments, message in (
        ("part4 --inference --device cuda -bc auto", "-bc does not go with --device cuda"),
        ("part4 --inference --device cuda --engine native", "engine is 'native'"),
        ("part4 --inference --step 1", "--step goes with --device cuda only"),
        ("part4 --inference --device cuda", "there is no GPU"),
        ("part0 --inference --device cuda --interactive", "there is no GPU"),
        ("eval --device cuda --threads 1", "--threads does not go with --device cuda"),
        (f"eval --device cuda --part part1 --corpus {__file__}", "part1 does not run there"),
        (f"eval --device cuda --corpus {__file__}", "there is no GPU"),
        ("race part0,part4 --device cuda", "there is no GPU"),
        ("race part0,part4 --device cuda -t 1", "-t does not go with --device cuda"),
    ):
        with naming(arguments):
            assert message in failed(*arguments.split())


@pytest.mark.parametrize("weights", list(Precision))
def test_part0_and_part4_write_the_same_texts_on_a_gpu(gpu, weights):
    checkpoint = load("shakes128")
    options = dict(device="cuda", weights=weights, max_new_tokens=150, temperature=0)
    expected = generate(checkpoint, part="part0", **options)
    for step in STEPS:
        if Dtype.FP32 in STEPS[step].dtypes and STEPS[step].runs_on(kernels.gpu(0).capability):
            assert generate(checkpoint, part="part4", step=step, **options) == expected, step


def test_a_gpus_logits_are_those_of_the_cpu(gpu):
    model = tiny.gpt()
    engines = [
        open_engine(model, "torch", part="part4", slots=2, device=device) for device in ("cpu", "cuda")
    ]
    for engine in engines:
        engine.prefill(0, PROMPT)
        engine.copy(0, 1)
        engine.push(1, 5)
    on_cpu, on_gpu = engines
    assert on_gpu._caches[0].k.is_cuda and on_gpu._logits.is_cuda
    for slot in (0, 1):
        torch.testing.assert_close(on_gpu.logits(slot), on_cpu.logits(slot), rtol=1e-5, atol=1e-5)
    assert next(model.parameters()).device.type == "cpu"  # the caller's model stays
    uniforms = [0.3, 0.6]
    assert on_gpu.next([0, 1], uniforms) == on_cpu.next([0, 1], uniforms)


def test_a_bf16_cache_on_a_gpu_changes_the_logits_a_little(gpu):
    caches = [open_engine(tiny.gpt(), part="part4", device="cuda", kv_cache=each) for each in CachePrecision]
    for engine in caches:
        engine.prefill(0, PROMPT)
    exact, rounded = (engine.logits(0) for engine in caches)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)


def test_the_loss_is_that_of_the_cpu(gpu):
    text = "First Citizen:\nWe are accounted poor citizens.\n" * 60
    expected = loss.held_out("shakes128", text).nats
    for part in ("part0", "part4"):
        assert loss.held_out("shakes128", text, part, device="cuda").nats == pytest.approx(expected, abs=1e-5)


def test_attention_takes_what_the_engine_gives(gpu):
    """Views of a cache: rows that are far apart."""
    cache = torch.randn(3, 4, 64, 16, device="cuda")
    q = torch.randn(2, 4, 1, 16, device="cuda")
    k, v = cache[:2, :, :33], cache[1:, :, :33]
    expected = attention("part0", q, k, v, causal=True)
    torch.testing.assert_close(attention("part4", q, k, v, causal=True), expected, rtol=1e-5, atol=1e-6)
