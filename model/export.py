"""Models for other programs: Hugging Face's transformers, llama.cpp (gguf_file.py) and nanoGPT."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from shakespeare.checkpoints import SHIPPED
from shakespeare.model import gguf_file
from shakespeare.model.checkpoint import Checkpoint, directory_of, loaded
from shakespeare.model.config import EMBEDDING, HEAD, GPTConfig
from shakespeare.model.files import write_file
from shakespeare.model.huggingface import CHARACTERS, END, TRANSPOSED, tables
from shakespeare.model.tokenizer import CharTokenizer, HuggingFaceTokenizer, Tokenizer

FORMATS = ("hf", "gguf", "nanogpt")
GGUF_TYPES = ("f32", "f16", "q8_0")
NANOGPT = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")  # its GPTConfig
NO_LOSS = 1e9  # nanoGPT's best_val_loss before it has one


def export(model: Any, to: str, out: str | Path, type: str = "f32", text: str = "") -> Path:
    """Write a model for another program, with its draft beside it unless it is one file; returns `out`.

    model: what load() takes or gives. to: 'hf', a directory for transformers; 'gguf', a file for llama.cpp;
    'nanogpt', a directory with ckpt.pt. out: a path that is free, or an empty directory. type: of the
    matrices in a GGUF file, one of GGUF_TYPES. text: one by the model, for the card of 'hf'. Raises
    CheckpointError, ValueError for what the program lacks, and ModuleNotFoundError without gguf, or for
    'nanogpt' without torch.
    """
    for name, value, known in (("to", to, FORMATS), ("type", type, GGUF_TYPES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    out = Path(out)
    if out.exists() and (to == "gguf" or not out.is_dir() or any(out.iterdir())):
        place = "file" if to == "gguf" else "directory"
        raise ValueError(f"out is {str(out)!r}, which exists; it must be a new {place}")
    checkpoint = loaded(model)
    name = "GPT"
    if checkpoint.config.endless:
        must = f"it must be 'table' for {to}: GPT-2's architecture has one"
        raise ValueError(f"model has positions 'alibi'; {must}")
    record: dict[str, Any] = {}
    if not isinstance(model, Checkpoint):
        name = directory_of(model).resolve().name
        file = directory_of(model) / "training.json"
        record = json.loads(file.read_bytes()) if file.is_file() else {}
    if to == "gguf":
        gguf_file.write_gguf(out, checkpoint.config, checkpoint.weights, type.upper(), checkpoint.tokenizer)
        return out
    if to == "hf":
        licence = "mit" if str(model) in SHIPPED else "unknown"
        write_hf(checkpoint, out, _card(checkpoint.config, record, name, licence, text))
    else:
        write_nanogpt(checkpoint, out, record)
    if checkpoint.draft:
        checkpoint.draft.save(out)
    return out


def write_hf(checkpoint: Checkpoint, out: Path, card: str) -> None:
    """Write what transformers' AutoModelForCausalLM and AutoTokenizer load, and README.md.

    "bias": false, which transformers ignores, tells this project that the biases are zeros.
    """
    c = checkpoint.config
    tokenizer, end = _tokenizer(checkpoint.tokenizer)
    ends: Any = dict(bos_token_id=end, eos_token_id=None)
    if c.eos_token_id:
        ends["eos_token_id"] = c.eos_token_id if len(c.eos_token_id) > 1 else c.eos_token_id[0]
    config = dict(
        **{field: getattr(c, field) for field in ("vocab_size", "n_layer", "n_head", "n_embd", "bias")},
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        n_positions=c.block_size,
        activation_function="gelu_new" if c.tanh_gelu else "gelu",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=not c.untied_head,
        **ends,
    )
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=c.block_size,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # GPT-2 would embed token_type_ids too
        **({} if end is None else dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)),
    )
    generation = dict(do_sample=True, top_k=0, max_length=c.block_size, **ends)
    contents = dict(
        config=config, tokenizer=tokenizer, tokenizer_config=settings, generation_config=generation
    )
    # what cannot be encoded leaves no directory
    files = {f"{n}.json": json.dumps(v, ensure_ascii=False, indent=1).encode() for n, v in contents.items()}
    arrays = gguf_file.with_biases(c, checkpoint.weights).items()
    tensors = {n: np.ascontiguousarray(w.T if TRANSPOSED.search(n) else w) for n, w in arrays}
    files["model.safetensors"] = safetensors.numpy.save(tensors, {"format": "pt"})
    files["README.md"] = card.encode()
    out.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        write_file(out / file, data)


def _tokenizer(tokenizer: Tokenizer) -> tuple[dict[str, Any], int | None]:
    """tokenizer.json, and the id of END."""
    found: dict[str, Any] = dict(version="1.0", added_tokens=[], normalizer=None, post_processor=None)
    if isinstance(tokenizer, CharTokenizer):
        ids = {c: i for i, c in enumerate(tokenizer.characters)}
        # No token has the name of the unknown one: an unknown character is an error.
        model: dict[str, Any] = dict(type="WordLevel", vocab=ids, unk_token="<unknown>")
        return found | dict(pre_tokenizer=CHARACTERS, decoder={"type": "Fuse"}, model=model), None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return json.loads(tokenizer.tokenizer.to_str()), tokenizer.tokenizer.token_to_id(END)
    vocab, special, merges = tables(tokenizer)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    flags = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
    found["added_tokens"] = [dict(id=id, content=text, **flags) for text, id in special.items()]
    model = dict(type="BPE", vocab=vocab | special, merges=merges)
    return found | dict(pre_tokenizer=level, decoder=level, model=model), special.get(END)


def _card(config: GPTConfig, record: Mapping[str, Any], name: str, licence: str, text: str) -> str:
    """The model's card."""
    losses = ", ".join(f"{n} {record[f'{n}_loss']:.4f}" for n in ("val", "test") if f"{n}_loss" in record)
    written = f"A text by this model:\n\n````text\n{text}\n````\n" if text else ""
    return f"""\
---
license: {licence}
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A GPT of {config.n_layer} layers, {config.n_head} heads and width {config.n_embd}. It reads at most
{config.block_size:,} tokens of {config.vocab_size:,}. Loss in nats per token: {losses or "not recorded"}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForCausalLM.from_pretrained(".")
```

{written}"""


def write_nanogpt(checkpoint: Checkpoint, out: Path, record: Mapping[str, Any]) -> None:
    """Write ckpt.pt, and data/NAME/meta.pkl with the characters; NAME is the directory's. Imports torch.

    record: training.json's. Raises ValueError for a model that nanoGPT's model.py cannot hold.
    """
    import torch

    c = checkpoint.config
    if c.tanh_gelu or c.untied_head:
        what = f"the model has {'a GELU by tanh' if c.tanh_gelu else 'a head of its own'}"
        raise ValueError(f"to is 'nanogpt', but {what}, which nanoGPT lacks; it must be hf or gguf")
    tensors = {name: torch.tensor(w, device="cpu") for name, w in checkpoint.weights.items()}
    # As in its configure_optimizers(): weight decay for matrices only. The tied head is no other parameter.
    split = [[t for t in tensors.values() if (t.dim() > 1) == matrices] for matrices in (True, False)]
    groups = [dict(params=split[0], weight_decay=0.1), dict(params=split[1], weight_decay=0.0)]
    dataset = re.sub(r"[^\w-]", "_", out.resolve().name)[:100]
    contents = dict(
        model=tensors | {HEAD: tensors[EMBEDDING]},
        optimizer=torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99)).state_dict(),
        model_args={field: getattr(c, field) for field in NANOGPT},
        iter_num=record.get("best_step", 0),
        best_val_loss=record.get("val_loss", NO_LOSS),
        config={"dataset": dataset, "eos_token_id": [*c.eos_token_id]},
    )
    file = io.BytesIO()
    torch.save(contents, file)
    (out / "data" / dataset).mkdir(parents=True, exist_ok=True)
    write_file(out / "ckpt.pt", file.getvalue())
    if isinstance(checkpoint.tokenizer, CharTokenizer):
        checkpoint.tokenizer.write_meta_pickle(out / "data" / dataset / "meta.pkl")
