"""webgpu.attention(): each step of the ladder against the float64 oracle, and the contract.

Without the package wgpu or an adapter most of it is skipped with a reason.
"""

import math
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from oracle import qkv
from support import full, naming, or_skip, printed

from shakespeare.attention_ext.parts import BuildError, Dtype
from shakespeare.attention_ext.webgpu import attention, calls
from shakespeare.attention_ext.webgpu.driver import SOURCES, Gpu, opened
from shakespeare.attention_ext.webgpu.steps import STEPS, Tile, ceil_div, choose

# (B, H, Nq, Nk, d): one row, tiles that are not full, widths that are padded, few queries, wide heads
SHAPES = [(2, 3, 63, 63, 24), (1, 1, 1025, 1025, 24)]  # each width is another shader to compile
MORE = [(1, 1, 1, 1, 1), (1, 2, 50, 123, 32), (1, 1, 1, 300, 64), (1, 2, 123, 123, 80), (1, 1, 130, 257, 128)]
MORE += [(1, 1, 40, 64, 256), (1, 2, 33, 97, 100), (1, 1, 1025, 1025, 64), (1, 1, 63, 123, 33)]
WIDTHS = (1, 24, 32, 33, 64, 80, 100, 128, 256)
HALF = 2.0**-11  # half a unit in the last place of 16 bits, by which step 6 rounds K, V and the weights


@pytest.fixture  # a test may lose the device, and the next one has another
def gpu() -> Gpu:
    with or_skip():
        return opened()


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest, gpu: Gpu) -> str:
    if lacking := STEPS[request.param].lacks(gpu.adapter):
        pytest.skip(f"{gpu.adapter.name} lacks {lacking}")
    return request.param


def check(step, q, k, v, causal=False, scale=None):
    """Compare a step with float64; step 6 with that of the K and V that it rounds."""
    applied = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    options = dict(causal=causal, scale=scale, kernel=step)
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32) and out.is_contiguous()
    if step == "6":
        k, v = k.half(), v.half()
    expected, expected_lse = oracle.attention(q, k, v, causal, applied)
    peers, lses = oracle.torch_float32_in_orders(q.float(), k.float(), v.float(), causal, applied)
    rounding = max(1e-6, oracle.score_rounding(q, k, applied))
    floor = rounding + (HALF if step == "6" else 0) + (HALF if q.dtype == torch.float16 else 0)
    oracle.assert_close(out.float(), expected, peers.double(), floor)
    oracle.assert_close(lse, expected_lse, lses.double(), 4 * rounding + (HALF if step == "6" else 0))


@pytest.mark.parametrize("shape", [*SHAPES, *(full(s) for s in MORE)], ids=str)
def test_awkward_shapes(step, shape):
    for causal in (True, False):
        check(step, *qkv(*shape), causal)


@pytest.mark.parametrize("count, widths", [(8, (24,)), full(120, WIDTHS)])
def test_generated_cases(step, count, widths):
    rng = random.Random(int(step))
    for seed in range(count):
        Nk, causal = rng.randint(1, 150), rng.random() < 0.5
        Nq = rng.randint(1, Nk if causal else 150)
        q, k, v = qkv(rng.randint(1, 2), rng.randint(1, 3), Nq, Nk, rng.choice(widths), seed=seed)
        if rng.random() < 0.2:  # not contiguous
            q, k = q.mT.contiguous().mT, torch.cat((k, k), dim=3)[..., k.shape[3] :]
        check(step, q, k, v, causal, rng.choice((None, 0.3, -0.2, 0.0)))


@pytest.mark.parametrize("kernel", [None, "1", "6"])
def test_float16(gpu, kernel):
    if lacking := {"shader-f16", *STEPS[kernel or "1"].needs} - gpu.adapter.features:
        pytest.skip(f"{gpu.adapter.name} lacks {' and '.join(sorted(lacking))}")
    chosen, _ = choose(kernel, 24, Dtype.FP16, gpu.adapter)
    check(chosen.name, *qkv(1, 2, 50, 123, 24, torch.float16), causal=True)


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_scores_of_1e4(step, large):
    q, k, v = qkv(1, 2, 50, 123, 24)
    q *= large / 30
    assert (q @ k.mT).abs().max() > 1e4 / 2
    check(step, q, k, v, True, 1.0)


def test_numbers_that_are_not_finite(step):
    """A query's reaches its row, a key's and a value's the rows that see it."""
    for change in ("q", "k", "v"):
        tensors = dict(zip("qkv", qkv(1, 1, 63, 63, 24)))
        for row, number in ((5, math.nan), (50, math.inf)):
            tensors[change][0, 0, row, 3] = number
            tensors[change][0, 0, row, 5] = -number
        out, lse = attention(*tensors.values(), causal=True, kernel=step, return_lse=True)
        finite = out[0, 0].isfinite().all(-1)
        clean = torch.arange(63) < 5 if change != "q" else (torch.arange(63) != 5) & (torch.arange(63) != 50)
        assert not finite[~clean].any()
        tile = 32 if change == "v" else 1  # a masked value may reach the rows of its tile
        assert finite[: 5 // tile * tile].all() and (change == "v" or torch.equal(finite, clean))
        assert change == "v" or torch.equal(lse[0, 0].isfinite(), clean)


def test_arrays_need_no_torch(gpu):
    program = """
import sys, numpy as np
from shakespeare.attention_ext.webgpu import attention
q = np.ones((1, 2, 3, 5), np.float32)
out, lse = attention(q, q, q, return_lse=True)
assert isinstance(out, np.ndarray) and np.allclose(out, 1) and lse.shape == (1, 2, 3)
assert "torch" not in sys.modules
"""
    printed(sys.executable, "-c", program)


def test_more_workgroups_than_a_dimension_has(gpu, monkeypatch):
    monkeypatch.setitem(STEPS, "1", replace(STEPS["1"], tiles=(Tile(1, 1),)))
    q = np.arange(70_000, dtype=np.float32).reshape(-1, 1, 1, 1)
    assert np.array_equal(attention(q, q, q, kernel="1"), q)


def test_several_dispatches_and_heads_that_do_not_fit_a_buffer_together(gpu, monkeypatch):
    tensors = qkv(2, 3, 63, 63, 24)
    whole = attention(*tensors)
    with monkeypatch.context() as patch:
        patch.setitem(calls.AT_ONCE, gpu.adapter.kind, 1)
        assert torch.equal(attention(*tensors), whole)
    monkeypatch.setitem(gpu.adapter.limits, "max-storage-buffer-binding-size", 4 * 63 * 24 * 4)
    assert torch.equal(attention(*tensors), whole)
    monkeypatch.setitem(gpu.adapter.limits, "max-storage-buffer-binding-size", 6000)
    with pytest.raises(BuildError, match="allows 6,000 bytes in a buffer, and 6,048 are needed"):
        attention(*tensors)


@pytest.mark.parametrize("step", ["5", "6"], indirect=True)
def test_rows_that_are_longer_than_a_subgroup(monkeypatch, step):
    """Subgroups have 4 to 128 lanes, so the maxima of a row must have another way."""
    for lanes in (2, 32):
        monkeypatch.setitem(STEPS, step, replace(STEPS[step], tiles=(Tile(lanes, 2, 4, 4),)))
        check(step, *qkv(1, 1, 40, 150, 8), causal=True)


@pytest.mark.parametrize("name", STEPS)
def test_the_table_has_the_workgroup_memory_of_the_source(name):
    step, size = STEPS[name], {"f32": 4, "u32": 4, "atomic<u32>": 4, "vec4f": 16, "vec4<f16>": 8}
    text = "".join((SOURCES / file).read_text() for file in step.files)
    size |= {name: size[of] for name, of in re.findall(r"^alias (\w+) = (.+);", text, re.M)}
    for tile in step.tiles:
        known = step.constants(ceil_div(200, 4), tile)
        for const, value in re.findall(r"^const (\w+): u32 = ([^;]+);", text, re.M):
            known[const] = eval(value.replace("/", "//"), {}, known)
        assert (known["BR"], known["BC"]) == (tile.br, tile.bc)
        declared = 0
        for kind, count in re.findall(r"^var<workgroup> \w+: array<(.+), ([^;]+)>;", text, re.M):
            declared += size[kind] * eval(count, {}, known)
        declared += sum(size[k] for k in re.findall(r"^var<workgroup> \w+: (u32|atomic<u32>);", text, re.M))
        assert declared == step.memory(tile, known["D4"])
        assert "// unroll" not in step.source(200, Dtype.FP32, tile).text()  # all marks are understood


@pytest.mark.full
@pytest.mark.parametrize("step", ["4", "6"], indirect=True)
def test_all_tiles_by_columns(gpu, monkeypatch, step):
    """At d = 8 more of them fit: a CPU adapter has too little memory for the largest at usual widths."""
    row, most = STEPS[step], gpu.adapter.limits["max-compute-workgroup-storage-size"]
    for tile in row.tiles:
        assert (tile.rows, tile.lines % 2, tile.keys % 4) == (4, 0, 0)  # what the source relies on
        if row.memory(tile, 2) <= most:
            monkeypatch.setitem(STEPS, step, replace(row, tiles=(tile,)))
            check(step, *qkv(1, 1, 300, 300, 8), causal=True)


@pytest.mark.parametrize("memory, threads", [(16384, 256), (32768, 1024)], ids=["least", "Metal"])
def test_every_width_fits_the_least_that_webgpu_promises_and_what_metal_has(memory, threads):
    limits = {"max-compute-workgroup-storage-size": memory, "max-compute-invocations-per-workgroup": threads}
    for step in STEPS.values():
        for d in range(1, 257):
            tile = step.tile(d, limits)
            assert step.memory(tile, ceil_div(d, 4)) <= memory and tile.threads <= threads


Q, T = np.ones((1, 2, 4, 8), np.float32), torch.ones(1, 2, 4, 8)
WRONG = [
    (dict(scale="1"), TypeError, "scale is a str; it must be a number"),
    (dict(window=(5, 5), softcap=None), ValueError, "window is given; it must be left out with"),
    (dict(windows=None), TypeError, "unexpected keyword argument 'windows'"),
    (dict(kernel=4), ValueError, "kernel is 4; it must be one of 1, 2"),
    (dict(kernel="7"), ValueError, "kernel is '7'; it must be one of 1, 2, 3, 4, 5, 6"),
    (dict(q=[1.0]), TypeError, "q is a list; it must be a NumPy array or a tensor"),
    (dict(k=torch.ones(1, 2, 4, 8)), TypeError, "k is a Tensor of shape .*; it must be as q is, an ndarray"),
    (dict(q=Q.astype(float)), TypeError, "q is float64; it must be float32 or float16 on WebGPU"),
    (dict(v=Q.astype(np.float16)), TypeError, "v is float16; it must be q's float32"),
    (dict(q=Q[0]), ValueError, r"q has shape \(2, 4, 8\); it must be \(B, H, N, d\) with no empty dimension"),
    (dict(k=Q[:, :1]), ValueError, r"k has shape \(1, 1, 4, 8\); it must be \(1, 2, Nk, 8\)"),
    (dict(k=Q[:, :, :2], v=Q[:, :, :2], causal=True), ValueError, "q has Nq=4 rows; with causal=True"),
    (dict.fromkeys("qkv", np.ones((1, 1, 1, 257), np.float32)), ValueError, "q has d=257; it must"),
    (dict(q=T, k=T.to("meta"), v=T), ValueError, "k is on meta; it must be on the CPU"),
    (dict(q=T, k=T, v=T.clone().requires_grad_()), ValueError, "device is 'webgpu'; it must be cpu or cuda"),
]


def test_a_wrong_argument_is_named(gpu):
    for change, error, message in WRONG:
        with naming(change), pytest.raises(error, match=message):
            attention(**dict(q=Q, k=Q, v=Q) | change)


def test_features_that_an_adapter_lacks(gpu):
    poor = replace(gpu.adapter, name="Poor", features=frozenset())
    assert choose(None, 32, Dtype.FP32, poor)[0].name == "4"
    with pytest.raises(ValueError, match="kernel is '6'; it needs shader-f16 and subgroup, which Poor lacks"):
        choose("6", 32, Dtype.FP32, poor)
    with pytest.raises(ValueError, match="q is float16; it must be float32 on Poor, which lacks shader-f16"):
        choose(None, 32, Dtype.FP16, poor)


def test_threads_may_call_at_the_same_time(gpu):
    inputs = [qkv(1, 1, 40, 150, 8, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda tensors: attention(*tensors, kernel="2"), inputs * 5)
    expected = [attention(*tensors, kernel="2") for tensors in inputs] * 5
    assert all(map(torch.equal, found, expected))


def test_another_device_takes_a_lost_ones_place(gpu):
    before = opened()
    tensors = qkv(1, 1, 40, 150, 8)
    expected = attention(*tensors)
    before.device.destroy()
    assert torch.equal(attention(*tensors), expected)
    assert opened() is not before


def test_a_missing_piece_is_named(gpu):
    missing, hidden = "import sys; sys.modules['wgpu'] = None", {"VK_DRIVER_FILES": "/none"}
    for what, environment, message in (
        (missing, {}, "device is 'webgpu', which needs wgpu: pip install wgpu"),
        ("import wgpu", hidden, "device is 'webgpu', and no adapter was found"),
    ):
        if environment and gpu.adapter.backend != "Vulkan":
            continue  # only Vulkan's drivers can be hidden
        program = f"""
{what}
import numpy as np
from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.webgpu import attention
q = np.ones((1, 1, 1, 1), np.float32)
try:
    attention(q, q, q)
except BuildError as error:
    print(error)
"""
        said = printed(sys.executable, "-c", program, VK_ICD_FILENAMES=None, **environment)
        assert message in said
