"""The page of web/ at /, if it is built, with a hint that a server is behind it."""

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HINT = '<meta name="server" content="v1">\n</head>'
SITE_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the page may be built again
    "content-security-policy": "frame-ancestors 'none'",  # the page has the rest of its policy inside
}
# Content types that do not depend on the system's table.
TYPES = {".js": "text/javascript", ".json": "application/json", ".gz": "application/gzip"}


class Site(StaticFiles):
    """The files of a page that `gpt.py web --build` has made in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder)
        self.folder = folder

    async def index(self, request: Request) -> Response:
        """The page with a hint that it may ask the server to write."""
        html = (self.folder / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(html.replace("</head>", HINT, 1), headers=SITE_HEADERS)

    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        response = await super().get_response(path, scope)
        response.headers.update(SITE_HEADERS)
        suffix = Path(path).suffix
        if suffix in TYPES:
            response.headers["content-type"] = TYPES[suffix]
        return response
