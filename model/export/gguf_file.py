"""GGUF files of llama.cpp's architecture gpt2."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from shakespeare.model import huggingface
from shakespeare.model.checkpoint import CheckpointError, Weights
from shakespeare.model.config import GPTConfig
from shakespeare.model.export import byte_pairs, with_biases
from shakespeare.model.files import UNFINISHED, Stored
from shakespeare.model.tokenizer import CharTokenizer, Tokenizer

TANH = "shakespeare.tanh_gelu"  # llama.cpp ignores it: its GELU is the one by tanh
EPSILON = 1e-5
FIELDS = {
    "block_size": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
}
# How RWKV's vocabularies write characters; a string of GGUF ends at a NUL.
ESCAPED = {"\\": "\\\\", "\n": "\\n", "\0": "\\x00"}


def write_gguf(
    path: Path,
    config: GPTConfig,
    weights: Weights,
    precision: str = "F32",
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model. precision: the matrices' type by gguf's name; positions and vectors stay F32."""
    import gguf

    if precision == "Q8_0" and config.n_embd % 32:
        raise ValueError(f"type is 'q8_0', but n_embd is {config.n_embd}; it must be a multiple of 32")
    kind = gguf.GGMLQuantizationType[precision]
    whole = gguf.LlamaFileType.ALL_F32 if precision == "F32" else gguf.LlamaFileType[f"MOSTLY_{precision}"]
    unfinished = path.with_name(path.name + UNFINISHED)
    writer = gguf.GGUFWriter(unfinished, "gpt2")
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_file_type(whole)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bool(TANH, config.tanh_gelu)
    _add_tokens(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, array in with_biases(config, weights).items():
        matrix = array.ndim == 2 and name != "transformer.wpe.weight"
        packed = gguf.quantize(array, kind) if matrix else array
        writer.add_tensor(_name(names, name), packed, raw_dtype=kind if matrix else None)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _name(names: Any, name: str) -> str:
    """llama.cpp's name of a tensor."""
    layer, _, kind = name.rpartition(".")
    return f"{names.get_name(layer)}.{kind}"


def _add_tokens(writer: Any, tokenizer: Tokenizer | None) -> None:
    from gguf import TokenType

    if isinstance(tokenizer, CharTokenizer):
        # RWKV's tokenizer takes the longest token that fits, without merges; unknown text becomes no token.
        writer.add_tokenizer_model("rwkv")
        texts = ["".join(ESCAPED.get(c, c) for c in token) for token in tokenizer.characters]
        types, scores = [TokenType.NORMAL] * len(texts), [0.0] * len(texts)
        writer.add_token_scores(scores)
    elif tokenizer:
        vocab, special, merges = byte_pairs.tables(tokenizer)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        texts, types = [f"[PAD{i}]" for i in range(len(tokenizer))], [TokenType.UNUSED] * len(tokenizer)
        for of, kind in ((vocab, TokenType.NORMAL), (special, TokenType.CONTROL)):
            for text, id in of.items():
                texts[id], types[id] = text, kind
        writer.add_token_merges([" ".join(pair) for pair in merges])
        if ends := list(special.values()):
            writer.add_bos_token_id(ends[0])
            writer.add_eos_token_id(ends[0])
    else:
        return writer.add_tokenizer_model("none")
    writer.add_token_list(texts)
    writer.add_token_types(types)


def read_gguf(path: Path) -> tuple[dict[str, Any], Stored, Tokenizer]:
    """A file's configuration, weights and vocabulary; biases that are all zeros are left out.

    The matrices of any type become float32. GELU is llama.cpp's unless this project wrote the file. Raises
    CheckpointError for a damaged file, another architecture or vocabulary, and without gguf.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"{path} needs gguf: pip install gguf") from None
    try:
        reader = gguf.GGUFReader(path)
        if (kind := _held(reader, "general.architecture")) != "gpt2":
            raise CheckpointError(f"{path} is a model of the architecture {kind!r}; it must be 'gpt2'")
        if abs(_held(reader, "gpt2.attention.layer_norm_epsilon") - EPSILON) > 1e-9:
            raise CheckpointError(f"{path}: the epsilon of its LayerNorm must be {EPSILON}")
        tokenizer = _tokenizer(reader, path)
        arrays = {t.name: partial(gguf.dequantize, t.data, t.tensor_type) for t in reader.tensors}
        args = {ours: _held(reader, f"gpt2.{theirs}") for ours, theirs in FIELDS.items()}
        args |= {"vocab_size": len(arrays["token_embd.weight"]()), "untied_head": "output.weight" in arrays}
        args["tanh_gelu"] = TANH not in reader.fields or _held(reader, TANH)
        args["bias"] = any(array().any() for name, array in arrays.items() if name.endswith(".bias"))
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, args["n_layer"])
        ours = {_name(names, name): name for name in GPTConfig(**args).shapes()}
        stored: Stored = {
            ours[t.name]: (tuple(t.shape[::-1].tolist()), arrays[t.name])
            for t in reader.tensors
            if t.name in ours
        }
        return args, stored, tokenizer
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise CheckpointError(f"{path} is no GGUF file of a GPT-2 ({error!r})") from None


def _held(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _tokenizer(reader: Any, path: Path) -> Tokenizer:
    """The vocabulary of a file."""
    texts, kind = _held(reader, "tokenizer.ggml.tokens"), _held(reader, "tokenizer.ggml.model")
    if kind == "rwkv":
        known = {escaped: c for c, escaped in ESCAPED.items()}
        characters = [re.sub(r"\\(?:x00|.)", lambda m: known.get(m[0], m[0]), text) for text in texts]
        return CharTokenizer(characters, str(path))
    if kind != "gpt2":
        raise CheckpointError(f"{path}: its vocabulary is {kind!r}; it must be of characters or GPT-2's")
    used = {1: False, 3: True, 4: True}  # gguf's types of tokens: normal; control and the user's are special
    types = [used.get(type) for type in _held(reader, "tokenizer.ggml.token_type")]
    vocab = {text: id for id, text in enumerate(texts) if types[id] is not None}
    merges = [tuple(pair.split(" ")) for pair in _held(reader, "tokenizer.ggml.merges")]
    return huggingface.byte_pairs(vocab, merges, [text for text in vocab if types[vocab[text]]], str(path))
