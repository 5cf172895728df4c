"""The status page at /."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from attention_ext import PARTS, __version__
from model.checkpoint import Checkpoint

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
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


def page(checkpoints: Mapping[str, Checkpoint], part: str, status: str, address: str) -> str:
    """The page's HTML. part: the default part. address: the server's address in the reader's request."""
    rows = ""
    for name, checkpoint in checkpoints.items():
        config = checkpoint.model.config
        cells = (f"{checkpoint.model.num_params():,}", config.block_size, f"{config.vocab_size:,}")
        rows += f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return TEMPLATE.format(
        version=__version__,
        status=status,
        part=part,
        parts=", ".join(PARTS),
        rows=rows,
        base=escape(address.rstrip("/")),
        model=escape(next(iter(checkpoints))),
    )
