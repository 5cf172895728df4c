"""The schemas of responses, as app.server.responses writes them: closed objects, all fields given."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NOTHING: Schema = {"type": "null"}
LOGPROB: Schema = {"type": "number", "maximum": 0}


def record(**properties: Schema) -> Schema:
    """An object with exactly these fields."""
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties} | closed


def array(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def optional(schema: Schema) -> Schema:
    """Null, or a value of the schema."""
    return {"anyOf": [schema, NOTHING]}


ERROR = record(error=record(message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT)))
USAGE = record(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
FINISH: Schema = {"enum": ["stop", "length"]}
TOP: Schema = {"type": "object", "additionalProperties": LOGPROB}
COMPLETION_LOGPROBS = record(
    tokens=array(TEXT),
    token_logprobs=array(optional(LOGPROB)),
    top_logprobs=optional(array(optional(TOP))),
    text_offset=array(COUNT),
)
TOKEN = {"token": TEXT, "logprob": LOGPROB, "bytes": array({"type": "integer", "minimum": 0, "maximum": 255})}
CHAT_LOGPROBS = record(content=array(record(**TOKEN, top_logprobs=array(record(**TOKEN)))), refusal=NOTHING)
MESSAGE = record(role={"const": "assistant"}, content=TEXT, refusal=NOTHING)
MODEL = record(
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    parts=array(TEXT),
    block_size={"type": "integer", "minimum": 1},
)


def texts(kind: str, finish: Schema, choice: dict[str, Schema], logprobs: Schema, **own: Schema) -> Schema:
    """The response of a writing endpoint, or an event of its stream."""
    common = {"index": COUNT, "logprobs": optional(logprobs), "finish_reason": finish}
    return record(
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=array(record(**common, **choice)),
        **own,
    )


def event(chunk: Schema, *extra: str) -> Schema:
    """An event of a stream: a chunk, an error that ends it, or the end. extra: fields of some chunks only."""
    chunk["required"] = [name for name in chunk["required"] if name not in (*extra, "usage")]
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, ERROR]}}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
    }


FINISHED = optional(FINISH)
DELTA: Schema = {
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": TEXT},
    "additionalProperties": False,
}
RESPONSES: dict[str, Schema] = {
    "Error": ERROR,
    "Completion": texts("text_completion", FINISH, {"text": TEXT}, COMPLETION_LOGPROBS, usage=USAGE),
    "Chat": texts("chat.completion", FINISH, {"message": MESSAGE}, CHAT_LOGPROBS, usage=USAGE, play=TEXT),
    "CompletionEvent": event(
        texts("text_completion", FINISHED, {"text": TEXT}, COMPLETION_LOGPROBS, usage=optional(USAGE))
    ),
    "ChatEvent": event(
        texts(
            "chat.completion.chunk",
            FINISHED,
            {"delta": DELTA},
            CHAT_LOGPROBS,
            usage=optional(USAGE),
            play=TEXT,
        ),
        "play",
    ),
    "Model": MODEL,
    "Models": record(object={"const": "list"}, data=array(MODEL)),
    "Health": record(status={"enum": ["ok", "loading", "failed", "shutting down"]}),
}
