"""The table of engines, and which one a model gets: choose() says it, open_engine() is Python's door.

An engine is imported when it is opened, and with it torch, CUDA or wgpu.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shakespeare.attention_ext.cuda.kernels import WIDEST
from shakespeare.attention_ext.parts import DEVICES, BuildError, one_of
from shakespeare.generation.engines.engine import Engine, EngineOptions, Unfit
from shakespeare.model.checkpoint import Checkpoint, loaded, named_draft
from shakespeare.model.draft import Draft

if TYPE_CHECKING:
    from shakespeare.model.gpt import GPT


@dataclass(frozen=True)
class Row:
    """An engine. opens: the module here and what makes one there, of a model, options and a draft if drafts.

    devices: where it runs. any_attention: also PyTorch's, a user's file's and CUDA's kernels by name. drafts:
    whether it takes a draft that is named.
    """

    name: str
    devices: tuple[str, ...]
    opens: tuple[str, str]
    any_attention: bool = False
    drafts: bool = False

    def open(self, model: Checkpoint | GPT, options: EngineOptions) -> Engine:
        """Raises Unfit for a model that it does not take, BuildError without its device."""
        file, make = self.opens
        module = importlib.import_module(f"shakespeare.generation.engines.{file}")
        draft = (draft_of(model, options.draft),) if self.drafts else ()
        return cast(Engine, getattr(module, make)(model, options, *draft))

    def refuses(self, model: Checkpoint | GPT, options: EngineOptions) -> str | None:
        """Why it does not take these options, or None."""
        part = options.row
        device = options.device
        kernel = options.kernel
        draft = options.draft
        d = model.config.head_dim
        if device not in self.devices:
            others = " or ".join(repr(row.name) for row in ENGINES.values() if device in row.devices)
            return f"engine is {self.name!r}; it must be {others} on {DEVICES[device]}"
        if not self.any_attention and part.operator is None:
            whose = "a user's" if part.file else "PyTorch's"
            return f"engine is {self.name!r}; it must be 'torch' with {part.name}, {whose} attention"
        if not self.any_attention and kernel is not None:
            return f"kernel is {kernel!r}; it must be None with the {self.name} engine, which has its own"
        if model.config.endless and part.file:
            return f"model has positions 'alibi'; it must have 'table' with {part.name}, a user's attention"
        if device == "cuda" and part.operator and d > WIDEST:
            return f"model has heads of d={d}; d must be at most {WIDEST} on CUDA in {part.name}"
        if not self.drafts and not (isinstance(draft, str) and draft in ("auto", "off")):
            who = " and the ".join(row.name for row in ENGINES.values() if row.drafts)
            return f"draft is {draft!r}; it must be 'auto' or 'off' but in the {who} engine"
        return None


# In the order in which they are tried.
ENGINES = {
    row.name: row
    for row in (
        Row("native", ("cpu",), ("native", "Decoder"), drafts=True),
        Row("cuda", ("cuda",), ("cuda", "CudaEngine"), drafts=True),
        Row("webgpu", ("webgpu",), ("webgpu", "WebGpuEngine")),
        Row("torch", ("cpu", "cuda"), ("pytorch", "open_torch"), any_attention=True),
    )
}


def choose(model: Checkpoint | GPT, options: EngineOptions) -> tuple[Engine, list[str]]:
    """The engine that is named, else the first that takes the model; and why those before it do not.

    Where WebGPU has no adapter, or its engine does not take the model, one on the CPU is chosen.
    Raises ValueError naming the wrong option, Unfit or BuildError if there is no other engine.
    """
    options.context(model.config)
    named = options.engine is not None
    device = options.device
    if named:
        one_of("engine", options.engine, ENGINES)  # type: ignore[arg-type]
    refused = ""
    unfit: list[str] = []
    for row in ENGINES.values():
        if row.name != options.engine if named else device not in row.devices:
            continue
        reason = row.refuses(model, options)
        if reason:
            refused = reason
            continue
        try:
            return row.open(model, options), [f"{why}; the {row.name} engine writes" for why in unfit]
        except (Unfit, BuildError) as error:
            if named or isinstance(error, BuildError) and device != "webgpu":
                raise
            unfit.append(str(error))
    if refused or device != "webgpu":
        raise ValueError(refused)
    engine, _ = choose(model, replace(options, device="cpu"))
    return engine, [f"{why}; the {engine.name} engine writes on the CPU" for why in unfit]


def open_engine(
    model: Checkpoint | GPT | str | Path, engine: str | EngineOptions | None = None, **options: Any
) -> Engine:
    """Open an engine for a model; the native engine and a GPU copy the weights.

    model: loaded, or a name for load(). engine, options: the fields of EngineOptions, or these. Warns if an
    engine that would come first does not take the model. Raises as EngineOptions and choose() do.
    """
    if isinstance(model, (str, Path)) or not hasattr(model, "config"):
        model = loaded(model)
    asked = engine if isinstance(engine, EngineOptions) else EngineOptions(engine=engine, **options)
    opened, unfit = choose(model, asked)
    for why in unfit:
        warnings.warn(why, stacklevel=2)
    return opened


def draft_of(model: Checkpoint | GPT, draft: Draft | str) -> Draft | None:
    """The draft that EngineOptions name, or None. Raises ValueError if it does not fit."""
    if draft == "off":
        return None
    found: Draft | None = None
    if isinstance(draft, Draft):
        found = draft
    elif isinstance(model, Checkpoint):
        found = model.draft if draft == "auto" else named_draft(draft, model.tokenizer)
    elif draft != "auto":
        must = "it must be 'auto', 'off' or a Draft for a model without a vocabulary"
        raise ValueError(f"draft is {draft!r}; {must}")
    V = model.config.vocab_size
    if found and len(found.vocabulary) != V:
        raise ValueError(f"draft has a vocabulary of {len(found.vocabulary)}; it must be the model's, {V}")
    return found
