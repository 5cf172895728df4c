"""One step of training: Muon, AdamW and an average of the weights.

Hidden matrices are trained with Muon, embeddings and norms with AdamW. An exponential moving average of the
weights is evaluated and saved. On a GPU the whole step is one CUDA graph around a compiled model, because
kernel launches bound a step of this size. On a CPU the same code runs without a graph. With part4's attention
and no dropout, training/native.py has the step in C++.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.gpt import GPT, Attend, GPTConfig
from training.muon import Muon
from training.native import NativeStep, helpers_of, is_native
from training.recipe import Recipe

CLIP = 1.0  # the largest norm of all gradients


def sinusoids(length: int, width: int) -> Tensor:
    """Vaswani et al.'s position encoding, (length, width), values in [-1, 1]."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = position * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


class Trainer:
    """A model, its average, and one training step over a corpus held on the device.

    ids: (N,) int64 training tokens. attend: attention of a step, with a gradient; None takes PyTorch's, the
    only one with the recipe's dropout. start: the model with the initial weights; it must have the recipe's
    sizes.
    Before a step, lr is set to its share of the peak learning rate, and decay to that of the average.
    native: whether the step is the one in C++. It needs a CPU, part4's attention, given as
    partial(attention, 'part4', causal=True), no dropout and no biases. Any other step is PyTorch's.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        ids: Tensor,
        device: torch.device,
        attend: Attend | None = None,
        start: GPT | None = None,
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
            bias=start is not None and start.config.bias,
        )

        def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            dropout = recipe.dropout if self.model.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)

        self.model = GPT(config, attend or with_dropout)
        positions = self.model.transformer.wpe.weight
        with torch.no_grad():
            positions.copy_(0.1 * sinusoids(*positions.shape))
        if start is not None:
            self.model.load_state_dict(start.state_dict())
        self.model.to(device)
        # The average is evaluated without dropout, so its attention needs none.
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
        self.decay = torch.full((), recipe.average, device=device)  # the average's, set before each step
        self.muon = Muon(
            [dict(params=ps, shape=shape) for shape, ps in matrices.items()],
            lr=torch.zeros((), device=device),
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
        self.native = is_native(config, device, attend)
        if self.native:
            simd = helpers_of(attend) or "auto"
            self.native_step = NativeStep(self.model, self.averaged, self.muon, self.adam, simd)
        self.step = self._captured_step() if on_gpu else self._step

    def _batch_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy, a scalar, of the model on tokens x (B, T) and the next ones y (B, T)."""
        bf16 = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = self.model(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def _update(self) -> None:
        """Step both optimizers and update the average; the gradients are set."""
        recipe = self.recipe
        peaks = [recipe.muon_lr] * len(self.muon.param_groups) + [recipe.adam_lr, recipe.position_lr]
        if self.native:
            fraction = self.lr.item()
            return self.native_step.update([peak * fraction for peak in peaks], self.decay.item())
        for group, peak in zip((*self.muon.param_groups, *self.adam.param_groups), peaks):
            group["lr"].copy_(peak * self.lr)
        self.muon.step()
        self.adam.step()
        with torch.no_grad():
            for a, p in zip(self.averaged.parameters(), self.model.parameters()):
                a.lerp_(p, 1 - self.decay)

    def _step(self) -> None:
        """Do a step on a new random batch and store the loss in self.loss."""
        T = self.recipe.block_size
        batch = max(1, self.recipe.batch_chars // T)
        starts = torch.randint(len(self.ids) - T, (batch, 1), device=self.device)
        window = self.ids[starts + torch.arange(T + 1, device=self.device)]  # (batch, T + 1)
        loss = self._gradients(window[:, :-1], window[:, 1:])
        self._update()
        self.loss.copy_(loss)

    def _gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Set the clipped gradients for tokens x (B, T) and the next ones y (B, T); return the loss."""
        if self.native:
            return self.native_step.gradients(x, y, CLIP)
        for p in self.model.parameters():
            p.grad = None
        loss = self._batch_loss(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        return loss.detach()

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

    def state_dict(self) -> dict[str, Tensor]:
        """The CPU tensors, by name, that the next steps depend on besides the corpus and the recipe."""
        tensors = {f"model.{name}": t for name, t in _untied(self.model).items()}
        tensors |= {f"averaged.{name}": t for name, t in _untied(self.averaged).items()}
        for kind, optimizer in self._optimizers().items():
            for index, values in optimizer.state_dict()["state"].items():
                tensors |= {f"{kind}.{index}.{name}": t for name, t in values.items()}
        tensors["generator.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["generator.cuda"] = torch.cuda.get_rng_state(self.device)
        return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state_dict(). Raises ValueError if it is from another model or device."""
        for kind, model in (("model", self.model), ("averaged", self.averaged)):
            own, saved = _untied(model), _below(kind, state)
            if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
                raise ValueError(f"state has a {kind} of other sizes; they must be those of this run")
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(saved[name])
        for kind, optimizer in self._optimizers().items():
            _restore(optimizer, _below(kind, state))
        generators = _below("generator", state)
        if generators.keys() != {"cpu", self.device.type}:
            raise ValueError(f"state is not one of a run on {self.device.type}")
        torch.set_rng_state(generators["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(generators["cuda"], self.device)

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"muon": self.muon, "adam": self.adam}


def _untied(model: GPT) -> dict[str, Tensor]:
    """The model's tensors by name, without the head's, which is the embedding's."""
    return {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}


def _below(kind: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the kind, under the rest of their names."""
    return {name.split(".", 1)[1]: t for name, t in state.items() if name.split(".", 1)[0] == kind}


def _restore(optimizer: torch.optim.Optimizer, saved: dict[str, Tensor]) -> None:
    """Set the optimizer's tensors; existing ones in place, because a captured graph may hold them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in saved.items():
        index, key = name.split(".", 1)
        values = optimizer.state[parameters[int(index)]]
        if key in values:
            values[key].copy_(tensor)
        else:
            values[key] = tensor.to(parameters[int(index)].device if tensor.ndim else "cpu", copy=True)
