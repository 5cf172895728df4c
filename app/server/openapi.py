"""The OpenAPI document: paths by hand, bodies from pydantic, responses from schemas.py."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from app.server.requests import ChatBody, CompletionBody
from app.server.schemas import RESPONSES, TEXT
from attention_ext import __version__

REFERENCE = "#/components/schemas/"
REFUSED = {
    400: "a field is wrong",
    403: "the Host header is not admitted",
    404: "there is no such model",
    408: "the body took too long",
    413: "the body is too long",
    415: "the body is not JSON",
    429: "the queue is full",
    500: "the engine failed",
    503: "the models are loading, or the server is ending",
}


def document(keys: bool) -> dict[str, Any]:
    """The document of a server, with or without keys."""
    _, schemas = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")], ref_template=REFERENCE + "{model}"
    )
    name = {"name": "model", "in": "path", "required": True, "schema": TEXT}
    paths = {
        "/v1/completions": {"post": _writing("Continue prompts.", "CompletionBody", "Completion")},
        "/v1/chat/completions": {"post": _writing("Continue a chat, as a play.", "ChatBody", "Chat")},
        "/v1/models": {"get": _reading("The models.", _json("Models"))},
        "/v1/models/{model}": {
            "get": _reading("A model.", _json("Model")) | {"parameters": [name]},
        },
        "/health": {"get": _reading("Whether requests are answered.", _json("Health")) | {"security": []}},
        "/metrics": {"get": _reading("Prometheus' metrics.", {"text/plain": {"schema": TEXT}})},
    }
    paths["/v1/models/{model}"]["get"]["responses"] |= _refusals(404)
    paths["/health"]["get"]["responses"]["503"] = {"description": REFUSED[503], "content": _json("Health")}
    components: dict[str, Any] = {"schemas": schemas["$defs"] | RESPONSES}
    shown: dict[str, Any] = {
        "openapi": "3.2.0",  # the first that describes the events of a stream
        "info": {"title": "shakespeare-attention", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        shown["security"] = [{"key": []}]
        for path in paths.values():
            for operation in path.values():
                operation["responses"].setdefault("401", _error("the key is missing or wrong"))
        del paths["/health"]["get"]["responses"]["401"]
    return shown


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE + schema}}}


def _error(why: str) -> dict[str, Any]:
    return {"description": why, "content": _json("Error")}


def _refusals(*codes: int) -> dict[str, Any]:
    return {str(code): _error(REFUSED[code]) for code in codes}


def _writing(summary: str, body: str, answer: str) -> dict[str, Any]:
    content = _json(answer) | {"text/event-stream": {"itemSchema": {"$ref": f"{REFERENCE}{answer}Event"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": {"description": "the texts", "content": content}} | _refusals(*REFUSED),
    }


def _reading(summary: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}} | _refusals(403),
    }
