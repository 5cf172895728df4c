"""A checkpoint that Python refuses, the page refuses too, with a sentence."""

import contextlib
import json
import random
import re
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import tiny
import torch
from node_process import Refused
from tiny import VOCABULARY

from shakespeare.model.checkpoint import SUMS, CheckpointError, load, save
from shakespeare.model.tokenizer import VocabularyError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save(tmp_path / "tiny", tiny.gpt(), VOCABULARY, {})
    (tmp_path / "tiny" / SUMS).unlink()
    return tmp_path / "tiny"


def refused_by_python(directory: Path) -> bool:
    with warnings.catch_warnings(), contextlib.suppress(CheckpointError, VocabularyError):
        warnings.simplefilter("ignore")
        load(str(directory))
        return False
    return True


def outcome(node, directory: Path) -> str:
    """What the page says: 'fine' or a sentence. Another kind of error is raised."""
    try:
        return node("check", directory=str(directory))
    except Refused as error:
        if error.kind not in ("Problem", "SyntaxError"):  # the latter is the test's JSON.parse's
            raise
        return str(error)


def test_damaged_weights_are_refused_where_python_refuses_them(node, directory):
    """Truncated, or with one byte changed; most changes are in the header."""
    file, rng = directory / "model.safetensors", random.Random(5)
    whole, agreed = file.read_bytes(), 0
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = [whole[:n] for n in (0, 7, 8, header - 1, header, len(whole) - 1)] + [whole + b"x"]
    damaged.append((2**62).to_bytes(8, "little") + whole[8:])
    for _ in range(150):
        at = rng.randrange(header)
        damaged.append(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
    for content in damaged:
        file.write_bytes(content)
        said = outcome(node, directory)
        assert (said != "fine") == refused_by_python(directory), (said, content[:300])
        agreed += said != "fine"
    assert agreed > len(damaged) // 3


NAME = "transformer.ln_f.bias"


def test_a_header_is_read_as_in_python(node, directory):
    file = directory / "model.safetensors"
    whole = safetensors.torch.save(safetensors.torch.load_file(file))
    end = 8 + int.from_bytes(whole[:8], "little")
    header = whole[8:end].decode().rstrip()
    for changed, fine in (
        (header.replace('"dtype":"F32"', '"dtype":"toString"', 1), False),
        (re.sub(r'"shape":\[(\d+)', r'"shape":[\1.5', header, count=1), False),
        ("\ufeff" + header, False),
        ('{"__metadata__":[],' + header[1:], False),
        ('{"__metadata__":null,' + header[1:], True),
    ):
        file.write_bytes(len(changed.encode()).to_bytes(8, "little") + changed.encode() + whole[end:])
        said = outcome(node, directory)
        assert (said == "fine") == fine != refused_by_python(directory), (said, changed[:80])


def test_a_vocabulary_that_the_page_cannot_count_is_refused(node, directory):
    characters = [*VOCABULARY.characters[:-1], "\U0001f600"]
    (directory / "meta.json").write_text(json.dumps({"characters": characters}))
    assert not refused_by_python(directory)
    assert "\U0001f600; the page takes characters up to U+FFFF only" in outcome(node, directory)


def test_what_other_programs_write_is_read_as_in_python(node, directory):
    file, config = directory / "model.safetensors", directory / "config.json"
    weights, sizes = safetensors.torch.load_file(file), json.loads(config.read_text())
    wte = weights["transformer.wte.weight"]
    rest = {name: w for name, w in weights.items() if w is not wte}
    for tensors, change, fine in (
        ({f"module._orig_mod.{name}": w for name, w in weights.items()}, {"rope": False}, True),
        ({f"net.{name}".replace(".h.0.", ".h.0._orig_mod."): w for name, w in weights.items()}, {}, True),
        (rest | {"lm_head.weight": wte}, {}, True),
        (rest | {"transformer.wte.weight": torch.cat([wte, wte])}, {"vocab_size": 22}, True),
        (weights | {f"module.{NAME}": weights[NAME]}, {}, False),
        (weights, {"rope": True}, False),
        (weights | {NAME: torch.full_like(weights[NAME], torch.nan)}, {}, False),
        ({name: w for name, w in weights.items() if not name.endswith(".bias")}, {"bias": None}, True),
    ):
        safetensors.torch.save_file({name: w.clone() for name, w in tensors.items()}, file)
        config.write_text(json.dumps(sizes | change))
        said = outcome(node, directory)
        assert (said == "fine") == fine != refused_by_python(directory), (said, change)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_floats_are_widened(node, directory, dtype, wasm):
    """Browsers have Float16Array, which test_page.py tries; node has it from 24 on."""
    file = directory / "model.safetensors"
    weights = {name: w.to(dtype) for name, w in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(weights, file)
    node.load(directory=str(directory))
    first = node("text", prompt="abc", length=30)
    safetensors.torch.save_file({name: w.float() for name, w in weights.items()}, file)
    node.load(directory=str(directory))
    assert node("text", prompt="abc", length=30) == first


def test_a_wrong_configuration_is_refused(node, directory):
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for change, message in (
        ({"n_embd": 10**6, "n_head": 1}, "too large"),
        ({"block_size": 0}, "block_size is 0; it must be a whole number of at least 1"),
        ({"n_head": 3}, "it must be a multiple of n_head=3"),
        ({"n_layer": 10**12}, "it must be a whole number of at least 1 and at most 4096"),
        ({"n_layer": 4000}, "but there are"),
        ({"positions": "alibi", "window": 2**20 + 1}, "window is 1048577; it must be a whole number"),
        ({"positions": "alibi", "window": 8, "block_size": 1e30}, "block_size is 1e+30; it must be a whole"),
        ({"bias": "yes"}, "it must be true or false"),
        ({"positions": "rope"}, 'positions is "rope"; it must be "table" or "alibi"'),
        ({"positions": "alibi", "window": True}, "window is true; it must be a whole number of at least 1"),
        (
            {"positions": "alibi", "window": 5},
            "alibi_window is 256; it must be window=5: train the model again",
        ),
        (
            {"positions": "alibi", "window": 5, "alibi_window": 5},
            "1 tensors are unexpected, the first is transformer.wpe",
        ),
        ({"eos_token_id": [1, "2"]}, 'eos_token_id is [1,"2"]; it must be a whole number, or several'),
        ({"window": 5}, 'window is 5; it must be null with positions "table"'),
    ):
        file.write_text(json.dumps(config | change))
        assert message in outcome(node, directory) and refused_by_python(directory)


@pytest.mark.full
def test_a_prompt_with_unknown_characters_is_refused(node, directory, wasm):
    node.load(directory=str(directory))
    with pytest.raises(Refused, match='does not know 2 of the text\'s characters: "X" "Y"'):
        node("text", prompt="abcXY", length=3)
