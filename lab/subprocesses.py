"""Runs another program, for a limited time, and collects what it writes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import shakespeare

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = Path(shakespeare.__file__).resolve().parents[1]  # where Python finds shakespeare; a checkout's ROOT
POLL_SECONDS = 0.05


class Stopped(Exception):
    """A program was ended because its result is no longer wanted."""


def environment() -> dict[str, str]:
    """The environment of a process of this package."""
    path = os.pathsep.join(filter(None, (str(IMPORTS), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def run(
    command: Sequence[str], seconds: float, stop: Callable[[], bool] | None = None, **env: str
) -> tuple[int, str, str]:
    """The exit code, the standard output and the standard error of a command that runs in IMPORTS.

    Its output goes through files, because a pipe stays open as long as any child of the program has it.
    Raises TimeoutExpired after `seconds`, Stopped when stop() is true; the program's children are killed too.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        settings: dict = {"cwd": IMPORTS, "env": os.environ | env, "start_new_session": True}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, **settings)
        try:
            end = time.monotonic() + seconds
            while stop and process.poll() is None and time.monotonic() < end:
                if stop():
                    raise Stopped
                time.sleep(POLL_SECONDS)
            code = process.wait(max(0.0, end - time.monotonic()))
        finally:
            if process.poll() is None:
                process.kill() if sys.platform == "win32" else os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in (out, err):
            file.seek(0)
        texts = [file.read().decode(errors="replace").strip() for file in (out, err)]
    return code, texts[0], texts[1]
