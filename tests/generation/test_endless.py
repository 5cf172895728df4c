"""A model without an end: its logits, texts and loss in every part and engine, at any length."""

import numpy as np
import pytest
import tiny
import torch
from steps import forced, logits, prefill, write
from support import full
from torch.nn import functional as F

from shakespeare.attention_ext.parts import PARTS
from shakespeare.generation import draft_maker as drafts
from shakespeare.generation.engines.engine import Unfit
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.writer import Writer
from shakespeare.lab.eval import native_loss
from shakespeare.model.checkpoint import Checkpoint, load, save
from shakespeare.model.export import FORMATS, export
from shakespeare.model.loss import evaluate

pytestmark = pytest.mark.usefixtures("extension")
NATIVE = [(part, "native") for part, row in PARTS.items() if row.operator]
IDS = np.random.default_rng(0).integers(len(tiny.CHARACTERS), size=300).tolist()


def model(window: int, **change) -> Checkpoint:
    return tiny.checkpoint(positions="alibi", window=window, bias=False, **change)


@torch.no_grad()
def right(of: Checkpoint) -> torch.Tensor:
    """The logits after each of IDS, (N, V), by one pass over all of them."""
    return of.model(torch.tensor([IDS]))[0]


def guessers(of: Checkpoint) -> list:
    """No draft, one that hits often, and one that seldom does."""
    text = drafts.own_text(of, 400)
    return ["off", drafts.make(of, text), drafts.make(of, text[::-1])]


@pytest.mark.parametrize("part, name", [("part0", "torch"), ("part4", "torch"), *NATIVE])
@pytest.mark.parametrize("window, kv_cache", [(1, "fp32"), (7, "fp32"), (33, "fp32"), (33, "bf16")])
def test_the_logits_after_any_number_of_tokens(part, name, window, kv_cache):
    of = model(window)
    wanted, engine = right(of), open_engine(of, name, part=part, bc=16, kv_cache=kv_cache)
    allowed = dict(rtol=0, atol=2e-4 if kv_cache == "fp32" else 0.3)
    reach = of.config.reach
    for length in {1, *range(max(1, window - 1), window + 2), reach, reach + 1, 2 * window + 3}:
        prefill(engine, 0, IDS[:length])
        torch.testing.assert_close(logits(engine), wanted[length - 1], **allowed)
        for at, found in enumerate(forced(engine, 0, IDS[length : length + 3]), length - 1):
            torch.testing.assert_close(found, wanted[at], **allowed)
    prefill(engine, 0, IDS[:3])
    for at, found in enumerate(forced(engine, 0, IDS[3:]), 2):
        torch.testing.assert_close(found, wanted[at], **allowed)


@pytest.mark.parametrize("simd", ["portable", full("off")])
@pytest.mark.parametrize("part", [part for part, _ in NATIVE])
def test_texts_with_drafts_without_a_cache_and_among_others(part, simd):
    of = model(20)
    requests = [Request(IDS[: 9 * n], seed=n, max_new_tokens=200) for n in (1, 3, 8)]
    alone = [write(Writer(open_engine(of, part=part)), request).popitem()[1] for request in requests]
    ways = [dict(draft=draft) for draft in guessers(of)]
    for way in (*ways, dict(simd=simd), dict(engine="torch")):
        together = write(Writer(open_engine(of, part=part, slots=3, **way)), *requests)
        assert list(together.values()) == alone, way
    again = Request(IDS[:9], seed=1, max_new_tokens=200, use_cache=False)
    assert write(Writer(open_engine(of, part=part)), again).popitem()[1] == alone[0]


def test_a_drafted_text_has_the_same_bits(threads):
    threads(1)
    of, found = model(20), []
    for draft in guessers(of):
        engine = open_engine(of, draft=draft, bc=16)
        (tokens,) = write(Writer(engine), Request([0], max_new_tokens=300)).values()
        found.append((tokens, engine.logits(0)))
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize("window", [5, 40])
def test_the_loss_is_that_of_the_whole_text(window):
    of = model(window)
    loss = F.cross_entropy(right(of)[:-1], torch.tensor(IDS[1:])).item()
    assert evaluate(of.model, torch.tensor(IDS), batch_chars=64) == pytest.approx(loss, rel=1e-5)
    assert native_loss(open_engine(of), IDS) == pytest.approx(loss, rel=1e-5)


def test_the_loss_of_windows_apart_is_that_of_each_alone():
    of = model(20)
    parts = [IDS[start : start + 65] for start in range(0, len(IDS) - 1, 64)]
    with torch.no_grad():
        logits = torch.cat([of.model(torch.tensor([part[:-1]]))[0] for part in parts])
    loss = F.cross_entropy(logits, torch.tensor(IDS[1:])).item()
    assert evaluate(of.model, torch.tensor(IDS), apart=64) == pytest.approx(loss, rel=1e-5)
    assert native_loss(open_engine(of), IDS, apart=64) == pytest.approx(loss, rel=1e-5)


def test_it_is_saved_and_loaded_and_other_programs_do_not_take_it(tmp_path):
    of = model(5)
    save(tmp_path / "endless", of.model, tiny.VOCABULARY, {})
    again = load(tmp_path / "endless")
    assert again.config == of.config
    config = tmp_path / "endless" / "config.json"
    written = config.read_text()
    config.write_text(written.replace('"alibi_window": 5', '"alibi_window": 256'))  # of an earlier version
    with pytest.raises(ValueError, match="alibi_window is 256; it must be window=5: train the model again"):
        load(tmp_path / "endless")
    config.write_text(written)
    torch.testing.assert_close(right(again), right(of), rtol=0, atol=0)
    for to in FORMATS:
        with pytest.raises(ValueError, match="positions 'alibi'; it must be 'table'"):
            export(again, to, tmp_path / to)
    with pytest.raises(Unfit, match="webgpu engine takes no model with window"):
        open_engine(again, "webgpu", device="webgpu")
