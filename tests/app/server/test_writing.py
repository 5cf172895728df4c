"""Texts through the API: shapes, the command line's bytes, log-probabilities, choices, streams."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

from serving import MODEL, written

from shakespeare.app.server.app import stream
from shakespeare.attention_ext import PARTS
from shakespeare.model import load
from shakespeare.model.loss import evaluate

CLI_SAMPLING = {"temperature": 0.8, "top_k": 200}  # the command line's defaults
USER = {"role": "user", "content": "Who is there?"}


def test_a_seed_gives_the_command_lines_text(client, cli):
    cases = [
        ("ROMEO:", 1, 200, {}, ()),
        ("\n", 2, 100, {"stop": ["\n\n", "the"]}, ("--stop", "\n\n", "--stop", "the")),
        ("JULIET:\n" * 20, 3, 150, {"context": "reset"}, ("--context", "reset")),
        ("A", 4, 60, {"top_p": 0.7, "presence_penalty": 1.5}, ("--top-p", 0.7, "--presence-penalty", 1.5)),
    ]  # fmt: skip
    for prompt, seed, tokens, fields, arguments in cases:
        fields = {"prompt": prompt, "seed": seed, "max_tokens": tokens} | CLI_SAMPLING | fields
        expected = written(cli, prompt, seed, tokens, *arguments)
        assert client.complete(**fields).text() == expected
        assert client.complete(**fields, stream=True).text() == expected
        assert client.complete(**fields, stream=True, stream_options={"interval_ms": 0}).text() == expected


@pytest.mark.parametrize("part", PARTS)
def test_the_same_text_in_every_part(client, cli, part):
    expected = written(cli, "ROMEO:", 7, 40, part=part)
    response = client.complete(seed=7, max_tokens=40, part=part, **CLI_SAMPLING)
    assert response.text() == expected and response.json()["system_fingerprint"].endswith(part)


def test_the_mean_log_probability_is_the_loss(client):
    checkpoint = load(MODEL)
    text = "A SERVER:\nThe requests have come, and I must answer them.\n\nALL:\nAnswer, answer.\n"
    loss = evaluate(checkpoint.model, torch.tensor(checkpoint.tokenizer.encode(text)))
    response = client.complete(prompt=text, max_tokens=0, echo=True, logprobs=2).json()
    choice = response["choices"][0]
    assert choice["text"] == text and choice["finish_reason"] == "length"
    assert response["usage"]["completion_tokens"] == 0
    scores = choice["logprobs"]
    assert scores["tokens"] == list(text) and scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["text_offset"] == list(range(len(text)))
    assert -sum(scores["token_logprobs"][1:]) / (len(text) - 1) == pytest.approx(loss, abs=1e-5)
    streamed = client.complete(prompt=text, max_tokens=0, echo=True, logprobs=2, stream=True)
    assert streamed.text() == text
    pieces = [event["choices"][0]["logprobs"]["token_logprobs"] for event in streamed.events]
    assert sum(pieces, []) == scores["token_logprobs"]


def test_log_probabilities_of_what_is_written(client):
    fields = {"prompt": "ROMEO:", "max_tokens": 80, "seed": 3, "logprobs": 3, "stop": "\n\n"}
    choice = client.complete(**fields).json()["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"] and choice["finish_reason"] == "stop"
    assert scores["text_offset"] == list(range(6, 6 + len(choice["text"])))
    assert all(p <= 0 for p in scores["token_logprobs"])
    for token, logprob, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"]):
        assert 3 <= len(top) <= 4 and top[token] == logprob
    streamed = client.complete(**fields, stream=True)
    events = [event["choices"][0]["logprobs"] for event in streamed.events]
    for key in scores:
        assert sum((each[key] for each in events), []) == scores[key]
    without = client.complete(**fields | {"logprobs": None}).json()["choices"][0]
    assert without["text"] == choice["text"] and without["logprobs"] is None
    none = client.complete(**fields | {"logprobs": 0}, echo=True).json()["choices"][0]
    assert none["text"] == "ROMEO:" + choice["text"] and none["logprobs"]["top_logprobs"] is None
    assert none["logprobs"]["token_logprobs"][6:] == scores["token_logprobs"]


def test_choices_are_numbered_by_prompt(client):
    together = client.complete(prompt=["ROMEO:", "JULIET:"], n=2, seed=10, max_tokens=20).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert together["usage"] == {"prompt_tokens": 13, "completion_tokens": 80, "total_tokens": 93}
    each = enumerate(["ROMEO:", "ROMEO:", "JULIET:", "JULIET:"])
    alone = [client.complete(prompt=p, seed=10 + i, max_tokens=20).text() for i, p in each]
    assert [choice["text"] for choice in together["choices"]] == alone
    streamed = client.complete(prompt=["ROMEO:", "JULIET:"], n=2, seed=10, max_tokens=20, stream=True)
    assert [streamed.text(i) for i in range(4)] == alone
    ids = load(MODEL).tokenizer.encode("JULIET:")
    assert client.complete(prompt=[ids], seed=12, max_tokens=20).text() == alone[2]
    assert client.complete(prompt=ids, seed=12, max_tokens=20, echo=True).text() == "JULIET:" + alone[2]


def test_the_best_of_several(client):
    fields = {"seed": 20, "max_tokens": 30}
    alone = [client.complete(**fields | {"seed": 20 + i}, logprobs=0).json() for i in range(5)]
    candidates = [each["choices"][0] for each in alone]
    means = [sum(c["logprobs"]["token_logprobs"]) / 30 for c in candidates]
    ranked = [candidates[i]["text"] for i in sorted(range(5), key=lambda i: -means[i])]
    best = client.complete(**fields, best_of=5, n=2).json()
    assert [choice["text"] for choice in best["choices"]] == ranked[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 150


def test_the_shapes_of_completions(client):
    response = client.complete(max_tokens=5).json()
    shared = {"id", "object", "created", "model", "system_fingerprint", "seed"}
    assert response.keys() == shared | {"choices", "usage"}
    for seed in (None, -1):  # random, and named
        streamed = client.complete(seed=seed, n=2, stream=True)
        again = client.complete(seed=streamed.events[0]["seed"], n=2)
        assert [again.text(0), again.text(1)] == [streamed.text(0), streamed.text(1)]
    assert response["object"] == "text_completion" and response["id"].startswith("cmpl-")
    assert response["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    events = client.complete(max_tokens=50, stream=True, stream_options={"include_usage": True}).events
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 50
    assert all(event["usage"] is None for event in events[:-1])
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert len(events[0]["choices"][0]["text"]) == 1  # the first token at once
    assert "usage" not in client.complete(max_tokens=5, stream=True).events[-1]
    assert client.complete(max_tokens=0).text() == ""
    assert client.complete(max_tokens=0, echo=True, stream=True).text() == "ROMEO:"
    assert client.complete(prompt=None, max_tokens=3).status == 200


def test_the_shapes_of_chats(client):
    response = client.chat(USER, seed=1, logprobs=True, top_logprobs=2).json()
    play = "USER:\nWho is there?\n\nASSISTANT:\n"
    assert response["object"] == "chat.completion" and response["play"] == play
    choice = response["choices"][0]
    assert choice["message"]["role"] == "assistant" and "\n\n" not in choice["message"]["content"]
    expected = client.complete(prompt=play, seed=1, stop="\n\n", max_tokens=128)
    assert choice["message"]["content"] == expected.text()
    assert choice["finish_reason"] == expected.json()["choices"][0]["finish_reason"]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    for each in content:
        assert len(each["top_logprobs"]) == 2 and bytes(each["bytes"]).decode() == each["token"]
    streamed = client.chat(USER, seed=1, stream=True, n=2)
    assert streamed.events[0]["choices"][1]["delta"] == {"role": "assistant", "content": ""}
    assert streamed.events[0]["play"] == play and "play" not in streamed.events[1]
    assert streamed.text(0) == choice["message"]["content"]
    assert streamed.text(1) == client.chat(USER, seed=2).text()
    assert [e["choices"][0]["finish_reason"] for e in streamed.events].count(None) == len(streamed.events) - 2
    second = client.chat(USER, choice["message"], USER, seed=1)  # as after messages.append()
    assert second.json()["play"] == f"{play}{choice['message']['content']}\n\n{play}"
    longer = client.chat(USER, seed=1, stop=[], max_completion_tokens=128).text()
    assert longer.startswith(choice["message"]["content"]) and len(longer) == 128


def test_a_stream_is_whole_although_its_reader_was_waited_for():
    """The last text ends while a part before it is sent."""
    bodies, news = [], AsyncMock(side_effect=[b"one", b"two"])
    call = SimpleNamespace(left=1, gone=False, begin=lambda: b"", end=lambda: b"[DONE]", news=news)

    async def send(message) -> None:
        bodies.append((message.get("body"), message.get("more_body")))
        if message.get("body") == b"one":
            call.left = 0

    asyncio.run(stream(call, send))
    assert bodies[1:] == [(b"", True), (b"one", True), (b"two[DONE]", False)]


def test_errors_have_openais_shape(client):
    error = client.complete(temperature=3).json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == "temperature"
    unknown = client.complete(model="gpt-5")
    assert unknown.status == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert unknown.json()["error"]["param"] == "model"
    assert client.get("/v1/models/gpt-5").json()["error"]["code"] == "model_not_found"
    for path, method, status in ("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405):
        refusal = client.send(method, path)
        assert refusal.status == status and refusal.json()["error"]["type"] == "invalid_request_error"


def test_models_health_and_schema(client):
    models = client.get("/v1/models").json()
    assert models["object"] == "list" and models["data"][0]["id"] == MODEL
    assert client.get(f"/v1/models/{MODEL}").json() == models["data"][0]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/").json() == models  # without a page
    document = client.get("/openapi.json").json()
    fields = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "best_of", "suffix", "min_p"} <= fields.keys()
    assert fields["top_k"]["anyOf"][0] == {"type": "integer", "minimum": -1, "maximum": 2**63 - 1}


def test_metrics_count(client):
    client.idle()
    lane = {"model": MODEL, "part": "part4"}
    names = "prompt_tokens_total new_tokens_total texts_finished_total".split()
    before = [client.metric(f"attention_{name}", **lane) for name in names]
    client.complete(n=3, max_tokens=20)
    client.idle()
    after = [client.metric(f"attention_{name}", **lane) for name in names]
    assert [b - a for a, b in zip(before, after)] == [18, 60, 3]
    client.complete(temperature=9)
    assert client.metric("attention_requests_refused_total", status="400") >= 1
