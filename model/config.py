"""The sizes of a GPT, which decide the names and shapes of its parameters. torch is not imported here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"  # EMBEDDING's tensor, unless the head is untied
PLACES = "transformer.wpe.weight"
POSITIONS = ("table", "alibi")
SLOPED = 256  # the window for which ALiBi's slopes are the published ones
MOST_SIZE = 2**31
# Each layer has names. A cache has room for a window, and no tensor of the checkpoint shows its size.
MOST = {"n_layer": 4096, "window": 2**20}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model. Raises ValueError naming the first field that is out of range.

    block_size: the longest context, in tokens. vocab_size: V. n_layer: L. n_head: H. n_embd: C, a multiple of
    n_head. dropout: probability, used while training only. bias: whether Linear and LayerNorm layers have
    one. tanh_gelu: GELU's approximation by tanh, as in GPT-2, instead of the exact one. untied_head: the head
    is a tensor of its own. positions: one of POSITIONS. With 'table' each has an embedding. With 'alibi' a
    head attends less to what is farther away (Press, Smith & Lewis 2022, arXiv:2108.12409), and `window` is
    how many tokens a query sees, itself among them: the model is endless, and block_size is what it learned.
    eos_token_id: the tokens that end a text; one, several or None become a tuple.
    """

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    tanh_gelu: bool = False
    untied_head: bool = False
    positions: str = "table"
    window: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ends: Any = self.eos_token_id
        if ends is None:
            ends = ()
        elif not isinstance(ends, (list, tuple)):
            ends = (ends,)
        if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
            raise ValueError(f"eos_token_id is {self.eos_token_id!r}; it must be a whole number, or several")
        object.__setattr__(self, "eos_token_id", tuple(ends))
        sizes = ["block_size", "vocab_size", "n_layer", "n_head", "n_embd"]
        if self.endless:
            sizes.append("window")
        for field in sizes:
            value = getattr(self, field)
            limit = MOST.get(field, MOST_SIZE)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                must = f"a whole number of at least 1 and at most {limit}"
                raise ValueError(f"{field} is {value!r:.40}; it must be {must}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd is {self.n_embd}; it must be a multiple of n_head={self.n_head}")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}; it must be at least 0 and less than 1")
        for field in ("bias", "tanh_gelu", "untied_head"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be true or false")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions is {self.positions!r}; it must be one of {', '.join(POSITIONS)}")
        if self.window is not None and not self.endless:
            raise ValueError(f"window is {self.window!r}; it must be None with positions 'table'")

    @property
    def head_dim(self) -> int:
        """d, the width of one head."""
        return self.n_embd // self.n_head

    @property
    def num_params(self) -> int:
        """Number of parameters without the position embeddings, as nanoGPT counts them."""
        return sum(math.prod(shape) for name, shape in self.shapes().items() if name != PLACES)

    @property
    def endless(self) -> bool:
        """Whether a text may have any length."""
        return self.positions == "alibi"

    @property
    def reach(self) -> int | None:
        """How many of a text's last tokens decide the next one's logits; None if all up to block_size do."""
        return None if self.window is None else self.n_layer * (self.window - 1) + 1

    @property
    def alibi_slopes(self) -> list[float]:
        """ALiBi's slope of each head: as published for a window of SLOPED, for half of it twice as steep.

        The published ones are powers of 2; if H is no power of 2, some between them.
        """
        power = 1 << (self.n_head.bit_length() - 1)
        slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
        slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(self.n_head - power)]
        return [slope * SLOPED / (self.window or SLOPED) for slope in slopes]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by nanoGPT's name. HEAD is left out where it is EMBEDDING."""
        C = self.n_embd
        layer: dict[str, tuple[int, ...]] = {
            "ln_1": (C,),
            "attn.c_attn": (3 * C, C),
            "attn.c_proj": (C, C),
            "ln_2": (C,),
            "mlp.c_fc": (4 * C, C),
            "mlp.c_proj": (C, 4 * C),
        }
        layers = {f"transformer.h.{i}.{name}": layer[name] for i in range(self.n_layer) for name in layer}
        layers["transformer.ln_f"] = (C,)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, C)}
        if not self.endless:
            shapes[PLACES] = (self.block_size, C)
        shapes.update({f"{name}.weight": shape for name, shape in layers.items()})
        if self.bias:
            shapes.update({f"{name}.bias": shape[:1] for name, shape in layers.items()})
        if self.untied_head:
            shapes[HEAD] = (self.vocab_size, C)
        return shapes
