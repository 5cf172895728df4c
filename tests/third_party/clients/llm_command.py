"""The command llm, whose file extra-openai-models.yaml names the server."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CASE = json.loads(os.environ["CASE"])
MODEL = """
- model_id: {id}
  model_name: {name}
  api_base: {base}
  api_key_name: ours
  completion: {completion}
"""
base = os.environ["OPENAI_BASE_URL"]
options = ["-o", "seed", str(CASE["seed"]), "-o", "max_tokens", str(CASE["tokens"])]


def entry(id: str, **fields) -> str:
    return MODEL.format(id=id, **{"name": CASE["model"], "base": base, "completion": "true"} | fields)


def run(*arguments: str, key: str = os.environ["OPENAI_API_KEY"]) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    if arguments[0] == "prompt":
        command += ["--key", key]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def refused(*arguments: str, **settings) -> dict:
    done = run("prompt", CASE["prompt"], "--no-log", *arguments, **settings)
    return {"exit": done.returncode, "said": done.stderr}


with tempfile.TemporaryDirectory() as folder:
    environment = os.environ | {"LLM_USER_PATH": folder}
    entries = [entry("text"), entry("chat", completion="false"), entry("nothing", name="nothing")]
    entries.append(entry("full", base=CASE["full"]))
    (Path(folder) / "extra-openai-models.yaml").write_text("".join(entries))
    whole = run("prompt", "-m", "text", "--no-stream", "--no-log", CASE["prompt"], *options)
    stream = run("prompt", "-m", "text", "--no-log", CASE["prompt"], *options)
    question = CASE["messages"][-1]["content"]
    talk = run("prompt", "-m", "chat", "--no-stream", "-u", question, *options)
    found = {
        "text": whole.stdout.removesuffix("\n"),
        "stream": [stream.stdout.removesuffix("\n")],
        "chat": talk.stdout.removesuffix("\n"),
        "chat_said": talk.stderr,
        "errors": {
            "400": refused("-m", "text", "-o", "temperature", "1.9", "-o", "max_tokens", "70000"),
            "401": refused("-m", "text", key="wrong"),
            "404": refused("-m", "nothing"),
            "429": refused("-m", "full"),
        },
        "stderr": whole.stderr + stream.stderr,
    }
print(json.dumps(found))
