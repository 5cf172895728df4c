"""The OpenAPI document: the paths by hand, the bodies of requests from pydantic. Responses are OpenAI's."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from shakespeare import __version__
from shakespeare.app.server.requests import ChatBody, CompletionBody

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/"
TEXT: Schema = {"schema": {"type": "string"}}
NOTHING: Schema = {"type": "null"}
KEY = {"type": "http", "scheme": "bearer"}
JSON: Schema = {"application/json": {"schema": {"type": "object"}}}  # as in OpenAI's API
ERROR = {"description": "An error in OpenAI's format.", "content": JSON}


class Bodies(GenerateJsonSchema):
    """Pydantic's schemas, where null is admitted in place of any default, and as any other field."""

    def default_schema(self, schema: Any) -> Schema:
        field = super().default_schema(schema)
        default = field.pop("default")
        optional = field if NOTHING in field.get("anyOf", ()) else {"anyOf": [field, NOTHING]}
        return optional | {"default": default}

    def model_schema(self, schema: Any) -> Schema:
        return super().model_schema(schema) | {"additionalProperties": NOTHING}


def document(keys: bool, root_path: str) -> Schema:
    """The document of a server, with or without keys, at a path of its host."""
    _, bodies = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")],
        ref_template=REFERENCE + "{model}",
        schema_generator=Bodies,
    )
    name = {"name": "model", "in": "path", "required": True} | TEXT
    secured: Schema = {"security": [{"key": []}]} if keys else {}
    return secured | {
        "openapi": "3.1.0",
        "info": {"title": "shakespeare-attention", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": {
            "/v1/completions": {"post": writing("Continue prompts.", "CompletionBody")},
            "/v1/chat/completions": {"post": writing("Continue a chat, as a play.", "ChatBody")},
            "/v1/models": {"get": operation("The models.", JSON)},
            "/v1/models/{model}": {"get": operation("A model.", JSON, parameters=[name])},
            "/health": {"get": operation("Whether requests are answered.", JSON, security=[])},
            "/metrics": {"get": operation("Prometheus' metrics.", {"text/plain": TEXT})},
        },
        "components": {"schemas": bodies["$defs"], "securitySchemes": {"key": KEY}},
    }


def operation(summary: str, content: Schema, **more: Any) -> Schema:
    """A method of a path and what it answers."""
    answered = {"description": summary, "content": content}
    return {"summary": summary, "responses": {"200": answered, "default": ERROR}} | more


def writing(summary: str, body: str) -> Schema:
    """A method that writes texts, whole or as the events of a stream."""
    sent = {"application/json": {"schema": {"$ref": REFERENCE + body}}}
    content = JSON | {"text/event-stream": TEXT}
    return operation(summary, content, requestBody={"required": True, "content": sent})
