"""A build that takes a second: the extension's recipe over sources of one line each, in its own process.

    small_build.py SOURCES                  print the library's answer, or the error like gpt.py
    small_build.py SOURCES --kill COUNT     kill a build at COUNT points; build again after each

The cache directory is TORCH_EXTENSIONS_DIR. --kill makes a new one inside it for each point, and prints JSON.
"""

import ctypes
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.build import recipes

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
LEFT = ["attention_ext_portable.so", "building"]  # in the folder of a build
# Python's audit events for files and processes. A build can be killed before each.
STEPS = ("os.", "shutil.", "tempfile.", "open", "subprocess.Popen", "fcntl.flock")


def write_sources(directory: Path) -> Path:
    directory.mkdir()
    (directory / "answer.cpp").write_text(ANSWER)
    (directory / "other.cpp").write_text("int other = 1;\n")
    return directory


def answer(sources: Path) -> int:
    """Build these sources by the library's recipe, and return the built library's answer."""
    own = {"folders": (sources,), "sources": (sources / "other.cpp",)}
    kernels = dataclasses.replace(recipes.kernels("portable"), **own)
    own |= {"sources": (sources / "answer.cpp",), "needs": kernels}
    recipe = dataclasses.replace(recipes.operators("portable"), **own)
    return ctypes.CDLL(str(recipe.make())).answer()


def in_child(act: Callable[[], int]) -> str | None:
    """Call act() in a fork with its own process group. Returns its result as text, None if it was killed."""
    read, write = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: (os.setsid(), write.send(str(act()))))
    with warnings.catch_warnings():  # Python 3.12 warns that idle threads are not copied
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    child.join()
    if child.exitcode == -signal.SIGKILL:
        return None
    if child.exitcode or not read.poll():
        raise SystemExit(f"a build ended with status {child.exitcode}")
    return read.recv()


def watched(sources: Path, at: int | None, after: float | None, group: bool) -> int:
    """Call answer(); kill this process at step number `at`, or `after` seconds of compiling.

    group: kill the compilers too. Returns the number of steps if nothing was killed.
    """
    steps = 0

    def die() -> None:
        os.killpg(0, signal.SIGKILL) if group else os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple) -> None:
        nonlocal steps
        if not event.startswith(STEPS):
            return
        steps += 1  # counted first, as os.kill is a step too
        if steps == at:
            die()
        if event == "subprocess.Popen" and "-C" in args[1] and after is not None:
            threading.Timer(after, die).start()

    sys.addaudithook(hook)
    answer(sources)
    return steps


def kill_everywhere(sources: Path, cache: Path, count: int) -> dict:
    """Kill builds at `count` points: half are spread over the steps, half over the time of compiling."""

    def use(name: str) -> Path:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache / name)
        return cache / name

    use("whole")
    start = time.monotonic()
    steps = int(in_child(lambda: watched(sources, None, None, False)) or 0)
    seconds = time.monotonic() - start
    at_steps = count // 2
    points: list[tuple[int | None, float | None]] = [
        *((1 + steps * i // at_steps, None) for i in range(at_steps)),
        *((None, seconds * (i + 0.5) / (count - at_steps)) for i in range(count - at_steps)),
    ]
    killed, wrong = 0, []
    for i, (at, after) in enumerate(points):
        directory = use(str(i))
        killed += in_child(lambda: watched(sources, at, after, i % 2 == 0)) is None
        got = in_child(lambda: answer(sources))
        left = sorted(path.name for path in directory.glob("attention_ext_portable_*/*"))
        if got != "42" or left != LEFT:
            wrong.append([at, after, got, left])
    return {"steps": steps, "seconds": seconds, "points": len(points), "killed": killed, "wrong": wrong}


if __name__ == "__main__":
    try:
        if "--kill" in sys.argv:
            cache = Path(os.environ["TORCH_EXTENSIONS_DIR"])
            print(json.dumps(kill_everywhere(Path(sys.argv[1]), cache, int(sys.argv[3]))))
        else:
            print(answer(Path(sys.argv[1])))
    except BuildError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
