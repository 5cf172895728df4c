"""The forms in which figures are shown: tables in Markdown, counts and sizes."""

from collections.abc import Iterable, Sequence


def markdown(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def counted(count: int, what: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{count} {what}{'s' * (count != 1)}"


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
