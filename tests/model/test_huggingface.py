"""Directories of transformers' GPT-2: every kind of one gives the model's own texts, others are named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tiny
import torch
from support import naming

from shakespeare import generate
from shakespeare.generation.engines.layouts import layouts_for
from shakespeare.generation.engines.slots import Unfit
from shakespeare.model import files, huggingface
from shakespeare.model.checkpoint import CheckpointError, load
from shakespeare.model.config import HEAD
from shakespeare.model.tokenizer import CharTokenizer, VocabularyError

KINDS = [dict(tanh_gelu=tanh, untied_head=untied) for tanh in (False, True) for untied in (False, True)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_gives_the_models_logits_and_texts(tmp_path, kind, monkeypatch):
    model, ids = tiny.gpt(**kind), torch.randint(11, (1, 16))
    for layout, size in (dict(), 2**30), (dict(shards=3), 0), (dict(prefix=""), 0):
        monkeypatch.setattr(files, "LEAST_MAPPED", size)
        with naming(layout):
            shutil.rmtree(tmp_path / "a", ignore_errors=True)
            tiny.huggingface_directory(tmp_path / "a", model, **layout)
            loaded = load(tmp_path / "a")
            assert loaded.config == model.config and (HEAD in loaded.weights) == kind["untied_head"]
            assert all(files.is_mapped(array) != bool(size) for array in loaded.weights.values())
            assert all(np.array_equal(loaded.weights[name], w) for name, w in model.weights.items())
            torch.testing.assert_close(loaded.model(ids), model(ids), rtol=1e-4, atol=1e-4)
    texts = {generate(loaded, "\n", 40, temperature=0, part=part) for part in ("part0", "part1", "part4")}
    other = generate(tmp_path / "a", "\n", 40, temperature=0, part="part4", weights="bf16")
    assert len(texts) == 1 and len(other) == 40
    if any(kind.values()):
        with pytest.raises(Unfit, match=f"the cuda engine takes no model with {max(kind, key=kind.get)}"):
            layouts_for(loaded.config, "fp32", "fp32", None)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    tiny.huggingface_directory(tmp_path, tiny.gpt(**kind))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = theirs.generate(torch.tensor([[0]]), max_new_tokens=15, do_sample=False, eos_token_id=None)[0, 1:]
    text = "".join(tiny.CHARACTERS[i] for i in ids)
    assert generate(tmp_path, "\n", 15, temperature=0) == text


def test_biases_that_are_said_not_to_be_there_are_zeros(tmp_path):
    model = tiny.gpt(bias=True)
    tiny.huggingface_directory(tmp_path, model, bias=False)
    with pytest.raises(CheckpointError, match=r"bias is false, but transformer.*\.bias is not zero"):
        load(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= not name.endswith(".bias")
    tiny.huggingface_directory(tmp_path, model, bias=False)
    assert not load(tmp_path).config.bias and len(load(tmp_path).weights) == 15


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="llama"), "architecture 'llama'; it must be 'gpt2'"),
        (dict(activation_function="relu"), "activation_function is 'relu'; it must be one of gelu, gelu_new"),
        (dict(n_inner=63), "n_inner is 63; it must be 4"),
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon is 1e-06; it must be 1e-05"),
        (dict(n_positions="16"), "block_size is '16'; it must be a whole number"),
    ],
)
def test_other_models_are_named(tmp_path, change, message):
    tiny.huggingface_directory(tmp_path, tiny.gpt(), **change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}}', "{"])
def test_a_wrong_index_is_named(tmp_path, index):
    tiny.huggingface_directory(tmp_path, tiny.gpt(), shards=2)
    (tmp_path / huggingface.INDEX).write_text(index)
    with pytest.raises(CheckpointError, match="must have a weight_map of files in the same directory"):
        load(tmp_path)


def tokenizer_json(**change):
    """A vocabulary of GPT-2's kind with two merges, and its first symbols."""
    symbols = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    vocab = {token: i for i, token in enumerate([*symbols, "th", "the", "<|endoftext|>"])}
    model = dict(type="BPE", vocab=vocab, merges=["t h", ["th", "e"]])
    added = [dict(id=258, content="<|endoftext|>", special=True)]
    split = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
    return dict(model=model, added_tokens=added, pre_tokenizer=split, decoder=split) | change


def test_byte_pairs_from_files_without_a_network(tmp_path):
    held = tokenizer_json()
    (tmp_path / "tokenizer.json").write_text(json.dumps(held))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "vocab.json").write_text(json.dumps(held["model"]["vocab"]))
    (tmp_path / "b" / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    for tokenizer in (huggingface.vocabulary(tmp_path), huggingface.vocabulary(tmp_path / "b")):
        ids = tokenizer.encode("the é\r\n<|endoftext|>")
        assert ids[0] == 257 and ids[-1] == 258 and len(ids) == 7 and len(tokenizer) == 259
        assert tokenizer.decode_all(np.array([ids])) == ["the é\r\n<|endoftext|>"]
    tiny.huggingface_directory(tmp_path, tiny.gpt(vocab_size=259))
    (tmp_path / "meta.json").unlink()
    with pytest.raises(VocabularyError, match=r"tokenizer.json has byte pairs; it must be one of characters"):
        load(tmp_path, to_train=True)


def test_characters_from_tokenizer_json(tmp_path):
    vocab = {c: i for i, c in enumerate("\n aжé")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(model=dict(type="WordLevel", vocab=vocab))))
    tokenizer = huggingface.vocabulary(tmp_path)
    assert isinstance(tokenizer, CharTokenizer) and tokenizer.characters == [*"\n aжé"]
    assert huggingface.vocabulary(tmp_path / "none") is None


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model=dict(type="Unigram", vocab=[])), "the model is Unigram"),
        (dict(pre_tokenizer=dict(type="Metaspace")), r"text is split by \['Metaspace'\]"),
        (dict(pre_tokenizer=dict(type="ByteLevel", add_prefix_space=True)), "add_prefix_space"),
        (dict(model=dict(type="BPE", vocab={"a": 0}, merges=[])), "256 bytes"),
        (dict(model=[]), "must be a vocabulary of transformers"),
    ],
)
def test_other_vocabularies_are_named(tmp_path, change, message):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(**change)))
    with pytest.raises(VocabularyError, match=message):
        huggingface.vocabulary(tmp_path)
