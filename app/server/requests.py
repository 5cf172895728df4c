"""The bodies of requests, what they ask a Writer for, and refusals in OpenAI's words.

Types are strict and unknown fields are refused. null counts as a missing field.
A chat is a play: each message is a speech, and the model, which learned only plays, writes the next one. A
speech ends at a blank line, the default of `stop`:

    ROMEO:
    Good morrow, cousin.

    ASSISTANT:

"""

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, from_json

from shakespeare.app.server import Settings
from shakespeare.attention_ext import PARTS
from shakespeare.generation.logprobs import MOST_TOP
from shakespeare.generation.request import CONTEXTS, Request
from shakespeare.generation.sampling import (
    LARGEST_SEED,
    MOST_BIAS,
    RANDOM,
    SETTINGS,
    Sampling,
    Setting,
    drawn_seed,
)
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.tokenizer import Tokenizer

LARGEST_ID = 2**31 - 1
OPENAIS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")  # settings that OpenAI's API has
SPEAKER = "ASSISTANT"
START = "\n"  # what an empty prompt continues


@dataclass
class ApiError(Exception):
    """A refusal. The client gets {"error": {"message", "type", "param", "code"}}.

    param: the wrong field. code: a word for programs. headers: additional headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The response's JSON. OpenAI's type of the error says whose mistake it is."""
        blame = "invalid_request_error" if self.status < 500 else "server_error"
        blame = "rate_limit_error" if self.status == 429 else blame
        shown = {"message": self.message, "type": blame, "param": self.param, "code": self.code}
        return json.dumps({"error": shown}).encode()


def wrong(message: str, name: str) -> ApiError:
    """An ApiError 400 for the value of a field."""
    return ApiError(400, message, name, "invalid_value")


# 2.0 is the same number in JSON as 2.
WHOLE = pydantic.BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)
# The first wrong item of a list ends its check: a body may hold a hundred thousand of them.
FIRST = Field(fail_fast=True)
Ids = Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_ID), WHOLE]], FIRST]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopString | Annotated[list[StopString], Field(max_length=4, fail_fast=True)]
Choices = Annotated[int, Field(ge=1, le=Settings.most_texts), WHOLE]
Seed = Annotated[int, Field(ge=RANDOM, le=LARGEST_SEED), WHOLE]
MOST_NESTED = 4096  # lists and objects of a body
MOST_FIELDS = 1024  # of an object
BLOCK_SIZE = -1  # of max_tokens: as many as the model's block size
Tokens = Annotated[int, Field(ge=BLOCK_SIZE), WHOLE]
Alternatives = Annotated[int, Field(ge=0, le=5), WHOLE]  # of completions, as in OpenAI's API
Name = Annotated[str, Field(min_length=1, max_length=64)]
TOKEN_ID = r"^[0-9]{1,9}$"
BIAS = {"type": ["number", "null"], "minimum": -MOST_BIAS, "maximum": MOST_BIAS}
NULL = {"type": "null"}
BIASES: Any = {"type": "object", "patternProperties": {TOKEN_ID: BIAS}, "additionalProperties": NULL}
# Sampling checks the numbers; pydantic's schema would admit other keys.
Biases = Annotated[dict[Annotated[str, Field(pattern=TOKEN_ID)], float], WithJsonSchema(BIASES)]
LABELS: Any = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
Labels = Annotated[dict[str, str], WithJsonSchema(LABELS)]
# Fields of OpenAI's API without effect here: the values that ask for nothing, or the type of any value.
IDLE_IN_REQUESTS = {
    "function_call": ["none", "auto"],
    "functions": [[]],
    "metadata": Labels,
    "modalities": [["text"]],
    "parallel_tool_calls": bool,
    "prompt_cache_key": str,
    "prompt_cache_options": Labels,
    "prompt_cache_retention": ["in_memory", "in-memory", "24h"],
    "reasoning_effort": ["none"],
    "response_format": [{"type": "text"}],
    "safety_identifier": str,
    "service_tier": ["auto", "default"],
    "store": [False],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "user": str,
    "verbosity": ["medium"],
}
IDLE_IN_MESSAGES: dict[str, list] = {
    "annotations": [[]],
    "refusal": [""],
    "tool_calls": [[]],
    "provider_specific_fields": [{}],  # LiteLLM's
}


class Fields(BaseModel):
    """A strict object: no other fields, no other types."""

    # deferred: a server starts sooner, and the first request takes what it saves
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def one_of(values: list[Any]) -> Any:
    """The type of a field that has one of these values of JSON."""
    known = [json.dumps(value) for value in values]  # in Python 0 equals False

    def check(value: Any) -> Any:
        if json.dumps(value) not in known:
            shown = {"known": " or ".join(known)}
            raise PydanticCustomError("unsupported", "only {known} is supported", shown)
        return value

    return Annotated[Any, pydantic.AfterValidator(check), WithJsonSchema({"enum": values})]


def idle(**known: Any) -> Any:
    """A base of objects with these fields, which have no effect."""
    note = Field(None, description="Accepted; nothing depends on it.")
    fields: Any = {
        name: (one_of(values) if isinstance(values, list) else values, note) for name, values in known.items()
    }
    return pydantic.create_model("Idle", __base__=Fields, **fields)


class StreamOptions(idle(include_obfuscation=[False])):  # type: ignore[misc]
    include_usage: bool = Field(default=False, description="Send a last chunk with the usage.")
    interval_ms: Annotated[int, Field(ge=0, le=10_000), WHOLE] = Field(
        default=16, description="Milliseconds between two chunks of a text. Not in OpenAI's API."
    )


def setting(name: str, known: Setting) -> Any:
    """The type and the field of a setting of Sampling. Its default changes nothing, as in OpenAI's API."""
    minimum, maximum = known.served or (known.minimum, known.maximum)
    low: Any = {"gt": minimum} if known.above and not known.served else {"ge": minimum}
    bounds = Field(**low, le=maximum)
    number: Any = Annotated[int, bounds, WHOLE] if known.integral else Annotated[float, bounds]
    note = None if name in OPENAIS else f"{known.help} Not in OpenAI's API."
    return (number | None if known.off is None else number), Field(known.off, description=note)


Settable: Any = pydantic.create_model(
    "Settable",
    __base__=idle(**IDLE_IN_REQUESTS),
    **{name: setting(name, known) for name, known in SETTINGS.items()},
)


class Body(Settable):
    """The fields of both kinds of requests besides the numbers of Sampling, and the texts that they ask for.

    Each kind has `alternatives` (for each token; None sends no log-probabilities), `echo`, `limit` (the most
    tokens of a text, after the name of their field), play() (a chat's prompt) and ids().
    """

    model: str
    n: Choices = 1
    seed: Seed = Field(
        RANDOM, description="Choice i has the seed SEED + i. -1: a random one, which the response names."
    )
    stop: Stop = []
    logit_bias: Biases = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(False, description="Write on after a token that ends a text, as in vLLM's API.")
    part: Literal[*PARTS] | None = Field(None, description="The attention. Not in OpenAI's API.")  # type: ignore
    context: Literal[*CONTEXTS] = Field(  # type: ignore
        "slide", description="What the model sees of a text beyond its block size. Not in OpenAI's API."
    )

    @property
    def options(self) -> StreamOptions:
        """How a stream is sent."""
        return self.stream_options or StreamOptions()

    @property
    def candidates(self) -> int:
        """The texts that are written for each prompt; the best n of them are sent."""
        return self.n

    @property
    def ranked(self) -> bool:
        """Whether there are more candidates than choices."""
        return self.candidates > self.n

    def requests(self, checkpoint: Checkpoint, settings: Settings) -> list[Request]:
        """The texts to be written, `candidates` for each prompt. Raises ApiError naming the wrong field."""
        config = checkpoint.config
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options needs stream.", "stream_options")
        prompts = self.ids(checkpoint.tokenizer)
        candidates = self.candidates
        alternatives = self.alternatives
        bias = tuple((int(token), number) for token, number in self.logit_bias.items())
        check_tokens("logit_bias", (token for token, _ in bias), config.vocab_size)
        name, tokens = self.limit
        texts = len(prompts) * candidates
        limit = min(settings.most_texts, settings.slots + settings.queue)
        if texts > limit:
            field = "prompt" if len(prompts) > limit else "best_of" if self.ranked else "n"
            raise wrong(f"The request has {texts} texts; this server admits at most {limit} in one.", field)
        if tokens == BLOCK_SIZE:
            tokens = min(config.block_size, settings.most_tokens, settings.most_request_tokens // texts)
        if tokens > settings.most_tokens:
            raise wrong(f"{name} is {tokens}; it must be at most {settings.most_tokens}.", name)
        limit = settings.most_request_tokens
        if texts * tokens > limit:
            message = f"The request asks for up to {texts * tokens} tokens; at most {limit} are written."
            raise wrong(message, name)
        echoed = max(map(len, prompts)) if self.echo else 0
        scores = 0 if alternatives is None else texts * (tokens + echoed)
        limit = settings.most_scores
        if scores > limit:
            message = f"logprobs of up to {scores} tokens are asked for; at most {limit} are sent."
            raise wrong(message, "logprobs")
        if texts * echoed > settings.body_bytes:
            raise wrong("The prompt is too long to be echoed so often.", "echo")
        seed = drawn_seed(self.seed)
        if seed + texts - 1 > LARGEST_SEED:
            raise wrong(f"seed is {seed}; the last choice's must be less than 2**63.", "seed")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        try:
            sampling = Sampling(**{name: getattr(self, name) for name in SETTINGS}, logit_bias=bias)
            return [
                Request(
                    prompts[i // candidates],
                    seed=seed + i,
                    sampling=sampling,
                    max_new_tokens=tokens,
                    stop=stop,
                    context=self.context,
                    ignore_eos=self.ignore_eos,
                    logprobs=0 if self.ranked and alternatives is None else alternatives,
                    prompt_logprobs=self.echo and alternatives is not None,
                )
                for i in range(texts)
            ]
        except (TypeError, ValueError) as error:  # its first word is the name of the field
            raise wrong(f"{error}.", str(error).split(" ")[0]) from None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], FIRST] | Ids | Annotated[list[Ids], FIRST] = Field(
        START, description="A text, a list of texts, ids, or a list of lists of ids."
    )
    max_tokens: Tokens = 16
    best_of: Choices | None = None
    echo: bool = False
    logprobs: Alternatives | None = None

    def play(self, tokenizer: Tokenizer) -> None:
        """No play."""

    @property
    def candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> tuple[str, int]:
        return "max_tokens", self.max_tokens

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of each prompt. Raises ApiError."""
        if self.candidates < self.n:
            raise wrong(f"best_of is {self.best_of}; it must be at least n={self.n}.", "best_of")
        if self.stream and self.ranked:
            raise wrong("best_of must equal n with stream: candidates are compared when they end.", "best_of")
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts: list[Any] = [self.prompt] if single else self.prompt  # type: ignore[list-item,assignment]
        if not prompts or [] in prompts:
            unit = "token" if prompts else "text"
            raise wrong(f"prompt is empty; it must have at least one {unit}.", "prompt")
        ids = [
            encoded(each or START, tokenizer, "prompt") if isinstance(each, str) else each for each in prompts
        ]
        check_tokens("prompt", map(max, ids), len(tokenizer))
        return ids


class TextPart(idle(prompt_cache_breakpoint=Labels)):  # type: ignore[misc]
    type: Literal["text"]
    text: str


class Message(idle(**IDLE_IN_MESSAGES)):  # type: ignore[misc]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FIRST]
    name: Name | None = Field(None, description="The speaker in the play; the role in capitals by default.")

    def speech(self, tokenizer: Tokenizer) -> str:
        """The speaker and the text."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        text = tokenizer.normal(parts)  # alone: its last \r does not belong to the line end behind it
        return speaker_line(self.name, self.role.upper(), tokenizer) + text + spelled("\n\n", tokenizer)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    stop: Stop = ["\n\n"]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = Field(None, description="-1 by default: the model's block size.")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP), WHOLE] | None = None
    speaker: Name | None = Field(
        None, description=f"Who answers in the play; {SPEAKER} by default. Not in OpenAI's API."
    )
    echo: ClassVar[bool] = False

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def play(self, tokenizer: Tokenizer) -> str:
        """The speeches, then a line with `speaker`, else the assistant's last name, else SPEAKER."""
        named = (m.name for m in reversed(self.messages) if m.role == "assistant" and m.name)
        speeches = "".join(message.speech(tokenizer) for message in self.messages)
        line = speaker_line(self.speaker or next(named, None), SPEAKER, tokenizer)
        return tokenizer.normal(speeches + line)

    @property
    def limit(self) -> tuple[str, int]:
        if self.max_completion_tokens is None:
            return "max_tokens", BLOCK_SIZE if self.max_tokens is None else self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise wrong("max_tokens and max_completion_tokens exclude each other.", "max_tokens")
        return "max_completion_tokens", self.max_completion_tokens

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of the play. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs needs logprobs.", "top_logprobs")
        encoded(self.speaker or "", tokenizer, "speaker")
        for i, message in enumerate(self.messages):
            encoded(message.name or "", tokenizer, f"messages[{i}].name")
        return [encoded(self.play(tokenizer) or START, tokenizer, "messages")]


def speaker_line(name: str | None, default: str, tokenizer: Tokenizer) -> str:
    """The line before a speech. What the client did not send is left out if the model does not know it."""
    who = name or spelled(default, tokenizer)
    return who and who + spelled(":", tokenizer) + spelled("\n", tokenizer)


def spelled(text: str, tokenizer: Tokenizer) -> str:
    """The text, or nothing if the model does not know one of its characters."""
    try:
        return text if tokenizer.encode(text) else ""
    except ValueError:
        return ""


def encoded(text: str, tokenizer: Tokenizer, name: str) -> list[int]:
    """The tokens of a field's text. Raises ApiError for characters that the model does not know."""
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise wrong(f"{name}: {error}.", name) from None


def check_tokens(name: str, tokens: Iterable[int], size: int) -> None:
    """Raise ApiError if a field has a token that the model does not have."""
    largest = max(tokens, default=0)
    if largest >= size:
        raise wrong(f"{name} has the token {largest}; it must be from 0 to {size - 1}.", name)


AnyBody = TypeVar("AnyBody", bound=Body)

# Messages for fields with a union of types. Pydantic would list the errors of each type.
MUST_BE = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": "must be a text of 1 to 256 characters, or a list of at most four of them",
    "content": "must be a text, or a list of parts of the type 'text' with a text and nothing else",
}


def without_nulls(value: Any, numbers: Iterator[int]) -> Any:
    """A value of JSON without the fields that are null. numbers: one is taken for each list and object.

    Raises ApiError for too many of them: pydantic and Python's collector would take long.
    """
    if not isinstance(value, dict | list):
        return value
    if next(numbers) == MOST_NESTED or isinstance(value, dict) and len(value) > MOST_FIELDS:
        limits = f"at most {MOST_NESTED} lists and objects, each of at most {MOST_FIELDS} fields"
        raise ApiError(400, f"The body must have {limits}.")
    if isinstance(value, list):
        return [without_nulls(each, numbers) for each in value]
    return {name: without_nulls(each, numbers) for name, each in value.items() if each is not None}


def parse(model: type[AnyBody], data: bytes | bytearray) -> AnyBody:
    """The body of a request. Raises ApiError 400 that names the first wrong field in `param`."""
    try:
        body = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    try:
        return model.model_validate(without_nulls(body, count()))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = path(first["loc"])
    message = first["msg"]
    value = first.get("input")
    union = next((str(part) for part in first["loc"] if part in MUST_BE), None)
    match first["type"]:
        case _ if not first["loc"]:
            raise ApiError(400, "The body must be a JSON object.")
        case "extra_forbidden":
            raise ApiError(400, f"Unsupported parameter: {name!r}.", name, "unsupported_parameter")
        case "missing":
            raise ApiError(400, f"Missing required parameter: {name!r}.", name, "missing_required_parameter")
        case _ if union:
            raise wrong(f"{name} {MUST_BE[union]}.", name)
    shown = f" is {value!r:.100}" if isinstance(value, str | int | float | bool) else ""
    raise wrong(f"{name}{shown}: {message}.", name)


def path(loc: tuple[int | str, ...]) -> str:
    """The path to a field, such as messages[0].content, without pydantic's names for a union's types."""
    shown = ""
    for part in loc:
        shown += f"[{part}]" if isinstance(part, int) else f".{part}" if shown else part
        if part in MUST_BE:
            break
    return shown.removesuffix(".[key]")  # pydantic's for a key of logit_bias
