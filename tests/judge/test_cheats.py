"""gpt.py try: the kernels of tests/cheats, which deceive who measures them, are found or gain nothing."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from support import ROOT, start_python

from shakespeare.attention_ext.build import cache
from shakespeare.judge import speed

CHEATS = sorted(file for file in (ROOT / "tests" / "cheats").iterdir() if file.suffix in (".cpp", ".py"))
DEFAULT = {("replay.py", 2), ("forge.py", 0)}
TWINS = {
    ".cpp": '#include "right.h"\nvoid attention(const Attention& a, float*) { right(a, a.out); }\n',
    ".py": "from right import right as attention\n",
}
WHOLE = ("forge", "parent", "leftover", "clock")  # what attacks try itself; the others are tried in brief
BRIEFLY = """
import json, sys
from pathlib import Path
from shakespeare.judge import speed, verdict
file, checker = Path(sys.argv[1]), verdict.Checker()
verdict = checker.check(file, 600)
timed = verdict.right and not verdict.library
figures = speed.measure(file, speed.Size(256, alone=True)) if timed else None
checker.close()
found = {"right": verdict.right, "finding": verdict.finding and vars(verdict.finding)}
found["library"] = verdict.library or getattr(figures, "library", "")
print(json.dumps(found | {"speed": figures and vars(figures)}))
"""
GAIN = 4  # times as fast as its twin is a gain, also on a busy machine
TRIES = 3  # of the twin, whose time a neighbour may have made several times as long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the cheats use Linux")


def rows() -> list:
    """(file, way, kind) of each cheat: a file has several ways, and names what must be found in each."""
    found = []
    for file in CHEATS:
        kinds = re.search(r"^(?:#|//) found: (.*)$", file.read_text(), re.M)
        for way, kind in enumerate(kinds[1].split() if kinds else ()):
            marks = () if (file.name, way) in DEFAULT else pytest.mark.full
            found.append(pytest.param(file, way, kind, marks=marks, id=f"{file.name}-{way}-{kind}"))
    return found


def text(file: Path, way: int) -> str:
    """A cheat's source with one of its ways: a part of the file, or a number in it."""
    head, *ways = re.split(r"^(?=(?:#|//) way \d)", file.read_text(), flags=re.M)
    return head + ways[way] if ways else re.sub(r"\bWAY( =)? 0$", rf"WAY\1 {way}", head, flags=re.M)


def left(marker: str) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if f"CHEAT={marker}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


@pytest.fixture
def tried(process, tmp_path):
    """Try a source in processes of its own: it may kill them. No process may be left."""
    for helper in ("right.h", "right.py"):
        shutil.copy(ROOT / "tests" / "cheats" / helper, tmp_path)

    def run(name: str, source: str, whole: bool) -> dict:
        (tmp_path / name).write_text(source)
        if whole:
            running = process("try", name, "-N", 256, "--json", CHEAT=str(tmp_path))
        else:
            running = start_python(cache.directory(), "-c", BRIEFLY, tmp_path / name, CHEAT=str(tmp_path))
        with running:
            out, said = running.communicate()
        assert out.count("\n") == 1, out + said
        return json.loads(out) | {"code": running.returncode}

    yield run
    others = left(str(tmp_path))
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    Path("/dev/shm/attention-cheat").unlink(missing_ok=True)
    assert not others


@pytest.mark.parametrize("file, way, kind", rows())
def test_a_cheat_is_found(tried, tmp_path, extension, file, way, kind):
    whole = file.stem in WHOLE
    found = tried(f"mine{file.suffix}", text(file, way), whole)
    figures = found.get("speed") or {}
    said = {(found["finding"] or {}).get("kind"), figures.get("kind")}
    if kind == "library":
        assert found["right"] and "not a kernel of its own" in found["library"], found
    elif "none" in kind.split("|") and not said & {*kind.split("|")}:
        twin = tmp_path / f"twin{file.suffix}"
        twin.write_text(TWINS[file.suffix])
        assert found["right"] and figures.get("kind") in (None, "untimed", "threads"), found
        ms = figures.get("ms", {}).get("own", math.inf)
        # A busy machine makes the twin slower, never faster.
        twins = (speed.measure(twin, speed.Size(256, alone=True)).ms["own"] for _ in range(TRIES))
        assert any(ms > honest / GAIN for honest in twins), found
    else:
        assert found["code"] == whole and said & {*kind.split("|")}, found
