"""Vocabularies: characters from JSON and pickle, GPT-2's byte pairs, and damaged or hostile files."""

from __future__ import annotations

import pickle
import sys
import types
from unittest.mock import Mock

import numpy as np
import pytest
from support import Hostile, naming

from shakespeare.model.corpus import AT_ONCE
from shakespeare.model.tokenizer import CharTokenizer, GPT2Tokenizer, VocabularyError


def decoded(tokenizer, ids):
    decoder = tokenizer.decoder()
    return "".join([*map(decoder.feed, ids), decoder.end()])


def test_a_long_text_becomes_a_small_array():
    for characters, kind in ((100, "uint8"), (1000, "int16"), (33_000, "int32")):
        every = "".join(map(chr, range(32, 32 + characters)))
        text = every[::-1] + every * (2 * AT_ONCE // characters)
        tokenizer = CharTokenizer.from_text(text)
        ids = tokenizer.encode_array(text)
        assert ids.dtype == kind and tokenizer.characters == list(every)
        assert ids.tolist() == tokenizer.encode(text)
        with pytest.raises(ValueError, match="does not know 1 of the text's characters: '😀'"):
            tokenizer.encode_array(text + "😀")
    assert CharTokenizer("ab").encode_array("").size == 0


def test_line_ends_and_byte_order_marks_are_those_of_the_vocabulary():
    for characters, text, normal in (
        ("a\n", "\ufeffa\r\na\ra\n", "a\na\na\n"),
        ("a\n\r", "\ufeffa\r\na\r", "a\r\na\r"),
        ("a\n\ufeff", "\ufeffa\r\n", "\ufeffa\n"),
    ):
        tokenizer = CharTokenizer(characters)
        with naming(characters):
            assert tokenizer.normal(text) == normal == decoded(tokenizer, tokenizer.encode(text))
    with pytest.raises(ValueError, match=r"does not know 1 of the text's characters: '\\ufeff'"):
        CharTokenizer("a").encode("\ufeff")  # it does not become an empty text


def test_unknown_characters_are_named():
    with pytest.raises(ValueError, match=r"does not know 2 of the text's characters: 'x' 'é'"):
        CharTokenizer.from_text("abc").encode("axébx")
    with pytest.raises(ValueError, match=r"does not know 26 .*'j' \.\.\.$"):
        CharTokenizer.from_text("1").encode("abcdefghijklmnopqrstuvwxyz")


def test_a_hostile_meta_pickle_is_refused_unexecuted(tmp_path):
    proof, path = tmp_path / "executed", tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps({"itos": {0: "a"}, "extra": Hostile(f"touch {proof}")}))
    with pytest.raises(VocabularyError, match="meta.pkl.*names .*system'; only built-in values"):
        CharTokenizer.from_meta_pickle(path)
    assert not proof.exists()
    pickle.loads(path.read_bytes())  # an ordinary unpickler runs it, so this test can fail
    assert proof.exists()


@pytest.mark.parametrize("put", [b"r\0\0\0\x20", b"p536870912\n"])
def test_a_pickle_gets_no_memory_that_it_does_not_fill(tmp_path, put):
    (path := tmp_path / "meta.pkl").write_bytes(b"\x80\x02}" + put + b".")
    with pytest.raises(VocabularyError, match="its memo has an index of 536870912"):
        CharTokenizer.from_meta_pickle(path)


def test_numpys_numbers_in_a_meta_pickle_are_read(tmp_path):
    path = tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps({"itos": {np.int64(0): "a", np.uint8(1): "b"}, "vocab_size": np.int32(2)}))
    assert CharTokenizer.from_meta_pickle(path).characters == ["a", "b"]
    for other in (np.array([1]), np.datetime64(1, "s"), np.void(b"12345678"), np.longdouble(1)):
        path.write_bytes(pickle.dumps({"itos": {0: "a"}, "other": other}))
        with naming(other), pytest.raises(VocabularyError, match="meta.pkl"):
            CharTokenizer.from_meta_pickle(path)


def test_a_damaged_vocabulary_is_named(tmp_path):
    path = tmp_path / "meta.pkl"
    for data in (b"", b"\x80\x04", b"text", *map(pickle.dumps, ([1], {"itos": {1: "a"}}, {"itos": 3}))):
        path.write_bytes(data)
        with naming(data), pytest.raises(VocabularyError, match="meta.pkl: it must be a nanoGPT meta.pkl"):
            CharTokenizer.from_meta_pickle(path)
    for text, message in (
        ("{", "must be JSON with a list 'characters'"),
        ("[1]", "must be JSON with a list 'characters'"),
        ('{"characters": "abc"}', "'characters' is str; it must be a list"),
        ('{"characters": ["a", "bc"]}', "token 1 is 'bc'; it must be one character"),
        ('{"characters": ["a", 5]}', "token 1 is 5; it must be one character"),
        ('{"characters": ["a", "\\ud800"]}', "token 1 is .*; it must be one character"),
        ('{"characters": ["a", "a"]}', "at least one character, all different"),
        ('{"characters": []}', "at least one character, all different"),
    ):
        path.write_text(text)
        with naming(text), pytest.raises(VocabularyError, match=message):
            CharTokenizer.from_meta_json(path)


class Bytes:
    """A stand-in for tiktoken's encoding. Each byte is a token."""

    n_vocab = 50257

    def encode(self, text, allowed_special):
        assert allowed_special == "all"
        return list(text.encode())

    def decode_single_token_bytes(self, token):
        return {token: bytes([token]) for token in range(256)}[token]


def test_byte_pairs_stream_whole_characters(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=lambda name: Bytes()))
    tokenizer = GPT2Tokenizer.downloaded()
    assert len(tokenizer) == 50257
    decoder = tokenizer.decoder()
    assert [decoder.feed(i) for i in tokenizer.encode("aé")] + [decoder.end()] == ["a", "", "é", ""]
    assert decoded(tokenizer, [104, 50300, 105]) == "h\ufffdi"  # padding tokens have no text
    assert decoded(tokenizer, [0xC3]) == "\ufffd"
    assert decoded(tokenizer, [104, 0xC3]) == "h\ufffd"


def test_byte_pairs_without_tiktoken_or_without_a_network(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(VocabularyError, match="needs tiktoken: pip install tiktoken"):
        GPT2Tokenizer.downloaded()

    for said, shown in (("no route to host", "no route to host"), ("long " * 70, "OSError")):
        fails = Mock(side_effect=OSError(said))
        monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=fails))
        with pytest.raises(VocabularyError, match="TIKTOKEN_CACHE_DIR") as raised:
            GPT2Tokenizer.downloaded()
        assert f"could not load GPT-2's vocabulary: {shown};" in str(raised.value)
        assert len(str(raised.value)) < 250
