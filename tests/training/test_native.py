"""The training step in C++ against PyTorch's: gradients, both optimizers, their states, fallbacks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from support import naming
from torch import library as torch_library

from attention_ext import attention
from attention_ext import extension as loader
from training.muon import Muon
from training.native import KINDS, part4
from training.recipe import Recipe
from training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("extension")
RECIPE = Recipe(
    block_size=16, steps=1, dropout=0.0, batch_chars=64, n_layer=2, n_head=2, n_embd=32, average=0.8
)
CPU = torch.device("cpu")

# Awkward sizes: batch, block, V, C, heads, layers
SIZES = [
    (4, 16, 12, 32, 2, 2),
    (1, 9, 7, 24, 3, 2),
    (33, 5, 65, 24, 3, 1),
    (3, 1, 2, 8, 1, 1),
    (2, 200, 11, 48, 4, 1),
    (1, 450, 5, 16, 2, 1),
    (2, 33, 130, 200, 5, 1),
    (1, 2, 1, 1, 1, 3),
]


def trainer(attend=None, sizes=SIZES[0], factor=1.0, recipe=RECIPE) -> Trainer:
    """A trainer of a model of these sizes, whose first weights are multiplied by a factor."""
    batch, block, V, C, heads, layers = sizes
    change = dict(block_size=block, batch_chars=batch * block, n_embd=C, n_head=heads, n_layer=layers)
    ids = torch.randint(V, (500,), generator=torch.Generator().manual_seed(1))
    made = Trainer(dataclasses.replace(recipe, **change), V, ids, CPU, attend)
    with torch.no_grad():
        for p in made.model.parameters():
            p.mul_(factor)
    made.averaged.load_state_dict(made.model.state_dict())
    return made


def batch_of(sizes, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    batch, block, V, *_ = sizes
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(V, (batch, block), generator=generator) for _ in range(2))  # type: ignore[return-value]


def exact(of: Trainer, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, list[torch.Tensor]]:
    """The loss, the norm and the clipped gradients in float64, by PyTorch."""
    model = copy.deepcopy(of.model).double()
    for block in model.transformer.h:
        block.attn.attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item(), norm.item(), [p.grad for p in model.parameters()]  # type: ignore[misc]


def test_loss_norm_and_gradients(threads):
    threads(2)
    for sizes, factor in itertools.product(SIZES, (1.0, 5.0)):
        native = trainer(part4(), sizes, factor)
        assert native.native
        x, y = batch_of(sizes)
        loss, norm, gradients = exact(native, x, y)
        with naming(sizes, factor):
            assert float(native._gradients(x, y)) == pytest.approx(loss, rel=1e-5, abs=1e-6)
            assert float(native.native_step.norm) == pytest.approx(norm, rel=1e-4, abs=1e-6)
            for (name, p), right in zip(native.model.named_parameters(), gradients):
                allowed = 1e-4 * float(right.abs().max()) + 1e-9
                with naming(name):
                    torch.testing.assert_close(p.grad.double(), right, rtol=0, atol=allowed)
        if sizes == SIZES[0]:
            assert all(float(right.abs().max()) > 1e-5 for right in gradients)  # so that 1e-9 hides none
            assert (norm > 1) == (factor > 1)  # both ways of clipping are tested


def test_no_bit_depends_on_the_threads(threads):
    for sizes in (SIZES[2], SIZES[4]):
        seen = []
        for count in (1, 2, 3, 16):
            threads(count)
            native = trainer(part4(), sizes, 3.0)
            for step in range(2):
                native._gradients(*batch_of(sizes, step))
                native._update()
            found = [p.grad.clone() for p in native.model.parameters()]
            found += [p.detach() for model in (native.model, native.averaged) for p in model.parameters()]
            seen.append(found)
            with naming(sizes, count):
                assert all(map(torch.equal, found, seen[0]))


def test_the_step_follows_pytorchs(threads):
    """Weights, averages and the optimizers' states after some steps, from the same gradients each time."""
    threads(2)
    pytorchs, native = trainer(), trainer(part4())
    assert not pytorchs.native and native.native
    start = [p.detach().clone() for p in native.model.parameters()]
    for step in range(6):
        for each in (pytorchs, native):
            each.lr.fill_((step + 1) / 6)
        loss = pytorchs._gradients(*batch_of(SIZES[0], step))
        torch.testing.assert_close(native._gradients(*batch_of(SIZES[0], step)), loss, rtol=1e-4, atol=0)
        for p, q in zip(pytorchs.model.parameters(), native.model.parameters()):
            q.grad.copy_(p.grad)
        for each in (pytorchs, native):
            each._update()
    pairs = zip(
        pytorchs.model.parameters(), native.model.parameters(), pytorchs.averaged.parameters(),
        native.averaged.parameters(), start,
    )  # fmt: skip
    for p, q, of_p, of_q, before in pairs:
        moved = float((p.detach() - before).abs().max())
        assert moved > 0
        torch.testing.assert_close(q, p, rtol=0, atol=1e-3 * moved)
        torch.testing.assert_close(of_q, of_p, rtol=0, atol=1e-3 * moved)
        for one, other in ((pytorchs.muon, native.muon), (pytorchs.adam, native.adam)):
            assert one.state[p].keys() == other.state[q].keys()
            for key, value in one.state[p].items():
                torch.testing.assert_close(other.state[q][key], value, rtol=1e-4, atol=1e-7)


def pytorchs_direction(gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """Minus Muon's first direction for matrices of so many rows, times their scale."""
    value = torch.nn.Parameter(torch.zeros_like(gradient))
    value.grad = gradient
    group = dict(params=[value], shape=(rows, gradient.shape[1]))
    Muon([group], torch.ones((), dtype=gradient.dtype), weight_decay=0.0).step()
    return value.detach()


def test_the_direction_of_muon(threads):
    """Also of a matrix of low rank, whose small singular values rounding replaces, in PyTorch too."""
    threads(2)
    operators, generator = loader.load(), torch.Generator().manual_seed(0)
    empty, seconds = [torch.empty(0)], torch.zeros(len(KINDS), dtype=torch.float64)
    shapes = (((96, 32), 32), ((32, 128), 32), ((128, 32), 128), ((24, 40), 24))
    for (shape, rows), rank in itertools.product(shapes, (1, 5, 99)):
        rank = min(rank, *shape)
        scratch = torch.empty(operators.update_scratch([rows], [shape[1]], 2))
        left, right = (torch.randn(n, rank, generator=generator) for n in shape)
        gradient = left @ right.T + 1e-4 * torch.randn(shape, generator=generator)
        exact, peer = (
            pytorchs_direction(gradient.to(dtype), rows) for dtype in (torch.float64, torch.float32)
        )
        value, momentum, average = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        operators.gpt_update(
            [value], [gradient], [momentum], empty, [], [average], [rows], [shape[1]], [1.0], 0.0, 0.95, 0.9,
            0.99, 1e-8, 0.5, scratch, seconds,
        )  # fmt: skip
        allowed = 4 * float((peer - exact).abs().max()) + 1e-4 * float(exact.abs().max())
        with naming(shape, rows, rank):
            torch.testing.assert_close(value.double(), exact, rtol=0, atol=allowed)
            torch.testing.assert_close(average, value / 2)
            torch.testing.assert_close(momentum, 0.05 * gradient)


def test_a_whole_step_learns_and_keeps_its_time(threads):
    threads(2)
    native = Trainer(RECIPE, 8, torch.arange(400) % 8, CPU, part4())
    native.step()
    before = float(native.loss)
    for _ in range(100):
        native.step()
    assert float(native.loss) < 0.1 < 1 < before
    seconds = dict(zip(KINDS, native.native_step.seconds.tolist()))
    assert all(spent >= 0 for spent in seconds.values()) and seconds["products"] > 0 and seconds["Muon"] > 0


def test_what_is_not_native_is_pytorchs():
    for attend, dropout, expected in (
        (partial(attention, "part4", causal=True), 0.0, True),
        (part4(), 0.1, False),
        (None, 0.0, False),
        (partial(attention, "part0", causal=True), 0.0, False),
        (partial(attention, "part4", causal=True, scale=0.1), 0.0, False),
        (lambda q, k, v: attention("part4", q, k, v, causal=True), 0.0, False),
    ):
        made = trainer(attend, recipe=dataclasses.replace(RECIPE, dropout=dropout))
        with naming(attend, dropout):
            assert made.native is expected
            made.step()
            assert math.isfinite(float(made.loss)) and float(made.loss) > 0


def test_the_operator_checks_its_arguments():
    native = trainer(part4())
    x, y = batch_of(SIZES[0])
    native._gradients(x, y)
    step = native.native_step
    right = dict(
        ids=x, targets=y, parameters=step._values, heads=2, clip=1.0,
        gradients=[p.grad for p in native.model.parameters()], scratch=step._scratch,
        results=torch.zeros(2), seconds=torch.zeros(len(KINDS), dtype=torch.float64),
    )  # fmt: skip
    gradients = loader.load().gpt_gradients
    tests = ("test_schema", "test_faketensor")
    torch_library.opcheck(gradients.default, tuple(right.values()), test_utils=tests)
    for wrong, message in (
        (dict(ids=torch.full((4, 16), 12)), "ids has 12; each must be from 0 to 11"),
        (dict(targets=torch.full((4, 16), -1)), "targets has -1; each must be from 0 to 11"),
        (dict(targets=torch.zeros(4, 15, dtype=torch.int64)), "targets has 60 numbers; it must have 64"),
        (dict(ids=torch.zeros(4, 8, dtype=torch.int64)), "ids has rows of 8 tokens; it must have as many as"),
        (dict(ids=torch.zeros(4, 16)), "ids must be int64, contiguous and on the CPU"),
        (dict(heads=3), "heads is 3; it must divide the width, 32"),
        (dict(heads=0), "heads is 0; it must divide the width, 32"),
        (dict(scratch=torch.zeros(5)), "scratch has 5 numbers; it must have"),
        (dict(parameters=[torch.zeros(3, 3)]), "parameters has 1 tensors; it must have 3, and 6 for each"),
    ):
        with pytest.raises(RuntimeError, match=message):
            gradients(*(right | wrong).values())
