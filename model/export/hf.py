"""A directory that AutoModelForCausalLM and AutoTokenizer of Hugging Face's transformers load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from shakespeare.attention_ext import BuildError
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.export import byte_pairs, with_biases
from shakespeare.model.files import write_file
from shakespeare.model.huggingface import TRANSPOSED
from shakespeare.model.tokenizer import CharTokenizer, Tokenizer

END = "<|endoftext|>"
CARD = """\
---
license: {licence}
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A GPT of {layers} layers, {heads} heads and width {width}: {parameters:,} parameters without positions.
It knows {vocabulary} and reads at most {block:,} tokens.{losses}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
ids = tokenizer({prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids)[0]))
```
{sample}"""


def write(checkpoint: Checkpoint, out: Path, record: Mapping[str, Any], name: str, licence: str) -> None:
    """Write GPT-2's architecture. record: training.json's. name, licence: for the card.

    "bias": false, which transformers ignores, tells this project that the biases are zeros.
    """
    c = checkpoint.config
    tokenizer, end = _tokenizer(checkpoint.tokenizer)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{field: getattr(c, field) for field in ("vocab_size", "n_layer", "n_head", "n_embd", "bias")},
        "n_positions": c.block_size,
        "activation_function": "gelu_new" if c.tanh_gelu else "gelu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": not c.untied_head,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        "dtype": "float32",
    }
    # GPT-2 would add embeddings of token_type_ids, which a tokenizer gives unless it is told not to.
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": c.block_size,
    }
    settings |= {"clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]}
    settings |= {} if end is None else dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    generation: dict[str, Any] = {"do_sample": True, "max_length": c.block_size, "top_k": 0}
    generation |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    arrays = with_biases(c, checkpoint.weights).items()
    tensors = {n: np.ascontiguousarray(w.T if TRANSPOSED.search(n) else w) for n, w in arrays}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "README.md": _card(checkpoint, record, name, licence).encode(),
        "model.safetensors": safetensors.numpy.save(tensors, {"format": "pt"}),
    }
    for file, held in files.items():  # what cannot be encoded leaves no directory
        if file.endswith(".json"):
            files[file] = (json.dumps(held, ensure_ascii=False, indent=1) + "\n").encode()
    out.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        write_file(out / file, data)


def _tokenizer(tokenizer: Tokenizer) -> tuple[dict[str, Any], int | None]:
    """tokenizer.json, and the id of the token that ends a text."""
    found: dict[str, Any] = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None}
    if isinstance(tokenizer, CharTokenizer):
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        ids = {c: i for i, c in enumerate(tokenizer.characters)}
        # No token has the name of the unknown one: an unknown character is an error.
        model = {"type": "WordLevel", "vocab": ids, "unk_token": "<unknown>"}
        return found | {"pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model}, None
    vocab, special, merges = byte_pairs.tables(tokenizer)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": id, "content": text, "special": True, **flags} for text, id in special.items()]
    pairs = {"type": "BPE", "vocab": vocab | special, "merges": merges}
    found |= {"added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": pairs}
    return found, special.get(END)


def _card(checkpoint: Checkpoint, record: Mapping[str, Any], name: str, licence: str) -> str:
    """The model's card, with a text by the model where its kernels compile."""
    from shakespeare.generation.texts import generate

    c, characters = checkpoint.config, getattr(checkpoint.tokenizer, "characters", None)
    kinds = {"val_loss": "validation", "test_loss": "test"}
    losses = [f"{kind} {record[key]:.4f}" for key, kind in kinds.items() if key in record]
    prompt = characters[0] if characters and "\n" not in characters else "\n"
    try:
        text = str(generate(checkpoint, prompt, min(300, c.block_size), seed=1))
    except BuildError:
        text = ""
    return CARD.format(
        licence=licence,
        name=name,
        parameters=c.num_params,
        layers=c.n_layer,
        heads=c.n_head,
        width=c.n_embd,
        vocabulary=f"{len(checkpoint.tokenizer):,} {'characters' if characters else 'byte pairs'}",
        block=c.block_size,
        losses=f" Loss, nats per token: {', '.join(losses)}." if losses else "",
        prompt=prompt,
        sample=f"\nA text by this model:\n\n````text\n{text}\n````\n" if text else "",
    )
