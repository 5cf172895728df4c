"""The page as `gpt.py serve` shows it: it also writes through the server."""

import pytest
from serving import serving

from shakespeare import generate
from shakespeare.model import load


def test_the_server_and_the_browser_write_the_same_text(visit, page_folder, extension):
    pytest.importorskip("starlette", reason="the packages of serve are missing")
    if visit.browser == "firefox":
        pytest.skip("Firefox is tested without the page's policy, which the server's page has")
    query = {"model": "shakes256", "seed": "18446744073709", "length": 120, "weights": "fp32"}
    from shakespeare.app.server import Settings

    with serving(Settings(("shakes256",), page=page_folder)) as client:
        made = visit("server", query=query, home=f"http://127.0.0.1:{client.port}/")
    expected = generate(
        load("shakes256"), "ROMEO:", 120, seed=18446744073709, temperature=0.8, top_k=65, weights="fp32"
    )
    assert made["server"] == made["browser"] == expected
    assert made["server status"].startswith("120 characters by the server") and not made["server bars"]
    assert made["browser status"].startswith("120 characters with part4") and made["browser bars"]
    assert made["choice"] == "server"
