"""The page as one file that opens from a disk: styles, modules, worker, kernels and weights inside.

A module becomes a function that returns its exports. Imports and exports have only the forms that the page's
modules use, each on its own line.
"""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

IMPORT = re.compile(r'^import \{ ([^}]*) \} from "\./([\w-]+\.js)";$', re.M)
# Comments and indentation, which the files beside the page have. No string of the page contains ' // '.
COMMENT = re.compile(r"^ *//.*\n|^ *\n|^ +| +// .*$", re.M)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const) ([\w$]+))", re.M)

# Unpacks the page's script, which the policy names too.
START = """const packed = atob(document.getElementById("asset:main.js").textContent),
  bytes = new Blob([Uint8Array.from(packed, (c) => c.charCodeAt(0))]).stream(),
  script = Object.assign(document.createElement("script"), { type: "module" });
script.textContent = await new Response(bytes.pipeThrough(new DecompressionStream("gzip"))).text();
document.body.append(script);"""


def one_file(folder: Path, source: Path, models: tuple[str, ...]) -> str:
    """The page of `folder` with everything that it loads inside, and these models in bf16."""
    html, style = (
        re.sub(r"^ +", "", path.read_text(encoding="utf-8"), flags=re.M)
        for path in (source / "index.html", folder / "style.css")
    )
    style = re.sub(r"/\*.*?\*/|\s*([{};,])\s*|(?<=:) ", r"\1", style, flags=re.S)
    script = joined(folder / "js", "main.js")
    worker = joined(folder / "js", "worker.js")
    index = json.loads((folder / "models" / "models.json").read_text(encoding="utf-8"))
    inside = {name: index[name] | {"files": {"bf16": index[name]["files"]["bf16"]}} for name in models}
    assets = {path.name: path.read_bytes() for path in sorted(folder.glob("*.gz"))}
    for name, text in {"worker.js": worker, "main.js": script}.items():
        assets[name] = gzip.compress(text.encode(), 9, mtime=0)
    assets["models/models.json"] = json.dumps(inside).encode()
    for model in inside.values():
        path = model["files"]["bf16"]["path"]
        assets[path] = (folder / path).read_bytes()
    policy = (
        f"default-src 'none'; script-src '{digest(START)}' '{digest(script)}' 'wasm-unsafe-eval' blob:; "
        f"style-src '{digest(style)}'; worker-src blob:; img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = replaced(html, r'(?<=Content-Security-Policy" content=")[^"]*', policy)
    html = replaced(html, r'<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    html = replaced(html, r'<script type="module" src="js/main.js"></script>\n', "")
    data = "\n".join(
        f'<script type="text/plain" id="asset:{name}">{base64.b64encode(content).decode()}</script>'
        for name, content in assets.items()
    )
    return replaced(html, "</body>", f'{data}\n<script type="module">{START}</script>\n</body>')


def modules(folder: Path, entry: str) -> dict[str, str]:
    """The texts of an entry and of the modules that it needs, by name, each behind those that it imports."""
    known: dict[str, str] = {}

    def add(name: str) -> None:
        if name in known:
            return
        text = COMMENT.sub("", (folder / name).read_text(encoding="utf-8"))
        for _, other in IMPORT.findall(text):
            add(other)
        known[name] = text

    add(entry)
    return known


def joined(folder: Path, entry: str) -> str:
    """The modules that an entry needs as a script. Raises ValueError for an unknown form."""
    script = '"use strict";\n'
    for name, text in modules(folder, entry).items():
        exported = ", ".join(EXPORT.findall(text))
        body = IMPORT.sub(lambda m: f"const {{ {m[1]} }} = {variable(m[2])};", EXPORT.sub("", text))
        if re.search(r"^(?:import|export)\b", body, re.M) or "</script" in body:
            raise ValueError(f"{name} has a form of import or export that the bundle does not know")
        script += f"const {variable(name)} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n"
    return script


def variable(name: str) -> str:
    """The name of a module's exports."""
    return "m_" + re.sub(r"\W", "_", name)


def digest(text: str) -> str:
    """A text's hash, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def replaced(html: str, pattern: str, new: str) -> str:
    """The page with the one place that matches replaced. Raises ValueError if there is not one."""
    changed, count = re.subn(pattern, lambda _: new, html)
    if count != 1:
        raise ValueError(f"index.html has {count} places like {pattern}; it must have one")
    return changed
