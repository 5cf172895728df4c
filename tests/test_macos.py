"""The commands in a process that hides what macOS lacks. Linux cannot run macOS's own programs."""

import sys

import pytest
from support import finished

from shakespeare.attention_ext import processor

pytestmark = pytest.mark.full

# Hides files of Linux, its names in os, and functions of its C library. The processor's features are given:
# they come from such a file, and decide which build is taken.
RUN = """
import ctypes, os, sys

def hide(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "hidden", arguments[0])

for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise", "O_TMPFILE"):
    if hasattr(os, name):
        delattr(os, name)
sys.modules.pop("tempfile", None)  # it remembers O_TMPFILE; numba-cuda imports it when Python starts

def function(library, name, original=ctypes.CDLL.__getattr__):
    if name in ("mallopt", "malloc_trim"):
        raise AttributeError(name)
    return original(library, name)

ctypes.CDLL.__getattr__ = function
sys.addaudithook(hide)
sys.path.insert(0, os.getcwd())

from shakespeare.attention_ext import processor
processor.capabilities = lambda given=sys.argv.pop(1): given
from shakespeare.app.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command, shown",
    [
        ("part4 -N 64 -br 16 -bc 16", "manual attention == pytorch attention True"),
        ("part4 --inference -m shakes128 --num-samples 1 --max-new-tokens 8", ""),
        ("bench part0,part4 -N 64 --rounds 2 --min-time 0.001", "| part4 |"),
        ("explain part4 -N 64", "bound by"),
        ("doctor", "attention_ext_portable.so (portable C++"),
    ],
)
def test_a_command_needs_nothing_of_linux(extension, command, shown, tmp_path):
    words = "-c", RUN, processor.capabilities(), *command.split()
    done = finished(sys.executable, *words, ATTENTION_TILES=str(tmp_path / "tiles.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in done.stdout and "Compiling" not in done.stderr
