"""docs/api.md lists every route, field, header, error code and limit of the gateway, and nothing else."""

from __future__ import annotations

import ast
import functools
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import pytest

from quire.service.api import api, bodies, decoding, fields
from quire.service.api.anthropic import messages
from quire.service.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.service.api.openai_responses import responses
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import LIMITS
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
# callables that make an error -> position of its code
REFUSALS = {"Refusal": 1, "Overloaded": 1, "UnknownModel": 1, "_bad": 0}
BODIES = {"completions": CompletionBody, "chat": ChatBody}


def section(title: str) -> str:
    """The text under a heading of any level, up to the next heading of that level or a higher one."""
    found = re.search(rf"^(#+) {re.escape(title)}$", PAGE, re.MULTILINE)
    assert found is not None, f"docs/api.md has no heading '{title}'"
    rest = PAGE[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """Cells of every line of a table but heads and rules."""
    found = []
    for line in text.splitlines():
        if line.startswith("| `") or re.match(r"\| \d{3} \|", line):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


@functools.cache
def modules() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "service").rglob("*.py"))]


def calls() -> Iterator[ast.Call]:
    for tree in modules():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def strings(node: ast.AST) -> set[str]:
    """The strings that an expression may be: a constant, or either side of a conditional."""
    if isinstance(node, ast.IfExp):
        return strings(node.body) | strings(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def routes() -> set[str]:
    """Every (method, path) that service/ registers."""
    found = set()
    for call in calls():
        method = name_of(call)
        if method in ("get", "post", "put", "delete") and call.args and isinstance(call.args[0], ast.Constant):
            path = call.args[0].value
            if isinstance(path, str) and path.startswith("/"):
                found.add(f"{method.upper()} {re.sub(r':[^}]*}', '}', path)}")
    return found


def structs(kinds: list[Any]) -> set[type[msgspec.Struct]]:
    """The structs that a JSON body of one of `kinds` may hold."""
    found: set[type[msgspec.Struct]] = set()
    left = list(kinds)
    while left:
        kind = left.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in found:
                found.add(kind)
                left += typing.get_type_hints(kind).values()
        elif kind is not NoneType:
            left += typing.get_args(kind)
    return found


def codes() -> set[str]:
    """Every error code in service/: the argument of an error, or a constant that a variable `code` may hold."""
    found = set()
    for tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node) in REFUSALS:
                at = REFUSALS[name_of(node)]
                found |= strings(node.args[at]) if len(node.args) > at else set()
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id == "code":
                        found |= strings(node.value)
                    elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        for one, value in zip(target.elts, node.value.elts, strict=True):
                            if isinstance(one, ast.Name) and one.id == "code":
                                found |= strings(value)
    found |= {limit.code for limit in LIMITS.values() if limit.code}
    return {code for code in found if re.fullmatch(r"[a-z][a-z0-9_]+", code)}


def pairs() -> set[tuple[str, str]]:
    """(status, code) of every error that is made with both as constants, and of every limit."""
    found = {(str(limit.status), limit.code) for limit in LIMITS.values() if limit.code}
    for call in calls():
        if name_of(call) in ("Refusal", "Overloaded", "UnknownModel") and len(call.args) > 1:
            status, code = call.args[:2]
            if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                found.add((str(status.value), str(code.value)))
        elif name_of(call) == "_bad" and call.args and isinstance(call.args[0], ast.Constant):
            found.add(("400", str(call.args[0].value)))
    return found


def request_headers() -> set[str]:
    """Every header that service/ reads from a request."""
    found = set()
    for call in calls():
        if name_of(call) == "get" and isinstance(call.func, ast.Attribute) and call.args:
            of, key = call.func.value, call.args[0]
            if isinstance(of, ast.Attribute) and of.attr == "headers" and isinstance(key, ast.Constant):
                found.add(str(key.value).lower())
    return found


def documented(title: str) -> list[tuple[str, str]]:
    """(field, example) of the tables of one section."""
    return [(row[0].strip("`"), row[-1].strip("`")) for row in rows(section(title))]


def body(endpoint: str, example: str) -> bytes:
    needed: dict[str, Any] = (
        {"prompt": "x"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    return json.dumps({"model": "tiny", **needed, **json.loads(example)}).encode()


def parse(endpoint: str, data: bytes) -> ValidRequest:
    """Parse a body in which no field may be unknown."""
    config = GatewayConfig(strict_fields=True)
    return (api.parse_completion if endpoint == "completions" else api.parse_chat)(data, config, "tiny", 600.0)


def test_the_walks_over_the_code_find_something() -> None:
    assert len(routes()) > 10
    assert len(codes()) > 30
    assert len(pairs()) > 30
    assert len(request_headers()) > 5


def test_every_route_has_a_section_with_an_example() -> None:
    written = set(re.findall(r"^### ((?:GET|POST|PUT|DELETE) \S+)$", PAGE, re.MULTILINE))
    assert written == routes()
    for route in written:
        assert "```" in section(route) or "list above" in section(route), f"{route} has no example"


def test_every_request_field_is_listed() -> None:
    listed = {row[0].strip("`") for row in rows(section("Request fields"))}
    kinds = structs([kind for name, kind in vars(bodies).items() if name.endswith("Body")])
    harmless = {row[0].strip("`") for row in rows(section("Harmless fields"))}
    refused = {row[0].strip("`") for row in rows(section("Refused fields"))}
    declared = {field for kind in kinds for field in kind.__struct_fields__}
    assert len(declared) > 50
    assert listed - harmless - refused <= declared
    assert declared | set(fields.UNSERVED) | harmless == listed


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_example_of_a_field_is_accepted(endpoint: str) -> None:
    only = ["Completions only"] if endpoint == "completions" else ["Chat only"]
    for title in ("Both endpoints", *only):
        for field, example in documented(title):
            assert field in example, f"the example of {field} does not show it"
            parse(endpoint, body(endpoint, example))


def test_every_example_of_tokenize_is_accepted() -> None:
    for field, example in documented("Tokenize and detokenize"):
        assert field in example
        decoding.decode(example.encode(), DetokenizeBody if field == "tokens" else TokenizeBody)


def test_every_refused_field_is_refused() -> None:
    table = rows(section("Refused fields"))
    served = {field for title in ("Both endpoints", "Completions only", "Chat only") for field, _ in documented(title)}
    for field, where, example, _ in table:
        assert field.strip("`") in example
        for endpoint in BODIES if where == "both" else [where]:
            with pytest.raises(Refusal) as refused:
                parse(endpoint, body(endpoint, example.strip("`")))
            assert refused.value.code == "unsupported", example
    names = {row[0].strip("`") for row in table}
    declared = {field for kind in BODIES.values() for field in kind.__struct_fields__}
    assert declared | set(fields.UNSERVED) <= names | served


def test_every_harmless_field_is_listed_and_accepted() -> None:
    table = [row for row in rows(section("Harmless fields")) if len(row) == 4]
    inner = {name for names in fields.INNER.values() for name in names}
    assert {row[0].strip("`") for row in table} == {*fields.HARMLESS, *inner}
    for name, where, _, example in table:
        assert name.strip("`") in example
        for endpoint in BODIES if where == "both" else [where]:
            assert parse(endpoint, body(endpoint, example.strip("`"))).unknown == ()
        if name.strip("`") in fields.HARMLESS:
            of = fields.HARMLESS[name.strip("`")].endpoints
            assert of == (fields.ANSWERS if where == "both" else (where,))


def test_every_header_is_listed_with_an_example() -> None:
    listed = rows(section("Headers"))
    names = {row[0].strip("`").lower() for row in listed}
    assert request_headers() <= names
    for row in listed:
        assert row[2].strip("`").lower().startswith(row[0].strip("`").lower() + ":"), row[0]


def test_every_error_code_is_listed_with_its_status_and_an_example() -> None:
    listed = [row for row in rows(section("Errors")) if len(row) == 4]
    named = {row[1].strip("`") for row in listed}
    assert codes() - named == set(), "missing on the page"
    assert {name for name in named if not name.startswith("http_")} - codes() == set(), "not in the code"
    assert pairs() <= {(row[0], row[1].strip("`")) for row in listed}
    assert all(all(row) for row in listed)


def test_every_status_is_listed() -> None:
    table = section("Errors").split("| `code` |")[0]
    listed = set(re.findall(r"\b\d{3}\b", " ".join(re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE))))
    assert {status for status, _ in pairs()} <= listed


def test_every_limit_is_listed_with_its_refusal() -> None:
    table = section("Limits")
    for limit in LIMITS.values():
        refusal = f"{limit.status} `{limit.code}`" if limit.code else "the connection is closed"
        for field in limit.field.split(", "):
            lines = [line for line in table.splitlines() if f"`{field}`" in line and f"| {limit.counts} |" in line]
            assert len(lines) == 1, f"{field}: {limit.counts}"
            assert refusal in lines[0]
            assert not limit.option or f"`--{limit.option.replace('_', '-')}`" in lines[0]


def test_answer_fields_beyond_openais_are_listed() -> None:
    written = section("Answer fields")
    for field in ("stop_reason", "token_ids", "prompt_token_ids", "cached_tokens", "system_fingerprint"):
        assert f"{field}`" in written, field


FOREIGN: dict[str, tuple[Any, dict[str, Any], type[msgspec.Struct]]] = {
    "Messages": (
        messages.parse,
        {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        messages.MessagesBody,
    ),
    "Responses": (responses.parse, {"input": "x"}, responses.ResponsesBody),
}


@pytest.mark.parametrize("title", FOREIGN)
def test_every_field_of_a_foreign_format_is_listed_and_served_as_it_says(title: str) -> None:
    parse_body, needed, kind = FOREIGN[title]
    table = [row for row in rows(section(title)) if len(row) == 5]
    assert {row[0].strip("`") for row in table} == set(kind.__struct_fields__)
    config = GatewayConfig(strict_fields=True)
    for field, _, _, meaning, example in table:
        assert field.strip("`") in example
        data = json.dumps({**needed, **json.loads(example.strip("`"))}).encode()
        if not meaning.startswith("refused"):
            parse_body(data, config, "tiny", 600.0, api.NO_DEFAULTS)
            continue
        with pytest.raises(Refusal) as refused:
            parse_body(data, config, "tiny", 600.0, api.NO_DEFAULTS)
        assert (refused.value.code, refused.value.param) == ("unsupported", field.strip("`"))
