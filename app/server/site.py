"""The page of web/ at /, if it is built: its files, and a hint to the page that a server is behind it."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from web import build

HINT = '<meta name="server" content="/v1">\n</head>'
HEADERS = {
    "cache-control": "no-cache",  # the page may be built again
    "content-security-policy": "frame-ancestors 'none'",  # the page has the rest of its policy inside
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
# Content types that do not depend on the system's table.
TYPES = {".js": "text/javascript", ".json": "application/json", ".gz": "application/gzip"}


class Site(StaticFiles):
    """The files of a page that `gpt.py web --build` has made in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder)
        self.folder = folder

    def index(self) -> Response:
        """The page with a hint that it may ask the server to write."""
        html = (self.folder / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(html.replace("</head>", HINT, 1), headers=HEADERS)

    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        if kind := TYPES.get(Path(path).suffix):
            response.headers["content-type"] = kind
        return response


def site(folder: Path | None) -> Site | None:
    """The page's files, or None if the folder has no complete page."""
    return Site(folder) if folder and build.is_whole(folder) else None
