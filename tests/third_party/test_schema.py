"""schemathesis: requests made from the server's own OpenAPI document get what it says, and no 500."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from shakespeare.model import load

from .conftest import KEY, MODEL

HERE = Path(__file__).parent
SECONDS = 3600  # ends what hangs


def test_the_document_holds(environments, server, tmp_path):
    program = environments / "schemathesis" / "bin" / "schemathesis"
    if not program.exists():
        pytest.skip("needs schemathesis")
    tokenizer = load(MODEL).tokenizer
    vocabulary = "".join(tokenizer.decoder().feed(token) for token in range(len(tokenizer)))
    own = {"SCHEMATHESIS_HOOKS": "generated_requests", "PYTHONPATH": str(HERE)}
    own |= {"MODEL": MODEL, "VOCABULARY": vocabulary}
    command = [program, "--config-file", HERE / "schemathesis.toml", "run"]
    command += [f"{server.removesuffix('/v1')}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    command += ["--checks", "all", "--max-examples", "40", "--seed", "1"]
    command += ["--continue-on-failure", "--request-timeout", "600", "--no-color"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "Selected: 6/6" in done.stdout and "Tested: 6" in done.stdout
    cases = re.search(r"(\d+) generated, \d+ passed", done.stdout)
    assert cases and int(cases[1]) > 200, done.stdout[-2000:]
