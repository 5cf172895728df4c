"""The bodies of requests: their schemas, and refusals in OpenAI's words.

Types are strict and unknown fields are refused. As in OpenAI's API, null counts as a missing field.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from app.server.errors import ApiError
from attention_ext import PARTS
from generation.sampling import NUMBERS, Number
from generation.writer import CONTEXTS

# The settings of Sampling that OpenAI's API has.
OPENAIS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
MOST_CHOICES = 128
MOST_LOGPROBS = 5
LARGEST_SEED = 2**63 - 1
LARGEST_ID = 2**31 - 1


def whole(value: Any) -> Any:
    """2 for 2.0, which is the same number in JSON; any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole)
Ids = list[Annotated[int, Field(ge=0, le=LARGEST_ID), WHOLE]]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE]
Tokens = Annotated[int, Field(ge=0), WHOLE]
Bias = Annotated[float, Field(ge=-100, le=100)]
TOKEN_ID = r"^[0-9]{1,9}$"
Biases = Annotated[
    dict[Annotated[str, Field(pattern=TOKEN_ID)], Bias],
    WithJsonSchema(  # pydantic's schema would admit other keys
        {
            "type": "object",
            "patternProperties": {TOKEN_ID: {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
        }
    ),
]


class Body(BaseModel):
    """A strict object: no other fields, no other types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    interval_ms: Annotated[int, Field(ge=0, le=10_000), WHOLE] | None = Field(
        None, description="Milliseconds between two chunks of a text, by default 16. Not in OpenAI's API."
    )


def schema(name: str, known: Number) -> tuple[Any, Any]:
    """The type and the field of a setting of Sampling."""
    kind = Annotated[int, WHOLE] if known.whole else float
    least, most = known.served or (known.least, known.most)
    low = {"gt": least} if known.above and not known.served else {"ge": least}
    note = None if name in OPENAIS else f"{known.help} Not in OpenAI's API."
    return Annotated[kind, Field(**low, le=most)] | None, Field(None, description=note)  # type: ignore


Chosen = create_model(
    "Chosen", __base__=Body, **{name: schema(name, known) for name, known in NUMBERS.items()}
)  # type: ignore


class Writing(Chosen):  # type: ignore[misc, valid-type]
    """The fields that both kinds of requests have, besides the settings of Sampling."""

    model: str
    n: Choices | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED), WHOLE] | None = Field(
        None, description="Choice i has the seed SEED + i."
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    logit_bias: Biases | None = None
    user: str | None = Field(None, description="Accepted; nothing depends on it.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    part: Literal[*PARTS] | None = Field(None, description="The attention. Not in OpenAI's API.")  # type: ignore
    context: Literal[*CONTEXTS] | None = Field(  # type: ignore
        None, description="What the model sees of a text beyond its block size. Not in OpenAI's API."
    )


class CompletionBody(Writing):
    """POST /v1/completions."""

    prompt: str | list[str] | Ids | list[Ids] | None = Field(
        None, description="A text, a list of texts, ids, or a list of lists of ids; a line end by default."
    )
    max_tokens: Tokens | None = Field(None, description="16 by default.")
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None
    suffix: None = Field(None, description="Not supported: the model writes forwards only.")


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="The speaker in the play; the role in capitals by default."
    )


class ChatBody(Writing):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = Field(None, description="The model's block size by default.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), WHOLE] | None = None
    speaker: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="Who answers in the play; ASSISTANT by default. Not in OpenAI's API."
    )


AnyBody = TypeVar("AnyBody", bound=Body)

# Messages for fields with a union of types. Pydantic would list the errors of each type.
MUST_BE = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": "must be a text of 1 to 256 characters, or a list of at most four of them",
    "content": "must be a text, or a list of parts of the type 'text'",
}


def parse(kind: type[AnyBody], data: bytes) -> AnyBody:
    """The body of a request. Raises ApiError 400 that names the first wrong field in `param`."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise refusal(kind, first["loc"], first["type"], first["msg"], first.get("input"))


def refusal(kind: type[Body], loc: tuple[int | str, ...], error: str, message: str, value: Any) -> ApiError:
    """An error of pydantic in OpenAI's format."""
    if error == "json_invalid":
        return ApiError(400, f"The body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if not loc:
        return ApiError(400, "The body must be a JSON object.")
    param = path(loc)
    name = next((str(part) for part in loc if part in MUST_BE), None)
    if error == "extra_forbidden":
        return ApiError(400, f"Unsupported parameter: {param!r}.", param, "unsupported_parameter")
    if error == "none_required":
        return ApiError(
            400, f"Unsupported parameter: {param!r}; it must be null.", param, "unsupported_parameter"
        )
    if error == "missing":
        return ApiError(400, f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    if name is not None:
        return ApiError(400, f"{param} {MUST_BE[name]}.", param, "invalid_value")
    shown = f" is {value!r:.100}" if isinstance(value, str | int | float | bool) else ""
    return ApiError(400, f"{param}{shown}: {message}.", param, "invalid_value")


def path(loc: tuple[int | str, ...]) -> str:
    """The path to a field, such as messages[0].content, without pydantic's names for a union's types."""
    shown = ""
    for part in loc:
        if isinstance(part, int):
            shown += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+|[0-9]+", part) and part not in ("str", "int", "float"):
            shown += f".{part}" if shown else part
        elif not shown:  # an unknown field of any name
            shown = part
        if part in MUST_BE:
            break
    return shown
