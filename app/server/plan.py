"""What a valid request asks the scheduler to write, and how its response is put together."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from app.server import chat
from app.server.errors import ApiError
from app.server.requests import LARGEST_SEED, ChatBody, CompletionBody, Writing
from app.server.settings import Settings
from generation.sampling import Sampling
from generation.writer import Request
from model.checkpoint import Checkpoint
from model.tokenizer import Tokenizer

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
INTERVAL_MS = 16


@dataclass(frozen=True)
class Plan:
    """The texts of a request, in the order of its prompts, `candidates` for each prompt.

    prompts: their texts. prompt_tokens: of all prompts together. n: choices of each prompt; the best
    candidates. unwritten: one token is written and dropped, so that the prompt is read: max_tokens is 0.
    logprobs: alternatives with each token; None sends no log-probabilities. ranked: the candidates are
    compared. interval: seconds between two chunks. play: the chat's prompt.
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


def of_completion(body: CompletionBody, checkpoint: Checkpoint, settings: Settings) -> Plan:
    """The plan of a completion. Raises ApiError that names the wrong field."""
    n = body.n or 1
    candidates = body.best_of or n
    if candidates < n:
        raise ApiError(
            400, f"best_of is {candidates}; it must be at least n={n}.", "best_of", "invalid_value"
        )
    if body.stream and candidates > n:
        raise ApiError(
            400,
            "best_of must equal n with stream: candidates are compared when they end.",
            "best_of",
            "invalid_value",
        )
    ids, prompts = encoded(body.prompt, checkpoint.tokenizer)
    tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return _plan(
        body,
        checkpoint,
        settings,
        "max_tokens",
        ids,
        prompts,
        tokens,
        stop,
        n,
        candidates,
        body.logprobs,
        body.echo,
    )


def of_chat(body: ChatBody, checkpoint: Checkpoint, settings: Settings) -> Plan:
    """The plan of a chat. Raises ApiError that names the wrong field."""
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens not in (None, tokens):
        raise ApiError(
            400, "max_tokens and max_completion_tokens exclude each other.", "max_tokens", "invalid_value"
        )
    if tokens is None:
        tokens = checkpoint.model.config.block_size
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs.", "top_logprobs", "invalid_value")
    prompt = chat.play(body)
    try:
        ids = [checkpoint.tokenizer.encode(prompt)]
    except ValueError as error:
        raise ApiError(400, f"messages: {error}.", "messages", "invalid_value") from None
    stop = (
        chat.STOP if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    n = body.n or 1
    return _plan(
        body, checkpoint, settings, field, ids, [prompt], tokens, stop, n, n, logprobs, False, prompt
    )


def _plan(
    body: Writing,
    checkpoint: Checkpoint,
    settings: Settings,
    tokens_field: str,
    ids: Sequence[Sequence[int]],
    prompts: list[str],
    tokens: int,
    stop: tuple[str, ...],
    n: int,
    candidates: int,
    logprobs: int | None,
    echo: bool | None,
    play: str | None = None,
) -> Plan:
    count = len(ids) * candidates
    most = min(settings.most_texts, settings.slots + settings.queue)
    if count > most:
        field = "prompt" if len(ids) > most else "best_of" if candidates > n else "n"
        raise ApiError(
            400,
            f"The request has {count} texts; this server admits at most {most} in one.",
            field,
            "invalid_value",
        )
    if tokens > settings.most_tokens:
        message = f"{tokens_field} is {tokens}; it must be at most {settings.most_tokens}."
        raise ApiError(400, message, tokens_field, "invalid_value")
    if logprobs is not None:
        longest = max(map(len, ids)) if echo else 0
        if (scores := count * (tokens + longest)) > settings.most_scores:
            most = settings.most_scores
            message = (
                f"The request asks for up to {scores} log-probabilities; this server sends at most {most}."
            )
            raise ApiError(400, message, "logprobs", "invalid_value")
    if echo and count * max(map(len, ids)) > settings.body_bytes:
        raise ApiError(400, "The prompt is too long to be echoed so often.", "echo", "invalid_value")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream.", "stream_options", "invalid_value")
    # As large as JavaScript's numbers are exact, so that it can be given again.
    seed = secrets.randbelow(2**53 - count) if body.seed is None else body.seed
    if seed + count - 1 > LARGEST_SEED:
        raise ApiError(
            400, f"seed is {seed}; the last choice's must be less than 2**63.", "seed", "invalid_value"
        )
    unwritten = tokens == 0 and bool(echo) and logprobs is not None
    asked = logprobs if logprobs is not None else 0 if candidates > n else None
    try:
        sampling = sampling_of(body, checkpoint)
        requests = [
            Request(
                ids[i // candidates],
                seed + i,
                sampling,
                1 if unwritten else tokens,
                stop,
                body.context or "slide",
                logprobs=asked,
                prompt_logprobs=bool(echo) and logprobs is not None,
            )
            for i in range(count)
        ]
    except (TypeError, ValueError) as error:  # named as the field is
        raise ApiError(400, f"{error}.", str(error).split(" ")[0], "invalid_value") from None
    options = body.stream_options
    interval = INTERVAL_MS if options is None or options.interval_ms is None else options.interval_ms
    return Plan(
        body.model,
        body.part or settings.part,
        checkpoint.tokenizer,
        requests,
        prompts,
        sum(map(len, ids)),
        n,
        candidates,
        logprobs,
        bool(echo),
        unwritten,
        bool(body.stream),
        bool(options and options.include_usage),
        interval / 1000,
        play,
    )


def sampling_of(body: Writing, checkpoint: Checkpoint) -> Sampling:
    """The sampling of a request; what is not given is OpenAI's default, not the command line's."""
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    vocab_size = checkpoint.model.config.vocab_size
    if outside := [token for token in bias if token >= vocab_size]:
        raise ApiError(
            400,
            f"logit_bias has the token {outside[0]}; it must be from 0 to {vocab_size - 1}.",
            "logit_bias",
            "invalid_value",
        )

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        temperature=given(body.temperature, 1.0),
        top_k=body.top_k,
        top_p=given(body.top_p, 1.0),
        min_p=given(body.min_p, 0.0),
        repetition_penalty=given(body.repetition_penalty, 1.0),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        logit_bias=tuple(bias.items()),
    )


def encoded(
    prompt: str | list[str] | list[int] | list[list[int]] | None, tokenizer: Tokenizer
) -> tuple[list[list[int]], list[str]]:
    """(ids, texts) of the prompts. Raises ApiError for an empty one or what the model does not know."""
    if prompt is None:
        prompt = "\n"
    single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    given: list = [prompt] if single else list(prompt)  # type: ignore[arg-type]
    if not given:
        raise ApiError(400, "prompt is empty; it must have at least one text.", "prompt", "invalid_value")
    ids, texts = [], []
    for each in given:
        if not each:
            message = "prompt is empty; it must have at least one token."
            raise ApiError(400, message, "prompt", "invalid_value")
        if isinstance(each, str):
            try:
                ids.append(tokenizer.encode(each))
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}.", "prompt", "invalid_value") from None
            texts.append(each)
            continue
        if outside := next((token for token in each if token >= len(tokenizer)), None):
            message = f"prompt has the token {outside}; it must be from 0 to {len(tokenizer) - 1}."
            raise ApiError(400, message, "prompt", "invalid_value")
        decoder = tokenizer.decoder()
        ids.append(each)
        texts.append("".join(map(decoder.feed, each)) + decoder.end())
    return ids, texts
