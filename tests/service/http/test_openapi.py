"""GET /openapi.json says what the gateway does: same routes, same fields, same types."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import jsonschema
import pytest

from quire.service.api import decoding, fields
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.http.openapi import OPERATIONS, document
from tests.docs.test_api import BODIES, body, documented, routes
from tests.service.fakes import Served

Serve = Callable[..., Awaitable[Served]]
DOCUMENT = document(GatewayConfig(), "1", guarded=True)


def test_every_route_is_described_and_no_other() -> None:
    page = {"GET /", "GET /docs", "GET /web/{name}", "GET /docs/{name}"}  # files for a browser, no API
    assert {f"{one.method.upper()} {one.path}" for one in OPERATIONS} == routes() - page
    assert len({one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()}) == len(OPERATIONS)


def schema(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_schema_of_a_body_accepts_what_the_gateway_accepts(endpoint: str) -> None:
    name = BODIES[endpoint].__name__
    checker = jsonschema.Draft202012Validator(schema(name))
    checker.check_schema(schema(name))
    for title in ("Both endpoints", "Completions only" if endpoint == "completions" else "Chat only"):
        for _, example in documented(title):
            whole = json.loads(body(endpoint, example))
            checker.validate(whole)
            assert whole.keys() <= DOCUMENT["components"]["schemas"][name]["properties"].keys()


@pytest.mark.parametrize(
    ("endpoint", "wrong"),
    [
        ("completions", {"prompt": 5}),
        ("completions", {"temperature": "hot"}),
        ("completions", {"stream_options": {"include_usage": "x"}}),
        ("chat", {"messages": "Hello"}),
        ("chat", {"messages": [{"content": "no role"}]}),
        ("chat", {"stop": 5}),
    ],
)
def test_the_schema_of_a_body_refuses_what_the_gateway_refuses(endpoint: str, wrong: dict[str, Any]) -> None:
    data = body(endpoint, json.dumps(wrong))
    with pytest.raises(Refusal):
        decoding.decode(data, BODIES[endpoint])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(data), schema(BODIES[endpoint].__name__))


def test_bounds_and_fields_without_effect_are_described() -> None:
    chat = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["temperature"]["description"].endswith("<= 2")
    assert "no effect" in chat["user"]["description"]
    assert not set(fields.UNSERVED) & {
        name for name in chat if "chat" in fields.UNSERVED.get(name, fields.Unserved("", (), ())).endpoints
    }


async def test_it_is_served_without_a_key_and_names_the_paths_that_need_one(serve: Serve) -> None:
    served = await serve(api_keys="secret", root_path="/llm")
    async with served.session.get("/openapi.json") as response:
        assert response.status == 200
        found = await response.json()
    assert found["servers"] == [{"url": "/llm"}]
    assert found["paths"]["/v1/chat/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in found["paths"]["/health"]["get"]
    assert found["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    open_to_all = document(GatewayConfig(), "1", guarded=False)
    assert "security" not in open_to_all["paths"]["/v1/chat/completions"]["post"]


async def test_the_document_is_made_once(serve: Serve) -> None:
    """It takes 20 ms, and many clients ask for it at once."""
    served, made = await serve(), 0
    status = served.gateway._status
    make = status._document

    def count() -> dict[str, Any]:
        nonlocal made
        made += 1
        return make()

    status._document = count
    pages = set()
    for _ in range(3):
        async with served.session.get("/openapi.json") as response:
            pages.add(await response.read())
    assert made == len(pages) == 1
