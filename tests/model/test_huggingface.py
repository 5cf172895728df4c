"""Directories of transformers' GPT-2: every kind of one gives the model's own texts, others are named."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys

import numpy as np
import pytest
import tiny
import torch
from support import Hostile, naming

from shakespeare import generate
from shakespeare.generation.engines.engine import Unfit
from shakespeare.generation.engines.layouts import layouts_for
from shakespeare.model import files, huggingface
from shakespeare.model.checkpoint import Checkpoint, CheckpointError, load
from shakespeare.model.config import EMBEDDING, HEAD
from shakespeare.model.export import export
from shakespeare.model.huggingface import END
from shakespeare.model.tokenizer import CharTokenizer, VocabularyError

KINDS = [dict(tanh_gelu=tanh, untied_head=untied) for tanh in (False, True) for untied in (False, True)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_gives_the_models_weights_and_texts(tmp_path, kind, monkeypatch):
    model = tiny.gpt(**kind)
    for layout, size in (dict(), 2**30), (dict(shards=3), 0), (dict(prefix=""), 0):
        monkeypatch.setattr(files, "LEAST_MAPPED", size)
        with naming(layout):
            shutil.rmtree(tmp_path / "a", ignore_errors=True)
            tiny.huggingface_directory(tmp_path / "a", model, **layout)
            loaded = load(tmp_path / "a")
            assert loaded.config == model.config and (HEAD in loaded.weights) == kind["untied_head"]
            assert all(files.is_mapped(array) != bool(size) for array in loaded.weights.values())
            assert all(np.array_equal(loaded.weights[name], w) for name, w in model.weights.items())
    texts = {generate(loaded, "\n", 40, temperature=0, part=part) for part in ("part0", "part1", "part4")}
    other = generate(tmp_path / "a", "\n", 40, temperature=0, part="part4", weights="bf16")
    assert len(texts) == 1 and len(other) == 40
    if any(kind.values()):
        with pytest.raises(Unfit, match=f"the cuda engine takes no model with {max(kind, key=kind.get)}"):
            layouts_for(loaded.config, "fp32", "fp32", None)


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
        (dict(activation_function=["gelu"]), r"activation_function is \['gelu'\]; it must be one of"),
        (dict(n_inner=63), "n_inner is 63; it must be 4"),
        (dict(n_embd=None, n_inner=63), "n_embd is None; it must be a whole number"),
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


def test_pickled_tensors_are_read_as_safely_as_a_ckpt_pt(tmp_path):
    model = tiny.gpt(bias=True)
    for i, shards in enumerate((1, 2)):
        tiny.huggingface_directory(tmp_path / str(i), model, shards, prefix="", pickled=True)
        loaded = load(tmp_path / str(i)).weights
        assert loaded.keys() == model.weights.keys()
        assert all(np.array_equal(loaded[name], w) for name, w in model.weights.items())
    file, proof = tmp_path / "0" / "pytorch_model.bin", tmp_path / "executed"
    tensors = torch.load(file)
    torch.save(tensors | {"h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool)}, file)
    assert load(file).config == load(tmp_path / "0").config  # a file names its directory
    torch.save(tensors, file, _use_new_zipfile_serialization=False)  # as GPT-2 itself was published
    assert np.array_equal(load(file).weights[EMBEDDING], model.weights[EMBEDDING])
    for held, message in (
        (tensors | {"a": Hostile(f"touch {proof}")}, "is refused: it is not a plain PyTorch checkpoint"),
        ([1], "holds a list; it must be a dict of tensors"),
        (tensors | {"wpe.weight": 1}, "must be a dense tensor of floats"),
        (tensors | {"wpe.weight": torch.ones(1).expand(16, 16)}, "it repeats a few"),
    ):
        torch.save(held, file)
        with naming(message), pytest.raises(CheckpointError, match=message):
            load(file)
    assert not proof.exists()
    tiny.huggingface_directory(tmp_path / "0", model)  # safetensors come first
    assert load(file).config == model.config


def tokenizer_json(**change):
    """A vocabulary of GPT-2's kind with two merges, and its first symbols."""
    symbols = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    vocab = {token: i for i, token in enumerate([*symbols, "th", "the"])}
    split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(type="BPE", vocab=vocab, merges=["t h", "th e"])
    return dict(model=model, added_tokens=[added(258, END)], pre_tokenizer=split, decoder=split) | change


def added(id, content):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return dict(id=id, content=content, special=True, **flags)


@pytest.fixture
def read(tmp_path):
    """Read the vocabulary of a directory with these files of JSON."""

    def reads(**files):
        for name, held in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(held))
        return huggingface.vocabulary(tmp_path)

    return reads


def test_byte_pairs_from_files_without_a_network(tmp_path, read):
    held = tokenizer_json()
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    found = [read(vocab=held["model"]["vocab"] | {END: 258}), read(tokenizer=held)]
    for tokenizer in found:
        ids = tokenizer.encode(f"the é\r\n{END}")
        assert ids[0] == 257 and ids[-1] == 258 and len(ids) == 7 and len(tokenizer) == 259
        assert tokenizer.decoder().feed_all(ids) == f"the é\r\n{END}"
    assert huggingface.tables(found[0]) == huggingface.tables(found[1])
    tiny.huggingface_directory(tmp_path, tiny.gpt(vocab_size=259))
    (tmp_path / "meta.json").unlink()
    with pytest.raises(VocabularyError, match=r"tokenizer.json has byte pairs; it must be one of characters"):
        load(tmp_path, to_train=True)
    assert load(tmp_path).config.eos_token_id == (258,)  # no file says what ends a text, but the vocabulary


def test_the_tokens_that_end_a_text_are_read(tmp_path):
    for config, generation, ends in (
        ({}, None, ()),
        (dict(eos_token_id=3), None, (3,)),
        (dict(eos_token_id=[3, 50256]), {}, (3, 50256)),
        (dict(eos_token_id=3), dict(eos_token_id=[5, 4]), (5, 4)),
        (dict(eos_token_id=3), dict(eos_token_id=None), (3,)),
        (dict(eos_token_id=None), dict(eos_token_id=0), (0,)),
    ):
        tiny.huggingface_directory(tmp_path, tiny.gpt(), **config)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert load(tmp_path).config.eos_token_id == ends, (config, generation)
    for wrong in ("3", True, [3, None]):
        (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=wrong)))
        with (
            naming(wrong),
            pytest.raises(CheckpointError, match="eos_token_id is .*; it must be a whole number"),
        ):
            load(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="generation_config.json holds a list; it must be an object"):
        load(tmp_path)


def test_a_tokenizer_json_is_read_with_its_steps_and_the_tokens_of_other_files(tmp_path, read):
    template = [dict(SpecialToken=dict(id=END, type_id=0)), dict(Sequence=dict(id="A", type_id=0))]
    ends = {END: dict(id=END, ids=[258], tokens=[END])}
    first = dict(type="TemplateProcessing", single=template, pair=[*template, *template], special_tokens=ends)
    held = tokenizer_json(normalizer=dict(type="NFC"), post_processor=first)
    held["model"]["dropout"] = 0.9  # for training
    of_config = dict(added_tokens_decoder={260: added(260, "<|end é|>")}, pad_token=END, add_bos_token=False)
    tokenizer = read(tokenizer=held, added_tokens={"<|user|>": 259}, tokenizer_config=of_config)
    ids = tokenizer.encode("<|user|>the e\u0301<|end é|>")
    assert ids == [258, 259, 257, 220, 127, 102, 260] and len(tokenizer) == 261
    decoder = tokenizer.decoder()
    assert [decoder.feed(id) for id in ids[1:]] == ["<|user|>", "the", " ", "", "é", "<|end é|>"]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f"{END}<|user|>the é<|end é|>"
    for to, kind in (("hf", None), ("gguf", ValueError)):
        checkpoint = Checkpoint(tiny.gpt(vocab_size=261).config, tiny.gpt(vocab_size=261).weights, tokenizer)
        with contextlib.nullcontext() if kind is None else pytest.raises(kind, match="otherwise than GPT-2"):
            assert load(export(checkpoint, to, tmp_path / to)).tokenizer.encode("<|user|>") == [258, 259]


def test_other_kinds_of_tokens_stream_as_tokenizers_decodes_them(read):
    words = {word: i for i, word in enumerate(["[UNK]", "the", "##m", "cat", "你"])}
    pieces = [[piece, -1.0] for piece in ("<unk>", "▁the", "▁cat", "s", "▁", "<0xC3>", "<0xA9>")]
    metaspace = dict(type="Metaspace", replacement="▁", prepend_scheme="always", split=True)
    both = dict(type="Sequence", decoders=[dict(type="ByteFallback"), metaspace])
    subwords = dict(type="WordPiece", prefix="##", cleanup=True)
    of_words = dict(type="WordPiece", vocab=words, unk_token="[UNK]", continuing_subword_prefix="##")
    of_words |= dict(max_input_chars_per_word=100)
    of_pieces = dict(type="Unigram", unk_id=0, vocab=pieces, byte_fallback=True)
    bert = dict(type="BertPreTokenizer")
    for model, split, decoder, text, tokens in (
        (of_words, bert, subwords, "them the cat dog", [" the", "m", " the", " cat", " [UNK]"]),
        (of_pieces, metaspace, both, "the cats é", [" the", " cat", "s", " ", "", "é"]),
    ):
        change = dict(pre_tokenizer=split, decoder=decoder, added_tokens=[])
        tokenizer = read(tokenizer=tokenizer_json(model=model, **change))
        stream = tokenizer.decoder()
        with naming(text):
            assert [stream.feed(id) for id in tokenizer.encode(text)] == tokens


def test_files_that_are_not_read_are_named(tmp_path, read, monkeypatch):
    held = tokenizer_json()
    (tmp_path / "merges.txt").write_text("t h\nth e\n")
    vocab = held["model"]["vocab"] | {END: 258}
    for more in (
        dict(added_tokens={"<|user|>": 259}),
        dict(tokenizer_config=dict(added_tokens_decoder={"259": added(259, "<|user|>")})),
        dict(special_tokens_map=dict(additional_special_tokens=["<|user|>"], eos_token=dict(content=END))),
    ):
        (name,) = more
        with pytest.warns(UserWarning, match=rf"{name}\.json: its token '<\|user\|>' is not read"):
            assert len(read(vocab=vocab, **more)) == 259
        (tmp_path / f"{name}.json").unlink()
    tiny.huggingface_directory(tmp_path, tiny.gpt())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(VocabularyError, match=r"tokenizer\.json needs tokenizers: pip install tokenizers"):
        read(tokenizer=held)


def test_characters_from_tokenizer_json(tmp_path, read):
    tokenizer = read(
        tokenizer=dict(model=dict(type="WordLevel", vocab={c: i for i, c in enumerate("\n aжé")}))
    )
    assert isinstance(tokenizer, CharTokenizer) and tokenizer.characters == [*"\n aжé"]
    assert huggingface.vocabulary(tmp_path / "none") is None


def of_ids(*tokens):
    return dict(added_tokens=[added(id, content) for id, content in tokens])


@pytest.mark.parametrize(
    "change, message",
    [
        (of_ids((258, "")), "the token of id 258 is ''; it must be a text"),
        (of_ids((-1, "a b")), "the id of 'a b' is -1; it must be from 0"),
        (of_ids((2**40, "a b")), "the id of 'a b' is 1099511627776; it must be from 0"),
        (of_ids((True, "a b")), "the id of 'a b' is True; it must be from 0"),
        (of_ids((257, "a b")), "the id of 'a b' is 257, which is that of 'the'; ids must differ"),
        (of_ids((258, "the")), "the id of 'the' is 258 and 257; it must be one"),
        (of_ids((300, "a b")), "the id of 'a b' is 300, but for tokenizers it is 258"),
        (dict(model=[]), "must be a vocabulary of transformers"),
        (dict(model=dict(type="Other", vocab={"a b": 0})), "cannot be read: "),
        (
            dict(decoder=dict(type="BPEDecoder", suffix="_")),
            "the decoder is BPEDecoder; it must decode token",
        ),
        (dict(added_tokens="a" * 2**26), "must have at most 67108864"),
    ],
)
def test_other_vocabularies_are_named(change, message, read):
    with pytest.raises(VocabularyError, match=message) as raised:
        read(tokenizer=tokenizer_json(**change))
    assert "\n" not in str(raised.value)


def test_byte_pairs_that_tiktoken_would_read_otherwise_are_named(tmp_path, read):
    (tmp_path / "merges.txt").write_text("t h\nth e\n")
    vocab = tokenizer_json()["model"]["vocab"]
    for change, message in (
        ({"the": 3}, "the id of 'the' is 3, which is that of"),
        ({END: -1}, "is -1; it must be from 0"),
        ({"": 258}, "must be a text"),
        ({"ab": 258}, "256 bytes"),
    ):
        with naming(change), pytest.raises(VocabularyError, match=message):
            read(vocab=vocab | change)
