"""GET /openapi.json: the API as an OpenAPI 3.1 document.

    structs that parse requests ─┐
    fields.py, limits.py ────────┼─ document ──> schemas, with bounds and what is accepted without effect
    OPERATIONS, one per route ───┘

Source: OpenAPI Specification 3.1.1.  `tests/service/http/test_openapi.py` compares OPERATIONS with the routes and with
docs/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from quire.service.api import chat_batch, fields, generative_scoring
from quire.service.api.anthropic import messages
from quire.service.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.service.api.openai_responses import responses
from quire.service.common.limits import LIMITS
from quire.service.config import GatewayConfig
from quire.service.http.adapter_endpoints import LoadBody, UnloadBody
from quire.service.http.connections import PROBES
from quire.service.http.middleware import GUARDED, MESSAGES

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"


class Operation(NamedTuple):
    """One route."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    endpoint: fields.Endpoint | None = None  # name of the endpoint in `fields.py`
    answers: tuple[str, ...] = (JSON,)  # content types of a 200 response; empty: the response is a 204


OPERATIONS = (
    Operation("post", "/v1/completions", "Continue prompts", CompletionBody, "completions", (JSON, EVENTS)),
    Operation("post", "/v1/chat/completions", "Answer a chat", ChatBody, "chat", (JSON, EVENTS)),
    Operation("post", "/v1/chat/completions/batch", "Answer several chats", chat_batch.BatchBody, "chat"),
    Operation("post", "/invocations", "Answer a chat or continue prompts", answers=(JSON, EVENTS)),
    Operation("post", "/generative_scoring", "Score items by a label", generative_scoring.ScoringBody, "scoring"),
    Operation(
        "post", "/v1/messages", "Answer in Anthropic's format", messages.MessagesBody, "messages", (JSON, EVENTS)
    ),
    Operation("post", "/v1/messages/count_tokens", "Count prompt tokens", messages.CountBody, "messages"),
    Operation(
        "post", "/v1/responses", "Answer as OpenAI's responses", responses.ResponsesBody, "responses", (JSON, EVENTS)
    ),
    Operation(
        "post", "/v1/responses/compact", "Summarise a conversation", responses.ResponsesBody, "responses", (JSON,)
    ),
    Operation("post", "/v1/responses/input_tokens", "Count prompt tokens", responses.ResponsesBody, "responses"),
    Operation("get", "/v1/responses/{id}", "A stored response, or its events", answers=(JSON, EVENTS)),
    Operation("delete", "/v1/responses/{id}", "Delete a stored response"),
    Operation("post", "/v1/responses/{id}/cancel", "End a background response"),
    Operation("get", "/v1/responses/{id}/input_items", "Input items of a stored response"),
    Operation("get", "/v1/streams/{id}", "Repeat or resume an answer", answers=(JSON, EVENTS)),
    Operation("delete", "/v1/streams/{id}", "Cancel an answer", answers=()),
    Operation("post", "/tokenize", "Turn text into token ids", TokenizeBody, "tokenize"),
    Operation("post", "/detokenize", "Turn token ids into text", DetokenizeBody, "detokenize"),
    Operation("get", "/tokenizer_info", "Describe the tokenizer"),
    Operation("get", "/v1/models", "List the served model's names"),
    Operation("get", "/v1/models/{id}", "Describe one of them"),
    Operation("post", "/v1/load_lora_adapter", "Serve one more LoRA adapter", LoadBody, "adapters", (TEXT,)),
    Operation("post", "/v1/unload_lora_adapter", "Stop serving a LoRA adapter", UnloadBody, "adapters", (TEXT,)),
    Operation("get", "/engine/state", "Watch block pools and load of the engines", answers=(EVENTS,)),
    Operation("post", "/reset_prefix_cache", "Empty the prefix caches of all engines"),
    Operation("get", "/health", "200 if an engine is running"),
    Operation("get", "/v1/health", "The same"),
    Operation("get", "/healthz", "The same"),
    Operation("get", "/ready", "200 if requests are taken"),
    Operation("get", "/ping", "200 if this gateway answers"),
    Operation("post", "/ping", "The same"),
    Operation("get", "/load", "Count open requests"),
    Operation("get", "/version", "Name versions"),
    Operation("get", "/metrics", "Metrics of this gateway for Prometheus", answers=(TEXT,)),
    Operation("get", "/openapi.json", "This document"),
)

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string", "description": "docs/api.md lists all of them"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "limit": {"description": "what is allowed"},
                "given": {"description": "what was given"},
            },
        }
    },
}


def document(config: GatewayConfig, version: str, *, guarded: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway.  `guarded`: requests need an API key."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for operation in OPERATIONS:
        if operation.body is not None:
            _describe(components[operation.body.__name__], operation.endpoint, config)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, guarded=guarded)
    schemes = {"key": {"type": "http", "scheme": "bearer"}} if guarded else {}
    return {
        "openapi": "3.1.1",
        "info": {"title": "Quire", "version": version, "summary": "An OpenAI-compatible server of language models"},
        "servers": [{"url": config.path_prefix or "/"}],
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR}, "securitySchemes": schemes},
    }


def _operation(operation: Operation, *, guarded: bool) -> dict[str, Any]:
    refusal = {"description": "An error, as OpenAI words it", "content": {JSON: {"schema": _reference("Error")}}}
    if operation.path.startswith(MESSAGES):
        refusal = {"description": "An error, as Anthropic words it", "content": {JSON: {}}}
    answered: dict[str, Any] = {"description": "The answer", "content": {kind: {} for kind in operation.answers}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.title()}".translate({ord(char): None for char in "/_.{}"}),
        "responses": {
            **({"200": answered} if operation.answers else {"204": {"description": "It is done"}}),
            "default": refusal,
        },
    }
    if operation.body is not None:
        content = {JSON: {"schema": _reference(operation.body.__name__)}}
        described["requestBody"] = {"required": True, "content": content}
    if names := re.findall(r"\{(\w+)\}", operation.path):
        text = {"in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [{"name": name, **text} for name in names]
    if guarded and operation.path.startswith(GUARDED) and operation.path not in PROBES:
        described["security"] = [{"key": []}]
    return described


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _describe(schema: dict[str, Any], endpoint: fields.Endpoint | None, config: GatewayConfig) -> None:
    """Add to a body's schema the bounds of its fields, and the fields that have no effect."""
    for field, text in _bounds(config):
        if (known := schema["properties"].get(field)) is not None:
            known["description"] = "; ".join(filter(None, (known.get("description"), text)))
    for name, harmless in fields.HARMLESS.items():
        if endpoint in harmless.endpoints:
            schema["properties"].setdefault(name, {"description": f"no effect: {harmless.why}"})


def _bounds(config: GatewayConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, its bound as text) for every limit."""
    for limit in LIMITS.values():
        if text := limit.text(config):
            for field in limit.field.split(", "):
                yield field, f"{limit.counts}: {text}"
