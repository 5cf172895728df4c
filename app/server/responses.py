"""A request in progress: its texts as they grow, and the bytes of its response in OpenAI's formats.

An event costs microseconds of a core that also writes texts. So the fields that all events of a stream share
are encoded once.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from numpy.typing import NDArray

from shakespeare import __version__
from shakespeare.app.server import Settings
from shakespeare.app.server.requests import ApiError, Body
from shakespeare.generation.logprobs import TokenLogprob
from shakespeare.generation.request import Request
from shakespeare.generation.texts import Completion
from shakespeare.model.checkpoint import Checkpoint

dumps = json.JSONEncoder(separators=(",", ":")).encode
# A token, the characters before it, and its log-probability: None where nothing predicts the token.
Score = tuple[int, int, TokenLogprob | None]


class Choice(Completion):
    """A growing text of a call. Until it has ended, only the scheduler's thread uses it.

    prompt: its text, if echoed or scored. sent_at: the time of the last event; 0 before the first token.
    """

    def __init__(self, call: "Call", number: int, request: Request, prompt: str) -> None:
        super().__init__(request, number, call.tokenizer)
        self.call = call
        self.sent_at = 0.0
        self.sum_logprobs = 0.0
        if call.body.echo:
            self.pieces.append(prompt)
        self._scores: list[Score] = []  # of tokens that are not sent
        self._scored = self._sent = 0 if call.body.echo else len(prompt)  # characters so far
        self._scores_decoder = call.tokenizer.decoder()

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Show tokens that the Writer has appended, up to one that completes a stop string."""
        before = self.shown_tokens
        piece = super().add(tokens)
        self._take_logprobs(self.shown_tokens - before)
        return piece

    def unsent(self) -> tuple[str, list[Score]]:
        """The text that may be sent, and the scores of the tokens that begin in it."""
        text = self.text
        self.pieces.clear()
        self._sent += len(text)
        everything = self.finish_reason and not self.stopped_by
        count = sum(everything or start < self._sent for _, start, _ in self._scores)
        scores = self._scores[:count]
        self._scores = self._scores[count:]
        return text, scores

    def _take_logprobs(self, count: int) -> None:
        """Take the log-probabilities of the prompt and of `count` new tokens from the Writer's text."""
        if self.request.logprobs is None:
            return
        known = self.prompt_logprobs
        if known:
            for token in self.request.ids[: -len(known)]:  # only the last tokens of a long prompt were read
                self._score(token, None)
            for token, each in zip(self.prompt, known):
                self._score(token, each)
            self.prompt_logprobs = []
        for new in self.logprobs[:count]:
            self.sum_logprobs += new.logprob
            self._score(new.token, new)
        self.logprobs.clear()

    def _score(self, token: int, known: TokenLogprob | None) -> None:
        text = self._scores_decoder.feed(token)
        own = self.call.tokenizer.token_bytes(token)
        broken = max(0, len(text) - len(own.decode(errors="replace")))  # what earlier tokens did not complete
        self._scores.append((token, self._scored + broken, known))
        self._scored += len(text)


def readable(token: bytes) -> str:
    """A token's text. A part of a character is written as OpenAI does: 'bytes:\\xe2\\x80'."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + token.decode(errors="backslashreplace")


class Call:
    """A request in progress. The event loop owns all fields but `choices`.

    overflowed: is called if more than buffer_bytes of events wait for behind_seconds. left: the number of
    choices that have not ended. gone: whether the client has left, was dropped, or has everything.
    Raises ApiError naming the wrong field of the body.
    """

    def __init__(
        self, body: Body, checkpoint: Checkpoint, settings: Settings, overflowed: Callable[[], None]
    ) -> None:
        self.body = body
        self.tokenizer = checkpoint.tokenizer
        self.lane = body.model, body.part or settings.part
        self.began = time.monotonic()
        requests = body.requests(checkpoint, settings)
        prompts = [request.ids for request in requests[:: body.candidates]]
        self._prompt_tokens = sum(map(len, prompts))
        shown = body.echo or body.alternatives is not None
        texts = [self._decoded(ids) if shown else "" for ids in prompts]
        self.choices = [Choice(self, i, r, texts[i // body.candidates]) for i, r in enumerate(requests)]
        self.left = len(requests)
        self.gone = False
        self._buffer_bytes = settings.buffer_bytes
        self._behind_seconds = settings.behind_seconds
        self._overflowed = overflowed
        self._behind: asyncio.TimerHandle | None = None  # runs while more than buffer_bytes wait
        self._inbox = bytearray()
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        self._text_of = cache(lambda token: readable(self.tokenizer.token_bytes(token)))
        play = body.play(self.tokenizer)
        self._chat = play is not None
        response = "chat.completion" if self._chat else "text_completion"
        self._common: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{response}.chunk" if self._chat and body.stream else response,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"shakespeare-attention-{__version__}-{self.lane[1]}",
            "seed": requests[0].seed,
        }
        self._play = {"play": play} if self._chat else {}  # OpenAI's API lacks this field
        self._head = b"data: " + dumps(self._common).encode()[:-1]
        self.interval = body.options.interval_ms / 1000  # seconds between two chunks of a text
        self._tail = b',"usage":null}\n\n' if body.options.include_usage else b"}\n\n"

    def put(self, news: bytes | ApiError, ended: bool = False) -> None:
        """Append events, or note the error that ends the request. ended: whether a choice has ended."""
        self.left -= ended
        if isinstance(news, ApiError):
            self._error = news
        else:
            self._inbox += news
            # A single batch may be larger; a reader that is fast enough has it at once.
            if len(self._inbox) > self._buffer_bytes and not (self._behind or self.gone):
                self._behind = asyncio.get_running_loop().call_later(self._behind_seconds, self._overflowed)
        self._news.set()

    def leave(self) -> None:
        """Note that the client has left or has everything."""
        self.gone = True
        self._in_time()
        self._news.set()

    async def news(self) -> bytes:
        """Wait for events or the end of a choice; return all events. Raises the ApiError that ended them."""
        await self._news.wait()
        self._news.clear()
        if self._error and not self.gone:
            raise self._error
        taken = bytes(self._inbox)
        self._inbox = bytearray()
        self._in_time()
        return taken

    def _in_time(self) -> None:
        if self._behind:
            self._behind.cancel()
            self._behind = None

    def begin(self) -> bytes:
        """The events of a stream before the first text."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in range(len(self.choices))
        ]
        return self._head + f',"choices":{dumps(choices)},{dumps(self._play)[1:-1]}'.encode() + self._tail

    def event(self, choice: Choice) -> bytes:
        """The events of a choice's new text. A chat's text and its end are two events, as in OpenAI's API."""
        text, scores = choice.unsent()
        if not text and not choice.finish_reason:
            return b""
        shown = "null" if self.body.alternatives is None else dumps(self._shown(scores))
        finish = f'"{choice.finish_reason}"' if choice.finish_reason else "null"
        if not self._chat:
            return self._event(choice, f'"text":{dumps(text)}', shown, finish)
        events = self._event(choice, f'"delta":{{"content":{dumps(text)}}}', shown, "null") if text else b""
        return events + (self._event(choice, '"delta":{}', "null", finish) if choice.finish_reason else b"")

    def _event(self, choice: Choice, content: str, scores: str, finish: str) -> bytes:
        shown = f'{{"index":{choice.number},{content},"logprobs":{scores},"finish_reason":{finish}}}'
        return self._head + f',"choices":[{shown}]'.encode() + self._tail

    def end(self) -> bytes:
        """The events of a stream after the last text."""
        usage = f',"choices":[],"usage":{dumps(self._usage)}}}\n\n'.encode()
        return (self._head + usage if self.body.options.include_usage else b"") + b"data: [DONE]\n\n"

    def response(self) -> bytes:
        """The response to a request without a stream."""
        each = self.body.candidates
        chosen: list[Choice] = []
        for at in range(0, len(self.choices), each):
            ranked = self.choices[at : at + each]
            if self.body.ranked:
                ranked.sort(key=lambda choice: -choice.sum_logprobs / max(choice.new_tokens, 1))
            chosen += ranked[: self.body.n]
        choices = []
        for index, choice in enumerate(chosen):
            text, scores = choice.unsent()
            shown = None if self.body.alternatives is None else self._shown(scores)
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._chat else {"text": text}
            common = {"index": index, "logprobs": shown, "finish_reason": choice.finish_reason}
            choices.append(common | content)
        return dumps(self._common | {"choices": choices, "usage": self._usage} | self._play).encode()

    @property
    def _usage(self) -> dict[str, int]:
        """The number of tokens of the prompts and of all written texts, chosen or not."""
        prompt = self._prompt_tokens
        written = sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _shown(self, scores: Sequence[Score]) -> dict[str, Any]:
        """Log-probabilities in the format of completions or of chats."""
        if self._chat:
            scored = [(token, known) for token, _, known in scores if known]
            likeliest = [{"top_logprobs": [self._token(*each) for each in known.top]} for _, known in scored]
            tokens = (self._token(token, known.logprob) for token, known in scored)
            return {"content": [token | top for token, top in zip(tokens, likeliest)], "refusal": None}
        tops = [
            {self._text_of(each): logprob for each, logprob in (*known.top, (token, known.logprob))}
            if known
            else None
            for token, _, known in scores
        ]
        return {
            "tokens": [self._text_of(token) for token, _, _ in scores],
            "token_logprobs": [known and known.logprob for _, _, known in scores],
            "top_logprobs": tops if self.body.alternatives else None,
            "text_offset": [start for _, start, _ in scores],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": self._text_of(token), "logprob": logprob, "bytes": list(data)}

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of tokens. The replacement character stands for bytes that are not a character."""
        decoder = self.tokenizer.decoder()
        return "".join(map(decoder.feed, ids)) + decoder.end()
