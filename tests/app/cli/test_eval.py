"""The commands prepare, train and eval."""

from __future__ import annotations

from attention_ext import PARTS
from model import corpus

TEXT = "First Citizen:\nWe are accounted poor citizens.\n" * 60


def test_prepare_counts(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "data" / "input.txt")
    (tmp_path / "text.txt").write_text(TEXT)
    done = cli("prepare", "--corpus", "text.txt")
    assert done.returncode == 0, done.stderr
    assert "not Tiny Shakespeare" in done.stdout
    assert f"length of dataset in characters: {len(TEXT):,}" in done.stdout
    assert f"vocabulary: {len(set(TEXT))} characters" in done.stdout
    assert (tmp_path / "data" / "input.txt").read_text() == TEXT
    assert cli("eval").returncode == 0  # it finds the file that prepare saved


def test_without_a_corpus_train_and_eval_say_how_to_get_one(failed, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "input.txt")
    for command in (["eval"], ["train", "shakes128"]):
        assert "give --corpus FILE or run `gpt.py prepare`" in failed(*command)


def test_a_failed_download_says_what_to_do(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "URL", "http://localhost:1/input.txt")
    monkeypatch.setattr(corpus, "INPUT", tmp_path / "input.txt")
    done = cli("prepare")
    assert done.returncode == 2
    assert "could not be downloaded (ConnectionError); --corpus takes a file" in done.stderr.splitlines()[-1]


def test_eval_is_the_same_through_every_part(cli, extension, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    losses = {cli("eval", "--corpus", "text.txt", "--part", part).stdout for part in PARTS}
    assert len(losses) == 1 and "nats" in losses.pop()
