"""A directory with what sample.py and train.py of nanoGPT read."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.config import EMBEDDING, HEAD
from shakespeare.model.files import write_file
from shakespeare.model.tokenizer import CharTokenizer

FIELDS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
NO_LOSS = 1e9  # nanoGPT's best_val_loss before it has one


def write(checkpoint: Checkpoint, out: Path, record: Mapping[str, Any]) -> None:
    """Write ckpt.pt, and data/NAME/meta.pkl with the characters; NAME is the directory's. Imports torch.

    record: training.json's. Raises ValueError for a model that nanoGPT's model.py does not have.
    """
    import torch

    c = checkpoint.config
    for field in ("tanh_gelu", "untied_head"):
        if getattr(c, field):
            what = (
                "computes GELU exactly, not by tanh"
                if field == "tanh_gelu"
                else "ties the head to the embedding"
            )
            raise ValueError(f"to is 'nanogpt', whose model.py {what}; it must be another format")
    tensors = {name: torch.tensor(w) for name, w in checkpoint.weights.items()}
    # As in its configure_optimizers(), which numbers parameters by group; the head is no other parameter.
    groups = [
        {"params": [t for t in tensors.values() if t.dim() > 1], "weight_decay": 0.1},
        {"params": [t for t in tensors.values() if t.dim() == 1], "weight_decay": 0.0},
    ]
    dataset = re.sub(r"[^\w-]", "_", out.resolve().name)[:100]
    held = {
        "model": tensors | {HEAD: tensors[EMBEDDING]},
        "optimizer": torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99)).state_dict(),
        "model_args": {field: getattr(c, field) for field in FIELDS},
        "iter_num": record.get("best_step", 0),
        "best_val_loss": record.get("val_loss", NO_LOSS),
        "config": {"dataset": dataset},
    }
    file = io.BytesIO()
    torch.save(held, file)
    (out / "data" / dataset).mkdir(parents=True, exist_ok=True)
    write_file(out / "ckpt.pt", file.getvalue())
    if isinstance(checkpoint.tokenizer, CharTokenizer):
        checkpoint.tokenizer.write_meta_pickle(out / "data" / dataset / "meta.pkl")
