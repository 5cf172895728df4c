"""GPT-2 as transformers writes it: a directory's configuration, tensors and vocabulary."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shakespeare.model.files import Stored
from shakespeare.model.tokenizer import (
    BYTES,
    CharTokenizer,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    VocabularyError,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
# Files of tensors, and what names the shards that they may be split into; the first that is there counts.
FILES = {WEIGHTS: INDEX, PICKLED: f"{PICKLED}.index.json"}
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
# How export splits a text of a vocabulary of characters
CHARACTERS = dict(type="Split", pattern={"Regex": r"[\s\S]"}, behavior="Isolated", invert=False)
MOST_BYTES = 2**26  # of a JSON file of a vocabulary
LARGEST_ID = 2**31 - 1
END = "<|endoftext|>"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


def configuration(args: Mapping[str, Any]) -> dict[str, Any]:
    """GPTConfig's fields. Raises ValueError for another architecture, or for an unusual GPT-2.

    bias: False if config.json says so, as export writes it: GPT-2 always has biases, and they are zeros then.
    """
    architecture = args.get("model_type") or args.get("architectures")
    if architecture not in ("gpt2", ["GPT2LMHeadModel"]):
        raise ValueError(f"it is a model of the architecture {architecture!r}; it must be 'gpt2'")
    found = {name: args.get(name, value) for name, value in FIELDS.items()}
    found["block_size"] = found.pop("n_positions")
    found["eos_token_id"] = args.get("eos_token_id")
    activation = args.get("activation_function", "gelu_new")
    if activation not in list(TANH):
        raise ValueError(f"activation_function is {activation!r}; it must be one of {', '.join(TANH)}")
    inner = args.get("n_inner")
    if isinstance(found["n_embd"], int) and inner not in (None, 4 * found["n_embd"]):
        raise ValueError(f"n_inner is {inner!r}; it must be 4 * n_embd")
    for name, value in FIXED.items():
        if args.get(name, value) != value:
            raise ValueError(f"{name} is {args[name]!r}; it must be {value!r}")
    untied = not args.get("tie_word_embeddings", True)
    return found | {"tanh_gelu": TANH[activation], "untied_head": untied, "bias": args.get("bias", True)}


def files(directory: Path) -> list[Path]:
    """The files that hold the tensors. Raises ValueError for an index that is malformed."""
    for name, index in FILES.items():
        if (directory / name).is_file():
            return [directory / name]
        if (directory / index).is_file():
            return _shards(directory, index)
    return [directory / WEIGHTS]


def _shards(directory: Path, index: str) -> list[Path]:
    try:
        names = sorted(set(json.loads((directory / index).read_bytes())["weight_map"].values()))
        if all(re.fullmatch(r"[\w-][\w.-]*", name) for name in names):
            return [directory / name for name in names]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{index} must have a weight_map of files in the same directory")


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

    Raises VocabularyError for files that are malformed or that their package does not read. Warns of tokens
    in other files that are not read.
    """
    file = directory / "tokenizer.json"
    pairs = directory / "merges.txt"
    if not file.is_file():
        file = directory / "vocab.json"
        if not file.is_file() or not pairs.is_file():
            return None
    with _naming(file):
        text = _text(file)
        stored = json.loads(text)
        if file.name == "tokenizer.json":
            return _characters(stored, str(file)) or _complete(directory, text, stored)
        merges = [tuple(line.split(" ")) for line in _text(pairs).splitlines() if line]
        merges = merges[1:] if merges[:1] and merges[0][0].startswith("#version") else merges
        tokenizer = byte_pairs(stored, merges, [END, *added_tokens(directory)], str(file))
        warn_of_unread(directory, stored)
        return tokenizer


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Raise VocabularyError that names a file for what is malformed in it."""
    try:
        yield
    except VocabularyError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise VocabularyError(f"{file}: it must be a vocabulary of transformers ({error!r})") from None


def _text(file: Path) -> str:
    size = file.stat().st_size
    if size > MOST_BYTES:
        raise VocabularyError(f"{file} has {size} bytes; it must have at most {MOST_BYTES}")
    return file.read_text("utf-8")


def _characters(tokenizer: Any, source: str) -> CharTokenizer | None:
    """The characters of a tokenizer.json that has no other tokens or steps, as export writes it."""
    model = tokenizer["model"]
    ids = model["vocab"]
    pairs = model.get("merges")
    steps = [tokenizer.get(name) for name in ("added_tokens", "normalizer", "post_processor")]
    other_split = tokenizer.get("pre_tokenizer") not in (None, CHARACTERS)
    if any(steps) or pairs or other_split or model.get("type", "BPE") not in ("BPE", "WordLevel"):
        return None
    if any(len(token) != 1 for token in ids) or sorted(ids.values()) != list(range(len(ids))):
        return None
    return CharTokenizer(sorted(ids, key=ids.__getitem__), source)


class Added(NamedTuple):
    """A token that a file besides the vocabulary names. id: None if the file has none."""

    file: str
    id: int | None
    flags: dict[str, bool]


def added_tokens(directory: Path) -> dict[str, Added]:
    """The tokens of tokenizer_config.json, added_tokens.json and special_tokens_map.json."""
    found: dict[str, Added] = {}
    special: dict[str, str] = {}  # their files
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        file = directory / name
        if not file.is_file():
            continue
        with _naming(file):
            stored = json.loads(_text(file))
            if name == "added_tokens.json":
                for token, id in stored.items():
                    found.setdefault(token, Added(name, id, {"special": token in special}))
                continue
            for id, each in stored.get("added_tokens_decoder", {}).items():
                flags = {flag: each[flag] for flag in FLAGS if flag in each}
                found[each["content"]] = Added(name, int(id), flags)
            for role, value in stored.items():
                if role.endswith(("_token", "special_tokens")):
                    special.update(dict.fromkeys(_contents(value), name))
    return {token: Added(name, None, {"special": True}) for token, name in special.items()} | found


def _contents(value: Any) -> Iterator[str]:
    """The texts of a special token, of a list of them, or of an object with some."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _contents(each)
    elif isinstance(value, dict):
        yield from _contents(value.get("content", [*value.values()]))


def warn_of_unread(directory: Path, known: Container[str]) -> None:
    """Warn of each file with tokens that a vocabulary does not have; their text is read as other tokens."""
    unread = {each.file: token for token, each in added_tokens(directory).items() if token not in known}
    for name, token in unread.items():
        what = f"its token {token!r:.80} is not read: the vocabulary lacks it, and its text is other tokens"
        warnings.warn(f"{directory / name}: {what}", stacklevel=5)


def _complete(directory: Path, text: str, tokenizer: Any) -> HuggingFaceTokenizer:
    """The vocabulary of a tokenizer.json with tokens of the files beside it, as transformers adds them."""
    source = str(directory / "tokenizer.json")
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, list):  # of Unigram: pairs of a token and its score
        vocab = {each[0]: id for id, each in enumerate(vocab)}
    own = {each["content"]: each["id"] for each in tokenizer.get("added_tokens") or ()}
    others = added_tokens(directory)
    tokens = [(token, id, source) for token, id in (*vocab.items(), *own.items())]
    tokens += [
        (token, each.id, str(directory / each.file)) for token, each in others.items() if each.id is not None
    ]
    ids = _checked(tokens)
    new = sorted(others.keys() & ids.keys() - own.keys(), key=ids.__getitem__)
    warn_of_unread(directory, ids)
    return HuggingFaceTokenizer(
        text, ids, {token: others[token].flags for token in new}, _steps(tokenizer.get("decoder")), source
    )


def _steps(decoder: Any) -> list[str]:
    """The types of the steps from tokens to text."""
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [name for each in decoder["decoders"] for name in _steps(each)]
    return [decoder["type"]]


def _checked(tokens: Iterable[tuple[Any, Any, str]]) -> dict[str, int]:
    """The ids of (token, id, file). Raises VocabularyError for an empty token, and for a wrong id."""
    ids: dict[str, int] = {}
    owners: dict[int, str] = {}
    for token, id, file in tokens:
        if not isinstance(token, str) or not token:
            raise VocabularyError(f"{file}: the token of id {id!r} is {token!r}; it must be a text")
        shown = f"{file}: the id of {token!r:.80} is {id!r:.80}"
        if type(id) is not int or not 0 <= id <= LARGEST_ID:
            raise VocabularyError(f"{shown}; it must be from 0 to {LARGEST_ID}")
        owner = owners.setdefault(id, token)
        if owner != token:
            raise VocabularyError(f"{shown}, which is that of {owner!r:.80}; ids must differ")
        first = ids.setdefault(token, id)
        if first != id:
            raise VocabularyError(f"{shown} and {first}; it must be one")
    return ids


def byte_pairs(
    vocab: dict[str, int], merges: list[tuple[str, ...]], special: list[str], source: str
) -> GPT2Tokenizer:
    """GPT-2's encoding by these tokens. Raises VocabularyError where tiktoken's would differ."""
    _checked((token, id, source) for token, id in vocab.items())
    specials = {token: vocab[token] for token in special if token in vocab}
    ranks = {bytes(map(BYTES.__getitem__, t)): id for t, id in vocab.items() if t not in specials}
    order = [vocab["".join(merge)] for merge in merges]
    complete = all(bytes([byte]) in ranks for byte in range(256)) and len(ranks) == 256 + len(merges)
    if not complete or any(a >= b for a, b in zip(order, order[1:])):
        raise VocabularyError(f"{source}: its tokens must be 256 bytes, and one a merge with rising ids")
    return GPT2Tokenizer(ranks, specials, source)


def tables(
    tokenizer: GPT2Tokenizer | HuggingFaceTokenizer,
) -> tuple[dict[str, int], dict[str, int], list[tuple[str, str]]]:
    """Ids of the tokens, and of special ones, and the pairs that are joined in their order, for byte_pairs().

    A token's pair is what the tokens of lower ranks leave of its bytes. Raises ValueError for a vocabulary
    that splits text otherwise than GPT-2.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _tables_of(json.loads(tokenizer.tokenizer.to_str()), tokenizer.source)
    ranks = tokenizer._encoding._mergeable_ranks
    special = tokenizer._encoding._special_tokens
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


def _tables_of(tokenizer: Any, source: str) -> tuple[dict[str, int], dict[str, int], list[tuple[str, str]]]:
    """The tables of a tokenizer.json."""
    split = tokenizer["pre_tokenizer"]
    after = tokenizer["post_processor"]
    usual = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    plain = tokenizer["normalizer"] is None and (after or usual)["type"] == "ByteLevel"
    if tokenizer["model"]["type"] != "BPE" or not plain or not usual.items() <= (split or {}).items():
        raise ValueError(f"{source} encodes otherwise than GPT-2; it must be as GPT-2 for this format")
    special = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    vocab = {token: id for token, id in tokenizer["model"]["vocab"].items() if token not in special}
    return vocab, special, [tuple(pair) for pair in tokenizer["model"]["merges"]]
