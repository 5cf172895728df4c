"""What `gpt.py try --new FILE` writes: the naive part, or its backward pass, with its loop nest explained."""

from pathlib import Path


def write(file: Path, backward: bool = False, triton: bool = False) -> None:
    """Write the start for a file's suffix, which is one of report's. Raises ValueError if the file exists."""
    name = "start" + ("_triton" if triton else "") + ("_backward" if backward else "") + file.suffix
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    try:
        with open(file, "x", encoding="utf-8") as start:
            start.write(text)
    except FileExistsError:
        raise ValueError(f"--new is {str(file)!r}; that file exists, and is not replaced") from None
