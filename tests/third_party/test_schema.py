"""schemathesis: requests made from the server's own OpenAPI document get what it says, and no 500."""

import re
from pathlib import Path

import pytest
from support import printed

from shakespeare.model import load

from .conftest import KEY, MODEL

HERE = Path(__file__).parent


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
    shown = printed(*command, cwd=tmp_path, **own)
    assert "Selected: 6/6" in shown and "Tested: 6" in shown
    cases = re.search(r"(\d+) generated, \d+ passed", shown)
    assert cases and int(cases[1]) > 200, shown[-2000:]
