"""The training recipe of the shipped checkpoints: Muon, AdamW and an average of the weights.

Hidden matrices are trained with Muon (K. Jordan et al. 2024, kellerjordan.github.io/posts/muon),
embeddings and norms with AdamW. The saved weights are an exponential moving average, taken
at its best validation loss. On a GPU the whole step is one CUDA graph around a compiled model, because
kernel launches bound a step at this size. On a CPU the same code runs without a graph, slowly.
"""

from __future__ import annotations

import copy
import hashlib
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import corpus
from model.checkpoint import save, save_record
from model.gpt import GPT, Attend, GPTConfig
from model.tokenizer import CharTokenizer


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run, except the corpus and the device.

    block_size in characters; batch_chars is batch size times block size.
    average: decay of the exponential moving average of the weights, per step.
    """

    block_size: int
    steps: int
    dropout: float
    batch_chars: int = 16_384
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    position_lr: float = 3e-4
    weight_decay: float = 0.1
    average: float = 0.999
    warmup: int = 200
    eval_every: int = 500
    seed: int = 1337


RECIPES = {
    "shakes128": Recipe(block_size=128, steps=60_000, dropout=0.12, muon_lr=0.04),
    "shakes256": Recipe(block_size=256, steps=60_000, dropout=0.08, muon_lr=0.04),
    "shakes1024": Recipe(block_size=1024, steps=40_000, dropout=0.08, muon_lr=0.02),
    "shakes2048": Recipe(block_size=2048, steps=20_000, dropout=0.06, muon_lr=0.04),
}


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by a Newton-Schulz iteration, for groups of equal matrices.

    Each parameter group holds tensors whose trailing shape (rows, cols), given as `shape`, is the
    matrix to orthogonalise: a fused QKV weight (3C, C) with shape (C, C) counts as three. All
    matrices of a group go through one batched iteration. `lr` is a 0-d tensor, so that a captured
    CUDA graph reads its current value (torch.optim.Muon takes a Python number, which a graph would
    freeze, and orthogonalises a fused QKV weight as one).
    """

    def __init__(self, groups: list[dict], lr: Tensor, weight_decay: float, momentum: float = 0.95):
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rows, cols = group["shape"]
            for p in group["params"]:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum"] for p in group["params"]]
            update = _muon_direction(
                [p.grad for p in group["params"]], buffers, group["momentum"], rows, cols
            )
            sizes = [p.numel() // (rows * cols) for p in group["params"]]
            scale = math.sqrt(max(1, rows / cols))
            for p, u in zip(group["params"], update.split(sizes)):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * scale * u.view_as(p))


def _muon_direction(
    grads: list[Tensor], buffers: list[Tensor], momentum: float, rows: int, cols: int
) -> Tensor:
    """Nesterov momentum, then the nearest orthogonal matrices.

    grads, buffers: one tensor (n * rows, cols) per parameter, n matrices each; the buffers are updated.
    Returns (matrices of all parameters, rows, cols).
    """
    for g, b in zip(grads, buffers):
        b.lerp_(g, 1 - momentum)
    x = torch.cat([g.lerp(b, momentum).view(-1, rows, cols) for g, b in zip(grads, buffers)])
    if rows > cols:
        x = x.mT
    if x.is_cuda:
        x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # a quintic with a steep slope at 0; Jordan's coefficients
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if rows > cols else x).float()


def sinusoids(length: int, width: int) -> Tensor:
    """Vaswani et al.'s position encoding, (length, width), values in [-1, 1]."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = position * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


@torch.no_grad()
def evaluate(model: GPT, ids: Tensor, batch_chars: int = 16_384) -> float:
    """Mean loss in nats per token over contiguous windows of the block size.

    ids: (N,), N >= 2. Windows do not overlap; the last one may be shorter. Each token but the first
    is predicted once, from the tokens before it in its window. Raises ValueError if N < 2.
    """
    if len(ids) < 2:
        raise ValueError(f"ids has {len(ids)} tokens; it must have at least 2")
    T = model.config.block_size
    inputs, targets = ids[:-1], ids[1:]
    whole = len(inputs) // T * T
    rows = max(1, batch_chars // T)
    batches = list(zip(inputs[:whole].view(-1, T).split(rows), targets[:whole].view(-1, T).split(rows)))
    batches.append((inputs[None, whole:], targets[None, whole:]))
    was_training = model.training
    model.eval()
    total = sum(
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").double()
        for x, y in batches
        if x.numel()
    )
    model.train(was_training)
    return float(total) / len(inputs)


class Trainer:
    """A model, its average, and one training step over a corpus held on the device.

    ids: (N,) int64 training tokens. attend: attention of a step, which needs a gradient; None takes
    PyTorch's, which alone has the recipe's dropout inside.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        ids: Tensor,
        device: torch.device,
        attend: Attend | None = None,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.ids, self.device = recipe, ids.to(device), device
        config = GPTConfig(
            block_size=recipe.block_size,
            vocab_size=vocab_size,
            n_layer=recipe.n_layer,
            n_head=recipe.n_head,
            n_embd=recipe.n_embd,
            dropout=recipe.dropout,
            bias=False,
        )

        def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            dropout = recipe.dropout if self.model.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)

        self.model = GPT(config, attend or with_dropout)
        positions = self.model.transformer.wpe.weight
        with torch.no_grad():
            positions.copy_(0.1 * sinusoids(*positions.shape))
        self.model.to(device)
        # The average is evaluated in float32 without dropout, so its attention needs none.
        self.averaged = GPT(
            config, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ).to(device)
        self.averaged.load_state_dict(self.model.state_dict())
        self.averaged.eval()

        C = config.n_embd
        matrices: dict[tuple[int, int], list[nn.Parameter]] = {}
        others = []
        for name, p in self.model.named_parameters():
            if p.ndim == 2 and ".h." in name:
                shape = (C, C) if name.endswith("c_attn.weight") else (p.shape[0], p.shape[1])
                matrices.setdefault(shape, []).append(p)
            elif p is not positions:
                others.append(p)
        self.lr = torch.ones((), device=device)  # fraction of the peak, set before each step
        self.muon_lr = torch.zeros((), device=device)
        self.muon = Muon(
            [dict(params=ps, shape=shape) for shape, ps in matrices.items()],
            lr=self.muon_lr,
            weight_decay=recipe.weight_decay,
        )
        on_gpu = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            [
                dict(params=others, lr=torch.zeros((), device=device)),
                dict(params=[positions], lr=torch.zeros((), device=device)),
            ],
            betas=(0.9, 0.99),
            weight_decay=recipe.weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self.loss = torch.zeros((), device=device)
        self.step = self._captured_step() if on_gpu else self._step

    def _batch_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy, a scalar, of the model on tokens x (B, T) and the next ones y (B, T)."""
        bf16 = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = self.model(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def _update(self) -> None:
        """Step both optimizers and update the average; the gradients are already there."""
        self.muon_lr.copy_(self.recipe.muon_lr * self.lr)
        for group, peak in zip(self.adam.param_groups, (self.recipe.adam_lr, self.recipe.position_lr)):
            group["lr"].copy_(peak * self.lr)
        self.muon.step()
        self.adam.step()
        with torch.no_grad():
            for a, p in zip(self.averaged.parameters(), self.model.parameters()):
                a.lerp_(p, 1 - self.recipe.average)

    def _step(self) -> None:
        """One step on a fresh random batch; stores the loss in self.loss."""
        T = self.recipe.block_size
        batch = max(1, self.recipe.batch_chars // T)
        starts = torch.randint(len(self.ids) - T, (batch, 1), device=self.device)
        window = self.ids[starts + torch.arange(T + 1, device=self.device)]  # (batch, T + 1)
        for p in self.model.parameters():
            p.grad = None
        loss = self._batch_loss(window[:, :-1], window[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._update()
        self.loss.copy_(loss.detach())

    def _captured_step(self) -> Callable[[], None]:
        """The step as a CUDA graph; model, optimizers and average are reset after the warm-up."""
        start = copy.deepcopy(self.model.state_dict())
        self._batch_loss = torch.compile(self._batch_loss)  # type: ignore[method-assign]
        self.muon.step = torch.compile(self.muon.step)  # type: ignore[method-assign]
        self.lr.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for optimizer in (self.muon, self.adam):
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        self.model.load_state_dict(start)
        self.averaged.load_state_dict(start)
        return graph.replay


def learning_rate(recipe: Recipe, step: int) -> float:
    """Fraction of the peak learning rate: linear warm-up, then a cosine to 0."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def train(
    recipe: Recipe,
    text: str,
    device: str = "cpu",
    out: Path | None = None,
    report: Callable[[str], None] = print,
    attend: Attend | None = None,
) -> dict:
    """Train on the first 90 % of `text`, keep the average with the best loss on the last 10 %.

    attend: as Trainer takes it.
    Writes a checkpoint directory to `out` at every new best. Returns the training record: corpus
    hash, recipe, device, validation loss (nats per character) and the loss curve as
    [step, training loss, validation loss].
    Raises ValueError if the device is missing, the text is shorter than a block or the loss becomes
    infinite or NaN; OSError if `out` cannot be written.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch finds no GPU here; it must be 'cpu'")
    tokenizer = CharTokenizer.from_text(text)
    training, validation = corpus.split(tokenizer.encode(text))
    if len(training) <= recipe.block_size:
        raise ValueError(
            f"text has {len(training)} characters for training; "
            f"it must have more than block_size={recipe.block_size}"
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # a bad path fails now, not after hundreds of steps
    where = torch.device(device)
    trainer = Trainer(recipe, len(tokenizer), torch.tensor(training), where, attend)
    held_out = torch.tensor(validation, device=where)
    record: dict[str, Any] = {
        "corpus_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "characters": len(text),
        "recipe": asdict(recipe),
        "device": torch.cuda.get_device_name() if where.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "curve": [],
    }
    record["val_loss"], started = math.inf, time.monotonic()
    for step in range(recipe.steps):
        trainer.lr.fill_(learning_rate(recipe, step))
        trainer.step()
        done = step + 1
        if done % recipe.eval_every and done != recipe.steps:
            continue
        train_loss, loss = trainer.loss.item(), evaluate(trainer.averaged, held_out)
        seconds = time.monotonic() - started
        record["curve"].append([done, round(train_loss, 4), round(loss, 4)])
        report(f"step {done}/{recipe.steps}  train {train_loss:.4f}  val {loss:.4f}  {seconds:.0f} s")
        if not math.isfinite(loss):
            raise ValueError(f"the validation loss is {loss} at step {done}: training diverged")
        if loss < record["val_loss"]:
            record |= {"val_loss": loss, "best_step": done, "seconds_to_best": round(seconds)}
            if out is not None:
                save(out, trainer.averaged, tokenizer, record)
    if out is not None:
        save_record(out, record)  # with the whole curve, past the best step
    report(f"best validation loss {record['val_loss']:.4f} nats per character, at step {record['best_step']}")
    return record
