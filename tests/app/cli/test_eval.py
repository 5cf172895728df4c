"""The commands prepare, train and eval, and the loss on held-out text."""

import pickle
import shutil
import sys

import numpy as np
import pytest
from support import ROOT, naming, printed

from shakespeare.attention_ext import PARTS
from shakespeare.attention_ext.parts import CachePrecision, Precision
from shakespeare.lab.eval import held_out_loss
from shakespeare.model import corpus
from shakespeare.model.tokenizer import CharTokenizer

TEXT = "First Citizen:\nWe are accounted poor citizens.\n" * 60


def test_prepare_writes_what_nanogpt_reads(cli, failed, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "data" / "input.txt")
    (tmp_path / "text.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    done = cli("prepare", "--corpus", "text.txt")
    assert "not Tiny Shakespeare" in done.stdout
    assert f"length of dataset in characters: {len(TEXT):,}" in done.stdout
    assert f"vocabulary: {len(set(TEXT))} characters" in done.stdout
    cli("eval")  # it finds the file that prepare saved
    # The script is the same command, from any folder, and writes beside itself.
    script = tmp_path / "nanoGPT" / "data" / "shakespeare_char" / "prepare.py"
    shutil.copytree(ROOT / "data", script.parents[1])
    printed(sys.executable, script, "--corpus", "text.txt", cwd=tmp_path, PYTHONPATH=str(ROOT))
    characters, cut = sorted(set(TEXT)), int(len(TEXT) * 0.9)
    stoi = {c: i for i, c in enumerate(characters)}
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": stoi}
    for folder in (tmp_path / "data", script.parent):
        assert (folder / "input.txt").read_bytes() == TEXT.encode()
        for name, part in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
            assert np.fromfile(folder / f"{name}.bin", np.uint16).tolist() == [stoi[c] for c in part]
        assert pickle.loads((folder / "meta.pkl").read_bytes()) == meta
        assert CharTokenizer.from_meta_json(folder / "meta.json").characters == characters
    (tmp_path / "many.txt").write_text("".join(map(chr, range(0x10000, 0x20001))))
    assert "has 65537 different characters; it must" in failed("prepare", "--corpus", "many.txt")


def test_a_byte_order_mark_and_other_line_ends_change_nothing(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "data" / "input.txt")
    (tmp_path / "text.txt").write_text(TEXT)
    commands = (("eval", "--part", "part0"), ("prepare",))
    expected = [cli(*command, "--corpus", "text.txt").stdout for command in commands]
    for end in ("\r\n", "\r"):
        text = "\ufeff" + TEXT.replace("\n", end)
        (tmp_path / "text.txt").write_bytes((text[:500] + "\ufeff" + text[500:]).encode())  # of joined files
        assert [cli(*command, "--corpus", "text.txt").stdout for command in commands] == expected


def test_a_missing_corpus_and_a_failed_download_say_what_to_do(cli, failed, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "input.txt")
    for command in (["eval"], ["train", "shakes128"]):
        assert "give --corpus FILE or run `gpt.py prepare`" in failed(*command)
    monkeypatch.setattr("shakespeare.app.cli.prepare.URL", "http://localhost:1/input.txt")
    done = cli("prepare", code=2)
    assert "could not be downloaded (ConnectionError); --corpus takes a file" in done.stderr.splitlines()[-1]


def test_a_short_text_is_named_and_another_has_the_same_loss_in_every_part(failed, cli, extension, tmp_path):
    for part in ("part0", "part4"):
        for text, said in (("a", "1 character"), (10 * "a", "10 characters")):
            (tmp_path / "text.txt").write_text(text)
            assert f"text has {said}; its last 10 %" in failed("eval", "--corpus", "text.txt", "--part", part)
        (tmp_path / "text.txt").write_text(11 * "a")  # shorter than a block
        cli("eval", "--corpus", "text.txt", "--part", part)
    (tmp_path / "text.txt").write_text(TEXT)
    losses = {cli("eval", "--corpus", "text.txt", "--part", part).stdout for part in PARTS}
    assert len(losses) == 1 and "nats" in losses.pop()


def test_a_wrong_argument_is_named():
    for name, kinds in (("weights", Precision), ("kv_cache", CachePrecision)):
        message = f"{name} is 'int4'; it must be one of {', '.join(kinds)}"
        with naming(name), pytest.raises(ValueError, match=message):
            held_out_loss("shakes128", TEXT, **{name: "int4"})
    for change, said in (({"apart": 0}, "apart is 0"), ({"between": (0.9, 0.9)}, r"between is \(0.9, 0.9\)")):
        with pytest.raises(ValueError, match=said):
            held_out_loss("shakes128", TEXT, **change)


def test_rounding_changes_the_loss_a_little(extension):
    for part in ("part0", "part4"):
        exact = held_out_loss("shakes128", TEXT, part).nats
        for change in ({"weights": "bf16"}, {"weights": "int8"}, {"kv_cache": "bf16"}):
            with naming(part, change):
                rounded = held_out_loss("shakes128", TEXT, part, **change).nats
                assert exact != rounded and exact == pytest.approx(rounded, abs=0.01)
