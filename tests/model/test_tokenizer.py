"""Vocabularies: characters from JSON and pickle, GPT-2's byte pairs, and damaged or hostile files."""

from __future__ import annotations

import pickle
import sys
import types

import numpy as np
import pytest
from support import Hostile, naming

from model.tokenizer import CharTokenizer, GPT2Tokenizer, VocabularyError


def decoded(tokenizer, ids):
    decoder = tokenizer.decoder()
    return "".join([*map(decoder.feed, ids), decoder.end()])


def test_characters_round_trip():
    tokenizer = CharTokenizer.from_text("hello, wörld")
    assert len(tokenizer) == 10
    assert tokenizer.characters == sorted(set("hello, wörld"))
    assert decoded(tokenizer, tokenizer.encode("hold")) == "hold"
    assert tokenizer.encode("") == []


def test_unknown_characters_are_named():
    with pytest.raises(ValueError, match=r"does not know 2 of the text's characters: 'x' 'é'"):
        CharTokenizer.from_text("abc").encode("axébx")
    with pytest.raises(ValueError, match=r"does not know 26 .*'j' \.\.\.$"):
        CharTokenizer.from_text("1").encode("abcdefghijklmnopqrstuvwxyz")


def test_a_hostile_meta_pickle_is_refused_unexecuted(tmp_path):
    proof, path = tmp_path / "executed", tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps({"itos": {0: "a"}, "extra": Hostile(f"touch {proof}")}))
    with pytest.raises(VocabularyError, match="meta.pkl.*names .*system; only built-in values"):
        CharTokenizer.from_meta_pickle(path)
    assert not proof.exists()
    pickle.loads(path.read_bytes())  # an ordinary unpickler runs it, so this test can fail
    assert proof.exists()


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
        ('{"characters": ["a", "a"]}', "at least one character, all different"),
        ('{"characters": []}', "at least one character, all different"),
    ):
        path.write_text(text)
        with naming(text), pytest.raises(VocabularyError, match=message):
            CharTokenizer.from_meta_json(path)


class Bytes:
    """A stand-in for tiktoken's encoding. Each byte is a token."""

    n_vocab = 256

    def encode(self, text, allowed_special):
        assert allowed_special == {"<|endoftext|>"}
        return list(text.encode())

    def decode_single_token_bytes(self, token):
        return bytes([token])


def test_byte_pairs_stream_whole_characters(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=lambda name: Bytes()))
    tokenizer = GPT2Tokenizer(50304)
    assert len(tokenizer) == 50304
    decoder = tokenizer.decoder()
    assert [decoder.feed(i) for i in tokenizer.encode("aé")] + [decoder.end()] == ["a", "", "é", ""]
    assert decoded(tokenizer, [104, 50300, 105]) == "h\ufffdi"  # padding tokens have no text
    assert decoded(tokenizer, [0xC3]) == "\ufffd"
    assert tokenizer.decode_all(np.array([[0xC3, 0xA9], [104, 0xC3]])) == ["é", "h\ufffd"]


def test_byte_pairs_without_tiktoken_or_without_a_network(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(VocabularyError, match="needs tiktoken: pip install tiktoken"):
        GPT2Tokenizer(50257)

    def fail(name):
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=fail))
    with pytest.raises(VocabularyError, match="could not load GPT-2's vocabulary: no route to host"):
        GPT2Tokenizer(50257)
