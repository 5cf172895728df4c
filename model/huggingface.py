"""GPT-2 as transformers writes it: a directory's configuration, tensors and vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shakespeare.model.files import Stored
from shakespeare.model.tokenizer import CharTokenizer, GPT2Tokenizer, Tokenizer, VocabularyError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Ours by transformers' names, with the value where config.json has none.
FIELDS = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
TANH = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}  # transformers' activations
# What this model has; another value would change its results.
FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # transformers' Conv1D has (in, out)
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in a token
OTHERS = [byte for byte in range(256) if byte not in SHOWN]
BYTES = {chr(byte): byte for byte in SHOWN} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def configuration(args: Mapping[str, Any]) -> dict[str, Any]:
    """GPTConfig's fields. Raises ValueError for another architecture, or for an unusual GPT-2.

    bias: False if config.json says so, as export writes it: GPT-2 always has biases, and they are zeros then.
    """
    kind = args.get("model_type") or args.get("architectures")
    if kind not in ("gpt2", ["GPT2LMHeadModel"]):
        raise ValueError(f"it is a model of the architecture {kind!r}; it must be 'gpt2'")
    found = {name: args.get(name, value) for name, value in FIELDS.items()}
    found["block_size"] = found.pop("n_positions")
    if (activation := args.get("activation_function", "gelu_new")) not in TANH:
        raise ValueError(f"activation_function is {activation!r}; it must be one of {', '.join(TANH)}")
    inner = args.get("n_inner")
    if inner is not None and inner != 4 * found["n_embd"]:
        raise ValueError(f"n_inner is {inner!r}; it must be 4 * n_embd")
    for name, value in FIXED.items():
        if args.get(name, value) != value:
            raise ValueError(f"{name} is {args[name]!r}; it must be {value!r}")
    untied = not args.get("tie_word_embeddings", True)
    return found | {"tanh_gelu": TANH[activation], "untied_head": untied, "bias": args.get("bias", True)}


def files(directory: Path) -> list[Path]:
    """The files that hold the tensors. Raises ValueError for an index that is malformed."""
    if (directory / WEIGHTS).is_file() or not (directory / INDEX).is_file():
        return [directory / WEIGHTS]
    try:
        names = sorted(set(json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
        if all(re.fullmatch(r"[\w-][\w.-]*", name) for name in names):
            return [directory / name for name in names]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{INDEX} must have a weight_map of files in the same directory")


def turned(stored: Stored, args: Mapping[str, Any]) -> Stored:
    """The tensors as views of the shapes that nanoGPT's have, without biases that args says there are not.

    Raises ValueError for such a bias that is not zero.
    """
    found: Stored = {}
    for name, (shape, array) in stored.items():
        if args["bias"] is False and name.endswith(".bias"):
            if array().any():
                raise ValueError(f"bias is false, but {name} is not zero")
        elif TRANSPOSED.search(name):
            found[name] = shape[::-1], lambda array=array: array().T  # type: ignore[misc]
        else:
            found[name] = shape, array
    return found


def vocabulary(directory: Path) -> Tokenizer | None:
    """The vocabulary of tokenizer.json, or of vocab.json and merges.txt; None without them.

    Raises VocabularyError for one that is neither of characters nor of GPT-2's byte pairs.
    """
    file = directory / "tokenizer.json"
    whole = file.is_file()
    if not whole:
        file = directory / "vocab.json"
        if not file.is_file() or not (directory / "merges.txt").is_file():
            return None
    try:
        held = json.loads(file.read_bytes())
        if not whole:
            lines = (directory / "merges.txt").read_text("utf-8").splitlines()
            merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
            return byte_pairs(held, merges, ["<|endoftext|>"], str(file))
        model = held["model"]
        special = {each["content"]: each["id"] for each in held.get("added_tokens") or ()}
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ())
        vocab, merges = model["vocab"], [*map(tuple, pairs)]
        if model.get("type", "BPE") not in ("BPE", "WordLevel"):
            raise VocabularyError(f"{file}: the model is {model['type']}; it must be BPE or WordLevel")
        splits = _splits(held.get("pre_tokenizer"))
        if "ByteLevel" not in splits and not merges:
            ids = {token: id for token, id in vocab.items() if token not in special}
            if sorted(ids.values()) != list(range(len(ids))):
                raise VocabularyError(f"{file}: the ids of the characters must be 0 to {len(ids) - 1}")
            return CharTokenizer(sorted(ids, key=ids.__getitem__), str(file))
        if splits != ["ByteLevel"]:
            must = "it must be as GPT-2 does, by ByteLevel"
            raise VocabularyError(f"{file}: text is split by {splits}; {must}")
        return byte_pairs(special | vocab, merges, list(special), str(file))
    except VocabularyError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise VocabularyError(f"{file}: it must be a vocabulary of transformers ({error!r})") from None


def _splits(step: Any) -> list[str]:
    """What tokenizer.json says to split text by; what GPT-2's ByteLevel does not do is added."""
    if not step:
        return []
    if step["type"] == "Sequence":
        return [name for each in step["pretokenizers"] for name in _splits(each)]
    usual = {"add_prefix_space": False, "use_regex": True}
    return [step["type"], *(name for name, value in usual.items() if step.get(name, value) != value)]


def byte_pairs(
    vocab: dict[str, int], merges: list[tuple[str, ...]], special: list[str], source: str
) -> GPT2Tokenizer:
    """GPT-2's encoding by these tokens. Raises VocabularyError where tiktoken's would differ."""
    specials = {token: vocab[token] for token in special if token in vocab}
    ranks = {bytes(map(BYTES.__getitem__, t)): id for t, id in vocab.items() if t not in specials}
    order = [vocab["".join(merge)] for merge in merges]
    if len(ranks) != 256 + len(merges) or any(a >= b for a, b in zip(order, order[1:])):
        raise VocabularyError(f"{source}: its tokens must be 256 bytes, and one a merge with rising ids")
    return GPT2Tokenizer(ranks, specials, source)


def tables(tokenizer: GPT2Tokenizer) -> tuple[dict[str, int], dict[str, int], list[tuple[str, str]]]:
    """Ids of the tokens, and of special ones, and the pairs that are joined in their order, for byte_pairs().

    A token's pair is what the tokens of lower ranks leave of its bytes.
    """
    ranks, special = tokenizer._encoding._mergeable_ranks, tokenizer._encoding._special_tokens
    letters = {bytes([byte]): letter for letter, byte in BYTES.items()}
    shown: dict[bytes, str] = {token: "".join(letters[bytes([byte])] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((shown[parts[0]], shown[parts[1]]))
    return {shown[token]: rank for token, rank in ranks.items()}, special, merges
