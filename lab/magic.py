"""Magics for notebooks: commands of gpt.py, and kernels of your own in cells.

    %load_ext shakespeare.lab.magic
    %gpt explain part1 -N 512         a command and its output, with the pictures of --plot
    %%attention mine.cpp --causal     the cell is saved as mine.cpp and tried: gpt.py try mine.cpp --causal

Both run in a process of their own: a kernel that crashes does not end the notebook's.
"""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.user_kernel import check_name
from shakespeare.lab.subprocesses import environment

CTRL_C_SECONDS = 2  # that a command may take to end when the cell is interrupted
PICTURE = re.compile(r"wrote (.*)\.(svg|png)\n")


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; IPython calls this for %load_ext."""
    shell.register_magic_function(gpt, "line")
    shell.register_magic_function(attention, "cell")


def gpt(line: str) -> None:
    """Run a command of gpt.py: %gpt COMMAND OPTIONS. An error is printed, and the notebook goes on."""
    from IPython.display import Image, display

    command = [sys.executable, "-m", "shakespeare", *shlex.split(line)]
    env = environment() | {"PYTHONUNBUFFERED": "1"}  # lines appear as they are printed
    env.pop("FORCE_COLOR", None)  # ipykernel 6 sets it; it would show progress bars
    settings: dict[str, Any] = {
        "env": env,
        "text": True,
        "errors": "replace",
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    # In a session of its own an interrupt reaches the command once.
    with subprocess.Popen(command, **settings, start_new_session=True) as child:
        assert child.stdout
        try:
            for output_line in child.stdout:
                picture = PICTURE.fullmatch(output_line)
                if not picture:
                    print(output_line, end="", flush=True)
                elif picture[2] == "png":
                    display(Image(f"{picture[1]}.png", retina=True))  # type: ignore[no-untyped-call]
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(CTRL_C_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


def attention(line: str, cell: str) -> None:
    """Save the cell as a file and try it: %%attention FILE OPTIONS; its suffix is .cpp, .ispc, .cu or .py."""
    from IPython.core.error import UsageError

    file = Path(next(iter(shlex.split(line)), "nothing"))
    try:
        check_name(file)
    except ValueError as error:
        raise UsageError(str(error)) from None
    file.write_text(cell, encoding="utf-8")
    gpt(f"try {line}")
