"""Truncated and changed files: an error that names the file or a warning, never silent garbage."""

import collections
import itertools
import json
import os
import random
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import tiny
import torch
from support import copy_tree, finished, printed
from tiny import VOCABULARY, nanogpt_file

from shakespeare.model import checkpoint
from shakespeare.model.checkpoint import CheckpointError, load, save
from shakespeare.model.tokenizer import VocabularyError

pytestmark = pytest.mark.full

REFUSED = (CheckpointError, VocabularyError)
TOUCH = b"X\x0e\x00\x00\x00touch executed"
# Pickles that run a command, one for each opcode that can call something.
PICKLES = {
    "GLOBAL": b"cos\nsystem\n" + TOUCH + b"\x85R.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + TOUCH + b"\x85R.",
    "INST": b"(" + TOUCH + b"ios\nsystem\n.",
    "OBJ": b"(cos\nsystem\n" + TOUCH + b"o.",
    "NEWOBJ": b"\x80\x02cos\nsystem\n" + TOUCH + b"\x85\x81.",
    "PERSID": b"Pos.system\n.",
    "getattr": b"cbuiltins\ngetattr\ncos\nsystem\n\x85R.",
    "newline": b"\x80\x04\x8c\x0aos\n\x1b[31mrm\x8c\x06system\x93.",
}


def truncated(whole: bytes, count: int, rng: random.Random):
    """`count` beginnings of a file, among them the empty one and the one that lacks the last byte."""
    yield from (whole[:0], whole[:-1])
    for _ in range(count - 2):
        yield whole[: rng.randrange(len(whole))]


def changed(whole: bytes, count: int, rng: random.Random):
    """`count` copies with one byte changed, to any value or to one of the same kind, which looks right."""
    kinds = [b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b' ,:"[]{}.-\\', bytes(range(256))]
    for number in range(count):
        at = rng.randrange(len(whole) if number % 2 else min(len(whole), 4000))  # headers come first
        alike = kinds[-1] if number % 3 == 0 else next(kind for kind in kinds if whole[at] in kind)
        other = rng.choice([c for c in alike if c != whole[at]])
        yield whole[:at] + bytes([other]) + whole[at + 1 :]


@pytest.fixture
def damaged(full):
    """Damage a file's contents: 100 truncated and 200 changed copies in full, else a tenth of them."""

    def contents(whole: bytes):
        rng = random.Random(7)
        share = 1 if full else 10
        return itertools.chain(truncated(whole, 100 // share, rng), changed(whole, 200 // share, rng))

    return contents


def outcome(path: Path) -> str:
    """The outcome of a load: 'fine', 'warned' or 'refused'. Other exceptions are raised."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            load(str(path))
        except REFUSED as error:
            assert str(path) in str(error)
            return "refused"
    return "warned" if said else "fine"


@pytest.mark.parametrize("file", [*checkpoint.SUMMED, checkpoint.DRAFT])
@pytest.mark.parametrize("name", checkpoint.SHIPPED)
def test_a_damaged_checkpoint_is_refused_or_warned_of(tmp_path, damaged, name, file):
    directory = copy_tree(checkpoint.shipped(name), tmp_path / name)
    assert outcome(directory) == "fine"
    whole = (directory / file).read_bytes()
    outcomes: collections.Counter = collections.Counter()
    for content in damaged(whole):
        (directory / file).write_bytes(content)
        outcomes[outcome(directory)] += 1
    assert set(outcomes) == ({"warned"} if file == checkpoint.DRAFT else {"refused", "warned"})


@pytest.mark.filterwarnings("always")
def test_the_command_line_warns_in_one_line_and_writes(cli, tmp_path):
    """A model with half as many heads is well-formed, and writes nonsense."""
    save(tmp_path / "tiny", tiny.gpt(), VOCABULARY, {})
    common = ("part0", "--inference", "-m", "tiny", "--max-new-tokens", 5, "--num-samples", 1)
    assert "warning" not in cli(*common).stderr
    config = tmp_path / "tiny" / "config.json"
    config.write_text(config.read_text().replace('"n_head": 2', '"n_head": 1'))
    done = cli(*common)
    assert len(done.stdout) == 6
    message = "gpt.py: warning: tiny: config.json does not match SHA256SUMS; the text may be garbage"
    assert done.stderr.splitlines()[0] == message


TERA = """
import json, resource, sys
from pathlib import Path
from shakespeare.model.checkpoint import CheckpointError, load

path, sizes = Path(sys.argv[1]), json.loads(sys.argv[2])
config = json.loads((path / "config.json").read_text())
load(str(path))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for size in sizes:
    (path / "config.json").write_text(json.dumps(config | size))
    try:
        load(str(path))
    except CheckpointError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_trillion_parameters_are_refused_before_anything_is_allocated(tmp_path):
    save(tmp_path / "tiny", tiny.gpt(), VOCABULARY, {})
    sizes = [
        {"n_embd": 10**6, "n_head": 1},
        {"vocab_size": 10**12 // 16},
        {"block_size": 10**12 // 16},
        {"n_layer": 10**12 // 3072},
        {"n_embd": 10**5, "vocab_size": 10**7, "n_layer": 2},
    ]
    said = printed(sys.executable, "-c", TERA, tmp_path / "tiny", json.dumps(sizes))
    *errors, kibibytes = said.splitlines()
    assert len(errors) == len(sizes) and all("it must be" in e or "but there are" in e for e in errors)
    assert int(kibibytes) < 8 << 10


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_damaged_nanogpt_checkpoint_is_refused(tmp_path, damaged, zipped):
    """Or a warning is given, unless nothing reads the changed bytes. The legacy format has no checksums."""
    path = tmp_path / "ckpt.pt"
    nanogpt_file(path)
    VOCABULARY.write_meta_json(tmp_path / "meta.json")
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=zipped)
    assert outcome(path) == "fine"
    whole = path.read_bytes()
    outcomes = [outcome(path) for content in damaged(whole) if path.write_bytes(content)]
    assert outcomes.count("refused") > len(outcomes) // 3
    if zipped:
        path.write_bytes(whole)
        with zipfile.ZipFile(path) as archive:
            contents = [archive.read(name) for name in archive.namelist()]
        for content in filter(None, contents):
            at = whole.index(content) + len(content) // 2
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert outcome(path) in ("refused", "warned")


def test_a_checkpoint_that_would_unpack_to_any_size_is_not_unpacked(tmp_path):
    """A tensor of 300 MB in a file of 300 KB; the process gets 200 MB more than it has."""
    path = tmp_path / "ckpt.pt"
    nanogpt_file(path, extra=torch.zeros(75 << 20))
    with (
        zipfile.ZipFile(path) as stored,
        zipfile.ZipFile(tmp_path / "small", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in stored.namelist():
            small.writestr(name, stored.read(name))
    os.replace(tmp_path / "small", path)
    code = """
import resource, sys
import torch
from shakespeare.model.checkpoint import CheckpointError, load
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, [pages * resource.getpagesize() + (200 << 20)] * 2)
try:
    load(sys.argv[1])
except CheckpointError as error:
    print(error)
"""
    assert "is refused: its files are compressed" in finished(sys.executable, "-c", code, path)[1]


@pytest.mark.parametrize("form", PICKLES)
def test_no_vocabulary_runs_a_command(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    nanogpt_file(tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(PICKLES[form])
    with pytest.raises(VocabularyError, match="meta.pkl") as error:
        load("ckpt.pt")
    assert str(error.value).isprintable()
    assert not (tmp_path / "executed").exists()
