"""Draw docs/figures/ring.svg: which rank computes when in a causal ring and in a zigzag of four ranks.

python scripts/make-ring-svg.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from attention_ext import parallel  # noqa: E402

P, N = 4, 800
COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#ee6677")
LEFT, WIDTH, ROW, TOP = 70, 560, 26, 64  # pixels
UNIT = WIDTH / (P - 0.5) / (N // P) ** 2  # pixels for a pair of a query and a key


def draw() -> str:
    """The picture as SVG."""
    height = TOP + P * ROW + 56
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {2 * height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="660" height="{2 * height}" fill="white"/>',
    ]
    for place, method in enumerate(("ring", "zigzag")):
        lines += panel(method, place * height)
    return "\n".join([*lines, "</svg>", ""])


def panel(method: str, y: float) -> list[str]:
    """The rows of each rank, and below them what each computes in each step."""
    rows = parallel.rows(method, N, P)
    lines = [f'<text x="10" y="{y + 20}" font-weight="bold">{method}</text>']
    lines.append(f'<text x="{LEFT}" y="{y + 20}">rows of the sequence, by the rank that holds them</text>')
    for rank, chunks in enumerate(rows):
        for chunk in chunks:
            x, width = LEFT + WIDTH * chunk.start / N, WIDTH * len(chunk) / N
            lines.append(box(x, y + 28, width, 16, COLOURS[rank]))
            lines.append(f'<text x="{x + width / 2}" y="{y + 41}" text-anchor="middle">{rank}</text>')
    start = 0.0
    for step in range(P):
        work = [parallel.pairs(rows[r], rows[(r - step) % P], True, 0) * UNIT for r in range(P)]
        for rank, width in enumerate(work):
            top = y + TOP + rank * ROW
            if width:
                lines.append(box(LEFT + start, top, width, ROW - 6, COLOURS[(rank - step) % P]))
        start += max(work)
        x = LEFT + start
        lines.append(
            f'<line x1="{x}" y1="{y + TOP - 4}" x2="{x}" y2="{y + TOP + P * ROW}" stroke="#888" '
            'stroke-dasharray="3"/>'
        )
    for rank in range(P):
        lines.append(f'<text x="10" y="{y + TOP + rank * ROW + 15}">rank {rank}</text>')
    whole = parallel.pairs([range(N)], [range(N)], True, 0) * UNIT
    used = whole / P / start
    lines.append(
        f'<text x="{LEFT}" y="{y + TOP + P * ROW + 18}">time; colour: whose keys; {used:.0%} of the '
        "processors used</text>"
    )
    return lines


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A rectangle with an edge."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}" stroke="white"/>'


if __name__ == "__main__":
    (ROOT / "docs" / "figures" / "ring.svg").write_text(draw())
