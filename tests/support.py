"""Helpers of several tests that are not fixtures."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from shakespeare.attention_ext import PARTS, BuildError
from shakespeare.lab.bench.gpu_bench import smaller
from shakespeare.lab.bench.plan import Cell, plan
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.bench.sweep import Sweep
from shakespeare.lab.timing import Clock
from shakespeare.lab.traffic import COUNTS

ROOT = Path(__file__).resolve().parent.parent
KERNELS = [name for name, part in PARTS.items() if part.operator]  # the parts that are compiled


class Done(NamedTuple):
    """The exit code and the output of a finished command."""

    returncode: int
    stdout: str
    stderr: str


def resident(process: int | str) -> int:
    """The resident memory of a process in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def full(*values: object):
    """The values of a parameter that the default tests leave out."""
    return pytest.param(*values, marks=pytest.mark.full)


@contextmanager
def or_skip() -> Iterator[None]:
    """Skip the test if what it needs is missing, such as a compiler, ispc or a GPU."""
    try:
        yield
    except BuildError as error:
        pytest.skip(str(error))


def found_program(name: str) -> str:
    """A program on PATH; skip the test if it is missing."""
    return shutil.which(name) or pytest.skip(f"{name} is missing")


@contextmanager
def naming(*case: object) -> Iterator[None]:
    """Name the case, one of a loop, in the message of an exception."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case}")
        raise


def finished(*command: str | Path, cwd: Path = ROOT, **env: str | None) -> Done:
    """Run a command to its end with these variables in its environment, or without one that is None."""
    kept = {name: value for name, value in (os.environ | env).items() if value is not None}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=kept, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def printed(*command: str | Path, **settings) -> str:
    """What a command prints that must succeed. settings: as finished() takes them."""
    done = finished(*command, **settings)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-8000:]}{done.stderr[-8000:]}"
    return done.stdout


def script(path: Path, text: str) -> str:
    """Write an executable shell script; return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def table(text: str) -> list[list[str]]:
    """The rows of the Markdown tables in a text, each a list of cells; headings are rows, too."""
    lines = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line] for line in lines if set("".join(line)) != {"-"}]


def anchors(document: Path) -> set[str]:
    """Those of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.M)
    words = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in words}


def records(done: Done) -> list[dict[str, str]]:
    """The rows of the Markdown table that a command printed, by the headings."""
    head, *lines = table(done.stdout)
    return [dict(zip(head, line)) for line in lines]


def start_python(cache: Path, *args: str | Path, prefix: Sequence[str] = (), **env: str) -> subprocess.Popen:
    """Start Python, in its own process group, with `cache` as its cache directory of builds."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(cache), "PYTHONPATH": str(ROOT)} | env
    return subprocess.Popen([*prefix, sys.executable, *map(str, args)], cwd=ROOT, env=env, **pipes)


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def bench_run(change=1.0, rounds=10, names=("part0", "part4", "sdpa"), **fields) -> Run:
    """A run of bench with known figures: 1 ms with a little spread, times `change` for part4."""
    done = Run(machine(), rounds, 0.1, 1 << 20, complete=True)
    done.peaks, done.bandwidths = {1: 1e11, 2: 2e11}, {1: 1e10, 2: 2e10}
    sizes = dict(lengths=(64, 128), widths=(16,), threads=(1, 2), br=(192,), bc=(256,)) | fields
    for cell in plan(names, Sweep(**sizes)):
        factor = change if cell.contender == "part4" else 1
        done.results.append(known(cell, 1e-3 * cell.N / 64 * factor, rounds))
        done.results[-1].traffic = 1000.0 if cell.contender in COUNTS else None
    return done


def machine(**fields) -> dict:
    """A machine's fields in the file of a run."""
    names = ("cpu", "date", "isa", "simd", "os", "python", "torch", "commit")
    return {"caches": [], "cores": 1} | dict.fromkeys(names, "x") | fields


def known(cell: Cell, seconds: float, rounds: int) -> Result:
    """A result that takes these seconds, with a little spread."""
    times = [seconds * (1 + 0.001 * i) for i in range(rounds)]
    paces = [1.0] * rounds
    return Result(cell, error=1e-7, error_at=(0, 0, 0, 0), scratch=1000, seconds=times, paces=paces)


def copy_tree(source: Path, target: Path, **options) -> Path:
    """shutil.copytree() to files and folders that can be written, as a checkout may not be."""
    shutil.copytree(source, target, copy_function=shutil.copyfile, dirs_exist_ok=True, **options)
    for folder in [target, *filter(Path.is_dir, target.rglob("*"))]:
        folder.chmod(0o755)
    return target


def cell(contender: str, N: int = 1024, **change: Any) -> Cell:
    """A case of attention, by default the lab's test."""
    sizes = {"queries": N, "d": 32, "batch": 1, "heads": 4, "causal": False, "br": None, "bc": None}
    return Cell(contender, None, N, **sizes | {"threads": 1} | change)


class FakeGpu(Clock):
    """In place of lab.cuda.device.Gpu: a GPU on which a call takes 1 ms, twice that with a cold cache."""

    device, l2 = torch.device("cpu"), 50 << 20

    def __init__(self, free: int = 10**10) -> None:
        self._free = free

    def describe(self) -> dict:
        sizes = {"multiprocessors": 132, "memory": 80 << 30, "l2": self.l2}
        return {"name": "Fake GPU", "capability": "9.0"} | sizes | {"cuda": "13.0"}

    def free(self) -> int:
        return self._free

    def allocated(self, function: Callable) -> tuple:
        out = function()
        return out, 1000 + sum(t.nbytes for t in (out if isinstance(out, tuple) else (out,)))

    def time(self, call: Callable, count: int, cold: bool = False) -> list[float]:
        return [2e-3 if cold else 1e-3] * count

    def fma_peak(self) -> float:
        return 5e13

    def reading(self, size: float, cold: bool) -> float:
        return 1e-3 if cold else 5e-4

    def tensor_peak(self, dtype: str) -> float:
        return 4e14

    def bandwidths(self) -> dict[str, float]:
        return {"read": 3e12, "copied": 2.9e12}


def gpu_run() -> Run:
    """A run on a GPU with known figures: kernel n takes 1/n ms with a little spread."""
    gpu = FakeGpu().describe() | {"bandwidths": FakeGpu().bandwidths()}
    done = Run(machine(gpu=gpu), 10, 0.1, FakeGpu.l2, complete=True)
    done.peaks, done.bandwidths = {1: 5e13}, {1: 3e12}
    names = ("part0", "kernel1", "kernel2", "kernel3-spilled", "kernel3", "sdpa-math")
    for cell in plan(names, Sweep(lengths=(4096,), heads=1, batch=100, device="cuda")):
        number = int(re.sub(r"\D", "", cell.contender.split("-")[0]) or 2)
        done.results.append(known(cell, 1e-3 / max(1, number), 10))
    small = smaller(done.results[0].cell)
    done.sequential = [Result(small, error=1e-7, error_at=(0, 0, 0, 0), seconds=[2.0] * 3, paces=[1.0] * 3)]
    return done
