"""Models for other programs: Hugging Face's transformers, llama.cpp and nanoGPT."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shakespeare.checkpoints import SHIPPED
from shakespeare.model.checkpoint import Checkpoint, Weights, directory_of, loaded
from shakespeare.model.config import GPTConfig

FORMATS = ("hf", "gguf", "nanogpt")
GGUF_TYPES = ("f32", "f16", "q8_0")


def export(model: Any, to: str, out: str | Path, type: str = "f32") -> Path:
    """Write a model for another program, with its draft beside it unless it is one file; returns `out`.

    model: what load() takes or gives. to: 'hf', a directory for transformers; 'gguf', a file for llama.cpp;
    'nanogpt', a directory with ckpt.pt. out: a path that is free, or an empty directory. type: of the
    matrices in a GGUF file, one of GGUF_TYPES. Raises CheckpointError, ValueError for what the program lacks,
    and ModuleNotFoundError without gguf, or for 'nanogpt' without torch.
    """
    out = Path(out)
    for name, value, known in (("to", to, FORMATS), ("type", type, GGUF_TYPES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if out.is_file() or out.is_dir() and (to == "gguf" or any(out.iterdir())):
        raise ValueError(f"out is {str(out)!r}, which exists; it must be a new {_kind(to)}")
    checkpoint, name = loaded(model), "GPT"
    record: dict[str, Any] = {}
    if not isinstance(model, Checkpoint):
        directory = directory_of(model)
        name, file = directory.resolve().name, directory / "training.json"
        record = json.loads(file.read_bytes()) if file.is_file() else {}
    if to == "gguf":
        from shakespeare.model.export.gguf_file import write_gguf

        out.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(out, checkpoint.config, checkpoint.weights, type.upper(), checkpoint.tokenizer)
        return out
    if to == "hf":
        from shakespeare.model.export.hf import write

        write(checkpoint, out, record, name, "mit" if str(model) in SHIPPED else "unknown")
    else:
        from shakespeare.model.export.nanogpt import write as write_nanogpt

        write_nanogpt(checkpoint, out, record)
    if checkpoint.draft:
        checkpoint.draft.save(out)
    return out


def _kind(to: str) -> str:
    return "file" if to == "gguf" else "directory"


def with_biases(config: GPTConfig, weights: Weights) -> dict[str, np.ndarray]:
    """The tensors with zeros for the biases that a model does not have, for programs that must have them."""
    shapes = replace(config, bias=True).shapes()
    return {
        name: weights[name] if name in weights else np.zeros(shape, np.float32)
        for name, shape in shapes.items()
    }
