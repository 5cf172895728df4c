"""Log-probabilities of tokens that are a part of a character."""

import json

import pytest

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

import tiny

from shakespeare.app.server import Settings
from shakespeare.app.server.requests import ChatBody, CompletionBody, parse
from shakespeare.app.server.responses import Call
from shakespeare.generation.logprobs import TokenLogprob
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.tokenizer import BytesTokenizer


class Bytes(BytesTokenizer):
    """Each byte is a token."""

    def __len__(self):
        return 256

    def token_bytes(self, id):
        return bytes([id])

    def encode(self, text):
        return list(text.encode())


def logprobs(kind, text, **fields):
    """Those of a response that writes the text, each token with two alternatives."""
    body = parse(kind, json.dumps({"model": "m", "stop": "##"} | fields).encode())
    call = Call(body, Checkpoint(tiny.gpt(vocab_size=256).config, {}, Bytes()), Settings(), lambda: None)
    (choice,) = call.choices
    choice.logprobs = [TokenLogprob(token, -1.0, [(0xC3, -2.0), (0xA9, -3.0)]) for token in text]
    choice.add(list(text))
    choice.end()
    return json.loads(call.response())["choices"][0]["logprobs"]


def test_a_part_of_a_character_has_its_own_bytes():
    chat = dict(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2)
    for text, shown in (
        ("aé😀##", "aé😀".encode()),
        ("aé😀", "aé😀".encode()),
        (b"a\xc3##", b"a\xc3"),  # never completed
        (b"a\xc3", b"a\xc3"),
    ):
        content = logprobs(ChatBody, text.encode() if isinstance(text, str) else text, **chat)["content"]
        assert b"".join(bytes(each["bytes"]) for each in content) == shown
        assert len(content) == len(shown) and content[0]["token"] == "a"
        for each in content:
            assert [top["bytes"] for top in each["top_logprobs"]] == [[0xC3], [0xA9]]
    scores = logprobs(CompletionBody, "é".encode(), prompt="a", logprobs=2)
    assert scores["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"] and scores["text_offset"] == [1, 1]
    assert scores["top_logprobs"][1] == {"bytes:\\xc3": -2.0, "bytes:\\xa9": -1.0}
