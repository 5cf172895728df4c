"""A training step: Muon, AdamW and an average of the weights.

Muon trains hidden matrices, AdamW embeddings and norms. An exponential moving average of the weights is
evaluated and saved. For part4 on a CPU it is native: TrainingStep of training/csrc. Else it is PyTorch's, on
a GPU around a compiled model and as one CUDA graph, which launches would bound. cuda/trainer.py has another
one for a GPU, without PyTorch.
"""

import copy
import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from shakespeare.attention_ext import attention, default_tile, extension
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.config import GPTConfig
from shakespeare.model.gpt import GPT, alibi_bias, causal_attention
from shakespeare.model.loss import evaluate
from shakespeare.training.initial import Floats, sinusoids
from shakespeare.training.muon import Muon, States
from shakespeare.training.recipe import BETAS, CLIP, EPSILON, GOLDEN, MOMENTUM, SIZES, Recipe


def windowed(config: GPTConfig, dropout: float, device: torch.device) -> Callable[..., Tensor]:
    """PyTorch's attention of an endless model in training, (B, H, T, d) each, for blocks of the model's size.

    A piece of `window` queries reads its own keys and those of the piece before, if the window divides the
    block; else all queries read all keys.
    """
    T = config.block_size
    w = config.window if config.window and T % config.window == 0 else T
    bias = alibi_bias(w, 2 * w, (config.window or w) - 1, torch.tensor(config.alibi_slopes, device=device))
    bias = bias[:, None].repeat(1, T // w, 1, 1)  # (H, n, w, 2 w), n windows
    bias[:, 0, :, :w] = -torch.inf  # before the block is nothing

    def keys(t: Tensor) -> Tensor:
        return F.pad(t, (0, 0, w, 0)).unfold(2, 2 * w, w).transpose(-1, -2).flatten(1, 2)  # (B, H n, 2 w, d)

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        mask = bias.flatten(0, 1).to(q.dtype)
        queries = q.reshape(q.shape[0], -1, w, q.shape[3])
        return F.scaled_dot_product_attention(queries, keys(k), keys(v), mask, dropout).reshape(q.shape)

    return attend


def load_training_step(simd: str = "auto") -> Any:
    """The class TrainingStep of training/csrc, compiled if need be; see extension.load_module()."""
    return extension.load_module("training_step", ("training", "model"), simd).TrainingStep


class Trainer:
    """A model, its average, and one training step over a corpus held on the device.

    ids: (N,) training tokens, any integers. part: the attention, with a gradient; only part0, PyTorch's, has
    the recipe's dropout of attention's weights. start: the model with the initial weights and the recipe's
    sizes. dtype: of the products on a GPU. Before step(), lr is set to its share of the peak learning rate,
    decay to that of the average.
    native: the TrainingStep for part4 on a CPU, for a model as the shipped ones are, without dropout: in C++
    over the SIMD helpers `simd`, with torch.get_num_threads() threads. None if the training step is
    PyTorch's. Raises BuildError as load_training_step() does.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        ids: Tensor,
        device: torch.device,
        part: str = "part0",
        simd: str = "auto",
        start: GPT | None = None,
        dtype: Dtype = Dtype.BF16,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.ids = ids.to(device)
        self.device = device
        self.dtype = dtype
        self.batch = recipe.batch
        config = recipe.config(vocab_size, start)
        sdpa: Callable[..., Tensor] = partial(F.scaled_dot_product_attention, is_causal=True)
        with_dropout: Callable[..., Tensor] = partial(sdpa, dropout_p=recipe.dropout)
        if config.endless:
            with_dropout = windowed(config, recipe.dropout, device)
            sdpa = causal_attention
        attend = with_dropout if part == "part0" else partial(attention, part, causal=True, simd=simd)
        self.model = GPT(config, attend)
        positions = None if config.endless else self.model.transformer.wpe.weight
        if positions is not None:
            with torch.no_grad():
                positions.copy_(0.1 * torch.from_numpy(sinusoids(*positions.shape)))
        if start is not None:
            self.model.load_state_dict(start.state_dict())
        self.model.to(device)
        self.averaged = GPT(config, sdpa).to(device)  # is evaluated without dropout
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
        placed = [] if positions is None else [positions]
        self.lr = torch.ones((), device=device)  # fraction of the peak
        self.decay = torch.full((), recipe.average, device=device)  # the average's
        on_gpu = device.type == "cuda"
        native = part == "part4" and config == recipe.config(vocab_size)
        native = native and not on_gpu and not recipe.dropout
        every: dict[str, Any] = dict(lr=torch.zeros((), device=device), weight_decay=recipe.weight_decay)
        groups = [dict(params=ps, lr=torch.zeros((), device=device)) for ps in (others, placed)]
        of_matrices = [dict(params=ps, shape=shape) for shape, ps in matrices.items()]
        self.muon: Any = (States if native else Muon)(of_matrices, **every, momentum=MOMENTUM)
        self.adam: Any = (States if native else torch.optim.AdamW)(
            groups, **every, betas=BETAS, eps=EPSILON, fused=on_gpu, capturable=on_gpu
        )
        for other in (*others, *placed):
            averages = {name: torch.zeros_like(other) for name in ("exp_avg", "exp_avg_sq")}
            self.adam.state[other] = {"step": torch.zeros((), device=device), **averages}
        for p in (p for ps in matrices.values() for p in ps):
            self.muon.state[p] = {"momentum": torch.zeros_like(p)}
        self.loss = torch.zeros((), device=device)
        # Multiples of the golden ratio, modulo 1, cover the text evenly, however many there are.
        self._strides = GOLDEN * torch.arange(self.batch + 1, device=device, dtype=torch.float64)
        self.place = torch.rand((), dtype=torch.float64).to(device)  # of the next window, a share of the text
        self.native: Any = self._native_step(simd) if native else None
        self.step = self._captured_step() if on_gpu else self._step
        self._losses = torch.zeros((), device=device, dtype=torch.float64)
        self._launched: Any = torch.cuda.Event() if on_gpu else None

    @property
    def config(self) -> GPTConfig:
        """The model's sizes."""
        return self.model.config

    @property
    def facts(self) -> dict[str, str]:
        """What a run's record says of the device."""
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine()
        return {"device": name, "torch": torch.__version__}

    def advance(self, rate: float, decay: float) -> None:
        """Do a training step, at a share of the peak learning rate and with the average's decay.

        A run by time waits for the step before: else launches are timed.
        """
        self.lr.fill_(rate)
        self.decay.fill_(decay)
        self.step()
        self._losses += self.loss
        if self._launched and self.recipe.minutes is not None:
            before, self._launched = self._launched, torch.cuda.Event()
            self._launched.record()
            before.synchronize()

    def take_losses(self) -> float:
        """The sum of the batches' losses since the last call."""
        total = self._losses.item()
        self._losses.zero_()
        return total

    def averages(self) -> dict[str, Floats]:
        """A copy of the average's weights, by name."""
        return {name: weight.copy() for name, weight in self.averaged.weights.items()}

    def set_averages(self, weights: Mapping[str, Floats]) -> None:
        """Let the average have these weights."""
        tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
        self.averaged.load_state_dict(tensors, strict=False)  # the head's are the embedding's

    def evaluate(self, ids: NDArray[Any]) -> float:
        """The average's mean loss on windows or a text, as model.loss.evaluate() has it."""
        return evaluate(self.averaged, torch.from_numpy(ids), self.recipe.batch_chars)

    def _native_step(self, simd: str) -> Any:
        """The TrainingStep on the tensors of the model, its average and its optimizers."""
        recipe = self.recipe
        config = self.model.config
        br, bc = default_tile.DEFAULT
        states = {**self.muon.state, **self.adam.state}
        parameters = []
        for p, average in zip(self.model.parameters(), self.averaged.parameters()):
            p.grad = torch.zeros_like(p)
            tensors = {"value": p, "gradient": p.grad, "average": average, **states[p]}
            parameters.append({name: t.detach().numpy() for name, t in tensors.items()})
        if config.endless:  # in the table's place
            names = ("value", "gradient", "average", "exp_avg", "exp_avg_sq")
            none = dict.fromkeys(names, np.empty(0, np.float32)) | {"step": np.zeros(1, np.float32)}
            parameters.insert(1, none)
        return load_training_step(simd)(
            parameters,
            br=br,
            bc=bc,
            **{name: getattr(config, name) or 0 for name in SIZES},
            batch=self.batch,
            vocab_size=config.vocab_size,
            threads=torch.get_num_threads(),
            settings=np.hstack([*recipe.optimizer().values()]).tolist(),
        )

    def _batch_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy, a scalar, of the model on tokens x (B, T) and the next ones y (B, T)."""
        rounded = self.device.type == "cuda" and self.dtype is not Dtype.FP32
        with torch.autocast(self.device.type, torch.bfloat16, enabled=rounded):
            logits = self.model(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def _step(self) -> None:
        """Do a training step on the next batch, and set self.loss."""
        T = self.recipe.block_size
        places = (self.place + self._strides) % 1  # (batch + 1,)
        starts = (places[:-1, None] * (len(self.ids) - T)).long()
        self.place.copy_(places[-1])
        self._gradients(self.ids[starts + torch.arange(T + 1, device=self.device)].long())  # (batch, T + 1)
        self._update()

    def _gradients(self, tokens: Tensor) -> None:
        """Set the loss and the clipped gradients for tokens (B, T + 1)."""
        if self.native:
            loss, _ = self.native.gradients(tokens.numpy())
            self.loss.fill_(loss)
            return
        for p in self.model.parameters():
            p.grad = None
        loss = self._batch_loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.loss.copy_(loss.detach())

    def _update(self) -> None:
        """Step both optimizers and update the average; the gradients are set."""
        if self.native:
            return self.native.update(self.lr, self.decay)
        recipe = self.recipe
        peaks = *(recipe.muon_lr for _ in self.muon.param_groups), recipe.adam_lr, recipe.position_lr
        for group, peak in zip((*self.muon.param_groups, *self.adam.param_groups), peaks):
            group["lr"].copy_(peak * self.lr)
        self.muon.step()
        self.adam.step()
        with torch.no_grad():
            for a, p in zip(self.averaged.parameters(), self.model.parameters()):
                a.lerp_(p, 1 - self.decay)

    def _captured_step(self) -> Callable[[], None]:
        """The training step as a CUDA graph; model, optimizers and average are reset after the warm-up."""
        start = copy.deepcopy(self.model.state_dict())
        self._batch_loss = torch.compile(self._batch_loss)  # type: ignore[method-assign]
        self.muon.step = torch.compile(self.muon.step)
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

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies, by name, of what the next training steps depend on besides corpus and recipe."""
        tensors = self._tensors() | {"generator.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["generator.cuda"] = torch.cuda.get_rng_state(self.device)
        return {name: t.detach().to("cpu", copy=True).contiguous().numpy() for name, t in tensors.items()}

    def load_state_dict(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state_dict(), in the same tensors, which a captured graph or the native step holds.

        Raises ValueError if the state is from another model or device.
        """
        own = self._tensors()
        state = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if any(name not in state or state[name].shape != t.shape for name, t in own.items()):
            raise ValueError("state is of a model of other sizes; they must be those of this run")
        devices = {name.removeprefix("generator.") for name in state if name.startswith("generator.")}
        if devices != {"cpu", self.device.type}:
            raise ValueError(f"state is not one of a run on {self.device.type}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
        torch.set_rng_state(state["generator.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["generator.cuda"], self.device)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of the model, its average and the optimizers. The head's weight is the embedding's."""
        named = {"place": self.place}
        for prefix, model in (("model", self.model), ("averaged", self.averaged)):
            weights = model.state_dict().items()
            named.update({f"{prefix}.{name}": t for name, t in weights if name != "lm_head.weight"})
        for prefix, optimizer in (("muon", self.muon), ("adam", self.adam)):
            for index, values in enumerate(optimizer.state.values()):
                named.update({f"{prefix}.{index}.{name}": t for name, t in values.items()})
        return named
