"""The cuda engine, and the torch engine on a GPU: what they hold and refuse, the texts that they write.

The contract of every engine is tested on the cuda engine by the fixture `engine`.
"""

import runpy
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from steps import SAMPLINGS, choose, forced, logits, prefill
from support import ROOT, full, naming, or_skip, resident

from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.build import cache, nvrtc, prebuilt
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import KERNELS, Gpu
from shakespeare.attention_ext.cuda.launches import Sizes
from shakespeare.attention_ext.parts import CachePrecision, Dtype, Precision
from shakespeare.generation.engines import cuda, layouts, pytorch
from shakespeare.generation.engines.engine import EngineOptions, Unfit
from shakespeare.generation.engines.table import choose as choose_engine
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.texts import complete, generate
from shakespeare.generation.writer import Writer
from shakespeare.lab.eval import held_out_loss
from shakespeare.model import load
from shakespeare.model.config import GPTConfig

PROMPT = [1, 2, 3]
SHAKES256 = GPTConfig(256, 65, 4, 4, 128, bias=False)
H100 = 227 * 1024  # bytes of shared memory for a block


@pytest.fixture
def gpu() -> None:
    with or_skip():
        driver.check_gpu()
        torch.cuda.synchronize()  # makes the GPU's context current
        driver.compiled("1", Sizes(1, 16, 16), 16, Dtype.FP32, torch.cuda.current_device())


@pytest.fixture
def a_gpu(no_cuda_engine) -> None:
    if no_cuda_engine:
        pytest.skip(no_cuda_engine)


@pytest.fixture
def no_gpu(monkeypatch) -> str:
    """A machine without a GPU; the error that says so."""
    message = "device is 'cuda', and there is no GPU"

    def check_gpu() -> None:
        raise BuildError(message)

    monkeypatch.setattr(driver, "check_gpu", check_gpu)
    monkeypatch.setattr(driver, "gpu", check_gpu)
    monkeypatch.setattr(layouts, "device", check_gpu)
    return message


def test_a_wrong_argument_is_named(no_gpu):
    for change, message in (
        (dict(device="tpu"), "device is 'tpu'; it must be one of cpu, cuda"),
        (dict(engine="native"), "engine is 'native'; it must be 'cuda' or 'torch' on CUDA"),
        (dict(engine="cuda", device="cpu"), "engine is 'cuda'; it must be 'native' or 'torch' on the CPU"),
        (dict(engine="cuda", part="part0"), "engine is 'cuda'; it must be 'torch' with part0"),
        (dict(engine="cuda", kernel="4"), "kernel is '4'; it must be None with the cuda engine"),
        (dict(br=64), "br is 64; it must be left out on CUDA"),
        (dict(kernel="0"), "kernel is '0'; it must be one of 1,"),
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


@pytest.mark.parametrize("weights", list(Precision))
def test_part0_and_part4_write_the_same_texts_on_a_gpu(gpu, weights):
    checkpoint = load("shakes128")
    options = dict(device="cuda", weights=weights, max_new_tokens=150, temperature=0)
    expected = generate(checkpoint, part="part0", **options)
    on = driver.gpu(0).capability
    for name, kernel in KERNELS.items():
        if Dtype.FP32 in kernel.dtypes and kernel.runs_on(on, Dtype.FP32):
            assert generate(checkpoint, part="part4", kernel=name, **options) == expected, name


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


def test_the_loss_is_that_of_the_cpu(gpu):
    text = "First Citizen:\nWe are accounted poor citizens.\n" * 60
    expected = held_out_loss("shakes128", text).nats
    for part in ("part0", "part4"):
        assert held_out_loss("shakes128", text, part, device="cuda").nats == pytest.approx(expected, abs=1e-5)


# The cuda engine, as far as it needs no GPU


def gpu_of(capability=(9, 0)):
    return Gpu("a GPU", capability, H100, 132, l2=50 << 20)


FP32 = dict(config=SHAKES256, weights=Precision.FP32, kv_cache=CachePrecision.FP32)
BF16 = FP32 | dict(weights=Precision.BF16, kv_cache=CachePrecision.BF16)
WIDE = FP32 | dict(config=GPTConfig(64, 100, 2, 6, 96, bias=True))
FULL = pytest.mark.full


COMPILED = [(layouts.Cluster(**FP32, blocks=16), 1, (9, 0)), (layouts.Grid(**FP32), 4, (9, 0))]
COMPILED_TOO = [
    (layouts.Cluster(**FP32, blocks=16), 5, (9, 0)),
    (layouts.Cluster(**BF16, blocks=16), 5, (9, 0)),
    (layouts.Cluster(**WIDE, blocks=16), 3, (9, 0)),
    (layouts.Cluster(**FP32, blocks=16, clocks=True), 2, (10, 0)),
    (layouts.Grid(**BF16), 8, (9, 0)),
    (layouts.Grid(**WIDE), 1, (8, 0)),
    (layouts.Grid(**FP32, clocks=True), 1, (8, 6)),
    (layouts.Grid(**FP32, prompt=True), 4, (8, 9)),
    (layouts.Grid(**BF16, prompt=True), 4, (10, 0)),
]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("cases", [COMPILED, full(COMPILED_TOO)], ids=["some", "others"])
def test_the_decoder_compiles_and_hardly_spills(cases):
    for layout, texts, capability in cases:
        _, found = layout.source(texts, capability).compile()
        few = 32 if isinstance(layout, layouts.Grid) else 0  # bytes: two blocks share the registers there
        with naming(layout, texts, capability):
            assert 0 < found.registers <= 255 and found.spill_stores <= few, found


def test_what_does_not_fit_is_a_sentence():
    fp32, int8, cache = Precision.FP32, Precision.INT8, CachePrecision.FP32
    for config, weights, on, message in (
        (SHAKES256, int8, gpu_of(), "the cuda engine has weights in fp32 and bf16, not int8"),
        (SHAKES256, fp32, gpu_of((7, 5)), "the cuda engine needs compute capability 8.0; a GPU has 7.5"),
        (GPTConfig(64, 65, 1, 4, 48), fp32, gpu_of(), "takes heads of 4, 8, 16, 32, 64, 128, not 12"),
        (GPTConfig(64, 65, 1, 3, 12), fp32, gpu_of(), "takes n_embd of multiples of 8, not 12"),
        (GPTConfig(64, 65, 12, 12, 768), fp32, gpu_of(), "takes 13,107,200 bytes of weights on a GPU"),
    ):
        with naming(message), pytest.raises(Unfit, match=message):
            layouts.layouts_for(config, weights, cache, on)
    (found,), grid = layouts.layouts_for(SHAKES256, fp32, cache, gpu_of())
    assert (found.blocks, found.most_texts(H100), grid.most_texts(H100)) == (16, 5, 8)
    both, _ = layouts.layouts_for(SHAKES256, Precision.BF16, cache, gpu_of())
    assert [each.blocks for each in both] == [16, 8]
    assert layouts.layouts_for(GPTConfig(64, 65, 1, 2, 8), fp32, cache, gpu_of())[0][0].blocks == 8
    assert layouts.layouts_for(SHAKES256, fp32, cache, gpu_of((8, 6)))[0] == []


def test_what_does_not_fit_is_written_by_the_torch_engine(monkeypatch):
    def unfit(*arguments, **named):
        raise Unfit("a model that does not fit")

    monkeypatch.setattr(cuda, "CudaEngine", unfit)
    monkeypatch.setattr(pytorch, "open_torch", lambda *arguments: "torch")
    said = ["a model that does not fit; the torch engine writes"]
    assert choose_engine(tiny.gpt(), EngineOptions(device="cuda")) == ("torch", said)
    with pytest.warns(UserWarning, match=said[0]):
        assert open_engine(tiny.gpt(), device="cuda") == "torch"
    with pytest.raises(ValueError, match="a model that does not fit"):
        open_engine(tiny.gpt(), "cuda", device="cuda")


# The cuda engine on the CPU, whose blocks run in any order and get each other's data late


@pytest.mark.parametrize(
    "threads, blocks, count, change",
    [
        full(64, 4, 9, dict(bias=True)),
        (64, 4, 45, dict(bias=True)),  # more than the clusters take: the grid, in two passes
        full(64, 8, 9, dict(bias=False, n_head=1)),
        full(256, 16, 9, dict(n_embd=32, n_head=4, vocab_size=70)),
        full(256, 8, 9, dict(n_embd=64, n_head=16)),  # two units a block
        full(128, 8, 9, dict(n_embd=48, n_head=6, vocab_size=3)),  # idle blocks
        full(128, 8, 21, dict(n_embd=48, n_head=6, vocab_size=3)),
        full(256, 32, 12, dict(n_embd=32, n_head=1, vocab_size=70)),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", full("bf16")])
def test_no_order_of_blocks_changes_a_text(emulated, monkeypatch, threads, blocks, count, change, precision):
    emulated(monkeypatch, threads, (blocks,))
    model, rounded = tiny.gpt(**change), dict(weights=precision, kv_cache=precision)
    vocab_size = model.config.vocab_size
    uniforms = np.random.default_rng(0).random((6, count)).tolist()
    expected = open_engine(model, "torch", slots=count, **rounded)
    engine = open_engine(model, "cuda", device="cuda", slots=count, **rounded)
    for slot in range(count):
        for each in (expected, engine):
            prefill(each, slot, [token * token % vocab_size for token in range(1 + slot % 9)])
            each.set_sampling(slot, Sampling(**SAMPLINGS[slot % 9] | dict(logit_bias=())))
    for slot in range(count):
        torch.testing.assert_close(logits(engine, slot), logits(expected, slot), rtol=1e-4, atol=1e-4)
    written = engine.write(range(count), uniforms, 100).tolist()
    assert len(written) == 6
    assert written == [choose(expected, range(count), row) for row in uniforms]
    close = 1e-4 if precision == "fp32" else 0.02  # a last bit may round a key to the next number of 8 bits
    for slot in range(count):
        torch.testing.assert_close(logits(engine, slot), logits(expected, slot), rtol=close, atol=close)
    with pytest.raises(ValueError, match="slot is 0; it must be read first"):
        engine.begin(0, [1])
        engine.write([0], [[0.5]])


def test_what_the_slots_need_is_compiled_and_a_wheel_brings_it(emulated, monkeypatch, tmp_path):
    """One text: the reading of its prompt, and one way to write it."""
    wheel = runpy.run_path(str(ROOT / "scripts" / "make-wheels.py"))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    for source in wheel["sources"]():
        (tmp_path / source.name()).write_bytes(source.name().encode())
    wheel["write_sums"](tmp_path)
    checkpoint = load("shakes256")
    monkeypatch.setattr(nvrtc, "versions", lambda: pytest.fail("NVRTC is asked for"))
    for capability, clusters, count, draft, precision, texts in (
        ((9, 0), 2, 1, "auto", "fp32", [4]),
        ((9, 0), 2, 1, "off", "bf16", [1]),
        ((9, 0), 0, 1, "auto", "fp32", [4, 1]),  # the GPU refuses clusters of 16
        ((8, 6), 0, 1, "auto", "bf16", [1]),
        ((9, 0), 2, 500, "auto", "fp32", [4, 2, 3, 4, 5, 4, 8]),
    ):
        emulated(monkeypatch, layouts.THREADS, layouts.CLUSTERS)
        on = layouts.device()
        monkeypatch.setattr(on, "clusters", lambda layout, drafts=False: clusters)
        shared = prebuilt.GPUS[capability] << 10
        on.on = replace(on.on, capability=capability, l2=50 << 20, shared=shared)
        rounded = dict(weights=precision, kv_cache=precision)
        open_engine(checkpoint, "cuda", device="cuda", slots=count, draft=draft, **rounded)
        (reader, _), *ways = dict.fromkeys(on.prepared)
        with naming(capability, clusters, count, draft, precision):
            assert reader.prompt and [rows for _, rows in ways] == texts
            for layout, rows in on.prepared:
                source = layout.source(rows, capability)
                assert source.make() == source.name().encode()
    (tmp_path / source.name()).write_bytes(b"another")
    with pytest.raises(BuildError, match=f"is not the file that {prebuilt.SUMS} beside it names"):
        source.make()


def test_compiling_is_not_counted_as_writing(emulated, monkeypatch):
    emulated(monkeypatch, 32, (2,))
    engine, seconds = open_engine(tiny.gpt(), "cuda", device="cuda"), 1.0
    kernel = engine._gpu.kernel

    def slow(layout, texts):
        with cache.uncounted(), cache.uncounted():  # as of a compilation in a compilation
            time.sleep(seconds)
        return kernel(layout, texts)

    monkeypatch.setattr(engine._gpu, "kernel", slow)
    kernel(engine._reader, engine._read_together), kernel(*engine._launch_for(np.arange(1))[:2])
    writer = Writer(engine)
    text, start = writer.join(Request([1], max_new_tokens=1)), time.perf_counter()
    writer.step()
    took = time.perf_counter() - start
    assert took >= 2 * seconds and writer.seconds <= took - 2 * seconds
    assert text.prefill_seconds + text.decode_seconds == pytest.approx(writer.seconds)


@pytest.mark.full
def test_a_new_machine_has_no_folder_for_the_lock(tmp_path, monkeypatch):
    """Another user could lead a file in a folder that all may change to any other file."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "file").touch()
    for folder, locks in (("new/folder", True), ("shared", False), ("file", False)):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / folder))
        with cuda.turn("name"):
            assert (tmp_path / folder / "gpu_name").exists() == locks


def test_long_launches_of_processes_take_turns(emulated, monkeypatch):
    emulated(monkeypatch, 32, (2,))
    engine = open_engine(tiny.gpt(), "cuda", device="cuda")
    prefill(engine, 0, [1])
    long = threading.Thread(target=engine.write, args=([0], [[0.5]], 1.0))
    with cuda.turn(driver.gpu().identity):  # its file is opened anew, as another process does
        engine.write([0], [[0.5]])  # short: it waits for nobody
        long.start()
        long.join(0.2)
        assert long.is_alive()
    long.join(60)
    assert not long.is_alive()


# The cuda engine on a GPU


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("weights, kv_cache", [("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_its_texts_are_those_of_the_cpu(extension, weights, kv_cache):
    precisions = dict(weights=weights, kv_cache=kv_cache)
    for name in ("shakes128", "shakes1024"):
        checkpoint = load(name)
        on_gpu = open_engine(checkpoint, "cuda", device="cuda", **precisions)
        on_cpu = open_engine(checkpoint, **precisions)
        for sampling in SAMPLINGS:
            texts = [
                generate(checkpoint, "ROMEO:", 150, engine=engine, seed=3, **sampling)
                for engine in (on_gpu, on_cpu)
            ]
            with naming(name, sampling):
                assert texts[0] == texts[1]


@pytest.mark.usefixtures("a_gpu")
def test_a_batch_changes_no_text_on_a_gpu():
    checkpoint = load("shakes128")
    alone, many = (open_engine(checkpoint, "cuda", device="cuda", slots=n) for n in (1, 100))
    uniforms = np.random.default_rng(1).random((30, 100))
    lengths = [1 + 7 * slot % 90 for slot in range(100)]
    for slot, length in enumerate(lengths):
        prefill(many, slot, [token % 65 for token in range(length)])
        many.set_sampling(slot, Sampling(top_p=0.9 if slot % 3 else 1.0))
    rows = many.write(range(100), uniforms, 10)
    assert len(rows) == 30
    for slot in range(0, 100, 9):
        prefill(alone, 0, [token % 65 for token in range(lengths[slot])])
        alone.set_sampling(0, Sampling(top_p=0.9 if slot % 3 else 1.0))
        written = alone.write([0], uniforms[:, [slot]], 10)
        assert np.array_equal(written, rows[:, [slot]])
        torch.testing.assert_close(logits(alone), logits(many, slot), rtol=1e-5, atol=1e-4)


def free_bytes() -> int:
    layouts.device().activate()
    free, _ = driver.checked(driver.bindings().cuMemGetInfo())
    return int(free)


@pytest.mark.full
@pytest.mark.whole_gpu
@pytest.mark.usefixtures("a_gpu")
def test_ten_million_tokens_at_constant_memory():
    checkpoint, texts = load("shakes256"), 39_100
    length = checkpoint.config.block_size
    engine = open_engine(checkpoint, "cuda", device="cuda", slots=1000)
    requests = (Request([0], seed=seed, max_new_tokens=length) for seed in range(texts))
    taken = []  # (resident bytes, free bytes of the GPU) after each thousand texts
    tokens = done = 0
    for completion, piece in complete(Writer(engine), checkpoint.tokenizer, requests):
        if not piece:
            tokens, done = tokens + completion.new_tokens, done + 1
            if done % 1000 == 0:
                taken.append((resident("self"), free_bytes()))
    assert tokens == texts * length > 10**7
    most, least = (pick(column) for pick, column in zip((max, min), zip(*taken[4:])))
    assert most <= taken[3][0] + (8 << 20) and least >= taken[3][1] - (8 << 20)
