"""gpt.py web: makes the page once, shows it to this machine only, and refuses in one line."""

import http.client
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import ROOT, found_program

from shakespeare.app import folder_server
from shakespeare.web import build


@pytest.fixture
def made(monkeypatch, tmp_path):
    """A page of one file, as if it had been made before."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    folder = build.path()
    folder.mkdir(parents=True)
    for each in (*folder.parents[:2], folder):
        each.chmod(0o700)
    (folder / "index.html").write_text("a page")
    build.write_stamp(folder)
    return folder


def test_it_serves_the_page_until_it_is_stopped(process, made):
    shown = process("web", "--port", 0)
    port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\n", shown.stdout.readline())[1])
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for path, status in (("/", 200), ("/index.html", 200), ("/../../etc/passwd", 404), ("/nothing", 404)):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == status, path
        assert (b"a page" in answer.read()) == (status == 200)
    shown.send_signal(signal.SIGINT)
    assert shown.wait() == 130


def test_as_process_1_of_a_container_it_ends_at_sigterm(made):
    """The command line's handler, which all commands have there: the system has no default for process 1."""
    alone = [found_program("unshare"), *"--user --map-root-user --pid --fork --kill-child".split()]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this user may not have process numbers of its own")
    command = [*alone, sys.executable, ROOT / "gpt.py", "web", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outer:
        try:
            assert outer.stdout.readline().startswith("http://")
            child = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text()
            os.kill(int(child), signal.SIGTERM)
            assert outer.wait(600) == 143
        finally:
            outer.kill()


def test_a_port_that_is_taken_is_one_line(failed, made):
    with folder_server.server(made, 0) as server:
        port = server.server_address[1]
        assert f"--port {port}: Address already in use" in failed("web", "--port", port)


def test_another_sites_host_is_refused(tmp_path):
    with folder_server.server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever).start()
        for host, status in (("localhost:1", 200), ("[::1]", 200), ("example.org", 403), ("", 403)):
            connection = http.client.HTTPConnection(*server.server_address, timeout=600)
            connection.request("GET", "/", headers={"Host": host})
            assert connection.getresponse().status == status, host
            connection.close()
        server.shutdown()


@pytest.mark.parametrize("other", ["stamp", "folder/thesis.txt", "js/mine.js", "empty/", "link"])
def test_what_no_build_wrote_is_never_replaced(failed, made, tmp_path, other):
    """The folder of a page is no exception, and neither is a file that looks like a stamp."""
    for folder in (made, tmp_path / "own"):
        mine = folder / other
        mine.parent.mkdir(parents=True, exist_ok=True)
        if other == "link":
            mine.symlink_to(tmp_path)
        elif other.endswith("/"):
            mine.mkdir()
        else:
            mine.write_text("text")
        said = failed("web", "--build", "--out", folder)
        assert f"but it has {other.split('/')[0]}" in said and "remove it yourself" in said
        assert mine.exists() and list(tmp_path.iterdir())
    no_stamp_of_a_build = '{"files": ["stamp", "link"]}'
    (tmp_path / "own" / build.STAMP).write_text(no_stamp_of_a_build)
    assert "but it has " in failed("web", "--build", "--out", tmp_path / "own")


def test_without_ziglang_it_says_what_to_install(failed, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))  # without a page of an earlier run
    assert "pip install ziglang" in failed("web", "--build", "--out", tmp_path / "page")


def test_a_source_that_does_not_compile_is_named(cli, tmp_path, monkeypatch):
    pytest.importorskip("ziglang", reason=build.NO_ZIG)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-include", "missing.h"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    done = cli("web", "--build", "--out", tmp_path / "page", code=2)
    notice, *said, error = done.stderr.splitlines()
    assert notice.startswith("Compiling the kernels to WebAssembly (simd); the first time")
    assert any("missing.h" in line for line in said)
    assert error.startswith("gpt.py: error: ") and "build.log" in error and not (tmp_path / "page").exists()
