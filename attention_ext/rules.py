"""What a query sees beside `causal`, and what changes its scores: the rules of attention(), checked.

Their C++ side is csrc/rules.h. The names are flash-attention's. torch is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shakespeare.attention_ext.checks import finite, kind, whole

if TYPE_CHECKING:
    from torch import Tensor

NAMES = frozenset(("window", "softcap", "alibi_slopes", "sinks", "bias", "documents"))
NO_LIMIT = 2**50  # keys to a side: further than any


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of a call, as attention() describes them; left and right are the window's."""

    left: int = NO_LIMIT
    right: int = NO_LIMIT
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # (B, H)
    sinks: Tensor | None = None
    bias: Tensor | None = None
    documents: Tensor | None = None

    @property
    def needs_gradient(self) -> bool:
        """Whether bias or sinks require a gradient."""
        return any(t is not None and t.requires_grad for t in (self.bias, self.sinks))

    def arguments(self, q: Tensor) -> tuple[Any, ...]:
        """What the operators of parts 1 to 4 take; an empty tensor stands for none."""
        none = q.new_empty(0)
        tensors = (self.alibi_slopes, self.bias, self.sinks, self.documents)
        return self.left, self.right, self.softcap, *(none if t is None else t for t in tensors)

    def change(self, s: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Scores (B, H, Nq, Nk) as the rules change them, and where a query sees a key, of a like shape."""
        import torch

        Nq, Nk = s.shape[2:]
        own = torch.arange(Nk - Nq, Nk, device=s.device)[:, None]  # the key beside each query
        j = torch.arange(Nk, device=s.device)
        seen = (j >= own - self.left) & (j <= own + (min(self.right, 0) if causal else self.right))
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.alibi_slopes is not None:
            s = s - self.alibi_slopes[:, :, None, None] * (own - j).abs()
        if self.bias is not None and self.bias.dtype == torch.bool:
            seen = seen & self.bias
        elif self.bias is not None:
            s, seen = s + self.bias, seen & (self.bias > -torch.inf)
        if self.documents is not None:
            seen = seen & (self.documents[:, None, -Nq:, None] == self.documents[:, None, None])
        return s, seen


def checked(given: dict[str, Any], q: Tensor, Nk: int) -> Rules:
    """The rules of these arguments of attention(), for k with Nk rows. Raises TypeError or ValueError."""
    import torch

    (B, H, Nq, _), found = q.shape, dict[str, Any]()
    if (window := given.get("window")) is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise TypeError(f"window is a {kind(window)}; it must be (left, right)")
        for name, keys in zip(("left", "right"), window):
            if keys is None:
                continue
            found[name] = whole("window", keys, "(left, right), whole numbers or None")
            if found[name] < 0:
                raise ValueError(f"window is {window}; its sides must be at least 0, or None for no limit")
            found[name] = min(found[name], NO_LIMIT)
    if (softcap := given.get("softcap")) is not None:
        found["softcap"] = finite("softcap", softcap)
        if found["softcap"] <= 0:
            raise ValueError(f"softcap is {softcap}; it must be above 0")

    def tensor(name: str, *shapes: tuple[int, ...], dtypes: tuple = (torch.float32,)) -> None:
        if (t := given.get(name)) is None:
            return
        if not isinstance(t, torch.Tensor) or t.dtype not in dtypes:
            is_a = t.dtype if isinstance(t, torch.Tensor) else f"a {type(t).__name__}"
            raise TypeError(f"{name} is {is_a}; it must be a tensor of {' or '.join(map(str, dtypes))}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; it must be on q's {q.device}")
        if tuple(t.shape) not in shapes:
            must = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be {must}")
        found[name] = t

    tensor("alibi_slopes", (B, H), (H,))
    tensor("sinks", (H,))
    tensor("bias", *((b, h, Nq, Nk) for b in (B, 1) for h in (H, 1)), dtypes=(torch.float32, torch.bool))
    tensor("documents", (B, Nk), dtypes=(torch.int64, torch.int32))
    for name, t in found.items():
        if name in ("alibi_slopes", "sinks") and not torch.isfinite(t).all():
            raise ValueError(f"{name} holds NaN or infinity; it must be finite")
    if "alibi_slopes" in found:
        if found["alibi_slopes"].requires_grad:
            raise ValueError("alibi_slopes requires a gradient; only q, k, v, bias and sinks have one")
        found["alibi_slopes"] = found["alibi_slopes"].expand(B, H)
    if "documents" in found:
        if Nq > Nk:
            raise ValueError(f"q has Nq={Nq} rows; with documents it must have at most Nk={Nk}")
        found["documents"] = found["documents"].long()
    if max(Nq, Nk) >= 2**31:
        raise ValueError(f"q has Nq={Nq} and k Nk={Nk} rows; with rules they must be below 2^31")
    return Rules(**found)
