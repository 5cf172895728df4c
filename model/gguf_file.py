"""GGUF files of llama.cpp's architecture gpt2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shakespeare.model import huggingface
from shakespeare.model.checkpoint import CheckpointError, Weights
from shakespeare.model.config import GPTConfig
from shakespeare.model.files import Stored, replacing
from shakespeare.model.tokenizer import CharTokenizer, Tokenizer

FIELDS = dict(block_size="context_length", n_embd="embedding_length", n_layer="block_count")
FIELDS["n_head"] = "attention.head_count"
TANH = "shakespeare.tanh_gelu"  # llama.cpp ignores it: its GELU is the one by tanh
EPSILON = 1e-5
ESCAPED = {"\\": "\\\\", "\0": "\\x00"}  # as in RWKV's vocabularies; a string of GGUF ends at a NUL
ENDS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]  # llama.cpp ends at each
# gguf.TokenType
NORMAL = 1
CONTROL = 3
USERS = 4
UNUSED = 5


def write_gguf(
    path: Path, config: GPTConfig, weights: Weights, type: str, tokenizer: Tokenizer | None
) -> None:
    """Write a model. type: of the matrices, by gguf's name; positions and vectors stay F32."""
    import gguf

    if type == "Q8_0" and config.n_embd % 32:
        raise ValueError(f"type is 'q8_0', but n_embd is {config.n_embd}; it must be a multiple of 32")
    kind = gguf.GGMLQuantizationType[type]
    file_type = gguf.LlamaFileType.ALL_F32 if type == "F32" else gguf.LlamaFileType[f"MOSTLY_{type}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(None, "gpt2")
    for ours, theirs in FIELDS.items():
        writer.add_uint32(f"gpt2.{theirs}", getattr(config, ours))
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bool(TANH, config.tanh_gelu)
    _add_tokens(writer, tokenizer)
    if len(config.eos_token_id) > len(ENDS):
        raise ValueError(f"eos_token_id has {len(config.eos_token_id)} tokens; a GGUF file has {len(ENDS)}")
    for key, end in zip(ENDS, config.eos_token_id):
        writer.add_uint32(key, end)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, array in with_biases(config, weights).items():
        quantization = (
            kind if array.ndim == 2 and name != "transformer.wpe.weight" else gguf.GGMLQuantizationType.F32
        )
        writer.add_tensor(_name(names, name), gguf.quantize(array, quantization), raw_dtype=quantization)
    with replacing(path) as unfinished:
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _name(names: Any, name: str) -> str:
    """llama.cpp's name of a tensor."""
    layer, _, kind = name.rpartition(".")
    return f"{names.get_name(layer)}.{kind}"


def _add_tokens(writer: Any, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        return writer.add_tokenizer_model("none")
    if isinstance(tokenizer, CharTokenizer):
        # RWKV's tokenizer takes the longest token that fits: it needs no merges, and no token ends a text.
        writer.add_tokenizer_model("rwkv")
        texts = [ESCAPED.get(c, c) for c in tokenizer.characters]
        types = [NORMAL for _ in texts]
    else:
        vocab, special, merges = huggingface.tables(tokenizer)
        texts = [f"[PAD{i}]" for i in range(len(tokenizer))]
        types = [UNUSED for _ in texts]
        for text, id in (vocab | special).items():
            texts[id] = text
            types[id] = CONTROL if text in special else NORMAL
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in merges])
        for first in list(special.values())[:1]:
            writer.add_bos_token_id(first)
    writer.add_token_list(texts)
    writer.add_token_types(types)


def with_biases(config: GPTConfig, weights: Weights) -> dict[str, np.ndarray]:
    """The tensors, with zeros for biases that a model does not have, for programs that must have them."""
    shapes = replace(config, bias=True).shapes()
    return {n: weights[n] if n in weights else np.zeros(shape, np.float32) for n, shape in shapes.items()}


def read_gguf(path: Path) -> tuple[dict[str, Any], Stored, Tokenizer]:
    """A file's configuration, tensors, which become float32, and vocabulary.

    Biases that are all zeros are left out. GELU is llama.cpp's, unless this project wrote another. Raises
    CheckpointError for a damaged file, another architecture or vocabulary, and without gguf.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"{path} needs gguf: pip install gguf") from None

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **orders: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **orders)
            if len(found) < count:  # else an array would go on behind the end of the file
                raise ValueError("it ends too early")
            return found

    def value_of(name: str) -> Any:
        return reader.fields[name].contents()

    def numbers(tensor: Any) -> np.ndarray:
        try:
            return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError:
            raise ValueError(f"is of type {tensor.tensor_type.name}, which gguf does not read") from None

    try:
        reader = Reader(path)
        architecture = value_of("general.architecture")
        if architecture != "gpt2":
            raise ValueError(f"it is a model of the architecture {architecture!r}; it must be 'gpt2'")
        if abs(value_of("gpt2.attention.layer_norm_epsilon") - EPSILON) > 1e-9:
            raise ValueError(f"the epsilon of its LayerNorm must be {EPSILON}")
        tensors = {t.name: t for t in reader.tensors}
        args = {ours: value_of(f"gpt2.{theirs}") for ours, theirs in FIELDS.items()}
        if args["n_layer"] > len(tensors):
            raise ValueError(f"it has {args['n_layer']} layers, but {len(tensors)} tensors")
        args["eos_token_id"] = [value_of(key) for key in ENDS if key in reader.fields]
        args["vocab_size"] = len(tensors["token_embd.weight"].data)
        args["untied_head"] = "output.weight" in tensors
        args["tanh_gelu"] = TANH not in reader.fields or value_of(TANH)
        args["bias"] = any(t.data.any() for t in reader.tensors if t.name.endswith(".bias"))
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, args["n_layer"])
        theirs = {name: tensors.get(_name(names, name)) for name in GPTConfig(**args).shapes()}
        stored: Stored = {
            name: (tuple(t.shape[::-1].tolist()), partial(numbers, t)) for name, t in theirs.items() if t
        }
        return args, stored, _tokenizer(value_of, str(path))
    except Exception as error:  # a damaged file can raise nearly anything
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(f"{path} is no GGUF file of a GPT-2: {reason}") from None


def _tokenizer(value_of: Any, source: str) -> Tokenizer:
    """The vocabulary of a file."""
    texts = value_of("tokenizer.ggml.tokens")
    algorithm = value_of("tokenizer.ggml.model")
    if algorithm == "rwkv":
        known = {escaped: c for c, escaped in ESCAPED.items()}
        return CharTokenizer([known.get(text, text) for text in texts], source)
    if algorithm != "gpt2":
        raise ValueError(f"its vocabulary is {algorithm!r}; it must be of characters or GPT-2's")
    types = dict(zip(texts, value_of("tokenizer.ggml.token_type")))
    vocab = {text: id for id, text in enumerate(texts) if types[text] in (NORMAL, CONTROL, USERS)}
    merges = [tuple(pair.split(" ")) for pair in value_of("tokenizer.ggml.merges")]
    return huggingface.byte_pairs(vocab, merges, [t for t in vocab if types[t] != NORMAL], source)
