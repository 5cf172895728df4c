"""nanoGPT's architecture: CausalSelfAttention -> MLP -> Block -> GPT.

Names are nanoGPT's, so its checkpoints load unchanged. Only the attention differs: it is a callable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shakespeare.model.config import EMBEDDING, HEAD, GPTConfig
from shakespeare.model.kv_cache import KVCache

# (B, H, Nq, d), (B, H, Nk, d), (B, H, Nk, d) -> (B, H, Nq, d); causal and scaled by 1/sqrt(d); that of an
# endless model also takes attention()'s window and alibi_slopes
Attend = Callable[..., Tensor]


class CausalSelfAttention(nn.Module):
    """Fused QKV projection, the given attention, output projection: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.window = config.window
        self.attend = attend
        if config.endless:  # of no checkpoint; with memory also where parameters have none yet
            slopes = torch.tensor(config.alibi_slopes, device="cpu")
            self.register_buffer("slopes", slopes, persistent=False)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, d)
            for part in self.c_attn(x).split(C, dim=2)
        )
        attend = self.attend
        if self.window is not None:
            attend = partial(attend, window=(self.window - 1, 0), alibi_slopes=self.slopes)
        y = attend(q, k, v) if cache is None else cache.attend(attend, q, k, v)  # (B, H, T, d)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.approximate = "tanh" if config.tanh_gelu else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate)))


class Block(nn.Module):
    """Pre-LayerNorm residual block: x + attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, attend)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings, blocks and final norm, under nanoGPT's names."""

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if not config.endless:
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, attend) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)


def alibi_bias(Nq: int, Nk: int, left: int, slopes: Tensor) -> Tensor:
    """What slopes (H,) add to scores (H, Nq, Nk): -inf but for a query's own key and `left` before it."""
    away = torch.arange(Nk - Nq, Nk, device=slopes.device)[:, None] - torch.arange(Nk, device=slopes.device)
    return (-slopes[:, None, None] * away).masked_fill((away < 0) | (away > left), -torch.inf)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (0, 0), alibi_slopes: Tensor | None = None
) -> Tensor:
    """PyTorch's own causal attention: q (B, H, Nq, d), k and v (B, H, Nk, d) -> (B, H, Nq, d).

    window, alibi_slopes: an endless model's, as in attention().
    """
    Nq = q.shape[2]
    Nk = k.shape[2]
    if alibi_slopes is not None:
        bias = alibi_bias(Nq, Nk, window[0], alibi_slopes).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    if Nq in (1, Nk):  # one query sees all keys
        return F.scaled_dot_product_attention(q, k, v, is_causal=Nq > 1)
    seen = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device).tril(Nk - Nq)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class _Uninitialised(TorchFunctionMode):
    """Leaves parameters as they are made: a random number on the meta device imports PyTorch's compiler."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", *args[:1])
        return func(*args, **kwargs)


class GPT(nn.Module):
    """A decoder-only transformer whose attention is the callable `attend`.

    attend takes q (B, H, Nq, d) and k, v (B, H, Nk, d) and returns (B, H, Nq, d), scaled by 1/sqrt(d) and
    causal: query i sees keys j <= i + (Nk - Nq). An endless model's also takes window and alibi_slopes.
    """

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        self.config = config
        self.attend = attend
        self.transformer = Transformer(config, attend)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_head()
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # residual branches, scaled as GPT-2 does
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @classmethod
    def from_weights(cls, config: GPTConfig, weights: Mapping[str, NDArray[np.float32]]) -> GPT:
        """A model in evaluation mode over these arrays, which it shares if they can be written to."""
        # those of a map are copied
        arrays = {name: a if a.flags.writeable else a.copy() for name, a in weights.items()}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls._over(config, {HEAD: tensors[EMBEDDING]} | tensors, causal_attention)

    def with_attention(self, attend: Attend) -> GPT:
        """A model with the same, shared parameters and another attention, in evaluation mode."""
        return self._over(self.config, self.state_dict(), attend)

    @classmethod
    def _over(cls, config: GPTConfig, tensors: Mapping[str, Tensor], attend: Attend) -> GPT:
        with torch.device("meta"), _Uninitialised():  # parameters have no memory before the weights
            model = cls(config, attend)
        model.load_state_dict(tensors, assign=True)
        model.tie_head()
        return model.eval()

    def tie_head(self) -> None:
        """Make the head's weight the token embedding unless it is untied (Press & Wolf, arXiv:1608.05859)."""
        if not self.config.untied_head:
            self.lm_head.weight = self.transformer.wte.weight

    @property
    def weights(self) -> dict[str, NDArray[np.float32]]:
        """The parameters as arrays without a tied head's; on the CPU they share the memory."""
        tied = () if self.config.untied_head else (HEAD,)
        parameters = {name: t for name, t in self.state_dict().items() if name not in tied}
        return {name: t.detach().cpu().contiguous().numpy() for name, t in parameters.items()}

    def forward(
        self, ids: Tensor, caches: Sequence[KVCache] | None = None, last_only: bool = False
    ) -> Tensor:
        """Logits (B, T, V) of the token after each of `ids` (B, T).

        caches: one per layer; ids then continue the cached tokens. last_only: return only the last position's
        logits, (B, 1, V). Raises ValueError if the context would exceed the block size of one with an end.
        """
        T = ids.shape[1]
        start = caches[0].length if caches else 0
        if start + T > self.config.block_size and not self.config.endless:
            must = f"together they must be at most block_size={self.config.block_size}"
            raise ValueError(f"ids has {T} tokens after {start} in the cache; {must}")
        t = self.transformer
        x = t.wte(ids)  # (B, T, C)
        if not self.config.endless:
            x = x + t.wpe(caches[0].positions(T) if caches else torch.arange(T, device=ids.device))
        x = t.drop(x)
        for layer, block in enumerate(t.h):
            x = block(x, caches[layer] if caches else None)
        if last_only:
            x = x[:, -1:]
        return self.lm_head(t.ln_f(x))
