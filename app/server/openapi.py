"""The OpenAPI document: paths and responses by hand, bodies from pydantic.

Responses are closed objects with all fields given, as app.server.responses writes them.
"""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from shakespeare import __version__
from shakespeare.app.server.requests import ChatBody, CompletionBody

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/"
REFUSED = {
    400: "a field is wrong",
    401: "the key is missing or wrong",
    403: "the Host header is not admitted",
    404: "there is no such model",
    408: "the body took too long",
    413: "the body is too long",
    415: "the body is not JSON",
    429: "the queue is full",
    500: "the engine failed",
    503: "the models are loading, or the server is ending",
}
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


def texts(kind: str, finish: Schema, choice: dict[str, Schema], logprobs: Schema, **own: Schema) -> Schema:
    """The response of a writing endpoint, or an event of its stream."""
    common = {"index": COUNT, "logprobs": optional(logprobs), "finish_reason": finish}
    named = {
        "id": TEXT,
        "object": {"const": kind},
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": TEXT,
    }
    return record(**named, choices=array(record(**common, **choice)), **own)


def event(chunk: Schema) -> Schema:
    """An event of a stream: a chunk, an error, or the end. Some chunks have no play and no usage."""
    chunk["required"] = [name for name in chunk["required"] if name not in ("play", "usage")]
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, ERROR]}}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": TEXT | {"anyOf": [{"const": "[DONE]"}, data]}},
    }


ERROR = record(error=record(message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT)))
USAGE = record(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
FINISH: Schema = {"enum": ["stop", "length"]}
COMPLETION_LOGPROBS = record(
    tokens=array(TEXT),
    token_logprobs=array(optional(LOGPROB)),
    top_logprobs=optional(array(optional({"type": "object", "additionalProperties": LOGPROB}))),
    text_offset=array(COUNT),
)
TOKEN = {"token": TEXT, "logprob": LOGPROB, "bytes": array(COUNT | {"maximum": 255})}
CHAT_LOGPROBS = record(content=array(record(**TOKEN, top_logprobs=array(record(**TOKEN)))), refusal=NOTHING)
ASSISTANT = {"const": "assistant"}
DELTA: Schema = record(role=ASSISTANT, content=TEXT) | {"required": []}
MESSAGE = record(role=ASSISTANT, content=TEXT, refusal=NOTHING)
MODEL = record(
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    parts=array(TEXT),
    block_size=COUNT | {"minimum": 1},
)
COMPLETION = {"choice": {"text": TEXT}, "logprobs": COMPLETION_LOGPROBS}
STREAMED = {"finish": optional(FINISH), "usage": optional(USAGE)}
RESPONSES: dict[str, Schema] = {
    "Error": ERROR,
    "Completion": texts("text_completion", FINISH, usage=USAGE, **COMPLETION),
    "Chat": texts("chat.completion", FINISH, {"message": MESSAGE}, CHAT_LOGPROBS, usage=USAGE, play=TEXT),
    "CompletionEvent": event(texts("text_completion", **COMPLETION, **STREAMED)),
    "ChatEvent": event(
        texts("chat.completion.chunk", choice={"delta": DELTA}, logprobs=CHAT_LOGPROBS, play=TEXT, **STREAMED)
    ),
    "Model": MODEL,
    "Models": record(object={"const": "list"}, data=array(MODEL)),
    "Health": record(status={"enum": ["ok", "loading", "failed", "shutting down"]}),
}


class Bodies(GenerateJsonSchema):
    """Pydantic's schemas, where null is admitted in place of any default, and as any other field."""

    def default_schema(self, schema: Any) -> Schema:
        made = super().default_schema(schema)
        default = made.pop("default")
        return (made if NOTHING in made.get("anyOf", ()) else optional(made)) | {"default": default}

    def model_schema(self, schema: Any) -> Schema:
        return super().model_schema(schema) | {"additionalProperties": NOTHING}


def document(keys: bool) -> Schema:
    """The document of a server, with or without keys."""
    _, bodies = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")],
        ref_template=REFERENCE + "{model}",
        schema_generator=Bodies,
    )
    always = (401, 403) if keys else (403,)
    name = {"name": "model", "in": "path", "required": True, "schema": TEXT}
    metrics = {"text/plain": {"schema": TEXT}}
    health = operation("Whether requests are answered.", _json("Health"), 403, security=[])
    health["responses"]["503"] = {"description": REFUSED[503], "content": _json("Health")}
    model = operation("A model.", _json("Model"), *always, 404, parameters=[name])
    shown: Schema = {
        "openapi": "3.2.0",  # the first that describes the events of a stream
        "info": {"title": "shakespeare-attention", "version": __version__},
        "paths": {
            "/v1/completions": {"post": writing("Continue prompts.", "Completion", keys)},
            "/v1/chat/completions": {"post": writing("Continue a chat, as a play.", "Chat", keys)},
            "/v1/models": {"get": operation("The models.", _json("Models"), *always)},
            "/v1/models/{model}": {"get": model},
            "/health": {"get": health},
            "/metrics": {"get": operation("Prometheus' metrics.", metrics, *always)},
        },
        "components": {"schemas": bodies["$defs"] | RESPONSES},
    }
    if keys:
        shown["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        shown["security"] = [{"key": []}]
    return shown


def _json(schema: str) -> Schema:
    return {"application/json": {"schema": {"$ref": REFERENCE + schema}}}


def operation(summary: str, content: Schema, *codes: int, **more: Any) -> Schema:
    """A method of a path: what it answers, and the codes of its errors."""
    errors = {str(code): {"description": REFUSED[code], "content": _json("Error")} for code in codes}
    answered = {"200": {"description": summary, "content": content}}
    return {"summary": summary, "responses": answered | errors} | more


def writing(summary: str, answer: str, keys: bool) -> Schema:
    """A method that writes texts: its body, its answer or the events of a stream."""
    content = _json(answer) | {"text/event-stream": {"itemSchema": {"$ref": f"{REFERENCE}{answer}Event"}}}
    codes = [code for code in REFUSED if keys or code != 401]
    return operation(
        summary, content, *codes, requestBody={"required": True, "content": _json(f"{answer}Body")}
    )
