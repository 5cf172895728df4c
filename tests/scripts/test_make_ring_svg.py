"""The picture of ring and zigzag in docs/scale.md is that of the code's own rows."""

from __future__ import annotations

import runpy

from support import ROOT


def test_the_picture_is_current_and_shows_the_bound():
    picture = runpy.run_path(str(ROOT / "scripts" / "make-ring-svg.py"))["draw"]()
    assert (ROOT / "docs" / "figures" / "ring.svg").read_text() == picture
    assert "57% of the processors" in picture and "100% of the processors" in picture
