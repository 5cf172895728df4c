"""Whether a user's kernel is right: a worker tries it, and is ended if a call takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shakespeare.lab.command import IMPORTS
from shakespeare.own import kernel as kernels
from shakespeare.own.trial.diagnosis import Finding
from shakespeare.own.trial.worker import Verdict

BUILD_SECONDS = 300  # that a compiler may take
DIAGNOSIS_SECONDS = 10.0
JIT_SECONDS = 60.0  # more for the first call of Numba and Triton, which compile at it
SIGNALS = {
    "SIGSEGV": "segmentation fault: it reads or writes where no memory is",
    "SIGBUS": "bus error: it reads or writes where no memory is",
    "SIGFPE": "arithmetic error: it divides a whole number by 0",
    "SIGILL": "illegal instruction: this processor does not have it",
    "SIGABRT": "aborted: the C++ library found an error, or an exception left a thread",
    "SIGKILL": "killed, probably for its memory",
}


class Checker:
    """A worker that waits for the next trial."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._with_torch = False

    def close(self) -> None:
        """End the worker."""
        if self._worker:
            with self._worker:
                self._worker.kill()
            self._worker = None

    def warm(self, file: Path) -> None:
        """Start the worker that this file needs."""
        source = kernels.read(file)
        with_torch = source.torch or source.device == "cuda"
        if self._worker and (with_torch > self._with_torch or self._worker.poll() is not None):
            self.close()
        if self._worker is None:
            self._with_torch = with_torch
            command = [sys.executable, "-m", "shakespeare.own.trial.worker", *["torch"] * with_torch]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._worker = subprocess.Popen(command, **pipes, stderr=subprocess.DEVNULL, env=environment())

    def check(self, file: Path, seconds: float) -> Verdict:
        """Try the kernel of a file with all cases. seconds: that a call may take before it is endless."""
        try:
            return self._check(file, seconds)
        finally:
            self.close()

    def _check(self, file: Path, seconds: float) -> Verdict:
        self.warm(file)
        worker = self._worker
        assert worker and worker.stdin and worker.stdout
        request = {"file": str(file.resolve()), "seconds": seconds}
        compiling = JIT_SECONDS if kernels.read(file).compiling else 0
        with contextlib.suppress(BrokenPipeError), worker.stdin as stdin:
            stdin.write(json.dumps(request).encode() + b"\n")
        verdict, held, endless = Verdict(), b"", False
        limit = time.monotonic() + BUILD_SECONDS
        while True:
            if not select.select([worker.stdout], [], [], max(0.0, limit - time.monotonic()))[0]:
                endless = True
                break
            data = os.read(worker.stdout.fileno(), 1 << 16)
            if not data:
                break
            *lines, held = (held + data).split(b"\n")
            if lines:
                answer = json.loads(lines[-1])
                finding = answer["finding"] and Finding(**answer["finding"])
                verdict = Verdict(**answer | {"finding": finding})
                first = compiling if verdict.case == 0 else 0
                allowed = max(seconds, DIAGNOSIS_SECONDS) if verdict.finished else seconds + first
                limit = time.monotonic() + allowed
        if endless:
            worker.kill()
        code = worker.wait()
        if not verdict.finished and not verdict.refused:
            verdict.add(ended(code, endless, seconds))
        return verdict


def environment() -> dict[str, str]:
    """That of a process of this package."""
    path = os.pathsep.join(filter(None, (str(IMPORTS), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def ended(code: int, endless: bool, seconds: float) -> Finding:
    """How a trial ended before all cases were tried. code: of the worker."""
    if endless:
        return Finding("endless", f"a call did not end within {seconds:g} s, and was ended")
    if code >= 0:
        return Finding("crash", f"it ended the program with exit({code})")
    return Finding("crash", f"it crashed, {signalled(code)}")


def signalled(code: int) -> str:
    """What the signal means that ended a process. code: its negative number."""
    name = signal.Signals(-code).name
    return SIGNALS.get(name, name)
