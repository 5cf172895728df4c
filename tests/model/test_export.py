"""Exported models: read again they are the same, and the programs that they are for write the same texts."""

from __future__ import annotations

import errno
import json
import pickle
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors
import tiny
import torch
from support import naming

from shakespeare import generate, load
from shakespeare.checkpoints import PRESENT
from shakespeare.model import files
from shakespeare.model.checkpoint import Checkpoint, CheckpointError, shipped
from shakespeare.model.export import FORMATS, GGUF_TYPES, export
from shakespeare.model.huggingface import TRANSPOSED, byte_pairs, tables
from shakespeare.model.tokenizer import CharTokenizer

pytest.importorskip("gguf", reason="pip install gguf")
# Some begin with the same bytes, some are written otherwise in one of the formats.
OTHER = CharTokenizer("\n \r\t\\'\"nx0\0\u2028\ufeff\u00a0\u0301é你好😀абвاب가")
RECORD = json.loads((shipped(PRESENT[0]) / "training.json").read_bytes())
TEXT, END = "".join(OTHER.characters) + "  \n\n你é", "<|endoftext|>"
MERGES = [("l", "l"), ("h", "e"), ("ll", "o"), ("Ġ", "he"), ("Ã", "©"), ("Ġhe", "llo")]
LETTERS = "".join(map(chr, (*range(33, 127), *range(161, 173), *range(174, 324))))  # GPT-2's bytes
PAIRS = byte_pairs({t: i for i, t in enumerate([*LETTERS, *map("".join, MERGES), END])}, MERGES, [END], "")


def model(tokenizer=OTHER, scale=1.0, **change) -> Checkpoint:
    made = tiny.gpt(block_size=256, vocab_size=len(tokenizer), **dict(n_embd=32) | change)
    weights = {name: w * np.float32(scale) if w.ndim == 2 else w for name, w in made.weights.items()}
    return Checkpoint(made.config, weights, tokenizer)


@pytest.mark.parametrize("to", FORMATS)
def test_a_model_is_the_same_when_it_is_read_again(cli, tmp_path, to, extension):
    pairs = model(PAIRS, eos_token_id=(len(PAIRS) - 1,))  # END, which ends a text also where no file says so
    other = [model(tanh_gelu=True), model(untied_head=True), pairs] if to != "nanogpt" else []
    with_tables = [name for name in PRESENT if not load(name).config.endless]
    ending = model(eos_token_id=(5, 3, 9))
    for i, case in enumerate([*with_tables, model(bias=False), model(), ending, *other]):
        first = case if isinstance(case, Checkpoint) else load(case)
        again = load(export(case, to, tmp_path / f"{i}.gguf"))
        with naming(case, first.config):
            assert again.config == first.config and again.weights.keys() == first.weights.keys()
            assert all(np.array_equal(again.weights[name], w) for name, w in first.weights.items())
            known, found = (getattr(c.tokenizer, "characters", None) for c in (first, again))
            assert found == known and (known or tables(again.tokenizer) == tables(first.tokenizer))
            assert (again.draft is None) == (first.draft is None or to == "gguf")
    out = tmp_path / "made.gguf"
    assert cli("export", "-m", PRESENT[0], "--to", to, "--out", out).stdout == f"wrote {out}\n"
    text, again = (cli("--num-samples", 1, "--max-new-tokens", 300, "-m", m) for m in (PRESENT[0], out))
    assert again.stdout == text.stdout and len(text.stdout) > 300
    refused = cli("export", "-m", PRESENT[0], "--to", to, "--out", out, code=2)
    assert f"out is '{out}', which exists; it must be a new" in refused.stderr


def test_transformers_files_have_its_names_and_a_card(tmp_path):
    first = model(bias=False)
    with safetensors.safe_open(export(first, "hf", tmp_path / "a") / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"} and len(file.keys()) == 2 + 2 * 12 + 2
        for name in file.keys():
            wanted = first.weights.get(name, np.zeros(1))
            assert (file.get_tensor(name) == (wanted.T if TRANSPOSED.search(name) else wanted)).all(), name
    card = (export(PRESENT[0], "hf", tmp_path / "b", text="A text.") / "README.md").read_text()
    for said in ("---\nlicense: mit\n", f"val {RECORD['val_loss']:.4f}.\n", "A text."):
        assert said in card


def test_transformers_writes_the_same_text(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    cases = model(), model(tanh_gelu=True, untied_head=True), model(PAIRS, tanh_gelu=True)
    for i, (first, text) in enumerate(zip(cases, (TEXT, TEXT, f"hello  héllo{END}\n"))):
        out = export(first, "hf", tmp_path / str(i))
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        ids = tokenizer.encode(text)
        assert ids == first.tokenizer.encode(text) and tokenizer.decode(ids) == text
        asked = dict(do_sample=False, max_new_tokens=200, max_length=None, eos_token_id=None)
        with torch.no_grad():
            rows = theirs.generate(**tokenizer(text, return_tensors="pt"), **asked)
            assert (theirs(rows).logits[0, -1] - first.model(rows)[0, -1]).abs().max() < 1e-4
        assert tokenizer.decode(rows[0, len(ids) :]) == generate(first, text, 200, temperature=0)
    with pytest.raises(Exception, match="UNK"):  # no other character stands for one that is not known
        transformers.AutoTokenizer.from_pretrained(tmp_path / "0").encode("Ω")


def test_llama_cpp_writes_the_same_text(tmp_path):
    llama = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    for tokenizer, text in (OTHER, TEXT), (PAIRS, f"hello  héllo{END}\n"):
        # Its GELU is a table in half precision: errors grow with the weights.
        first = model(tokenizer, scale=0.3, tanh_gelu=True)
        out = export(first, "gguf", tmp_path / f"{len(tokenizer)}.gguf")
        theirs = llama.Llama(str(out), n_ctx=256, type_k=0, type_v=0, verbose=False)
        ids = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ids == tokenizer.encode(text) and theirs.detokenize(ids, special=True).decode() == text
        theirs.eval(ids)
        for _ in range(200):
            logits = np.ctypeslib.as_array(llama.llama_get_logits(theirs.ctx), (len(tokenizer),)).copy()
            ids.append(int(logits.argmax()))
            theirs.eval(ids[-1:])
        with torch.no_grad():
            ours = first.model(torch.tensor([ids[:-1]]))[0, -1].numpy()
        assert np.abs(logits - ours).max() < 1e-3
        decoder = tokenizer.decoder()
        written = decoder.feed_all(ids[-200:]) + decoder.end()
        assert written == generate(first, text, 200, temperature=0)


def test_smaller_types_round_the_matrices(tmp_path):
    for type, error in zip(GGUF_TYPES, (0, 2**-11, 1 / 127)):
        again = load(export(model(), "gguf", tmp_path / f"{type}.gguf", type))
        for name, w in model().weights.items():
            most = error * np.abs(w).max() if w.ndim == 2 and "wpe" not in name else 0
            assert np.abs(again.weights[name] - w).max() <= most, (type, name)


def test_nanogpt_resumes_with_the_files(tmp_path):
    out, ours = export(PRESENT[0], "nanogpt", tmp_path / "a b"), load(PRESENT[0]).model
    held = torch.load(out / "ckpt.pt")
    assert (held["iter_num"], held["best_val_loss"]) == (RECORD["best_step"], RECORD["val_loss"])
    assert held["model"].keys() == ours.state_dict().keys() and held["model_args"]["bias"] is False
    groups = [[p for p in ours.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4)
    optimizer.load_state_dict(held["optimizer"])  # raises ValueError where the groups' sizes differ
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    meta = pickle.loads((out / "data" / held["config"]["dataset"] / "meta.pkl").read_bytes())
    assert meta["vocab_size"] == 65 and all(meta["stoi"][meta["itos"][i]] == i for i in range(65))


def test_what_cannot_be_written_or_read_is_named(cli, tmp_path, monkeypatch):
    for to, change, said in (
        ("gguf", dict(n_embd=16), "type is 'q8_0', but n_embd is 16; it must be a multiple of 32"),
        ("nanogpt", dict(tanh_gelu=True), "has a GELU by tanh, which nanoGPT lacks"),
        ("nanogpt", dict(untied_head=True), "has a head of its own, which nanoGPT lacks"),
        ("gguf", dict(eos_token_id=(1, 2, 3, 4)), "eos_token_id has 4 tokens; a GGUF file has 3"),
        ("onnx", dict(), "to is 'onnx'; it must be one of hf, gguf, nanogpt"),
    ):
        with pytest.raises(ValueError, match=said):
            export(model(**change), to, tmp_path / "a", "q8_0")
            assert not any(tmp_path.iterdir())
    data, file = export(model(), "gguf", tmp_path / "a.gguf").read_bytes(), tmp_path / "b.gguf"
    length = data.index(types := b"tokenizer.ggml.token_type") + len(types) + 8  # where that array's is
    endless = data[:length] + b"\xff" * 7 + data[length + 7 :]
    cut = (data[: len(data) * i // 20] for i in range(20))
    for damaged in (data.replace(b"gpt2", b"gptx", 1), endless, *cut):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"b\.gguf is no GGUF file of a GPT-2"):
            load(file)
    at = data.index(name := b"output_norm.weight") + len(name) + 12  # after the number of sizes, and the one
    for kind, called in ((26, "I32"), (28, "F64")):
        file.write_bytes(data[:at] + kind.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(CheckpointError, match=f"is of type {called}|b\\.gguf is no GGUF file of a GPT-2"):
            load(file)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_sync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            export(model(), "gguf", tmp_path / "c.gguf", "q8_0")
    assert {*tmp_path.iterdir()} == {tmp_path / "a.gguf", file}
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="needs gguf: pip install gguf"):
        load(file)
    lacking = cli("export", "-m", PRESENT[0], "--to", "gguf", "--out", tmp_path / "c.gguf", code=2)
    assert lacking.stderr == "gpt.py: error: this command needs gguf: pip install gguf\n"
