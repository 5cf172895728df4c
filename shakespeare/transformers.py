"""attn_implementation="shakespeare": attention() in the models of Hugging Face's transformers, 5.x.

    import shakespeare.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="shakespeare")

"shakespeare" is part 4, "shakespeare-part0" to "shakespeare-part4" are the parts, and register("mine.cpp")
gives the name of a kernel of one's own. docs/use/models.md says what is taken.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from shakespeare.attention_ext.parts import PARTS, check_part
from shakespeare.flash_attn import attend

if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
    raise ImportError(f"transformers is {transformers.__version__}; it must be 5.23 or a later 5.x")
ARGUMENTS = {  # the models', by attention()'s
    "window": "sliding_window",
    "documents": "attention_mask or position_ids",
    "bias": "attention_mask",
    "sinks": "s_aux",
}


class Mask(BlockMask):
    """What queries see by rules, without a matrix; models hand a BlockMask on as it is.

    shape: (B, 1, Nq, Nk). window: (left, right), as attention()'s; causal is a right of 0. keys: those from
    here on are empty places of a static cache. documents: (B, keys), or None.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        window: tuple[int | None, int | None],
        keys: int,
        documents: Tensor | None,
    ) -> None:
        self.sizes = shape
        self.ndim = len(shape)
        self.window = window
        self.keys = keys
        self.documents = documents

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    def contiguous(self) -> Mask:
        return self

    def to(self, device: Any, **_: Any) -> Mask:
        documents = None if self.documents is None else self.documents.to(device)
        return Mask(self.sizes, self.window, self.keys, documents)


def _parsed(
    function: Callable, local: int | None = None
) -> tuple[int | None, int | None, Tensor | None] | None:
    """The window and the documents of a function of masking_utils; None if it hides keys by more.

    local: the window of a function that is causal and has no documents.
    """
    plain = {
        masking_utils.causal_mask_function: (None, 0, None),
        masking_utils.bidirectional_mask_function: (None, None, None),
    }
    if function in plain:
        return plain[function]
    if torch.compiler.is_compiling():  # a closure cannot be traced
        return (local - 1, 0, None) if local else None
    if function.__module__ != masking_utils.__name__:
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    match function.__qualname__.partition(".")[0]:
        case "sliding_window_overlay":
            return cells[0] - 1, None, None
        case "sliding_window_bidirectional_overlay":
            return cells[0], cells[0], None
        case "packed_sequence_mask_function":
            return None, None, cells[0]
        case "remap_positions_for_packed_sequence":  # a text's positions grow by 1, as its rows do
            return _parsed(next(filter(callable, cells)))
        case "and_masks":
            found = [_parsed(each) for each in cells[0]]
            if None in found:
                return None
            values = [[one for one in column if one is not None] for column in zip(*found)]
            if max(map(len, values)) > 1:
                return None
            left, right, documents = (column[0] if column else None for column in values)
            return left, right, documents
    return None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **more: Any,
) -> Mask | Tensor | None:
    """A Mask, or the matrix (B, 1, Nq, Nk) of what a Mask does not hold or the model asks a matrix for."""
    length = kv_length
    window = getattr(more.get("config"), "sliding_window", None)
    local = window if allow_is_causal_skip and window == more.get("local_size") else None
    parsed = None if use_vmap else _parsed(mask_function, local)
    if isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        q_offset = int(q_offset)  # of a static cache
    if parsed and not isinstance(q_offset, Tensor):
        left, right, documents = parsed
        wanted = documents is not None or allow_is_causal_skip or allow_is_bidirectional_skip or q_length == 1
        if right == 0:
            length = q_offset + q_length - kv_offset
        if attention_mask is not None:
            rows = attention_mask[:, kv_offset : kv_offset + length]
            if torch.compiler.is_compiling() or not rows.all():
                documents = F.pad(rows, (0, length - rows.shape[1])).long()
        aligned = right == 0 or q_length == kv_length or (left is right is documents is None)
        if wanted and aligned and q_length <= length <= kv_length:
            return Mask((batch_size, 1, q_length, kv_length), (left, right), length, documents)
    return masking_utils.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        **more,
    )


def forward(
    part: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """attention() of query (B, H, Nq, d), key and value (B, Hk, Nk, d), as a model calls it: (B, Nq, H, d).

    Raises ValueError, naming the model's argument, for what the part does not take.
    """
    refused = {
        "dropout": dropout,
        "output_attentions": more.get("output_attentions"),
        "cache": more.get("cache"),
    }
    for name, value_of in refused.items():
        if value_of:
            must = "config.attention_dropout must be 0" if name == "dropout" else "it must be left out"
            raise ValueError(f"{name} is {value_of}; {must} with attn_implementation='shakespeare'")
    Nq, d = query.shape[2:]
    rules: dict[str, Any] = {
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
        "bias": position_bias,
    }
    if isinstance(attention_mask, Mask):
        rules["window"] = attention_mask.window
        rules["documents"] = attention_mask.documents
        causal = attention_mask.window[1] == 0
        key = key[:, :, : attention_mask.keys]
        value = value[:, :, : attention_mask.keys]
    elif attention_mask is None:
        causal = Nq > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    else:
        causal = False
        bias = attention_mask[..., : key.shape[2]].expand(-1, -1, Nq, -1)
        if position_bias is not None:
            added = torch.where(bias, 0, -torch.inf) if bias.dtype == torch.bool else bias
            bias = position_bias[..., : key.shape[2]] + added
        rules["bias"] = bias
    if rules["bias"] is not None and rules["bias"].dtype != torch.bool:
        rules["bias"] = rules["bias"][..., : key.shape[2]].float()
    narrow = value.shape[3]
    if narrow < d:  # latent attention
        value = F.pad(value, (0, d - narrow))
    try:
        out, _ = attend(part, query, key, value, causal=causal, scale=scaling, **rules)
    except ValueError as error:
        rule, found_rule, rest = str(error).partition(" is given; ")
        if not found_rule:
            raise
        raise ValueError(f"{ARGUMENTS.get(rule, rule)} is given; {rest}") from None
    return out.transpose(1, 2)[..., :narrow], None


def _register(name: str, part: str) -> str:
    AttentionInterface.register(name, functools.partial(forward, part))
    AttentionMaskInterface.register(name, mask)
    return name


def register(file: str | Path) -> str:
    """The attn_implementation of a file with a kernel of one's own, which is read again after each save.

    It takes what docs/use/try.md says: float32 without gradients, causal or all keys. Raises ValueError
    unless the file exists and its suffix is a kernel's.
    """
    path = Path(file).absolute()
    check_part(str(path))
    stem = path.name.replace("flash", "kernel")  # transformers looks for the word
    names = (f"shakespeare-{stem}" + (f"-{i}" if i else "") for i in itertools.count())
    name = next(name for name in names if _files.setdefault(name, path) == path)
    return _register(name, str(path))


_files: dict[str, Path] = {}  # by the names that register() gave
_register("shakespeare", "part4")
for _part in PARTS:
    _register(f"shakespeare-{_part}", _part)
