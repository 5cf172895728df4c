"""The torch engine on another device: what it holds there, the arguments that it refuses, texts on a GPU."""

from __future__ import annotations

import pytest
import tiny
import torch
from steps import choose, forced, logits, prefill
from support import naming

from attention_ext import BuildError
from attention_ext.cuda import driver
from attention_ext.cuda.kernels import KERNELS
from attention_ext.parts import CachePrecision, Dtype, Precision
from generation.engine import open_engine
from generation.texts import generate
from lab.eval import held_out_loss
from model import load

PROMPT = [1, 2, 3]


@pytest.fixture
def gpu() -> None:
    """Skip the test without a GPU and what compiles for it."""
    try:
        driver.check_gpu()
        torch.cuda.synchronize()  # makes the GPU's context current
        driver.compiled("1", 1, 16, 16, 16, Dtype.FP32, torch.cuda.current_device())
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_gpu(monkeypatch) -> str:
    """A machine without a GPU; the error that says so."""
    message = "device is 'cuda', and there is no GPU"

    def check_gpu() -> None:
        raise BuildError(message)

    monkeypatch.setattr(driver, "check_gpu", check_gpu)
    return message


def test_a_wrong_argument_is_named(no_gpu):
    for change, message in (
        (dict(device="tpu"), "device is 'tpu'; it must be one of cpu, cuda"),
        (dict(part="part1"), "device is 'cuda'; part1 does not run there, only part0 and part4"),
        (dict(engine="native"), "engine is 'native'; it must be 'torch' on CUDA"),
        (dict(simd="off"), "simd is 'off'; it must be 'auto' on CUDA"),
        (dict(br=64), "br is 64; it must be None on CUDA"),
        (dict(bc=64), "bc is 64; it must be None on CUDA"),
        (dict(kernel="0"), "kernel is '0'; it must be one of 1,"),
        (dict(kernel="1", part="part0"), "kernel is '1'; it must be None with part0"),
        (dict(device="cpu", kernel="1"), "kernel is '1'; it must be None on the CPU"),
    ):
        with naming(change), pytest.raises(ValueError, match=message):
            open_engine(tiny.gpt(), **{"device": "cuda"} | change)
    wide = tiny.gpt(n_head=1, n_embd=257, n_layer=1)
    with pytest.raises(ValueError, match="model has heads of d=257; d must be at most 256 on CUDA in part4"):
        open_engine(wide, device="cuda")
    with pytest.raises(BuildError, match=no_gpu):  # part0 has no such limit
        open_engine(wide, device="cuda", part="part0")


def test_without_a_gpu_one_error_says_so(no_gpu):
    for part in ("part0", "part4"):
        for call in (
            lambda **given: open_engine(tiny.gpt(), **given),
            lambda **given: held_out_loss("shakes128", "First Citizen:\n" * 20, **given),
            lambda **given: generate(load("shakes128"), max_new_tokens=1, **given),
        ):
            with naming(part), pytest.raises(BuildError, match=no_gpu):
                call(device="cuda", part=part)


def test_the_command_line_refuses(failed, no_gpu):
    for arguments, message in (
        ("part4 --inference --device cuda -bc auto", "-bc does not go with --device cuda"),
        ("part4 --inference --kernel 1", "--kernel goes with --device cuda only"),
        ("part4 --inference --device cuda", "there is no GPU"),
        ("eval --device cuda --threads 1", "--threads does not go with --device cuda"),
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
    for kernel in KERNELS:
        if Dtype.FP32 in KERNELS[kernel].dtypes and KERNELS[kernel].runs_on(driver.gpu(0).capability):
            assert generate(checkpoint, part="part4", kernel=kernel, **options) == expected, kernel


def test_a_gpus_logits_are_those_of_the_cpu(gpu):
    model = tiny.gpt()
    on_cpu, on_gpu = (open_engine(model, "torch", slots=2, device=device) for device in ("cpu", "cuda"))
    for engine in (on_cpu, on_gpu):
        prefill(engine, 0, PROMPT)
        engine.copy(0, 1)
        list(forced(engine, 1, [5]))
    assert on_gpu._caches[0].k.is_cuda and on_gpu._logits.is_cuda
    for slot in (0, 1):
        torch.testing.assert_close(logits(on_gpu, slot), logits(on_cpu, slot), rtol=1e-5, atol=1e-5)
    assert next(model.parameters()).device.type == "cpu"  # the caller's model stays
    uniforms = [0.3, 0.6]
    assert choose(on_gpu, [0, 1], uniforms) == choose(on_cpu, [0, 1], uniforms)


def test_a_bf16_cache_on_a_gpu_changes_the_logits_a_little(gpu):
    caches = [open_engine(tiny.gpt(), part="part4", device="cuda", kv_cache=each) for each in CachePrecision]
    for engine in caches:
        prefill(engine, 0, PROMPT)
    exact, rounded = (logits(engine) for engine in caches)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)


def test_the_loss_is_that_of_the_cpu(gpu):
    text = "First Citizen:\nWe are accounted poor citizens.\n" * 60
    expected = held_out_loss("shakes128", text).nats
    for part in ("part0", "part4"):
        assert held_out_loss("shakes128", text, part, device="cuda").nats == pytest.approx(expected, abs=1e-5)
