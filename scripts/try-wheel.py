"""Try an installed wheel: the README's text, alone and from race, bulk and the server, and the page.

    python scripts/try-wheel.py README.md COMMAND...

COMMAND runs the wheel, such as shakespeare. This file needs only Python. scripts/try-wheels.sh runs it in
other systems, the tests in a new environment.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from itertools import takewhile
from pathlib import Path

MODEL = "shakes1024"
PROMPT = "ROMEO:"
SETTINGS = {"prompt": PROMPT, "seed": 1337, "temperature": 0.8, "top_k": 200, "max_tokens": 200}


def main(readme: str, *command: str) -> None:
    """Print a line for each check; exit with one that says what failed."""
    block = re.search(f"```text\n({PROMPT}\n.*?)```", Path(readme).read_text(encoding="utf-8"), re.DOTALL)
    assert block, readme

    def check(what: str, good: bool) -> None:
        sys.exit(f"FAILED: {what}") if not good else print(f"ok: {what}", flush=True)

    def run(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        check(" ".join(arguments), done.returncode == 0 or print(done.stderr))
        return done.stdout

    text = run("-m", MODEL, "--prompt", PROMPT)
    check("the text is the README's", text.startswith(block[1]))
    with tempfile.TemporaryDirectory() as folder:
        run("bulk", "-m", MODEL, "--texts", "2", "--prompt", PROMPT, "--out", f"{folder}/texts")
        (shard,) = Path(folder, "texts").glob("*.jsonl")
        lines = shard.read_text(encoding="utf-8").splitlines()
        check("bulk's texts are the same", all(PROMPT + json.loads(line)["text"] in text for line in lines))
        run("web", "--build", "--out", f"{folder}/page")
        check("the page has its kernels", len([*Path(folder, "page").glob("kernels-*.wasm")]) == 2)
    check("race has one text", "identical" in run("race", "part1,part2,part3,part4", "-m", MODEL))
    serve = [*command, "serve", "-m", MODEL, "--port", "0"]
    apart = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # Windows', for its signal
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, creationflags=apart) as server:
        assert server.stderr
        begin = "".join(takewhile(lambda line: not line.startswith("Ready"), server.stderr))
        found = re.search(r"http://\S+", begin)
        check("serve", found is not None and server.poll() is None or print(begin))
        assert found
        headers = {"content-type": "application/json"}
        body = json.dumps({"model": MODEL} | SETTINGS).encode()
        request = urllib.request.Request(f"{found[0]}/v1/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            check("its text is the same", PROMPT + json.load(answer)["choices"][0]["text"] in text)
        with urllib.request.urlopen(found[0]) as answer:
            check("it shows the page", b'<meta name="server"' in answer.read())
        server.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
    check("it ends", server.returncode == 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
