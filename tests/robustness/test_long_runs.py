"""Memory does not grow with texts of millions of characters or models loaded a thousand times."""

import os
import sys
from pathlib import Path

import pytest
import tiny
from support import printed, resident

from shakespeare.model.checkpoint import save

# Numbers of texts and the characters of each: in full, ten million by either engine; else what takes seconds.
# The torch engine would take hours for one such text, and so would a window that slides.
LENGTHS = {
    ("native", "reset"): ((1, 10_000_000), (1, 200_000)),
    ("native", "slide"): ((1, 500_000), (1, 20_000)),
    ("torch", "reset"): ((3_200, 3_125), (64, 500)),
}
SEPARATOR = "---------------\n"
CYCLES = (1_000, 50)
# Bytes. Allocators take 2 MiB at a time now and then. The model of one cycle, shakes128, takes 3.2 MB.
GROWTH = 3 << 20

pytestmark = [pytest.mark.full, pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")]


@pytest.fixture
def model(tmp_path) -> Path:
    save(tmp_path / "tiny", tiny.gpt(block_size=64), tiny.VOCABULARY, {})
    return tmp_path / "tiny"


@pytest.mark.parametrize("engine, context", LENGTHS)
def test_a_long_text_takes_the_memory_of_its_first_tenth(process, extension, model, full, engine, context):
    texts, length = LENGTHS[engine, context][0 if full else 1]
    options = ("-m", model, "--engine", engine, "--context", context, "--threads", 1)
    amounts = ("--num-samples", texts, "--max-new-tokens", length)
    running = process("part4", "--inference", *options, *amounts)
    written, sizes = 0, []
    while chunk := os.read(running.stdout.fileno(), 1 << 16):
        written += len(chunk)
        if written >= texts * length // 10:
            sizes.append(resident(running.pid))
    assert running.wait() == 0
    assert written == texts * (length + 1) + (texts - 1) * len(SEPARATOR)  # with the newlines
    assert sizes[0] > 20 << 20 and max(sizes) <= 1.05 * sizes[0]


LOAD_AND_FREE = """
import os, sys
from shakespeare import generate, load

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

name, engine, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3])
for cycle in range(cycles + 1):
    if cycle == cycles // 5:
        early = resident()
    text = generate(load(name), "a", 5, engine=engine)
print(early, resident(), len(text))
"""


@pytest.mark.parametrize("name", ["tiny", "shakes128"])
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_loading_writing_and_freeing_again_and_again_leaves_nothing(extension, model, full, engine, name):
    cycles = CYCLES[0 if full else 1]
    arguments = [str(model) if name == "tiny" else name, engine, str(cycles)]
    threads = "2" if engine == "native" else "1"
    said = printed(sys.executable, "-c", LOAD_AND_FREE, *arguments, OMP_NUM_THREADS=threads)
    early, late, length = map(int, said.split())
    assert length == 5
    assert late - early < GROWTH
