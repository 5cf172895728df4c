"""gpt.py serve as a process: what it says, how it ends, and what it refuses to start with."""

import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import MODEL, WAIT_SECONDS, Client, port_of, raw, until
from support import ROOT, finished, full

from shakespeare.model.checkpoint import shipped

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")


@pytest.fixture
def start(process, extension):
    """Start a server; wait until it is ready; return its process and a client."""

    def run(*arguments) -> tuple[subprocess.Popen, Client]:
        child = process("serve", "-m", MODEL, "--port", 0, *arguments)
        return child, Client(port_of(child))

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, full(signal.SIGINT)])
def test_a_signal_lets_running_requests_finish(start, number):
    child, client = start("--grace", WAIT_SECONDS)
    slow = {"prompt": "a" * 128, "max_tokens": 400, "part": "part1"}
    with ThreadPoolExecutor() as threads, client.connection():
        text = threads.submit(client.complete, **slow, stream=True)
        until(lambda: client.metric("attention_texts_running") == 1)
        child.send_signal(number)
        until(lambda: client.get("/health").status == 503)
        refused = client.complete()
        assert refused.status == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "shutting_down"
        assert len(text.result().text()) == 400
    assert child.wait(WAIT_SECONDS) == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "grace, signals", [(0.2, [signal.SIGTERM]), (10 * WAIT_SECONDS, [signal.SIGINT, signal.SIGTERM])]
)
def test_the_grace_period_or_a_second_signal_ends_what_runs(start, grace, signals):
    child, client = start("--grace", grace)
    with (
        raw(client, prompt="a" * 128, max_tokens=60_000, stream=True) as connection,
        client.connection() as other,
    ):
        other.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        assert connection.recv(10)
        for number in signals:
            child.send_signal(number)
        assert b"shutting_down" in b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert child.wait(WAIT_SECONDS) == 0
    assert "Traceback" not in child.stderr.read()


def test_names_of_models_and_a_file_of_keys(start, tmp_path):
    """A path with = is no name; the file begins with a byte order mark, as Windows' editors write it."""
    (tmp_path / "a=b").symlink_to(shipped(MODEL))
    (tmp_path / "keys").write_text("key\n", encoding="utf-8-sig")
    more = ("-m", f"mine={tmp_path / 'a=b'}", "-m", tmp_path / "a=b", "--api-key-file", tmp_path / "keys")
    _, client = start(*more)
    client.headers["Authorization"] = "Bearer key"
    names = [MODEL, "mine", str(tmp_path / "a=b")]
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == names
    assert len({client.complete(model=name, seed=1).text() for name in names}) == 1


def test_what_it_refuses_to_start_with(failed, tmp_path):
    assert "--insecure" in failed("serve", "--host", "0.0.0.0")
    assert "was not found" in failed("serve", "-m", "nothing")
    assert "--api-key" in failed("serve", "--api-key", " ")
    (tmp_path / "keys").write_text("\n")
    assert "has no key" in failed("serve", "--api-key-file", tmp_path / "keys")
    assert "No such file" in failed("serve", "--api-key-file", tmp_path / "none")
    (tmp_path / "keys").write_text("é", encoding="utf-8")
    assert "--api-key-file " in failed("serve", "--api-key-file", tmp_path / "keys")
    for models in (("=a",), ("a=",), ("",), ("a\nb=c",), ("a=b", "a=c"), (f"{MODEL}=a", MODEL)):
        each = [word for model in models for word in ("-m", model)]
        assert f"--model is {models[-1]!r};" in failed("serve", *each)
    assert "--grace" in failed("serve", "--grace", "nan")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host localhost, --port {port}: Address already in use" in failed(
            "serve", "-m", MODEL, "--port", port
        )
    assert "--host 256.1.1.1, --port " in failed("serve", "-m", MODEL, "--host", "256.1.1.1", "--insecure")


@pytest.mark.full
def test_memory_that_does_not_suffice(extension):
    code = (
        "import unittest.mock; from shakespeare.app.server import scheduler\n"
        "scheduler.open_engine = unittest.mock.Mock(side_effect=MemoryError('std::bad_alloc'))\n"
        f"from shakespeare.app.cli import main; main('serve -m {MODEL} --port 0 --slots 7'.split())"
    )
    code, _, said = finished(sys.executable, "-c", code)
    assert code == 2 and "with --slots 7;" in said and said.count("\n") == 2 and said.startswith("Loading")


@pytest.mark.full
def test_a_signal_while_loading_does_not_wait():
    """A compiler may take minutes."""
    code = (
        "import time; from shakespeare.app.server import scheduler\n"
        "scheduler.open_engine = lambda *arguments, **options: time.sleep(6000)\n"
        f"from shakespeare.app.cli import main; main(['serve', '-m', '{MODEL}', '--port', '0'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
        try:
            port = int(re.search(r":(\d+)$", child.stderr.readline(), re.M)[1])
            until(lambda: Client(port).get("/health").json()["status"] == "loading")
            child.send_signal(signal.SIGTERM)
            assert child.wait(WAIT_SECONDS) == 0 and child.stderr.read() == ""
        finally:
            child.kill()


def test_without_the_packages_it_says_what_to_install():
    code = (
        "import sys; sys.modules['hypercorn'] = None\nfrom shakespeare.app.cli import main; main(['serve'])"
    )
    code, _, said = finished(sys.executable, "-c", code)
    assert code == 2 and said.count("\n") == 1
    assert "serve needs hypercorn: pip install hypercorn" in said
