"""Programs that others wrote for OpenAI's API write the command line's texts, streamed or not.

A client is a program in clients/ that runs in its own environment: it gets a case, and prints as JSON what
its library made of the server's answers. What a library does not show is left out.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from serving import written

from .conftest import KEY, MODEL

HERE = Path(__file__).parent
QUESTION = "Who is there, and what is your business?"
CASE = {"model": MODEL, "prompt": "ROMEO:", "seed": 11, "tokens": 120}
CASE |= {"messages": [{"role": "user", "content": QUESTION}]}
PLAY = f"USER:\n{QUESTION}\n\nASSISTANT:\n"
ERRORS = ("BadRequestError", "AuthenticationError", "NotFoundError", "RateLimitError")
TYPES = dict(zip(("400", "401", "404", "429"), ERRORS))


@dataclass(frozen=True)
class Client:
    """A program, and the environment that it runs in."""

    program: str
    environment: str

    def command(self, environments: Path) -> list[str]:
        """How it is started. Skips the test if its environment is missing."""
        program = str(HERE / "clients" / self.program)
        if self.environment == "node":
            node, installed = shutil.which("node"), environments / "node" / "node_modules"
            if not (node and installed.exists()):
                pytest.skip("needs node and npm")
            # Node looks for packages beside a program only.
            return [node, shutil.copy(program, environments / "node")]
        return [str(environments / self.environment / "bin" / "python"), program]


CLIENTS = [Client("openai_sync.py", "openai"), Client("openai_node.mjs", "node")]
CLIENTS += [Client(f"{name}_client.py", name) for name in ("litellm", "langchain")]


def run(command: list[str], server: str, full: str) -> dict:
    # No variable of this machine's may lead a client elsewhere.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    own = {"OPENAI_BASE_URL": server, "OPENAI_API_KEY": KEY, "CASE": json.dumps(CASE | {"full": full})}
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, env=kept | own | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def write(cli):
    """The command line's texts, with the defaults of OpenAI's API."""
    return lambda prompt, *more: written(cli, prompt, CASE["seed"], CASE["tokens"], "--temperature", 1, *more)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.program)
def test_a_client(client, environments, server, full, write):
    found = run(client.command(environments), server, full)
    text, chat = write(CASE["prompt"]), write(PLAY, "--stop", "\n\n")
    usage = [len(CASE["prompt"]), CASE["tokens"]]

    assert found["text"] == text and len(text) == CASE["tokens"]
    assert "".join(found["stream"]) == text and len(found["stream"]) > 1
    assert found["chat"] == "".join(found["chat_stream"]) == chat != ""
    assert found["second"] == write(f"{PLAY}{chat}\n\n{PLAY}", "--stop", "\n\n")
    assert found.get("usage", usage) == found.get("stream_usage", usage) == usage
    if "chat_stream_usage" in found:
        assert found["chat_stream_usage"][0] == len(PLAY)
        # the stop string was written too
        assert 0 <= found["chat_stream_usage"][1] - len(chat) <= 2
    assert found.get("models", [MODEL]) == [MODEL] and found.get("model", MODEL) == MODEL
    errors = {status: (error["type"], error["status"]) for status, error in found["errors"].items()}
    assert errors == {status: (kind, int(status)) for status, kind in TYPES.items()}
    if "param" in found["errors"]["400"]:
        assert found["errors"]["400"]["param"] == "temperature"


def test_llm(environments, server, full, write):
    client = Client("llm_command.py", "llm")
    found = run(client.command(environments), server, full)
    assert found["text"] == found["stream"][0] == write(CASE["prompt"]), found["stderr"]
    assert found["chat"] == write(PLAY, "--stop", "\n\n"), found["chat_said"]
    errors = found["errors"]
    assert all(error["exit"] == 1 and "Traceback" not in error["said"] for error in errors.values())
    for status, word in {"400": "max_tokens", "401": "key", "404": "does not exist", "429": "full"}.items():
        assert word in errors[status]["said"]
