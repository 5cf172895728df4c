"""The formats of responses, and the bytes of a stream's events, which are built by hand.

An event costs microseconds of a core that also writes texts. So the fields that all events of a stream share
are encoded once.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.server.choices import Piece, Score
from app.server.errors import ApiError
from app.server.plan import Plan
from attention_ext import __version__

DONE = b"data: [DONE]\n\n"
dumps = json.JSONEncoder(separators=(",", ":")).encode


@dataclass
class Result:
    """A choice, the sum of its pieces."""

    number: int
    text: str = ""
    scores: list[Score] = field(default_factory=list)
    finish: str | None = None
    new_tokens: int = 0
    mean_logprob: float = 0.0

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.scores += piece.scores or ()
        self.finish, self.new_tokens, self.mean_logprob = piece.finish, piece.new_tokens, piece.mean_logprob


class Shape:
    """The response to a plan: one object, or the events of a stream."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chat = plan.play is not None
        kind = "chat.completion" if self.chat else "text_completion"
        self._common: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self.chat and plan.stream else kind,
            "created": int(time.time()),
            "model": plan.model,
            "system_fingerprint": f"shakespeare-attention-{__version__}-{plan.part}",
        }
        self._head = b"data: " + dumps(self._common).encode()[:-1]
        self._tail = b',"usage":null}\n\n' if plan.include_usage else b"}\n\n"
        self._offsets = [len(prompt) if not plan.echo else 0 for prompt in plan.prompts]

    def whole(self, results: Sequence[Result]) -> bytes:
        """The response to a request without a stream."""
        plan = self.plan
        choices = []
        for at in range(0, len(results), plan.candidates):
            ranked = list(results[at : at + plan.candidates])
            if plan.ranked:
                ranked = sorted(ranked, key=lambda result: -result.mean_logprob)[: plan.n]
            choices += ranked
        shown = self._common | {
            "choices": [self._choice(i, result) for i, result in enumerate(choices)],
            "usage": self.usage(results),
        }
        return dumps(shown | self._own).encode()

    def begin(self) -> bytes:
        """The events before the first text."""
        if not self.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in range(len(self.plan.requests))
        ]
        own = "".join(f",{dumps(name)}:{dumps(value)}" for name, value in self._own.items())
        return self._head + f',"choices":{dumps(choices)}{own}'.encode() + self._tail

    def event(self, piece: Piece) -> bytes:
        """The events of a piece. A chat's text and its end are two events, as in OpenAI's API."""
        text = dumps(piece.text)
        scores = "null" if piece.scores is None else dumps(self._scores(piece.scores, piece.number))
        if not self.chat:
            return self._event(piece.number, f'"text":{text}', scores, piece.finish)
        events = b""
        if piece.text:
            events = self._event(piece.number, f'"delta":{{"content":{text}}}', scores, None)
        if piece.finish:
            events += self._event(piece.number, '"delta":{}', "null", piece.finish)
        return events

    def end(self, results: Sequence[Result]) -> bytes:
        """The events after the last text."""
        if not self.plan.include_usage:
            return DONE
        usage = f',"choices":[],"usage":{dumps(self.usage(results))}}}\n\n'
        return self._head + usage.encode() + DONE

    @staticmethod
    def failed(error: ApiError) -> bytes:
        """The last event of a stream that ends with an error."""
        return b"data: " + error.body() + b"\n\n"

    def usage(self, results: Sequence[Result]) -> dict[str, int]:
        """The number of tokens of the prompts and of all written texts, chosen or not."""
        written = sum(result.new_tokens for result in results)
        prompt = self.plan.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    @property
    def _own(self) -> dict[str, Any]:
        """The field that OpenAI's API lacks: the play that the model read for a chat."""
        return {"play": self.plan.play} if self.chat else {}

    def _event(self, number: int, content: str, scores: str, finish: str | None) -> bytes:
        ended = "null" if finish is None else f'"{finish}"'
        choice = f'{{"index":{number},{content},"logprobs":{scores},"finish_reason":{ended}}}'
        return self._head + f',"choices":[{choice}]'.encode() + self._tail

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        scores = None if self.plan.logprobs is None else self._scores(result.scores, result.number)
        common = {"index": index, "logprobs": scores, "finish_reason": result.finish}
        if self.chat:
            return common | {"message": {"role": "assistant", "content": result.text, "refusal": None}}
        return common | {"text": result.text}

    def _scores(self, scores: Sequence[Score], number: int) -> dict[str, Any]:
        if self.chat:
            return {"content": [chat_score(score) for score in scores], "refusal": None}
        offset = self._offsets[number // self.plan.candidates]
        return {
            "tokens": [score.token for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [tops(score) for score in scores] if self.plan.logprobs else None,
            "text_offset": [offset + score.start for score in scores],
        }


def tops(score: Score) -> dict[str, float] | None:
    """Log-probabilities of the likeliest tokens and the written one, by their texts."""
    if score.logprob is None:
        return None
    return dict(score.top) | {score.token: score.logprob}


def chat_score(score: Score) -> dict[str, Any]:
    """A token's score in a chat's format."""
    top = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in score.top]
    return {
        "token": score.token,
        "logprob": score.logprob,
        "bytes": list(score.token.encode()),
        "top_logprobs": top,
    }
