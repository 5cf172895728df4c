"""What `gpt.py try --new FILE` writes: the naive part in each language, with its loop nest explained."""

from pathlib import Path


def write(file: Path) -> None:
    """Write the start for a file's suffix, one of parts.SUFFIXES. Raises ValueError if the file exists."""
    text = (Path(__file__).parent / f"start{file.suffix}").read_text(encoding="utf-8")
    try:
        with open(file, "x", encoding="utf-8") as start:
            start.write(text)
    except FileExistsError:
        raise ValueError(f"--new is {str(file)!r}; that file exists, and is not replaced") from None
