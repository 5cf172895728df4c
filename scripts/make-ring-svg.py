"""Draw docs/figures/ring.svg: which rank computes when in a causal ring and in a zigzag of four ranks.

python scripts/make-ring-svg.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shakespeare.attention_ext import layout, parallel  # noqa: E402

P, N = 4, 800
COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#ee6677")
LEFT, WIDTH, ROW, TOP = 70, 560, 26, 64  # pixels
UNIT = WIDTH / (P - 0.5) / (N // P) ** 2  # pixels for a pair of a query and a key


def draw() -> str:
    """The picture as SVG."""
    height = TOP + P * ROW + 56
    size = f'viewBox="0 0 660 {2 * height}" font-family="sans-serif" font-size="13"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    lines += [f'<rect width="660" height="{2 * height}" fill="white"/>', *panel("ring", 0)]
    return "\n".join([*lines, *panel("zigzag", height), "</svg>", ""])


def panel(method: str, y: float) -> list[str]:
    """The rows of each rank, and below them what each computes in each turn."""
    rows = parallel.rows(method, N, P)
    lines = [text(10, y + 20, method, 'font-weight="bold"')]
    lines.append(text(LEFT, y + 20, "rows of the sequence, by the rank that holds them"))
    for rank, chunks in enumerate(rows):
        for chunk in chunks:
            x, width = LEFT + WIDTH * chunk.start / N, WIDTH * len(chunk) / N
            lines.append(box(x, y + 28, width, 16, COLOURS[rank]))
            lines.append(text(x + width / 2, y + 41, str(rank), 'text-anchor="middle"'))
    start = 0.0
    for turn in range(P):
        work = [layout.pairs(rows[r], rows[(r - turn) % P], True, 0) * UNIT for r in range(P)]
        for rank, width in enumerate(work):
            if width:
                top = y + TOP + rank * ROW
                lines.append(box(LEFT + start, top, width, ROW - 6, COLOURS[(rank - turn) % P]))
        start += max(work)
        x = LEFT + start
        ends = f'x1="{x}" y1="{y + TOP - 4}" x2="{x}" y2="{y + TOP + P * ROW}"'
        lines.append(f'<line {ends} stroke="#888" stroke-dasharray="3"/>')
    lines += [text(10, y + TOP + rank * ROW + 15, f"rank {rank}") for rank in range(P)]
    used = layout.pairs([range(N)], [range(N)], True, 0) * UNIT / P / start
    legend = f"time; colour: whose keys; {used:.0%} of the processors used"
    return [*lines, text(LEFT, y + TOP + P * ROW + 18, legend)]


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    """A text whose base line begins at x, y."""
    return f'<text x="{x}" y="{y}"{attributes and " " + attributes}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A rectangle with an edge."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}" stroke="white"/>'


if __name__ == "__main__":
    (ROOT / "docs" / "figures" / "ring.svg").write_text(draw())
