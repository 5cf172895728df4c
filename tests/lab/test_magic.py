"""lab.magic: cells of a notebook that run commands and try kernels."""

import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from shakespeare.lab import magic

pytest.importorskip("IPython", reason="pip install ipykernel")


@pytest.fixture
def magics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = Mock()
    magic.load_ipython_extension(shell)
    calls = shell.register_magic_function.call_args_list
    found = {(kind, function.__name__): function for function, kind in (call.args for call in calls)}
    assert set(found) == {("line", "gpt"), ("cell", "attention")}
    return found


def test_a_cell_is_saved_and_tried(magics, capsys):
    cell = "def attention(q, k, v, causal, scale):\n    return 0 * q\n"
    magics["cell", "attention"]("mine.py --seconds 5", cell)
    assert Path("mine.py").read_text() == cell
    out = capsys.readouterr().out
    assert out.startswith("mine.py is wrong\nfirst at    1 head of N = 1")


@pytest.mark.parametrize("line", ["", "mine.txt", "--causal mine.cpp"])
def test_a_cell_without_a_kernels_name_is_refused(magics, line):
    from IPython.core.error import UsageError

    with pytest.raises(UsageError, match="must end with .cpp"):
        magics["cell", "attention"](line, "text")
    assert not list(Path().iterdir())


def test_a_commands_output_and_error_are_printed(magics, capsys):
    magics["line", "gpt"]("--version")
    magics["line", "gpt"]("part9")
    out = capsys.readouterr().out
    assert out.startswith("shakespeare-attention ") and "gpt.py: error: " in out


def test_an_interrupt_ends_the_command(magics):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # other tests may have changed it
    timer = threading.Timer(3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            magics["cell", "attention"]("mine.py --seconds 3600", "def attention(*_):\n    while True: ...\n")
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 600  # of 3600
