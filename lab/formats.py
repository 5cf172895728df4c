"""The forms in which figures are shown: tables in Markdown, counts and sizes."""

from collections.abc import Iterable, Iterator, Sequence


def markdown(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    return "\n".join(markdown_lines(titles, rows))


def markdown_lines(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield f"| {' | '.join(titles)} |"
    yield "|" + "".join("---|" for _ in titles)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def counted(count: int, what: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def scaled(number: float) -> str:
    """537e6 as '0.537 G', with the unit's letter."""
    if number >= 1e11:
        return f"{number / 1e12:.3g} T"
    return f"{number / 1e9:.3g} G" if number >= 1e8 else f"{number / 1e6:.3g} M"


def size_text(size: float) -> str:
    """Bytes for people: 4718592 as '4.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
