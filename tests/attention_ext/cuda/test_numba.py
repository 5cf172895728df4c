"""The Numba kernels against the float64 oracle, in Numba's simulator and, where there is one, on a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import math
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import numba_process
import oracle
import pytest
import torch
from support import naming

STATES = ["registers", "spilled"]
# (B, H, Nq, Nk, d), and the tile: the default's threads, up to 256, are Python's in the simulator
SHAPES = [
    ((2, 3, 7, 7, 24), dict(br=4, bc=4)),
    ((2, 1, 5, 17, 33), dict(br=2, bc=8)),
    ((1, 1, 9, 11, 80), dict(br=4, bc=5)),
    ((1, 1, 6, 10, 8), dict(br=1, bc=1)),
]
ON_GPU = [
    (1, 4, 257, 257, 32),
    (2, 3, 63, 63, 24),
    (1, 1, 1025, 1025, 16),
    (1, 2, 1, 300, 32),
    (1, 1, 130, 1000, 64),
    (1, 2, 65, 70, 256),
    (1, 1, 70, 90, 161),
    (40_000, 2, 3, 5, 4),
]


@pytest.fixture(scope="module", autouse=True)
def numba() -> None:
    """Skip the tests where Numba is missing."""
    if not all(map(importlib.util.find_spec, ("numba", "numba_cuda"))):
        pytest.skip("numba or numba-cuda is not installed: pip install -e '.[numba]'")


@pytest.fixture(scope="module")
def simulator():
    """Run a function of numba_process where Numba simulates CUDA."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=numba_process.simulate) as process:

        def run(function, tensors, **options):
            arrays = [t.numpy() for t in tensors]
            return process.submit(function, arrays, options).result(timeout=1200)

        yield run


@pytest.fixture
def gpu() -> None:
    """Skip the test without a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")


@pytest.fixture(params=["simulator", "gpu"])
def flash(request: pytest.FixtureRequest):
    """Return flash_attention() over tensors of the CPU."""
    device = request.getfixturevalue(request.param)

    def simulated(*tensors, **options):
        results = device(numba_process.flash_attention, tensors, **options)
        return tuple(map(torch.from_numpy, results))

    def on_gpu(*tensors, **options):
        from attention_ext.cuda import numba_flash

        results = numba_flash.flash_attention(*(t.cuda() for t in tensors), **options)
        return tuple(t.cpu() for t in results)

    return simulated if request.param == "simulator" else on_gpu


def qkv(B, H, Nq, Nk, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, n, d, generator=generator) for n in (Nq, Nk, Nk))


def check(flash, q, k, v, causal=False, scale=None, **options):
    """Compare the output and the logsumexp with the oracle's."""
    out, lse = flash(q, k, v, causal=causal, scale=scale, **options)
    applied = q.shape[3] ** -0.5 if scale is None else scale
    expected = oracle.attention(q, k, v, causal, applied)
    peer = oracle.torch_float32_in_orders(q, k, v, causal, applied)
    floor = max(1e-6, oracle.score_rounding(q, k, applied))
    oracle.assert_close(out, expected[0], peer[0], floor)
    oracle.assert_close(lse, expected[1], peer[1])


@pytest.mark.parametrize("state", STATES)
def test_awkward_shapes(flash, state):
    for (shape, tile), causal in itertools.product(SHAPES, (False, True)):
        with naming(shape, tile, causal):
            check(flash, *qkv(*shape), causal, state=state, **tile)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("flash", ["gpu"], indirect=True)
def test_shapes_of_many_blocks(flash, state):
    for shape, causal in itertools.product(ON_GPU, (False, True)):
        with naming(shape, causal):
            check(flash, *qkv(*shape), causal, state=state)


def test_strides(flash):
    q, k, v = (t.mT.contiguous().mT for t in qkv(1, 2, 5, 6, 8))
    assert not q.is_contiguous()
    check(flash, q, k, v, br=4, bc=4)
    check(flash, *(t[:, :1].expand_as(t) for t in (q, k, v)), br=4, bc=4)


def test_scores_of_1e4(flash):
    q, k, v = qkv(1, 1, 8, 8, 32)
    check(flash, q * (1e4 / (q @ k.mT).abs().max()), k, v, scale=1.0, br=4, bc=4)


def test_a_nan_reaches_the_rows_that_see_it(flash):
    for which in "qkv":
        tensors = dict(zip("qkv", qkv(1, 2, 8, 9, 8)))
        tensors[which][0, 1, 5, 3] = math.nan
        out = flash(*tensors.values(), causal=True, br=4, bc=2)[0]
        exact = oracle.attention(*tensors.values(), True, 8**-0.5)[0]
        assert torch.equal(out.isnan(), exact.isnan()), which


def test_wrong_arguments_are_named(flash):
    for change, message in (
        (dict(state="shared"), "state is 'shared'; it must be one of registers, spilled"),
        (dict(shape=(1, 1, 2, 2, 257)), "d is 257; it must be at most 256"),
        (dict(shape=(1, 1, 3, 2, 4), causal=True), "q has Nq=3 rows; .* at most Nk=2"),
        (dict(shape=(1, 1, 2, 0, 4)), r"k has shape \(1, 1, 0, 4\); it must be \(B, H, N, d\) with no empty"),
        (dict(br=0), "br is 0; it must be at least 1"),
        (dict(bc=-1), "bc is -1; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            flash(*qkv(*change.pop("shape", (1, 1, 2, 2, 4))), **change)


@pytest.mark.parametrize("state", STATES)
def test_global_traffic_is_as_counted(simulator, state):
    for d, causal in itertools.product((8, 33), (False, True)):
        options = dict(causal=causal, state=state, br=4, bc=4)
        simulated, counted = simulator(numba_process.traffic, qkv(1, 2, 7, 10, d), **options)
        assert simulated == counted, (d, causal)


@pytest.mark.parametrize("d", [32, *(pytest.param(d, marks=pytest.mark.full) for d in (64, 161, 256))])
def test_compiled_code(d):
    """No GPU is needed to see where the state is, and that no arithmetic is float64."""
    if not importlib.util.find_spec("nvidia.cu13.nvvm"):
        pytest.skip("NVVM is not installed: pip install nvidia-nvvm")
    registers, spilled = (numba_process.ptx(d, state) for state in STATES)
    assert not re.search(r"\.f64\b", registers + spilled)
    assert ".local" not in registers + spilled  # arrays that are not in registers
    assert "ld.shared.v4.f32" in registers
    width = -(-d // (4 * -(-d // 32))) * 4
    for access in ("ld.global", "st.global"):
        assert spilled.count(access) - registers.count(access) == width + 2  # a share of O, m and l
