"""The page's modules in a process of node."""

import contextlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from shakespeare.web import build

WEB_TESTS = Path(__file__).resolve().parent / "web"
RELAXED = "--experimental-wasm-relaxed-simd"  # of node 20; later ones accept and ignore it


class Refused(Exception):
    """A call in node failed; `kind` is the JavaScript error's class."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Node:
    """The page's modules in a process of node. node(method, **argument) calls; session.mjs lists what."""

    def __init__(self, program: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        above, modules = Path(self.folder.name), Path(self.folder.name, "web", "js")
        build.write_scripts(modules)
        shutil.copy(build.WEB / "package.json", modules.parent)
        (above / "package.json").write_text('{"type": "commonjs"}')  # as a folder above a checkout may say
        command = [program, RELAXED, WEB_TESTS / "session.mjs", modules.as_uri()]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(command, text=True, **pipes)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()

    def __call__(self, method: str, **argument: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"method": method, "argument": argument}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"node ended: {self.process.communicate()[1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"], answer["kind"])
        return answer.get("result")

    def load(
        self, name: str = "shakes256", precision: str = "fp32", kernels: str = "simd", **files: str
    ) -> None:
        """Load a shipped checkpoint, or the files of a directory, into fresh kernels of a build.

        Skips the test if this node has no relaxed SIMD and the build needs it.
        """
        if kernels == "relaxed" and self("build") != kernels:
            pytest.skip("this node has no relaxed SIMD")
        given = {"directory": str(ROOT / "checkpoints" / name)} | files
        self("load", wasm=str(build.compiled(kernels)), precision=precision, **given)
