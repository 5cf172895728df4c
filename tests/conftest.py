"""Fixtures for all tests. Nothing here needs a network, a GPU or the corpus."""

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shakespeare.attention_ext import processor

# Before torch is imported: on a busy machine, threads that spin make the tests slow.
processor.let_waiting_threads_sleep()
# The workers of pytest-xdist share the cores. The processes that they start have as many threads.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processor.cores() // workers)))

import cuda_on_cpu
import pooch  # noqa: F401  (its log keeps the stream of its import, which a test would close)
import pytest
import torch
from support import KERNELS, ROOT, Done, found_program, or_skip

from shakespeare.app import cli as command_line
from shakespeare.attention_ext import PARTS, default_tile, extension
from shakespeare.attention_ext.build import cache, nvrtc, toolchain
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import Gpu
from shakespeare.attention_ext.webgpu.driver import Adapter, opened
from shakespeare.lab import result_files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", type=Path, help="a file with a line for each test that is left out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the page: one worker compiles it for minutes while no other waits for it."""
    if file := config.getoption("without"):
        names = set(file.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
        items[:] = [item for item in items if item.nodeid not in names]
    items.sort(key=lambda item: not item.path.match("web/test_page.py"))


@pytest.fixture(autouse=True)
def own_tiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Give each test an empty file of tuned tiles instead of this machine's."""
    monkeypatch.setenv("ATTENTION_TILES", str(tmp_path_factory.mktemp("tiles") / "tiles.json"))
    default_tile.forget()
    yield
    default_tile.forget()


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this run; a run that a test of a worker starts has its own."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request: pytest.FixtureRequest, shared: Path):
    """A test that has the mark `whole_gpu` has the GPU's memory for itself: the other workers wait."""
    if sys.platform != "linux" or not torch.cuda.is_available():
        yield
        return
    import fcntl

    with open(shared / "next_on_gpu", "w") as queue, open(shared / "on_gpu", "w") as gpu:
        fcntl.flock(queue, fcntl.LOCK_EX)  # so that one who waits for all others is the next
        fcntl.flock(gpu, fcntl.LOCK_EX if request.node.get_closest_marker("whole_gpu") else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session", name="extension")
def compiled_extension() -> None:
    """Load the compiled extension; skip the test if there is no compiler, or no home for what it compiles."""
    with or_skip():
        toolchain.find_compiler()
        cache.directory()
    extension.load()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let the tests' processes receive Ctrl-C, which a shell ignores for background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> str:
    if PARTS[request.param].operator:
        request.getfixturevalue("extension")
    return request.param


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, extension: None) -> str:
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in place of benchmarks/results."""
    monkeypatch.setattr(result_files, "RESULTS", tmp_path / "results")
    result_files.RESULTS.mkdir()
    return result_files.RESULTS


class Quiet:
    """The Load of a machine on which nothing else runs."""

    others = slowed = staticmethod(lambda: 0.0)
    sample = staticmethod(lambda size=0, patience=0.0: 1.0)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, extension: None, threads):
    """Return a function that gives a benchmark's module a quiet, steady machine."""

    def patch(bench) -> None:
        monkeypatch.setattr(bench, "Load", Quiet)
        monkeypatch.setattr(bench, "fma_peak", lambda threads=1: 1e11)

    return patch


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, threads):
    """Run gpt.py's main() in an empty directory; it must end with the exit code `code`, if that is a number.

    It runs in this process: importing torch takes seconds.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("shakespeare"), "propagate", True)

    def run(*args: str | int | Path, input: str | bytes = b"", code: int | None = 0) -> Done:
        data = input.encode() if isinstance(input, str) else input
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        capsys.readouterr()
        try:
            command_line.main([*map(str, args)])
            ended = 0
        except SystemExit as done:
            ended = int(done.code or 0)
        out, err = capsys.readouterr()
        assert code in (ended, None), (args, out + err)
        return Done(ended, out, err)

    return run


@pytest.fixture
def failed(cli):
    """Run a wrong command; return its one line on stderr."""

    def run(*arguments, **settings) -> str:
        done = cli(*arguments, **settings, code=2)
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("gpt.py: error: ")
        return done.stderr

    return run


@pytest.fixture
def process(tmp_path: Path):
    """Start gpt.py in its own process, in an empty directory. The process is killed after the test."""
    started = []

    def start(*args: str | int | Path, **env: str) -> subprocess.Popen:
        command = [sys.executable, ROOT / "gpt.py", *map(str, args)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, **pipes, cwd=tmp_path, env=os.environ | env))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate() if not each.stdout.closed else each.stderr.close()
        each.wait()


@pytest.fixture(scope="session")
def emulated(shared: Path) -> Callable[..., None]:
    """Lets the cuda engine run on the CPU, where g++ is; see cuda_on_cpu.install()."""
    found_program("g++")
    return partial(cuda_on_cpu.install, shared / "emulated")


@pytest.fixture(scope="session", name="nvrtc")
def nvrtc_here() -> None:
    with or_skip():
        nvrtc.versions()


@pytest.fixture(scope="session")
def gpu(nvrtc: None) -> Gpu:
    with or_skip():
        driver.check_gpu()
    return driver.gpu(0)


@pytest.fixture
def adapter() -> Adapter:
    with or_skip():
        return opened().adapter
