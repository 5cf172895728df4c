"""Text to token ids and back: by characters, GPT-2's byte pairs, or Hugging Face's tokenizers."""

from __future__ import annotations

import codecs
import io
import json
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.checks import first_line
from shakespeare.model.corpus import MARK, alphabet, pieces
from shakespeare.model.files import write_file

FEW = 8  # ids that are faster decoded one after the other
NO_TOKEN = "\ufffd".encode()  # the bytes of an id that only pads the vocabulary
# GPT-2's letters for bytes: most stand for themselves.
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in SHOWN]
BYTES = {chr(byte): byte for byte in SHOWN} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


class VocabularyError(ValueError):
    """A vocabulary is missing or malformed; the message names the file and the error."""


class CharTokenizer:
    """One token per character: token i is characters[i]. Raises VocabularyError if two are equal."""

    def __init__(self, characters: Sequence[str], source: str = "the text") -> None:
        for i, c in enumerate(characters):
            if not isinstance(c, str) or len(c) != 1 or "\ud800" <= c <= "\udfff":
                raise VocabularyError(f"{source}: token {i} is {c!r}; it must be one character")
        self.characters = list(characters)
        self.source = source
        self._ids = {c: i for i, c in enumerate(self.characters)}
        if not self._ids or len(self._ids) != len(self.characters):
            raise VocabularyError(f"{source}: there must be at least one character, all different")
        self._points = np.array([ord(c) for c in self.characters], "<u4")

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        """The sorted characters of a text, as in nanoGPT's prepare.py."""
        return cls(alphabet(text))

    @classmethod
    def from_meta_json(cls, path: Path) -> CharTokenizer:
        """Read {"characters": ["\\n", " ", ...]}. Raises VocabularyError."""
        try:
            characters = json.loads(path.read_bytes())["characters"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise VocabularyError(f"{path}: it must be JSON with a list 'characters' ({error!r})") from None
        if not isinstance(characters, list):
            raise VocabularyError(f"{path}: 'characters' is {type(characters).__name__}; it must be a list")
        return cls(characters, str(path))

    @classmethod
    def from_meta_pickle(cls, path: Path) -> CharTokenizer:
        """Read nanoGPT's meta.pkl, {'itos': {0: '\\n', ...}}: numbers and strings. Raises VocabularyError."""
        try:
            data = path.read_bytes()
            _check_memo(data)
            itos = _PlainUnpickler(io.BytesIO(data)).load()["itos"]
            characters = [itos[i] for i in range(len(itos))]
        except OSError:
            raise
        except Exception as error:  # a damaged pickle can raise nearly anything
            reason = " ".join(str(error).split())
            raise VocabularyError(f"{path}: it must be a nanoGPT meta.pkl ({reason})") from None
        return cls(characters, str(path))

    def write_meta_json(self, path: Path) -> None:
        """Write the file that from_meta_json reads."""
        write_file(path, f"{json.dumps({'characters': self.characters}, ensure_ascii=False)}\n".encode())

    def write_meta_pickle(self, path: Path) -> None:
        """Write nanoGPT's file, which from_meta_pickle reads."""
        itos = dict(enumerate(self.characters))
        write_file(path, pickle.dumps({"vocab_size": len(itos), "itos": itos, "stoi": self._ids}))

    def __len__(self) -> int:
        return len(self.characters)

    def normal(self, text: str) -> str:
        """A text with '\\n' for '\\r\\n' and '\\r', and without byte order marks, unless these are known.

        One of marks alone stays as it is: no text becomes empty.
        """
        if "\r" not in self._ids:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text if MARK in self._ids else text.replace(MARK, "") or text

    def encode(self, text: str) -> list[int]:
        """The ids of the characters of normal(text). Raises ValueError naming unknown characters."""
        text = self.normal(text)
        self._check(text)
        return [self._ids[c] for c in text]

    def encode_array(self, text: str) -> NDArray[Any]:
        """encode() of a long text: an array of uint8, int16 or int32, the smallest that has all ids."""
        text = self.normal(text)
        self._check(alphabet(text))
        last = len(self) - 1
        ids = np.empty(len(text), np.uint8 if last < 2**8 else np.int16 if last < 2**15 else np.int32)
        table = np.zeros(self._points.max() + 1, ids.dtype)
        table[self._points] = np.arange(len(self))
        start = 0
        for points in pieces(text):
            ids[start : start + len(points)] = table[points]
            start += len(points)
        return ids

    def _check(self, characters: Iterable[str]) -> None:
        """Raise ValueError naming the characters that are unknown."""
        if unknown := sorted(set(characters) - self._ids.keys()):
            shown = " ".join(map(repr, unknown[:10])) + (" ..." if len(unknown) > 10 else "")
            raise ValueError(f"the model does not know {len(unknown)} of the text's characters: {shown}")

    def token_bytes(self, id: int) -> bytes:
        """A token's text in UTF-8."""
        return self.characters[id].encode("utf-8", "surrogatepass")

    def decoder(self) -> _CharDecoder:
        """A decoder from ids to text."""
        return _CharDecoder(self.characters, self._points)


class _CharDecoder:
    def __init__(self, characters: Sequence[str], points: NDArray[np.uint32]) -> None:
        self.feed = characters.__getitem__
        self._points = points

    def feed_all(self, ids: Sequence[int] | NDArray[Any]) -> str:
        if len(ids) < FEW:
            return "".join(map(self.feed, ids))
        return self._points[ids].tobytes().decode("utf-32-le", "surrogatepass")

    def end(self) -> str:
        return ""


class _Dtype:
    """Stands for numpy.dtype in a pickle. NumPy's own takes states that make it read any memory."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None: ...


def _number(dtype: _Dtype, data: bytes) -> float:
    """Stands for NumPy's function that makes a number of a pickle. Raises ValueError for another type."""
    if not re.fullmatch(r"b1|[iu][1248]|f[248]", dtype.name):
        raise ValueError(f"{dtype.name} is no type of numbers")
    return np.frombuffer(data, dtype.name).item()


# What is called for NumPy's numbers in a pickle, by the names of NumPy 1 and 2.
ADMITTED: dict[str, Any] = {f"numpy.{core}.multiarray.scalar": _number for core in ("core", "_core")}
ADMITTED["numpy.dtype"] = _Dtype


class _PlainUnpickler(pickle.Unpickler):
    """Admits numbers, strings, lists and dicts. Refuses every other global, so nothing else can be called."""

    def find_class(self, module: str, name: str):
        if found := ADMITTED.get(f"{module}.{name}"):
            return found
        raise VocabularyError(f"it names {f'{module}.{name}'!r}; only built-in values are admitted")


def _check_memo(data: bytes) -> None:
    """Raise VocabularyError for a pickle whose memo has room for more values than it has bytes."""
    for opcode, index, _ in pickletools.genops(data):
        if opcode.name.endswith("PUT") and int(index or 0) > len(data):
            raise VocabularyError(f"its memo has an index of {index}")


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError:
        what = "the model has GPT-2's vocabulary, which needs tiktoken: pip install tiktoken"
        raise VocabularyError(what) from None
    return tiktoken


class BytesTokenizer:
    """A vocabulary whose tokens are bytes, which may be a part of a character. source: its origin."""

    source: str

    def normal(self, text: str) -> str:
        """The text: no character is unknown."""
        return text

    def token_bytes(self, id: int) -> bytes:
        """A token's bytes of a text in UTF-8."""
        raise NotImplementedError

    def decoder(self) -> _BytesDecoder:
        """A decoder from ids to text. It emits a character after its last byte."""
        return _BytesDecoder(self.token_bytes)


class _BytesDecoder:
    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        return self._utf8.decode(self._token_bytes(id))

    def feed_all(self, ids: Sequence[int] | NDArray[Any]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, map(int, ids))))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


# How GPT-2 splits a text before it joins bytes: https://github.com/openai/gpt-2, src/encoder.py.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class GPT2Tokenizer(BytesTokenizer):
    """Byte pairs as GPT-2 encodes text, through tiktoken. Raises VocabularyError without it.

    ranks: the tokens' ids. special: those that only the text of the token itself gives.
    """

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int], source: str) -> None:
        self.source = source
        tiktoken = _tiktoken()
        self._encoding = tiktoken.Encoding(
            source, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    @classmethod
    def downloaded(cls) -> GPT2Tokenizer:
        """GPT-2's own, which tiktoken downloads once and caches. Raises VocabularyError without network."""
        found = cls.__new__(cls)
        tiktoken = _tiktoken()
        try:
            found._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken's download can raise nearly anything
            reason = str(error) if len(str(error)) < 80 else type(error).__name__
            raise VocabularyError(
                f"tiktoken could not load GPT-2's vocabulary: {reason}; let it download once, put vocab.json "
                "and merges.txt beside the model, or set TIKTOKEN_CACHE_DIR to a folder that has it"
            ) from None
        found.source = "GPT-2 encodings (tiktoken)"
        return found

    def __len__(self) -> int:
        return self._encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        """The ids of a text; '<|endoftext|>' is the special token, as in nanoGPT."""
        return self._encoding.encode(text, allowed_special="all")

    def token_bytes(self, id: int) -> bytes:
        """A token's bytes; those of the replacement character for an id that only pads the vocabulary."""
        try:
            return self._encoding.decode_single_token_bytes(id)
        except KeyError:
            return NO_TOKEN


class HuggingFaceTokenizer(BytesTokenizer):
    """The vocabulary of a tokenizer.json, with all its steps, by Hugging Face's `tokenizers`.

    file: the JSON. ids: of all tokens. added: those that the file lacks, with the arguments of `AddedToken`.
    decoders: the types of the file's steps from tokens to text. Raises VocabularyError without the package,
    and for what it does not read.
    """

    def __init__(
        self,
        file: str,
        ids: Mapping[str, int],
        added: Mapping[str, Mapping[str, bool]],
        decoders: Sequence[str],
        source: str,
    ) -> None:
        try:
            from tokenizers import AddedToken, Tokenizer
        except ImportError:
            raise VocabularyError(f"{source} needs tokenizers: pip install tokenizers") from None
        if together := set(decoders) & {"BPEDecoder", "CTC"}:
            raise VocabularyError(f"{source}: the decoder is {together.pop()}; it must decode token by token")
        self.source = source
        self._size = max(ids.values()) + 1
        self.tokenizer = self._tried("read", Tokenizer.from_str, file)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if getattr(self.tokenizer.model, "dropout", None):
            self.tokenizer.model.dropout = None  # for training: a prompt would have other ids each time
        self.tokenizer.add_tokens([AddedToken(token, **flags) for token, flags in added.items()])
        contents = self.tokenizer.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        for token, id in ids.items():
            known = self.tokenizer.token_to_id(token)
            if known != id:
                must = f"for tokenizers it is {known}; ids must be without gaps"
                raise VocabularyError(f"{source}: the id of {token!r} is {id}, but {must}")
            if "ByteLevel" in decoders:
                as_text = id in contents or not BYTES.keys() >= set(token)
                self._bytes[id] = token.encode() if as_text else bytes(map(BYTES.__getitem__, token))
            elif "ByteFallback" in decoders and (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)):
                self._bytes[id] = bytes.fromhex(byte[1])
            else:  # what it adds to a text before it: the first token of a text may lose its space
                once, twice = (self._tried("decoded", self._decode, ids) for ids in ([id], [id, id]))
                self._bytes[id] = twice[len(once) :].encode()
        largest = max(self.encode(""), default=0)
        if largest >= self._size:
            raise VocabularyError(f"{source}: it adds the id {largest} to texts, which no token has")

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _tried(self, does: str, call: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return call(argument)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust derives from no Exception
            raise VocabularyError(f"{self.source} cannot be {does}: {first_line(error)}") from None

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with those that the file adds around it, as for generate() of transformers.

        The text of a special token is that token. Raises VocabularyError for a text that has no ids.
        """
        return self._tried("used for this text", self.tokenizer.encode, text).ids

    def token_bytes(self, id: int) -> bytes:
        """A token's bytes within a text; a letter of '##letter', and ' word' of '▁word'."""
        return self._bytes.get(id, NO_TOKEN)


# `source` is a vocabulary's origin, for messages
Tokenizer = CharTokenizer | GPT2Tokenizer | HuggingFaceTokenizer
