"""What / shows: the page of web/, if it is built, with a hint that a server is behind it; or the status."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from shakespeare import __version__
from shakespeare.attention_ext import PARTS
from shakespeare.model.checkpoint import Checkpoint

HINT = '<meta name="server" content="/v1" data-most-tokens="{}">\n</head>'
COMMON = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
SITE_HEADERS = COMMON | {
    "cache-control": "no-cache",  # the page may be built again
    "content-security-policy": "frame-ancestors 'none'",  # the page has the rest of its policy inside
}
STATUS_HEADERS = COMMON | {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
# Content types that do not depend on the system's table.
TYPES = {".js": "text/javascript", ".json": "application/json", ".gz": "application/gzip"}
TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>shakespeare-attention</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 42rem; margin: 3rem auto; padding: 0 1rem; font: 1rem/1.6 Georgia, serif; }}
h1 {{ font-size: 1.5rem; font-weight: normal; margin-bottom: 0; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8884; }}
td + td, th + th {{ text-align: right; font-variant-numeric: tabular-nums; }}
code, pre {{ font: .85rem/1.5 ui-monospace, monospace; }}
pre {{ overflow-x: auto; padding: .8rem; border: 1px solid #8884; border-radius: .3rem; }}
</style>
<h1>shakespeare-attention</h1>
<p>Version {version}. Status: {status}. {part} unless a request names another of {parts}.</p>
<table>
<thead><tr><th>model</th><th>parameters</th><th>block size</th><th>vocabulary</th></tr></thead>
<tbody>{rows}</tbody>
</table>
<p>An OpenAI-compatible API at <code>/v1</code>:</p>
<pre>curl -N {base}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "prompt": "ROMEO:", "max_tokens": 200, "stream": true}}'</pre>
<p><a href="/v1/models">models</a>, <a href="/openapi.json">OpenAPI</a>, <a href="/metrics">metrics</a>,
<a href="/health">health</a></p>
</html>
"""


def status(checkpoints: Mapping[str, Checkpoint], part: str, status: str, address: str) -> Response:
    """The status page. part: the default part. address: the server's address in the reader's request."""
    rows = ""
    for name, checkpoint in checkpoints.items():
        config = checkpoint.config
        cells = (f"{config.num_params:,}", config.block_size, f"{config.vocab_size:,}")
        rows += f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    html = TEMPLATE.format(
        version=__version__,
        status=status,
        part=part,
        parts=", ".join(PARTS),
        rows=rows,
        base=escape(address.rstrip("/")),
        model=escape(next(iter(checkpoints))),
    )
    return HTMLResponse(html, headers=STATUS_HEADERS)


class Site(StaticFiles):
    """The files of a page that `gpt.py web --build` has made in a folder."""

    def __init__(self, folder: Path, most_tokens: int) -> None:
        super().__init__(directory=folder)
        self.folder, self.most_tokens = folder, most_tokens

    async def index(self, request: Request) -> Response:
        """The page with a hint that it may ask the server to write."""
        html = (self.folder / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(html.replace("</head>", HINT.format(self.most_tokens), 1), headers=SITE_HEADERS)

    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        response = await super().get_response(path, scope)
        response.headers.update(SITE_HEADERS)
        if kind := TYPES.get(Path(path).suffix):
            response.headers["content-type"] = kind
        return response
