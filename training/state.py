"""The state of a run: one file with all that its next training steps depend on, replaced atomically."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from shakespeare.model.files import locked, remove_unfinished, write_file

FILE = "resume.safetensors"
LOCK = ".lock"
FORMAT = 1


def save_state(
    directory: Path, tensors: dict[str, NDArray[Any]], run: dict[str, Any], progress: dict
) -> None:
    """Write a run's state. run: the run's settings as JSON; load_state() needs the same. Raises OSError."""
    described = {"format": FORMAT, "run": run, "progress": progress}
    write_file(directory / FILE, safetensors.numpy.save(tensors, {"state": json.dumps(described)}))


@contextlib.contextmanager
def only_run(directory: Path) -> Iterator[None]:
    """Keep other runs out of a directory. Raises ValueError if another process trains there."""
    with locked(directory / LOCK, "trains"):
        remove_unfinished(directory, FILE)
        yield


def check_state(directory: Path) -> None:
    """Raise ValueError unless the directory has a run's state."""
    if not (directory / FILE).is_file():
        finished = (directory / "training.json").is_file()
        which = "holds a finished run" if finished else "holds no run"
        more = f"; --init {directory} trains its model further" if finished else ""
        raise ValueError(f"{directory} {which}, so there is nothing to resume{more}")


def load_state(directory: Path, run: dict[str, Any]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """(tensors, progress) as given to save_state(); no pickle is read.

    Raises ValueError naming the file if the state is missing, damaged, or from another run or version.
    """
    check_state(directory)
    path = directory / FILE
    try:
        with safetensors.safe_open(path, framework="np") as file:
            described = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        saved = described["run"]
        progress = described["progress"]
        version = described["format"]
        if not isinstance(saved, dict) or not isinstance(progress, dict):
            raise TypeError("its metadata is not that of a run")
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); train without --resume") from None
    if version != FORMAT:
        raise ValueError(f"{path} is of format {version!r}; it must be {FORMAT}: another version wrote it")
    if differing := _difference(saved, json.loads(json.dumps(run))):
        name, was, now = differing
        raise ValueError(f"{path} is of another run: its {name} was {was!r}, and is {now!r} now")
    return tensors, progress


def _difference(saved: dict, run: dict) -> tuple[str, Any, Any] | None:
    """(name, saved value, value now) of the first difference, also inside a dictionary; None if equal."""
    for name in sorted(saved.keys() | run.keys()):
        was = saved.get(name)
        now = run.get(name)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            return _difference(was, now)
        return name, was, now
    return None
