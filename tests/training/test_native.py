"""The native training step in C++ against PyTorch's: gradients, both optimizers, their states, fallbacks."""

import dataclasses
import itertools
import math

import pytest
import tiny
import torch
from support import naming
from training_texts import ONE_STEP, TINY, exact, sized

from shakespeare.attention_ext.build.nvrtc import Source
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.parts import Dtype
from shakespeare.training.cuda import update
from shakespeare.training.cuda.update import FOLDER
from shakespeare.training.finetuning import recipe_of
from shakespeare.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("extension")
CPU = torch.device("cpu")

# Awkward sizes: batch, block, V, C, heads, layers, and the window of an endless model
SIZES = [
    (4, 16, 12, 32, 2, 2),
    (1, 9, 7, 24, 3, 2),
    (33, 5, 65, 24, 3, 1),
    (3, 1, 2, 8, 1, 1),
    (2, 200, 11, 48, 4, 1),
    (1, 450, 5, 16, 2, 1),
    (2, 33, 130, 200, 5, 1),
    (1, 2, 1, 1, 1, 3),
    (2, 70, 9, 24, 3, 2, 20),
    (3, 8, 9, 16, 2, 1, 100),
]


def trainer(part="part4", sizes=SIZES[0], factor=1.0) -> Trainer:
    """A trainer of a model of these sizes, whose first weights are multiplied by a factor."""
    V = sizes[2]
    ids = torch.randint(V, (500,), generator=torch.Generator().manual_seed(1))
    made = Trainer(sized(sizes), V, ids, CPU, part)
    with torch.no_grad():
        for p in made.model.parameters():
            p.mul_(factor)
    made.averaged.load_state_dict(made.model.state_dict())
    return made


def tokens_of(sizes, seed=0) -> torch.Tensor:
    batch, block, V, *_ = sizes
    return torch.randint(V, (batch, block + 1), generator=torch.Generator().manual_seed(seed))


def test_loss_norm_and_gradients(threads):
    threads(2)
    for sizes, factor in itertools.product(SIZES, (1.0, 5.0)):
        native, tokens = trainer("part4", sizes, factor), tokens_of(sizes)
        loss, model = exact(native.model, tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        gradients = [p.grad for p in model.parameters()]
        with naming(sizes, factor):
            got_loss, got_norm = native.native.gradients(tokens.numpy())
            assert got_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
            assert got_norm == pytest.approx(norm, rel=1e-4, abs=1e-6)
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
            native = trainer("part4", sizes, 3.0)
            for step in range(2):
                native._gradients(tokens_of(sizes, step))
                native._update()
            found = [p.grad.clone() for p in native.model.parameters()]
            found += [p.detach() for model in (native.model, native.averaged) for p in model.parameters()]
            seen.append(found)
            with naming(sizes, count):
                assert all(map(torch.equal, found, seen[0]))


def test_the_training_step_follows_pytorchs(threads):
    """Weights, averages and the optimizers' states after some steps, from the same gradients each time."""
    threads(2)
    pytorchs, native = trainer("part0"), trainer("part4")
    assert pytorchs.native is None and native.native is not None
    start = [p.detach().clone() for p in pytorchs.model.parameters()]
    for step in range(6):
        for each in (pytorchs, native):
            each.lr.fill_((step + 1) / 6)
            each._gradients(tokens_of(SIZES[0], step))
        torch.testing.assert_close(native.loss.cpu(), pytorchs.loss, rtol=1e-4, atol=0)
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
        torch.testing.assert_close(q.cpu(), p, rtol=0, atol=1e-3 * moved)
        torch.testing.assert_close(of_q.cpu(), of_p, rtol=0, atol=1e-3 * moved)
        for one, other in ((pytorchs.muon, native.muon), (pytorchs.adam, native.adam)):
            assert one.state[p].keys() == other.state[q].keys()
            for key, value in one.state[p].items():
                torch.testing.assert_close(other.state[q][key].cpu(), value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "dtype, arch",
    [
        pytest.param(dtype, arch, marks=[pytest.mark.full] * ((dtype, arch) != ("fp32", "sm_90")))
        for dtype, arch in itertools.product(("fp32", "bf16", "fp16"), ("sm_80", "sm_90", "sm_100"))
    ],
)
def test_kernels_compile_without_spills(nvrtc, dtype, arch):
    macros = {
        "FORMAT": driver.FORMATS[Dtype(dtype)],
        "EMBD": 128,
        "VOCAB": 65,
        "HEAD_SIZE": 32,
        "DROPOUT": 1,
        "ID": "short",
    }
    updates = update.source(Dtype(dtype), tuple(map(int, (arch[3:-1], arch[-1]))))
    for source in (Source("passes.cu", arch, macros | {"THREADS": 512}, FOLDER), updates):
        _, resources = source.compile()
        with naming(source.file, resources):
            assert resources.spill_stores == 0
            assert resources.registers * source.macros["THREADS"] <= 2**16


def test_training_steps_learn_and_measure_their_time(threads):
    threads(2)
    native = Trainer(ONE_STEP, 8, torch.arange(400) % 8, CPU, "part4")
    native.step()
    before = float(native.loss)
    for _ in range(100):
        native.step()
    assert float(native.loss) < 0.1 < 1 < before
    seconds = native.native.take_seconds()
    assert all(spent >= 0 for spent in seconds.values()) and seconds["products"] > 0 and seconds["Muon"] > 0
    assert native.native.take_seconds() == {}


def test_what_is_not_native_is_pytorchs():
    biased = tiny.gpt(bias=True)
    for part, dropout, start, expected in (
        ("part4", 0.0, None, True),
        ("part4", 0.1, None, False),
        ("part4", 0.0, biased, False),
        ("part0", 0.0, None, False),
    ):
        recipe = dataclasses.replace(recipe_of(TINY, biased, None), dropout=dropout)
        made = Trainer(recipe, 11, torch.arange(500) % 11, CPU, part, start=start)
        with naming(part, dropout, start is None):
            assert (made.native is not None) is expected
            made.step()
            assert math.isfinite(float(made.loss)) and float(made.loss) > 0


def test_tokens_are_checked():
    native = trainer("part4").native
    for wrong, message in (
        (torch.full((4, 17), 12), "a token is 12; it must be from 0 to 11"),
        (torch.full((4, 17), -1), "a token is -1; it must be from 0 to 11"),
        (torch.zeros(4, 16, dtype=torch.int64), "the size of tokens is 512; it must be 544"),
    ):
        with pytest.raises(ValueError, match=message):
            native.gradients(wrong.numpy())
