"""The OpenAPI document: paths by hand, the bodies' schemas from pydantic."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from app.server.requests import ChatBody, CompletionBody
from attention_ext import __version__

REFERENCE = "#/components/schemas/"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
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
    paths = {
        "/v1/completions": {"post": _writing("Continue prompts.", "CompletionBody")},
        "/v1/chat/completions": {"post": _writing("Continue a chat, as a play.", "ChatBody")},
        "/v1/models": {"get": _reading("The models.")},
        "/v1/models/{model}": {
            "get": _reading("A model.", 404)
            | {
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            }
        },
        "/health": {"get": _reading("Whether requests are answered.", 503, key=False)},
        "/metrics": {"get": _reading("Prometheus' metrics.", kind="text/plain")},
    }
    components: dict[str, Any] = {"schemas": schemas["$defs"] | {"Error": ERROR}}
    shown: dict[str, Any] = {
        "openapi": "3.1.0",
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


def _error(why: str) -> dict[str, Any]:
    return {"description": why, "content": {"application/json": {"schema": {"$ref": f"{REFERENCE}Error"}}}}


def _refusals(*codes: int) -> dict[str, Any]:
    return {str(code): _error(REFUSED[code]) for code in codes}


def _writing(summary: str, body: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": REFERENCE + body}}},
        },
        "responses": {"200": {"description": "the texts", "content": content}} | _refusals(*REFUSED),
    }


def _reading(summary: str, *codes: int, kind: str = "application/json", key: bool = True) -> dict[str, Any]:
    responses = {"200": {"description": summary, "content": {kind: {}}}} | _refusals(403)
    responses |= {str(c): {"description": REFUSED[c], "content": {kind: {}}} for c in codes}
    return {"summary": summary, "responses": responses} | ({} if key else {"security": []})
