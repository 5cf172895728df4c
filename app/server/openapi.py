"""The OpenAPI document: the paths by hand, the bodies of requests from pydantic. Responses are OpenAI's."""

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
NOTHING: Schema = {"type": "null"}
PLAIN: Schema = {"application/json": {"schema": {"type": "object"}}}  # as in OpenAI's API


def optional(schema: Schema) -> Schema:
    """Null, or a value of the schema."""
    return {"anyOf": [schema, NOTHING]}


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
    health = operation("Whether requests are answered.", PLAIN, 403, 503, security=[])
    models, model = (
        operation(text, PLAIN, *always, *more) for text, *more in (("The models.",), ("A model.", 404))
    )
    shown: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "shakespeare-attention", "version": __version__},
        "paths": {
            "/v1/completions": {"post": writing("Continue prompts.", "CompletionBody", keys)},
            "/v1/chat/completions": {"post": writing("Continue a chat, as a play.", "ChatBody", keys)},
            "/v1/models": {"get": models},
            "/v1/models/{model}": {"get": model | {"parameters": [name]}},
            "/health": {"get": health},
            "/metrics": {"get": operation("Prometheus' metrics.", {"text/plain": {"schema": TEXT}}, *always)},
        },
        "components": {"schemas": bodies["$defs"]},
    }
    if keys:
        shown["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        shown["security"] = [{"key": []}]
    return shown


def operation(summary: str, content: Schema, *codes: int, **more: Any) -> Schema:
    """A method of a path: what it answers, and the codes of its errors."""
    errors = {str(code): {"description": REFUSED[code], "content": PLAIN} for code in codes}
    answered = {"200": {"description": summary, "content": content}}
    return {"summary": summary, "responses": answered | errors} | more


def writing(summary: str, body: str, keys: bool) -> Schema:
    """A method that writes texts, whole or as the events of a stream."""
    sent = {"application/json": {"schema": {"$ref": REFERENCE + body}}}
    codes = [code for code in REFUSED if keys or code != 401]
    content = PLAIN | {"text/event-stream": {"schema": TEXT}}
    return operation(summary, content, *codes, requestBody={"required": True, "content": sent})
