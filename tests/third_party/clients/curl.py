"""curl, with the options that docs/serve.md shows."""

import json
import os
import subprocess

CASE = json.loads(os.environ["CASE"])
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
text = {"model": CASE["model"], "prompt": CASE["prompt"], "seed": CASE["seed"], "max_tokens": CASE["tokens"]}
chat = {
    "model": CASE["model"],
    "messages": CASE["messages"],
    "seed": CASE["seed"],
    "max_tokens": CASE["tokens"],
}


def curl(path: str, body: dict | None = None, base: str = BASE, key: str = KEY) -> tuple[int, str]:
    """(status, what came)."""
    command = ["curl", "-sSN", "-w", "\n%{http_code}", base + path, "-H", f"Authorization: Bearer {key}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    data, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition(
        "\n"
    )
    return int(status), data


def events(data: str) -> list[dict]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in data.split("\n\n") if line.strip()]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refused(fields: dict, **settings) -> dict:
    """How a text is refused."""
    status, data = curl("/completions", text | fields, **settings)
    error = json.loads(data)["error"]
    return {"type": error["type"], "status": status, "param": error["param"]}


usage = {"stream": True, "stream_options": {"include_usage": True}}
whole = json.loads(curl("/completions", text)[1])
talk = json.loads(curl("/chat/completions", chat)[1])
stream = events(curl("/completions", text | usage)[1])
deltas = events(curl("/chat/completions", chat | usage)[1])
found = {
    "text": whole["choices"][0]["text"],
    "usage": [whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]],
    "stream": [each["choices"][0]["text"] for each in stream if each["choices"]],
    "stream_usage": [stream[-1]["usage"]["prompt_tokens"], stream[-1]["usage"]["completion_tokens"]],
    "chat": talk["choices"][0]["message"]["content"],
    "chat_stream": [each["choices"][0]["delta"].get("content", "") for each in deltas if each["choices"]],
    "models": [each["id"] for each in json.loads(curl("/models")[1])["data"]],
    "errors": {
        "400": refused({"temperature": 9}),
        "401": refused({}, key="wrong"),
        "404": refused({"model": "nothing"}),
        "429": refused({}, base=CASE["full"]),
    },
}
print(json.dumps(found))
