"""Load and save checkpoints: a model with its vocabulary.

A checkpoint is a directory with model.safetensors and config.json, this project's or that of a GPT-2 of
Hugging Face's transformers, a nanoGPT ckpt.pt, or a GGUF file of a GPT-2. The files are not trusted: a pickle
cannot call anything, and every tensor is checked against the configuration. Files that SHA256SUMS does not
confirm are reported. Only ckpt.pt and Checkpoint.model need torch.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from shakespeare.attention_ext.checks import first_line, type_text
from shakespeare.checkpoints import DEFAULT, PRESENT
from shakespeare.checkpoints import SHIPPED as SHIPPED
from shakespeare.model import huggingface
from shakespeare.model.config import EMBEDDING, HEAD, SLOPED, GPTConfig
from shakespeare.model.draft import FILE as DRAFT
from shakespeare.model.draft import Draft, DraftError
from shakespeare.model.draft import load as load_draft
from shakespeare.model.files import NO_FLOATS, Stored, tensors_of, write_file
from shakespeare.model.tokenizer import ADMITTED, CharTokenizer, GPT2Tokenizer, Tokenizer, VocabularyError

if TYPE_CHECKING:
    from shakespeare.model.gpt import GPT

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"
DATA = CHECKPOINTS.parent / "data" / "shakespeare_char"  # in a checkout: what the shipped models learned
SUMS = "SHA256SUMS"  # in a checkpoint's directory, for sha256sum -c
SLOPES = "alibi_window"  # in config.json: the window for which a model's slopes are
SUMMED = ("config.json", "meta.json", "model.safetensors")  # all files that a model and its vocabulary need


class CheckpointError(ValueError):
    """A checkpoint is missing or malformed; the message names the file and what is wrong."""


# What other programs add to a tensor's name: a prefix, and within it torch.compile, FSDP and checkpointing.
AROUND = re.compile(
    r"^.*?(?=transformer\.|lm_head\.)|\b(module|_orig_mod|_(fsdp|checkpoint)_wrapped_module)\."
)
INSIDE = ("wte.", "wpe.", "h.", "ln_f.")
GPT2_TOKENS = 50257  # of GPT-2's vocabulary
GPT2_PADDED = 51200  # the most that a model pads it to
TO_TRAIN = "it must be one of characters to train it"
Named = TypeVar("Named")
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's configuration and its vocabulary, with its weights as arrays and as a PyTorch model.

    weights: by nanoGPT's names, without a tied lm_head.weight; each or its transpose is contiguous, and may
    be a read-only view of the file. draft: the model's, if any.
    """

    config: GPTConfig
    weights: Weights
    tokenizer: Tokenizer
    draft: Draft | None = None

    @cached_property
    def model(self) -> GPT:
        """The model in evaluation mode with PyTorch's attention. Imports torch; it shares the weights."""
        from shakespeare.model.gpt import GPT

        return GPT.from_weights(self.config, self.weights)


def shipped(name: str) -> Path:
    """The directory of a shipped checkpoint, in the checkout or beside the installed packages."""
    return CHECKPOINTS / name


def loaded(model: Any) -> Checkpoint:
    """A loaded model as it is, or that of a name for load(), and its errors."""
    return model if isinstance(model, Checkpoint) else load(model)


def load(name: str | Path, to_train: bool = False) -> Checkpoint:
    """Load a shipped checkpoint, a checkpoint directory, a nanoGPT ckpt.pt or its directory, or a GGUF file.

    name: one of SHIPPED, or a path. A ckpt.pt needs torch, a GGUF file gguf. to_train: refuse a vocabulary
    that is not one of characters. Rows of the embedding that only pad the vocabulary are left out. Raises
    CheckpointError or tokenizer.VocabularyError, which name the file. Warns of a wrong checksum, and of a
    draft that does not fit.
    """
    if not isinstance(name, (str, Path)):
        raise TypeError(f"model is {type_text(name)}; it must be a name, a path or what load() gives")
    path = _path_of(name)
    if path.is_dir() and not (path / "config.json").is_file() and (path / "ckpt.pt").is_file():
        path = path / "ckpt.pt"
    tokenizer: Tokenizer | None = None
    if path.is_dir():
        args, stored, dataset, drop = _read_directory(path)
    elif path.is_file() and path.suffix == ".gguf":
        from shakespeare.model.gguf_file import read_gguf

        args, stored, tokenizer = read_gguf(path)
        dataset = None
        drop = list
        path = path.parent
    elif path.is_file():
        args, stored, dataset, drop = _read_nanogpt(path)
        path = path.parent
    else:
        kinds = "a directory with model.safetensors and config.json, a nanoGPT ckpt.pt or a file .gguf"
        must = f"it must be one of {', '.join(PRESENT)}, {kinds}"
        raise CheckpointError(f"model {name!r} was not found; {must}")
    try:
        config = _config(args)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name}: the configuration is wrong: {error}") from None
    weights = _checked(str(name), config, stored, drop)
    tokenizer = tokenizer or _find_vocabulary(path, dataset, config.vocab_size, to_train)
    if to_train and not isinstance(tokenizer, CharTokenizer):
        raise VocabularyError(f"{tokenizer.source} has byte pairs; {TO_TRAIN}")
    if len(tokenizer) > config.vocab_size:
        has = f"the vocabulary {tokenizer.source} has {len(tokenizer)} tokens"
        raise CheckpointError(f"{name}: {has}; it must have vocab_size={config.vocab_size}")
    if len(tokenizer) < config.vocab_size:
        padded = {name: weights[name] for name in (EMBEDDING, HEAD) if name in weights}
        weights = {**weights, **{name: rows[: len(tokenizer)] for name, rows in padded.items()}}
        config = replace(config, vocab_size=len(tokenizer))
    if not config.eos_token_id and not isinstance(tokenizer, CharTokenizer):
        ids = set(tokenizer.encode(huggingface.END))
        config = replace(config, eos_token_id=tuple(ids) if len(ids) == 1 else ())
    if changed := _changed(path):
        what = " and ".join(changed) + (" does" if len(changed) == 1 else " do")
        warnings.warn(f"{path}: {what} not match {SUMS}; the text may be garbage", stacklevel=2)
    return Checkpoint(config, weights, tokenizer, _own_draft(path, tokenizer))


def _path_of(name: str | Path) -> Path:
    path = shipped(str(name)) if str(name) in SHIPPED else Path(name)
    return path.parent if path.name in huggingface.FILES else path


def directory_of(name: str | Path) -> Path:
    """The directory of a model that load() takes."""
    path = _path_of(name)
    return path.parent if path.is_file() else path


def save(directory: Path, model: GPT | Checkpoint, tokenizer: CharTokenizer, record: dict) -> None:
    """Write a checkpoint: weights, configuration, vocabulary and record, each file replaced as a whole."""
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / "model.safetensors", safetensors.numpy.save({**model.weights}))
    config = asdict(model.config) | {"dropout": 0.0}
    if not model.config.endless:  # other readers know no such fields
        del config["positions"], config["window"]
    else:
        config[SLOPES] = model.config.window
    if not model.config.eos_token_id:
        del config["eos_token_id"]
    write_file(directory / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    tokenizer.write_meta_json(directory / "meta.json")
    (directory / DRAFT).unlink(missing_ok=True)  # of weights that are replaced
    _write_sums(directory)
    save_record(directory, record)


def save_draft(directory: Path, draft: Draft) -> Path:
    """Write a draft beside a checkpoint; returns its path."""
    path = draft.save(directory)
    if (directory / SUMS).is_file():
        _write_sums(directory)
    return path


def _write_sums(directory: Path) -> None:
    names = [*SUMMED, *([DRAFT] if (directory / DRAFT).is_file() else ())]
    write_file(directory / SUMS, "".join(f"{_sum_line(directory / name)}\n" for name in names).encode())


def named_draft(name: str | Path, tokenizer: Tokenizer) -> Draft:
    """The draft of a shipped model, of a directory or in a file. Raises DraftError unless it fits."""
    if not isinstance(name, (str, Path)):
        must = "it must be 'auto', 'off', a name, a path or a Draft"
        raise TypeError(f"draft is {type_text(name)}; {must}")
    path = shipped(str(name)) if str(name) in SHIPPED else Path(name)
    return load_draft(path / DRAFT if path.is_dir() else path, tokenizer)


def _own_draft(directory: Path, tokenizer: Tokenizer) -> Draft | None:
    """The draft beside a model; None without one. Warns of one that does not fit."""
    path = directory / DRAFT
    if not path.is_file():
        return None
    try:
        if _changed(directory, (DRAFT,)):
            raise DraftError(f"{path} does not match {SUMS}")
        return load_draft(path, tokenizer)
    except DraftError as error:
        warnings.warn(f"{error}; it is ignored", stacklevel=3)
        return None


def save_record(directory: Path, record: dict) -> None:
    """Write a checkpoint directory's training record, training.json."""
    write_file(directory / "training.json", (json.dumps(record) + "\n").encode())


def _changed(directory: Path, names: Sequence[str] = SUMMED) -> list[str]:
    """Those of these files that do not match the directory's SHA256SUMS; none without SHA256SUMS."""
    if not (directory / SUMS).is_file():
        return []
    lines = (directory / SUMS).read_text(encoding="utf-8-sig", errors="replace").splitlines()
    files = [directory / name for name in names]
    return [file.name for file in files if not file.is_file() or _sum_line(file) not in lines]


def _sum_line(path: Path) -> str:
    """The line that sha256sum prints for a file."""
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


def _read_directory(path: Path) -> tuple[dict, Stored, str | None, Callable[[], object]]:
    """A directory's configuration, weights and data set, and what drops pages of the weights' files."""
    config_file = path / "config.json"
    try:
        files = huggingface.files(path)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for file in (config_file, *files):
        if not file.is_file():
            raise CheckpointError(f"{path} has no {file.name}; a checkpoint directory must have one")
    args = _object_in(config_file)
    stored = Stored()
    drops = []
    for file in files:
        if file.suffix == ".bin":
            tensors = _unpickled(file)
            if not isinstance(tensors, dict):
                raise CheckpointError(f"{file} holds {type_text(tensors)}; it must be a dict of tensors")
            stored.update(_arrays(tensors))
            continue
        try:
            tensors, drop = tensors_of(file)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        stored.update(tensors)
        drops.append(drop)
    weights = _named(files[0], stored)
    if "model_type" in args or "architectures" in args:  # of transformers
        try:
            args = huggingface.configuration(args)
            weights = huggingface.turned(weights, args)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
    generation = path / "generation_config.json"
    if generation.is_file():
        named = _object_in(generation).get("eos_token_id")
        args["eos_token_id"] = args.get("eos_token_id") if named is None else named
    return args, weights, args.pop("dataset", None), lambda: [drop() for drop in drops]


def _object_in(file: Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises CheckpointError."""
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds {type_text(found)}; it must be an object")
    return found


def _named(file: Path, stored: Mapping[Any, Named]) -> dict[str, Named]:
    """A file's tensors by nanoGPT's names, without causal masks. Raises CheckpointError for duplicates."""
    found: dict[str, Named] = {}
    for key, tensor in stored.items():
        name = AROUND.sub("", str(key))
        if name.startswith(INSIDE):  # of transformers' GPT2Model, without the head
            name = f"transformer.{name}"
        if name in found:
            raise CheckpointError(f"{file} has {name} twice, once as {key}; it must have each tensor once")
        if not name.endswith((".attn.bias", ".attn.masked_bias")):
            found[name] = tensor
    if HEAD in found and EMBEDDING not in found:  # some programs store one name of tied tensors
        found[EMBEDDING] = found.pop(HEAD)
    return found


def _config(args: dict[Any, Any]) -> GPTConfig:
    """The configuration of a file's values. Raises ValueError, TypeError or RuntimeError."""
    values = {name: _plain(value) for name, value in args.items()}
    known = {field.name for field in fields(GPTConfig)}
    window = values.get("window")
    sloped = values.pop(SLOPES, SLOPED)
    if window is not None and window != sloped:  # in earlier versions slopes did not scale
        raise ValueError(f"{SLOPES} is {sloped}; it must be window={window}: train the model again")
    # A feature that is off is none: None, False, 0, "" or an empty list.
    if unknown := [str(n) for n, v in values.items() if n not in known and (type(v) not in PLAIN or v)]:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"it has the unknown fields {names}; remove those that change no result")
    values = {name: value for name, value in values.items() if name in known}
    if values.get("bias", True) in (0, 1, None):
        values["bias"] = bool(values.get("bias", True))
    return replace(GPTConfig(**values | {"dropout": values.get("dropout") or 0}), dropout=0.0)


def _plain(value: Any) -> Any:
    """A value with a number of NumPy or PyTorch as Python's, and a whole float as an int."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_nanogpt(path: Path) -> tuple[dict, Stored, str | None, Callable[[], object]]:
    """A ckpt.pt's model_args, weights and data set, and what does nothing."""
    checkpoint = _unpickled(path)
    for key in ("model", "model_args"):
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(key), dict):
            raise CheckpointError(f"{path} has no dict {key!r}; a nanoGPT checkpoint must have one")
    weights = _arrays(_named(path, checkpoint["model"]))
    config = checkpoint.get("config")
    config = config if isinstance(config, dict) else {}
    args = checkpoint["model_args"] | {"eos_token_id": config.get("eos_token_id")}
    return args, weights, config.get("dataset"), lambda: None


def _unpickled(path: Path) -> Any:
    """What torch.save has written. Raises CheckpointError for more than tensors and plain values."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(f"{path} needs PyTorch: pip install torch") from None
    _check_stored(path)
    try:
        with torch.serialization.safe_globals([(called, name) for name, called in ADMITTED.items()]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):  # PyTorch's text recommends an unsafe load
            refused = re.search(r"GLOBAL ([\w.]+)|<class '([\w.]+)'", str(error))
            reason = "it must hold tensors and plain values only"
            reason += f", not {refused[1] or refused[2]}" if refused else ""
        raise CheckpointError(f"{path} is refused: it is not a plain PyTorch checkpoint ({reason})") from None
    if damaged := _damaged_member(path):
        what = f"{damaged} does not match its checksum"
        warnings.warn(f"{path}: {what}; the text may be garbage", stacklevel=4)
    return checkpoint


def _arrays(tensors: Mapping[Any, Any]) -> Stored:
    """Tensors of PyTorch as arrays."""
    import torch

    def array(tensor: Any) -> np.ndarray:
        floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_nested
        if not plain or tensor.device.type != "cpu" or tensor.dtype not in floats or tensor.is_neg():
            raise ValueError(NO_FLOATS)
        if not tensor.is_contiguous() and tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError("must be contiguous or have its own numbers: it repeats a few")  # to any size
        return tensor.detach().contiguous().float().numpy()

    return {n: (tuple(getattr(t, "shape", ())), partial(array, t)) for n, t in tensors.items()}


def _check_stored(path: Path) -> None:
    """Raise CheckpointError for a ckpt.pt that could expand to any size; torch.save never compresses."""
    try:
        members = zipfile.ZipFile(path).infolist()
    except (zipfile.BadZipFile, ValueError, RuntimeError):  # PyTorch reports a header that is damaged
        return
    compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if compressed or sum(member.file_size for member in members) > path.stat().st_size:
        raise CheckpointError(f"{path} is refused: its files are compressed")


def _damaged_member(path: Path) -> str | None:
    """The first file in a ckpt.pt with a wrong checksum. None if there is none, or for files without any."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        try:
            return archive.testzip()
        except (zipfile.BadZipFile, OSError, ValueError, RuntimeError):  # a header is damaged
            return "a part"


def _checked(name: str, config: GPTConfig, stored: Stored, drop: Callable[[], object]) -> Weights:
    """The weights in float32, without a tied head's. Raises CheckpointError unless they fit and are finite.

    Nothing is allocated for a tensor that does not fit the configuration. drop: called after each was read.
    """
    if config.n_layer > len(stored):
        raise CheckpointError(f"{name}: n_layer is {config.n_layer}, but there are {len(stored)} tensors")
    expected = config.shapes()
    if missing := sorted(expected.keys() - stored.keys()):
        raise CheckpointError(f"{name}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(stored.keys() - expected.keys() - {HEAD}):
        raise CheckpointError(f"{name}: {len(surplus)} tensors are unexpected, the first is {surplus[0]}")
    weights = {}
    for tensor, (shape, array) in sorted(stored.items()):  # safetensors gives them in any order
        must = expected.get(tensor, expected[EMBEDDING])
        try:
            if shape != must and shape != ():  # () may be no tensor at all
                raise ValueError(f"has shape {shape}; it must be {must}")
            with np.errstate(over="ignore"):  # an infinity is refused below
                weights[tensor] = array().astype(np.float32, copy=False)
            if weights[tensor].shape != must:
                raise ValueError(f"has shape {shape}; it must be {must}")
            if not all(map(np.isfinite, (weights[tensor].max(), weights[tensor].min()))):  # both keep NaN
                raise ValueError("holds NaN or infinity")
            drop()
        except ValueError as error:
            raise CheckpointError(f"{name}: {tensor} {error}") from None
    tied = HEAD in weights and not config.untied_head
    if tied and not np.array_equal(weights.pop(HEAD), weights[EMBEDDING]):
        raise CheckpointError(f"{name}: {HEAD} differs from {EMBEDDING}")
    drop()
    return weights


def _find_vocabulary(
    directory: Path, dataset: str | None, vocab_size: int, to_train: bool = False
) -> Tokenizer:
    """The vocabulary beside the checkpoint (meta.json or meta.pkl), else its data set's, else GPT-2's."""
    places = [directory]
    if directory.resolve().parent == CHECKPOINTS and not _changed(directory, (str(DATA / "meta.json"),)):
        places.insert(0, DATA)  # the same file; `prepare` may have replaced it
    if isinstance(dataset, str) and re.fullmatch(r"[\w-]{1,100}", dataset):
        places.append(directory / "data" / dataset)  # as export writes it
        places.append(directory.resolve().parent / "data" / dataset)  # as in a nanoGPT checkout
        places.append(Path("data") / dataset)  # the folder of `prepare`
        if dataset == "shakespeare_char":  # nanoGPT's name of the text that the shipped models learned
            places.append(shipped(DEFAULT))
    for place in places:
        if (place / "meta.json").is_file():
            return CharTokenizer.from_meta_json(place / "meta.json")
        if (place / "meta.pkl").is_file():
            return CharTokenizer.from_meta_pickle(place / "meta.pkl")
        if found := huggingface.vocabulary(place):
            return found
    if GPT2_TOKENS <= vocab_size <= GPT2_PADDED:
        if to_train:
            raise VocabularyError(f"the model's vocabulary is GPT-2's; {TO_TRAIN}")
        huggingface.warn_of_unread(directory, {huggingface.END})
        return GPT2Tokenizer.downloaded()
    looked = ", ".join(str(place) for place in places)
    raise CheckpointError(f"no vocabulary (meta.json, meta.pkl, tokenizer.json) was found in {looked}")


def bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of numbers rounded to bfloat16, to nearest, ties to even; NaN stays NaN. Of x's shape."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)
