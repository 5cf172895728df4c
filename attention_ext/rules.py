"""What a query sees beside `causal`, and what changes its scores: the rules of attention(), checked.

Their C++ side is csrc/rules.h. The names are flash-attention's. torch is not imported here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from shakespeare.attention_ext.build.structs import CSRC, structure
from shakespeare.attention_ext.checks import finite, type_text, whole_number

if TYPE_CHECKING:
    from torch import Tensor


class Options(TypedDict, total=False):
    """The rules among attention()'s arguments."""

    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    documents: Tensor | None
    score_mod: str | Path | None


NAMES = frozenset(Options.__annotations__)
NO_LIMIT = 2**50  # keys to a side: further than any
HIDDEN = -3.4e38  # above HIDDEN of csrc/rules.h, below any score


class ScoreMod:
    """A user's change of scores, compiled. Raises BuildError, with the compiler's output, if it is wrong."""

    known: ClassVar[dict[int, ScoreMod]] = {}  # by address

    def __init__(self, header: Path) -> None:
        from shakespeare.attention_ext.build import recipes

        self.header = header
        self._library = ctypes.CDLL(str(recipes.score_mod(header).make()))
        self._library.score_mod_has_slope.restype = ctypes.c_bool
        self.has_slope = self._library.score_mod_has_slope()
        self.address = ctypes.cast(self._library.score_mod_change, ctypes.c_void_p).value or 0
        self.known[self.address] = self

    @functools.cached_property
    def kept(self) -> Path:
        """A folder for NVRTC, with the header and what it includes in `user`, as at the first use."""
        from shakespeare.attention_ext.build import cache, nvrtc, recipes

        texts = cache.texts_of([self.header, *recipes.score_mod(self.header).read()])
        files = dict.fromkeys(nvrtc.STANDARD, "") | {f"user/{place}": text for place, text in texts.items()}
        return cache.kept("attention_ext_score_mod_text", self.header.name, files)

    def change(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, H, Nq, Nk), float32 and contiguous, as it changes them, and its derivative there."""
        import torch

        Strip = structure(CSRC / "rules.h", "Strip")
        slopes = torch.zeros_like(s)
        s = s.clone()
        for b, h in ((b, h) for b in range(s.shape[0]) for h in range(s.shape[1])):
            strip = Strip(s[b, h].data_ptr(), s.shape[3], 1, 0, s.shape[2], 0, s.shape[3], 1.0, True)
            address = ctypes.c_void_p(slopes[b, h].data_ptr())
            self._library.score_mod_change(ctypes.byref(strip), ctypes.c_int64(b), ctypes.c_int64(h), address)
        return s, slopes


_mods: dict[Path, Any] = {}


# How an operator takes a field of Rules, by its annotation: the type in C++, and in PyTorch's schema.
TYPES = {
    "int": ("int64_t", "SymInt"),
    "float": ("double", "float"),
    "ScoreMod | None": ("std::optional<int64_t>", "int?"),
    "Tensor | None": ("std::optional<Tensor>", "Tensor?"),
}


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of a call, as attention() describes them; left and right are the window's.

    The operators of parts 1 to 4 take all fields, in this order, of which C++ is told by macros().
    """

    left: int = NO_LIMIT
    right: int = NO_LIMIT
    softcap: float = 0.0
    score_mod: ScoreMod | None = None
    alibi_slopes: Tensor | None = None  # (B, H)
    bias: Tensor | None = None
    sinks: Tensor | None = None
    documents: Tensor | None = None
    extents: Tensor | None = None  # of documents on CUDA, by csrc/cuda/documents.cu, which part 4 launches

    def arguments(self) -> tuple[Any, ...]:
        """What an operator takes."""
        values = vars(self)
        return tuple(value.address if isinstance(value, ScoreMod) else value for value in values.values())

    def on_cuda(self) -> Rules:
        """The rules with contiguous tensors, as part 4 takes them on CUDA."""
        tensors = ("alibi_slopes", "sinks", "documents")
        laid = {n: t.contiguous() for n, t in vars(self).items() if n in tensors and t is not None}
        if self.bias is not None and self.bias.stride(3) != 1:
            laid["bias"] = self.bias.contiguous()
        return replace(self, **laid)

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
            s = s + self.bias
            seen = seen & (self.bias > -torch.inf)
        if self.score_mod:
            s = _modified()(s, self.score_mod)
            seen = seen & (s.detach() > HIDDEN)
        if self.documents is not None:
            seen = seen & (self.documents[:, None, -Nq:, None] == self.documents[:, None, None])
        return s, seen


ARGUMENTS = tuple(field.name for field in fields(Rules))  # what an operator takes, in its order


def macros() -> tuple[str, ...]:
    """What operators in C++ are compiled with: the types of their arguments, a struct's fields, a schema."""
    types, kinds = zip(*(TYPES[str(field.type)] for field in fields(Rules)))
    members = "".join(f"{type} {name};" for type, name in zip(types, ARGUMENTS))
    schema = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, ARGUMENTS))
    return f"-DRULE_TYPES={','.join(types)}", f"-DRULE_FIELDS={members}", f'-DRULE_SCHEMA="{schema}"'


@functools.cache
def _modified() -> Any:
    """ScoreMod.change() in PyTorch's graph: the derivative is the header's. torch is imported late."""
    import torch

    class Modified(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, s: Tensor, mod: ScoreMod) -> Tensor:
            changed, slopes = (t.to(s.device) for t in mod.change(s.float().cpu().contiguous()))
            ctx.save_for_backward(slopes)
            return changed.to(s.dtype)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return gradient * ctx.saved_tensors[0], None

    return Modified.apply


def named(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Those of attention()'s rules that are not None. Raises TypeError for a name that is none of a rule."""
    for name in rules:
        if name not in NAMES:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
    return {name: value for name, value in rules.items() if value is not None}


def any_gradient(rules: Mapping[str, Any]) -> bool:
    """Whether a tensor among these arguments of attention() requires a gradient."""
    import torch

    # torch.compile traces no getattr() of a dynamic number.
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in rules.values())


def checked(options: dict[str, Any], q: Tensor, Nk: int, gradient: bool = False) -> Rules:
    """The rules of these arguments of attention(), for k with Nk rows. Raises TypeError or ValueError.

    gradient: whether gradients are computed.
    """
    import torch

    B, H, Nq, _ = q.shape
    found: dict[str, Any] = {}  # torch.compile cannot trace dict[...]()
    window = options.get("window")
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise TypeError(f"window is {type_text(window)}; it must be (left, right)")
        for name, keys in zip(("left", "right"), window):
            if keys is None:
                continue
            found[name] = whole_number("window", keys, "(left, right), whole numbers or None")
            if found[name] < 0:
                raise ValueError(f"window is {window}; its sides must be at least 0, or None for no limit")
            found[name] = min(found[name], NO_LIMIT)
    softcap = options.get("softcap")
    if softcap is not None:
        found["softcap"] = finite("softcap", softcap)
        if not 1e-30 <= found["softcap"] <= 1e30:  # it and its inverse are float32's
            raise ValueError(f"softcap is {softcap}; it must be above 0, from 1e-30 to 1e30")

    def tensor(name: str, *shapes: tuple[int, ...], dtypes: tuple = (torch.float32,)) -> None:
        t = options.get(name)
        if t is None:
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

    header = options.get("score_mod")
    if header is not None:
        if not isinstance(header, str | Path):
            raise TypeError(f"score_mod is {type_text(header)}; it must be the path of a C++ header")
        path = Path(header).absolute()
        if not path.is_file():
            raise ValueError(f"score_mod is {str(header)!r}; it must be the path of a C++ header")
        from shakespeare.attention_ext.build import cache, recipes

        files = lambda: (path, *recipes.score_mod(path).read())  # noqa: E731
        mod = cache.latest(_mods, path, lambda: ScoreMod(path), files)
        if gradient and not mod.has_slope:
            raise ValueError(f"score_mod is {path}; its gradient needs slope(float s, At at)")
        found["score_mod"] = mod
    tensor("alibi_slopes", (B, H), (H,))
    tensor("sinks", (H,))
    tensor("bias", *((b, h, Nq, Nk) for b in (B, 1) for h in (H, 1)), dtypes=(torch.float32, torch.bool))
    tensor("documents", (B, Nk), dtypes=(torch.int64, torch.int32))
    # A GPU would be waited for; torch.compile and torch.func read no values.
    read = q.is_cpu and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    for name in ("alibi_slopes", "sinks") if read else ():
        if name in found and not torch.isfinite(found[name]).all():
            raise ValueError(f"{name} holds NaN or infinity; it must be finite")
    if "alibi_slopes" in found:
        if gradient and found["alibi_slopes"].requires_grad:
            raise ValueError("alibi_slopes requires a gradient; only q, k, v, bias and sinks have one")
        found["alibi_slopes"] = found["alibi_slopes"].expand(B, H)
    if "documents" in found:
        if Nq > Nk:
            raise ValueError(f"q has Nq={Nq} rows; with documents it must have at most Nk={Nk}")
        found["documents"] = found["documents"].long()
    if max(Nq, Nk) >= 2**31:
        raise ValueError(f"q has Nq={Nq} and k Nk={Nk} rows; with rules they must be below 2^31")
    return Rules(**found)
