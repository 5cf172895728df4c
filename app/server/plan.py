"""Plans: what the scheduler writes for a valid request, and what its response needs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.server import chat
from app.server.errors import ApiError
from app.server.requests import LARGEST_SEED, ChatBody, CompletionBody, Writing
from app.server.settings import Settings
from generation.sampling import NUMBERS, Sampling
from generation.writer import Request
from model.checkpoint import Checkpoint
from model.tokenizer import Tokenizer

DEFAULT_TOKENS = 16  # max_tokens of a completion by default, as in OpenAI's API
INTERVAL_MS = 16


@dataclass(frozen=True)
class Plan:
    """The texts of a request, in the order of its prompts, `candidates` for each prompt.

    prompts: the prompts' texts. prompt_tokens: the tokens of all prompts. n: choices for each prompt, its
    best candidates. unwritten: max_tokens is 0; one token is written and dropped so that the prompt is read.
    logprobs: number of alternatives for each token; None sends no log-probabilities. ranked: whether the
    candidates are compared. interval: seconds between two chunks. play: the chat's prompt.
    """

    model: str
    part: str
    tokenizer: Tokenizer
    requests: list[Request]
    prompts: list[str]
    prompt_tokens: int
    n: int
    candidates: int
    logprobs: int | None
    echo: bool
    unwritten: bool
    stream: bool
    include_usage: bool
    interval: float
    play: str | None = None

    @property
    def ranked(self) -> bool:
        """Whether there are more candidates than choices."""
        return self.candidates > self.n


@dataclass(frozen=True)
class Wanted:
    """The fields that completions and chats fill differently.

    ids, prompts: tokens and text of each prompt. field: the request's field that gave `tokens`.
    """

    ids: Sequence[Sequence[int]]
    prompts: list[str]
    tokens: int
    field: str
    stop: tuple[str, ...]
    n: int
    candidates: int
    logprobs: int | None
    echo: bool = False
    play: str | None = None

    @property
    def texts(self) -> int:
        """The number of texts that are written."""
        return len(self.ids) * self.candidates

    @property
    def unwritten(self) -> bool:
        """Whether the prompt is read only for its log-probabilities."""
        return self.tokens == 0 and self.echo and self.logprobs is not None


def wrong(message: str, field: str) -> ApiError:
    """An ApiError 400 for the value of a field."""
    return ApiError(400, message, field, "invalid_value")


def of_completion(body: CompletionBody, checkpoint: Checkpoint, settings: Settings) -> Plan:
    """The plan of a completion. Raises ApiError that names the wrong field."""
    n = body.n or 1
    candidates = body.best_of or n
    if candidates < n:
        raise wrong(f"best_of is {candidates}; it must be at least n={n}.", "best_of")
    if body.stream and candidates > n:
        raise wrong("best_of must equal n with stream: candidates are compared when they end.", "best_of")
    ids, prompts = encoded(body.prompt, checkpoint.tokenizer)
    tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    stop, echo = strings(body.stop, ()), bool(body.echo)
    wanted = Wanted(ids, prompts, tokens, "max_tokens", stop, n, candidates, body.logprobs, echo)
    return _plan(body, wanted, checkpoint, settings)


def of_chat(body: ChatBody, checkpoint: Checkpoint, settings: Settings) -> Plan:
    """The plan of a chat. Raises ApiError that names the wrong field."""
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, tokens):
        raise wrong("max_tokens and max_completion_tokens exclude each other.", "max_tokens")
    if tokens is None:
        tokens = checkpoint.model.config.block_size
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs needs logprobs.", "top_logprobs")
    prompt = chat.play(body)
    try:
        checkpoint.tokenizer.encode(chat.answering(body))
    except ValueError as error:
        raise wrong(f"speaker: {error}.", "speaker") from None
    try:
        ids = [checkpoint.tokenizer.encode(prompt)]
    except ValueError as error:
        raise wrong(f"messages: {error}.", "messages") from None
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    n = body.n or 1
    stop = strings(body.stop, chat.STOP)
    wanted = Wanted(ids, [prompt], tokens, field, stop, n, n, logprobs, play=prompt)
    return _plan(body, wanted, checkpoint, settings)


def strings(stop: str | list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """The strings of `stop`."""
    if stop is None:
        return default
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _plan(body: Writing, wanted: Wanted, checkpoint: Checkpoint, settings: Settings) -> Plan:
    check_sizes(wanted, settings)
    options = body.stream_options
    if options is not None and not body.stream:
        raise wrong("stream_options needs stream.", "stream_options")
    interval = INTERVAL_MS if options is None or options.interval_ms is None else options.interval_ms
    return Plan(
        body.model,
        body.part or settings.part,
        checkpoint.tokenizer,
        requests_of(body, wanted, checkpoint),
        wanted.prompts,
        sum(map(len, wanted.ids)),
        wanted.n,
        wanted.candidates,
        wanted.logprobs,
        wanted.echo,
        wanted.unwritten,
        bool(body.stream),
        bool(options and options.include_usage),
        interval / 1000,
        wanted.play,
    )


def check_sizes(wanted: Wanted, settings: Settings) -> None:
    """Raise ApiError if a request exceeds the server's limits for one request."""
    texts, tokens = wanted.texts, wanted.tokens
    most = min(settings.most_texts, settings.slots + settings.queue)
    if texts > most:
        field = "prompt" if len(wanted.ids) > most else "best_of" if wanted.candidates > wanted.n else "n"
        raise wrong(f"The request has {texts} texts; this server admits at most {most} in one.", field)
    if tokens > settings.most_tokens:
        message = f"{wanted.field} is {tokens}; it must be at most {settings.most_tokens}."
        raise wrong(message, wanted.field)
    if texts * tokens > settings.most_request_tokens:
        asked, most = texts * tokens, settings.most_request_tokens
        raise wrong(f"The request asks for up to {asked} tokens; at most {most} are written.", wanted.field)
    echoed = max(map(len, wanted.ids)) if wanted.echo else 0
    if wanted.logprobs is not None and texts * (tokens + echoed) > settings.most_scores:
        scores, most = texts * (tokens + echoed), settings.most_scores
        raise wrong(f"logprobs of up to {scores} tokens are asked for; at most {most} are sent.", "logprobs")
    if texts * echoed > settings.body_bytes:
        raise wrong("The prompt is too long to be echoed so often.", "echo")


def requests_of(body: Writing, wanted: Wanted, checkpoint: Checkpoint) -> list[Request]:
    """The texts to be written. Raises ApiError."""
    count = wanted.texts
    seed = secrets.randbelow(LARGEST_SEED - count) if body.seed is None else body.seed
    if seed + count - 1 > LARGEST_SEED:
        raise wrong(f"seed is {seed}; the last choice's must be less than 2**63.", "seed")
    ranked = wanted.candidates > wanted.n
    try:
        sampling = sampling_of(body, checkpoint)
        return [
            Request(
                wanted.ids[i // wanted.candidates],
                seed + i,
                sampling,
                1 if wanted.unwritten else wanted.tokens,
                wanted.stop,
                body.context or "slide",
                logprobs=0 if ranked and wanted.logprobs is None else wanted.logprobs,
                prompt_logprobs=wanted.echo and wanted.logprobs is not None,
            )
            for i in range(count)
        ]
    except (TypeError, ValueError) as error:  # its first word is the name of the field
        raise wrong(f"{error}.", str(error).split(" ")[0]) from None


def sampling_of(body: Writing, checkpoint: Checkpoint) -> Sampling:
    """The sampling of a request. Its defaults are OpenAI's, not those of the command line."""
    given_bias = body.logit_bias or {}
    bias = {int(token): value for token, value in given_bias.items()}
    if len(bias) < len(given_bias):
        raise wrong("logit_bias has a token twice; each must be there once.", "logit_bias")
    vocab_size = checkpoint.model.config.vocab_size
    if outside := [token for token in bias if token >= vocab_size]:
        raise wrong(
            f"logit_bias has the token {outside[0]}; it must be from 0 to {vocab_size - 1}.", "logit_bias"
        )

    given = {name: getattr(body, name) for name in NUMBERS}
    numbers: Any = {name: NUMBERS[name].off if value is None else value for name, value in given.items()}
    return Sampling(**numbers, logit_bias=tuple(bias.items()))


def encoded(
    prompt: str | list[str] | list[int] | list[list[int]] | None, tokenizer: Tokenizer
) -> tuple[list[list[int]], list[str]]:
    """(ids, texts) of the prompts. Raises ApiError for an empty prompt or unknown characters and tokens."""
    if prompt is None:
        prompt = "\n"
    single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    given: list = [prompt] if single else list(prompt)  # type: ignore[arg-type]
    if not given:
        raise wrong("prompt is empty; it must have at least one text.", "prompt")
    ids, texts = [], []
    for each in given:
        if not each:
            message = "prompt is empty; it must have at least one token."
            raise wrong(message, "prompt")
        if isinstance(each, str):
            try:
                ids.append(tokenizer.encode(each))
            except ValueError as error:
                raise wrong(f"prompt: {error}.", "prompt") from None
            texts.append(each)
            continue
        if outside := next((token for token in each if token >= len(tokenizer)), None):
            message = f"prompt has the token {outside}; it must be from 0 to {len(tokenizer) - 1}."
            raise wrong(message, "prompt")
        decoder = tokenizer.decoder()
        ids.append(each)
        texts.append("".join(map(decoder.feed, each)) + decoder.end())
    return ids, texts
