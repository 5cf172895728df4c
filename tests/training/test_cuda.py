"""Training on a GPU by kernels alone: gradients, both optimizers, evaluation; PyTorch is not imported."""

import dataclasses
import itertools
import sys

import numpy as np
import pytest
import torch
from support import ROOT, naming, printed
from training_texts import ONE_STEP, TINY, exact, sized, words

from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.checkpoint import load
from shakespeare.model.config import GPTConfig
from shakespeare.model.gpt import GPT
from shakespeare.model.loss import evaluate
from shakespeare.training.cuda.trainer import CudaTrainer
from shakespeare.training.initial import first_weights
from shakespeare.training.recipe import SIZES
from shakespeare.training.run import train
from shakespeare.training.trainer import Trainer

# Batch, block, V, C, heads, layers, and the window of an endless model
ON_GPU = [
    (4, 16, 12, 32, 2, 2),
    (33, 5, 65, 64, 4, 3),
    (2, 200, 130, 96, 3, 1),
    (300, 9, 7, 32, 1, 1),
    (32, 128, 65, 128, 4, 2),
    (2, 70, 9, 64, 2, 2, 20),
]


def trainer(sizes=ON_GPU[0], factor=1.0, recipe=ONE_STEP, dtype=Dtype.FP32) -> CudaTrainer:
    """A trainer of a model of these sizes, whose first weights are multiplied by a factor."""
    V = sizes[2]
    recipe = sized(sizes, recipe)
    shape = {name: getattr(recipe, name) for name in (*SIZES, "dropout")}
    config = GPTConfig(vocab_size=V, bias=False, **shape)
    weights = {name: factor * weight for name, weight in first_weights(config, recipe.seed)[0].items()}
    ids = np.random.default_rng(1).integers(V, size=500).astype(np.uint8)
    return CudaTrainer(recipe, config, ids, dtype, weights)


def tokens_of(sizes, seed=0) -> np.ndarray:
    batch, block, V, *_ = sizes
    return np.random.default_rng(seed).integers(V, size=(batch, block + 1))


def test_gradients_and_loss(gpu):
    for sizes, factor in itertools.product(ON_GPU, (1.0, 5.0)):
        trained, tokens = trainer(sizes, factor), tokens_of(sizes)
        started = GPT.from_weights(trained.config, trained.flat.read("value"))
        loss, model = exact(started, torch.from_numpy(tokens))
        trained.training_step.tokens.write(tokens)
        trained.training_step.gradients()
        trained.training_step.gradients()
        with naming(sizes, factor):
            assert trained.take_losses() == pytest.approx(2 * loss, rel=1e-5)
            assert trained.take_losses() == 0
            found = trained.flat.read("gradient")
            for name, p in model.named_parameters():
                with naming(name):
                    allowed = 1e-4 * float(p.grad.abs().max()) + 1e-9
                    torch.testing.assert_close(
                        torch.from_numpy(found[name]).double(), p.grad, rtol=0, atol=allowed
                    )


def test_the_training_step_follows_pytorchs(gpu):
    """Tokens, losses, weights, averages and the optimizers' states, from the same gradients each time."""
    trained = trainer()
    ids = torch.from_numpy(np.random.default_rng(1).integers(12, size=500))
    pytorchs = Trainer(ONE_STEP, 12, ids, torch.device("cpu"), "part0")
    for name, p in pytorchs.model.named_parameters():
        p.data.copy_(torch.from_numpy(trained.flat.read("value")[name]))
    pytorchs.averaged.load_state_dict(pytorchs.model.state_dict())
    start = {name: p.detach().clone() for name, p in pytorchs.model.named_parameters()}
    for step in range(6):
        pytorchs.advance((step + 1) / 6, 0.8)
        trained._rate.write(np.float32([(step + 1) / 6]))
        trained._decay.write(np.float32([0.8]))
        trained.training_step.take_batch()
        trained.training_step.gradients()
        gradients = {name: p.grad.numpy() for name, p in pytorchs.model.named_parameters()}
        trained.flat.write("gradient", gradients)
        trained.training_step.update(trained._rate, trained._decay)
        assert trained.take_losses() == pytest.approx(pytorchs.take_losses(), rel=1e-4)
    found = {name: trained.flat.read(name) for name in ("value", "average", "first", "second")}
    for (name, p), average in zip(pytorchs.model.named_parameters(), pytorchs.averaged.parameters()):
        moved = float((p.detach() - start[name]).abs().max())
        state = {**pytorchs.muon.state, **pytorchs.adam.state}[p]
        with naming(name):
            np.testing.assert_allclose(found["value"][name], p.detach(), rtol=0, atol=1e-3 * moved)
            np.testing.assert_allclose(found["average"][name], average.detach(), rtol=0, atol=1e-3 * moved)
            first = state.get("momentum", state.get("exp_avg"))
            np.testing.assert_allclose(found["first"][name], first, atol=1e-3 * float(first.abs().max()))
            if "exp_avg_sq" in state:
                second = state["exp_avg_sq"]
                largest = float(second.abs().max())
                np.testing.assert_allclose(found["second"][name], second, atol=1e-3 * largest)
    assert trained.flat.updates.read()[0] == 6


def test_equal_bits_and_a_state(gpu):
    """Two runs in bf16, with dropout; one continues from a state."""
    recipe = dataclasses.replace(ONE_STEP, dropout=0.2)
    seen = []
    for resumed in (False, True):
        trained = trainer(recipe=recipe, dtype=Dtype.BF16)
        for step in range(8):
            if resumed and step == 5:
                state = trained.state_dict()
                trained = trainer(recipe=recipe, dtype=Dtype.BF16)
                trained.load_state_dict(state)
            trained.advance(1.0, 0.8)
        seen.append(trained.state_dict())
    for name, array in seen[0].items():
        assert np.isfinite(array).all() and np.array_equal(array, seen[1][name]), name
    with pytest.raises(ValueError, match="of other sizes"):
        trainer(ON_GPU[1]).load_state_dict(state)


def test_evaluation_is_pytorchs(gpu):
    for sizes in ON_GPU:
        for dropout in (0.0, 0.3):
            trained = trainer(sizes, 3.0, dataclasses.replace(ONE_STEP, dropout=dropout))
            _, T, V, *_ = sizes
            model = GPT.from_weights(trained.config, trained.averages())
            text = np.random.default_rng(2).integers(V, size=7 * T + 3)
            for ids in (text, text[: 6 * T + 6].reshape(6, T + 1)):
                with naming(sizes, dropout, ids.ndim):
                    right = evaluate(model, torch.from_numpy(ids))
                    assert trained.evaluate(ids) == pytest.approx(right, rel=1e-5)


def test_a_run_learns_and_records_the_loss_of_what_it_saves(gpu, tmp_path):
    text = words(8000)
    recipe = dataclasses.replace(TINY, n_embd=32, dropout=0.0)
    record = train(recipe, text, tmp_path, "cuda", part="part4", dtype=Dtype.FP32)
    assert record["curve"][-1][2] < record["curve"][0][2] and "torch" not in record
    loaded = load(str(tmp_path))
    ids = torch.tensor(loaded.tokenizer.encode(text))
    assert evaluate(loaded.model, ids[7600:]) == pytest.approx(record["test_loss"], abs=1e-5)
    on_cpu = train(recipe, text, tmp_path / "cpu")
    assert record["test_loss"] == pytest.approx(on_cpu["test_loss"], abs=1e-3)


WITHOUT_A_GPU = """
import sys
from types import SimpleNamespace
sys.path.insert(0, "tests")
import cuda_on_cpu
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.launches import Gpu
fake = cuda_on_cpu.Driver()
fake.cuMemsetD32Async = fake.cuCtxSynchronize = lambda *_: (0,)
driver.bindings = lambda: fake
driver.gpu = lambda index=0: Gpu("none", (8, 0), 163 * 1024, 108)
driver.activate = driver.stream = lambda index=0: None
driver.launch = driver.launch_prepared = lambda *_, **__: None
driver.prepared_launch = lambda *_, **__: SimpleNamespace()
driver.captured = lambda stream, launches: launches() or (lambda: None)
driver.Event = SimpleNamespace
driver.Module = lambda source: SimpleNamespace(function=lambda *_: 0, ints=lambda name, n: n * [64])
from shakespeare.app.cli import main
try: main(sys.argv[1:])
except SystemExit as end: assert not end.code
print("torch" in sys.modules)
"""


def test_pytorch_is_not_imported(tmp_path, extension):
    """With launches that do nothing: by the command line, evaluations, files and the draft."""
    (tmp_path / "text.txt").write_text(words(8000))
    own = ["train", "mine", "--corpus", tmp_path / "text.txt", "--steps", 3, "--device", "cuda", "--out"]
    for more in ([], ["--whole-text"]):
        command = [sys.executable, "-c", WITHOUT_A_GPU, *own, tmp_path / "out", "--overwrite", *more]
        assert printed(*map(str, command), cwd=ROOT).endswith("\nFalse\n"), more
