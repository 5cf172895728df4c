"""Checkpoints: the shipped ones, a round trip, nanoGPT's format, and files that are wrong or hostile."""

from __future__ import annotations

import codecs
import fractions
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tiny
import torch
from support import Hostile, naming

from shakespeare.model import checkpoint
from shakespeare.model.checkpoint import CheckpointError, load, save
from shakespeare.model.tokenizer import VocabularyError
from shakespeare.training.recipe import RECIPES, Recipe

VOCABULARY, nanogpt_file = tiny.VOCABULARY, tiny.nanogpt_file


@pytest.fixture
def directory(tmp_path):
    save(tmp_path / "saved", tiny.gpt(), VOCABULARY, {"steps": 0})
    return tmp_path / "saved"


@pytest.mark.parametrize("name", checkpoint.SHIPPED)
def test_shipped_checkpoints_are_what_the_recipes_say(name):
    loaded = load(name)
    config, recipe = loaded.config, RECIPES[name]
    assert (config.n_layer, config.n_head, config.n_embd, config.vocab_size) == (4, 4, 128, 65)
    assert config.block_size == recipe.block_size
    assert name == ("shakes-endless" if config.endless else f"shakes{config.block_size}")
    assert f"{loaded.config.num_params / 1e6:.2f}M" == "0.80M"
    assert len(loaded.tokenizer) == 65
    assert not loaded.model.training
    record = json.loads((checkpoint.shipped(name) / "training.json").read_text())
    assert Recipe(**record["recipe"]) == recipe
    assert [record["best_step"], round(record["val_loss"], 4)] in [[s, v] for s, _, v in record["curve"]]


def test_nanogpts_checkpoint_with_meta_pickle(tmp_path):
    out, data = tmp_path / "out", tmp_path / "data" / "letters"
    out.mkdir()
    data.mkdir(parents=True)
    (data / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(tiny.CHARACTERS))}))
    expected = nanogpt_file(out / "ckpt.pt", bias=True).weights
    loaded = load(str(out / "ckpt.pt"))
    assert all(np.array_equal(array, expected[name]) for name, array in loaded.weights.items())
    assert loaded.tokenizer.characters == tiny.CHARACTERS
    assert loaded.config.dropout == 0


def test_the_users_data_set_is_found_and_comes_before_this_projects(tmp_path, monkeypatch):
    """Beside the checkpoint's folder, and in the current one."""
    vocabulary = tmp_path / "data" / "shakespeare_char" / "meta.json"
    vocabulary.parent.mkdir(parents=True)
    VOCABULARY.write_meta_json(vocabulary)
    for out in (tmp_path / "out", tmp_path / "far" / "out"):
        out.mkdir(parents=True)
        nanogpt_file(out / "ckpt.pt", config={"dataset": "shakespeare_char"})
        assert Path(load(str(out / "ckpt.pt")).tokenizer.source).samefile(vocabulary)
        monkeypatch.chdir(tmp_path)


def test_a_vocabulary_beside_the_checkpoint_comes_first(tmp_path):
    nanogpt_file(tmp_path / "ckpt.pt", config={"dataset": "shakespeare_char"})
    with pytest.raises(CheckpointError, match="has 65 tokens; it must have vocab_size=11"):
        load(str(tmp_path / "ckpt.pt"))
    VOCABULARY.write_meta_json(tmp_path / "meta.json")
    assert len(load(str(tmp_path / "ckpt.pt")).tokenizer) == 11


def test_a_dataset_name_cannot_leave_the_data_directory(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    VOCABULARY.write_meta_json(tmp_path / "elsewhere" / "meta.json")
    (tmp_path / "out").mkdir()
    nanogpt_file(tmp_path / "out" / "ckpt.pt", config={"dataset": "../elsewhere"})
    with pytest.raises(CheckpointError, match="no vocabulary"):
        load(str(tmp_path / "out" / "ckpt.pt"))


def test_a_hostile_checkpoint_is_refused_unexecuted(tmp_path):
    proof, path = tmp_path / "executed", tmp_path / "ckpt.pt"
    nanogpt_file(path, extra=Hostile(f"touch {proof}"))
    with pytest.raises(CheckpointError, match="ckpt.pt is refused.*tensors and plain values only"):
        load(str(path))
    assert not proof.exists()
    torch.load(path, weights_only=False)  # an unsafe load runs it, so this test can fail
    assert proof.exists()


@pytest.mark.parametrize("key", ["model", "model_args"])
def test_a_checkpoint_without_its_parts_is_refused(tmp_path, key):
    nanogpt_file(tmp_path / "ckpt.pt", **{key: 3})
    with pytest.raises(CheckpointError, match=f"has no dict '{key}'"):
        load(str(tmp_path / "ckpt.pt"))


def test_an_untied_head_is_refused(tmp_path):
    state = dict(tiny.gpt(bias=False).state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    nanogpt_file(tmp_path / "ckpt.pt", model=state)
    with pytest.raises(CheckpointError, match="lm_head.weight differs from transformer.wte.weight"):
        load(str(tmp_path / "ckpt.pt"))


def test_odd_tensors_are_refused(tmp_path):
    name = "transformer.wpe.weight"
    for spoil, message in (
        (lambda t: t.to_sparse(), "must be a dense tensor of floats"),
        (lambda t: t.to("meta"), "must be a dense tensor of floats"),
        (lambda t: t.to(torch.float8_e4m3fn), "must be a dense tensor of floats"),
        (lambda t: torch.zeros(1, 1).expand(16, 16), "must be contiguous"),
        (lambda t: torch.zeros(16).expand(16, 16), "must be contiguous"),
        (lambda t: t.double() * 1e300, "holds NaN or infinity"),
        (lambda t: 3, "must be a dense tensor of floats"),
        (torch._neg_view, "must be a dense tensor of floats"),
    ):
        state = dict(tiny.gpt(bias=False).state_dict())
        state[name] = spoil(state[name])
        nanogpt_file(tmp_path / "ckpt.pt", model=state)
        with pytest.raises(CheckpointError, match=f"{name} {message}"):
            load(str(tmp_path / "ckpt.pt"))


def test_a_nanogpt_directory_and_a_weights_file_load_too(tmp_path, directory):
    nanogpt_file(tmp_path / "ckpt.pt")
    VOCABULARY.write_meta_json(tmp_path / "meta.json")
    assert load(str(tmp_path)).model.config.n_embd == 16
    assert load(str(directory / "model.safetensors")).model.config.n_embd == 16


def test_the_shipped_models_share_the_vocabulary_of_their_text(tmp_path, monkeypatch):
    """Unless `prepare` replaced it, or an installed package lacks it; then each has its own."""
    for name in checkpoint.SHIPPED:
        assert load(name).tokenizer.source == str(checkpoint.DATA / "meta.json"), name
    monkeypatch.setattr(checkpoint, "DATA", tmp_path)
    own = str(checkpoint.shipped("shakes128") / "meta.json")
    assert load("shakes128").tokenizer.source == own
    VOCABULARY.write_meta_json(tmp_path / "meta.json")
    assert load("shakes128").tokenizer.source == own


def config_change(directory, **change):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def weights_change(directory, name, value):
    path = directory / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(path) | {name: value}, path)


WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
SIZES = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=11, bias=False)


def test_what_other_programs_write_is_read(tmp_path):
    """Names with the prefixes of wrappers, one name of tied tensors, views, padding, and odd numbers."""
    gpt = tiny.gpt(bias=False)
    state, path = dict(gpt.state_dict()), tmp_path / "ckpt.pt"
    VOCABULARY.write_meta_json(tmp_path / "meta.json")
    prefixes = ("module.", "module._orig_mod.", "_orig_mod.module.", "model._forward_module.", "net.", "")
    within = ("_orig_mod", "_fsdp_wrapped_module._checkpoint_wrapped_module")
    wide, wpe = torch.cat([state[WTE], torch.full((85, 16), 9.0)]), "transformer.wpe.weight"
    for tensors in (
        *({prefix + name: t for name, t in state.items()} for prefix in prefixes),
        {prefixes[i % 6] + name: t for i, (name, t) in enumerate(state.items())},
        *({name.replace("h.0.", f"h.0.{word}."): t for name, t in state.items()} for word in within),
        state | {"module.transformer.h.1.attn.bias": torch.ones(1, 1, 16, 16)},
        {name: t for name, t in state.items() if name != HEAD},
        {f"module.{name}": t for name, t in state.items() if name != WTE},
        {name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in state.items()},
        state | {wpe: torch.cat([state[wpe], state[wpe]], 1)[:, :16]},
        state | {WTE: wide, HEAD: wide},
    ):
        size = len(tensors.get(WTE, state[WTE]))
        nanogpt_file(path, model=tensors, model_args=SIZES | {"vocab_size": size})
        with naming(list(tensors)):
            loaded = load(str(path))
            assert loaded.config == gpt.config and loaded.weights.keys() == state.keys() - {HEAD}
            assert all(np.array_equal(array, state[name]) for name, array in loaded.weights.items())
    for change in (
        *({"bias": off} for off in (0, None, 0.0, np.bool_(False))),
        {"n_layer": 2.0, "n_embd": torch.tensor(16), "dropout": None, "vocab_size": np.int64(11)},
        {"rope": False, "experts": 0, "window": None, "names": []},
    ):
        nanogpt_file(path, model_args=SIZES | change)
        with naming(change):
            assert load(str(path)).config == gpt.config
    for change, message in (
        ({"model": state | {f"module.{WTE}": wide}}, f"has {WTE} twice, once as module.{WTE};"),
        ({"model_args": SIZES | {"rope": True, "x": "y"}}, "the unknown fields rope, x; remove those"),
        ({"model_args": SIZES | {"n_layer": 2.5}}, "n_layer is 2.5; it must be a whole number"),
        ({"model_args": SIZES | {"n_layer": np.bool_(True)}}, "n_layer is True; it must be a whole number"),
        ({"model_args": SIZES | {"bias": torch.ones(2)}}, "the configuration is wrong"),
        ({"extra": fractions.Fraction(1, 2)}, "tensors and plain values only, not fractions.Fraction"),
    ):
        nanogpt_file(path, **change)
        with naming(message), pytest.raises(CheckpointError, match=message):
            load(str(path))


def test_safetensors_are_read_likewise_and_json_with_a_byte_order_mark(directory):
    expected, file = tiny.gpt(), directory / "model.safetensors"
    assert load(str(directory)).tokenizer.source == str(directory / "meta.json")
    for name in ("config.json", "meta.json"):
        (directory / name).write_bytes(codecs.BOM_UTF8 + (directory / name).read_bytes())
    weights = safetensors.torch.load_file(file)
    weights[f"module.{HEAD}"] = weights.pop(WTE)
    safetensors.torch.save_file(weights, file)
    (directory / checkpoint.SUMS).unlink()  # it would warn: the files have changed
    loaded = load(str(directory))
    assert (loaded.config, loaded.tokenizer.characters) == (expected.config, tiny.CHARACTERS)
    assert all(np.array_equal(array, expected.weights[name]) for name, array in loaded.weights.items())
    assert loaded.model.lm_head.weight is loaded.model.transformer.wte.weight


def test_gpt2s_vocabulary_is_refused_for_training_before_it_is_loaded(tmp_path):
    state = tiny.gpt(bias=False, vocab_size=50304).state_dict()
    nanogpt_file(tmp_path / "ckpt.pt", model=state, model_args=SIZES | {"vocab_size": 50304}, config={"a": 1})
    with pytest.raises(VocabularyError, match="GPT-2's; it must be one of characters to train it"):
        load(str(tmp_path), to_train=True)


DAMAGE = {
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
    "unknown field": (lambda d: config_change(d, n_heads=2), "n_heads"),
    "wrong field": (lambda d: config_change(d, n_head=3), "n_embd is 16; it must be a multiple of n_head=3"),
    "another width": (lambda d: config_change(d, n_embd=32), r"attn.bias has shape \(48,\); it must be \(96"),
    "too deep": (lambda d: config_change(d, n_layer=4096), "n_layer is 4096, but there are"),
    "fewer layers": (lambda d: config_change(d, n_layer=1), "tensors are unexpected, .*h.1"),
    "more layers": (lambda d: config_change(d, n_layer=3), "tensors are missing, .*h.2"),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors cannot be read",
    ),
    "NaN": (lambda d: weights_change(d, WTE, torch.full((11, 16), torch.nan)), f"{WTE} holds NaN"),
    "no vocabulary": (lambda d: (d / "meta.json").unlink(), "no vocabulary .* was found in"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(directory, damage):
    spoil, message = DAMAGE[damage]
    spoil(directory)
    with pytest.raises(CheckpointError, match=message):
        load(str(directory))


def test_half_precision_weights_become_float32(directory):
    weights_change(directory, WTE, torch.full((11, 16), 0.5, dtype=torch.bfloat16))
    (directory / checkpoint.SUMS).unlink()  # it would warn: the files have changed
    model = load(str(directory)).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
