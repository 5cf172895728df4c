"""The page's modules in node, and the page in browsers. Tests skip where one of them is missing."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import WEB_TESTS, Node
from support import found_program, printed

from shakespeare.attention_ext.build import cache
from shakespeare.judge import player
from shakespeare.web import build

BROWSERS = {"chromium": ("CHROMIUM", ("chromium",)), "firefox": ("FIREFOX", ("firefox-esr", "firefox"))}


@pytest.fixture(scope="session")
def node_program() -> str:
    return found_program("node")


@pytest.fixture(scope="module")
def node(node_program: str) -> Iterator[Node]:
    made = Node(node_program)
    yield made
    made.close()


@pytest.fixture(scope="session")
def wasm() -> None:
    """Both builds of the kernels in WebAssembly; each compiles for a minute or more."""
    pytest.importorskip("ziglang", reason=build.NO_ZIG)
    for name in build.BUILDS:
        build.compiled(name)


@pytest.fixture(scope="session")
def page_folder(wasm: None, shared: Path) -> Path:
    """The page's files, made by one of the workers for all."""
    folder = shared / "made" / "page"
    cache.make(folder, "the page", build.write_page)
    return folder


@pytest.fixture
def visit(request: pytest.FixtureRequest, node_program: str, page_folder: Path, tmp_path: Path):
    """Return a function that runs a scenario of scenarios.mjs in a browser and gives what it returns.

    A scenario fails if the page asks another host for anything, or reports an error.
    """
    browser = getattr(request, "param", "chromium")
    variable, names = BROWSERS[browser]
    program = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    if not program:
        pytest.skip(f"{browser} is missing")
    if not (WEB_TESTS / "node_modules" / "playwright-core").is_dir():
        pytest.skip("playwright-core is missing: npm install --prefix tests/web")

    def run(scenario: str, **argument: Any) -> Any:
        given = dict(browser=browser, program=program, folder=str(page_folder), scenario=scenario)
        asked = json.dumps(given | {"argument": argument})
        player.close_this_process()  # a browser's processes become its children
        others = player.strangers()
        try:
            said = printed(node_program, WEB_TESTS / "scenarios.mjs", asked, HOME=str(tmp_path))
        finally:
            player.end_strangers(others)
        return json.loads(said.splitlines()[-1])

    run.browser = browser  # type: ignore[attr-defined]
    return run
