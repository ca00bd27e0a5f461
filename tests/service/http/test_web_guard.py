"""Web pages cannot use a keyless server of their reader: neither under a rebound name nor from another origin."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.web_pages import allows_host, is_foreign, is_loopback, name_of
from quire.engine.observers.metrics import Telemetry
from quire.engine.observers.metrics_page import Page
from quire.service.text.tokenizer import Tokenizer
from tests.ports import free_port
from tests.service.conftest import Serve
from tests.service.fakes import FakeEngine, settled
from tests.service.test_app import says

EngineMaker = Callable[..., FakeEngine]

LOCAL = ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "127.0.0.1", "127.8.9.1:80", "[::1]:8000", "[::1]"]
FOREIGN = ["attacker.example", "attacker.example:8000", "localhost.attacker.example", "127.0.0.1.attacker.example"]
FOREIGN += ["192.168.0.1", "0.0.0.0", "[::2]", "", "@127.0.0.1", "127.0.0.1@attacker.example", "[", "a b", "1270.0.1"]
# Not what RFC 9110 calls a Host; a proxy and this server may read another name in it.
MALFORMED = [
    "attacker.example@localhost",
    "user:a@127.0.0.1:80",
    "localhost/attacker.example",
    "localhost?a",
    "localhost#a",
]
MALFORMED += ["localhost\\@attacker.example", "[::1]/a", "localhost:80/", "@localhost"]


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine_are_served(host: str) -> None:
    assert allows_host(host, ())


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_refused_unless_allowed(host: str) -> None:
    assert not allows_host(host, ())
    assert allows_host(host, {"*"})
    if name := name_of(host):
        assert allows_host(host.upper(), {name})


@pytest.mark.parametrize("host", MALFORMED)
def test_a_malformed_host_names_nothing(host: str) -> None:
    assert name_of(host) == ""
    assert not allows_host(host, {"attacker.example", "localhost"})


@given(st.text(max_size=40))
def test_any_header_gets_an_answer(text: str) -> None:
    assert allows_host(text, ()) in (True, False)
    assert is_foreign("POST", text, text, text) in (True, False)
    assert is_loopback(text) in (True, False)


@pytest.mark.parametrize(
    ("method", "host", "origin", "site", "foreign"),
    [
        ("POST", "localhost:8000", None, None, False),  # a program
        ("POST", "localhost:8000", "http://localhost:8000", "same-origin", False),
        ("POST", "LocalHost:8000", "http://localhost:8000", None, False),
        ("POST", "localhost:8000", "http://localhost:3000", "same-site", True),
        ("POST", "localhost:8000", "https://attacker.example", None, True),
        ("POST", "localhost:8000", "null", None, True),  # a sandboxed frame, a file
        ("POST", "localhost:8000", "file://", None, True),  # a page on the reader's disk, in some browsers
        ("POST", "localhost:8000", "data:", None, True),
        ("POST", "localhost:8000", "content://downloads", None, True),  # the same on a phone
        ("POST", "localhost:8000", "ws://attacker.example", None, True),
        ("POST", "localhost:8000", "", "cross-site", True),
        ("POST", "localhost:8000", None, "Cross-Site", True),
        ("DELETE", "localhost:8000", "http://attacker.example", None, True),
        ("POST", "localhost:8000", None, "cross-site", True),
        ("POST", "localhost:8000", None, "none", False),  # typed by the reader
        ("POST", "localhost:8000", "app://notes", None, False),  # a desktop program
        ("GET", "localhost:8000", "http://attacker.example", "cross-site", False),  # the browser hides the answer
    ],
)
def test_which_requests_pages_of_other_origins_send(
    method: str, host: str, origin: str | None, site: str | None, foreign: bool
) -> None:
    assert is_foreign(method, host, origin, site) == foreign


async def test_a_keyless_gateway_on_loopback_refuses_rebound_names_and_foreign_pages(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(allowed_hosts=["llm.example"])
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    async with engine(says(byte_level_tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        for host in ("attacker.example", "attacker.example:80"):
            for path in ("/v1/completions", "/tokenize"):
                async with served.session.post(path, json=body, headers={"Host": host}) as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"], error["param"]) == (403, "host_not_allowed", "Host")
            for path in ("/engine/state", "/v1/models", "/", "/metrics"):
                async with served.session.get(path, headers={"Host": host}) as response:
                    assert response.status == 403
        for origin in ("http://attacker.example", "null"):
            async with served.session.post("/reset_prefix_cache", headers={"Origin": origin}) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (403, "origin_not_allowed")
        assert not fake.seen
        for host in ("localhost:1", "llm.example", "[::1]:8000"):
            async with served.session.post("/v1/completions", json=body, headers={"Host": host}) as response:
                assert response.status == 200


@pytest.mark.parametrize(
    "options", [{"api_keys": ["k"]}, {"host": "0.0.0.0"}, {"uds": "/x"}, {"allowed_hosts": ["*"]}], ids=str
)
async def test_other_gateways_answer_to_any_name(serve: Serve, options: dict[str, Any]) -> None:
    served = await serve(**options)
    async with served.session.get(
        "/v1/models", headers={"Host": "any.example", "Authorization": "Bearer k"}
    ) as response:
        assert response.status == 200


async def test_names_are_checked_with_keys_if_they_are_listed(serve: Serve) -> None:
    served = await serve(api_keys=["k"], allowed_hosts=["llm.example"])
    for host, status in (("llm.example", 200), ("any.example", 403)):
        headers = {"Host": host, "Authorization": "Bearer k"}
        async with served.session.get("/v1/models", headers=headers) as response:
            assert response.status == status


async def test_pages_of_allowed_origins_may_change_things(serve: Serve) -> None:
    served = await serve(cors_origins=["http://ui.example"])
    for origin, status in (("http://ui.example", 503), ("http://other.example", 403)):  # 503: no engine runs
        body = {"model": "tiny", "prompt": "a"}
        async with served.session.post("/v1/completions", json=body, headers={"Origin": origin}) as response:
            assert response.status == status


@pytest.mark.parametrize(("listens_at", "status"), [("127.0.0.1", 403), ("0.0.0.0", 200)])
@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_a_rebound_name_reads_no_metrics_of_an_engine(listens_at: str, status: int, path: str) -> None:
    page = Page(Telemetry("e0"), listens_at, port := free_port(), None)
    try:
        for host, expected in (("attacker.example", status), (f"localhost:{port}", 200)):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            assert answer.status == expected, answer.read()
            assert expected == 200 or "--metrics-host" in json.loads(answer.read())["error"]
            connection.close()
    finally:
        page.close()


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 403),
        ({"api_keys": ["k"]}, 403),  # this page needs no key
        ({"allowed_hosts": ["any.example"]}, 200),
        ({"host": "0.0.0.0"}, 200),
    ],
    ids=str,
)
async def test_a_rebound_name_reads_no_metrics_of_a_gateway(serve: Serve, options: dict[str, Any], status: int) -> None:
    served = await serve(**options)
    async with TestClient(TestServer(served.gateway.page())) as client:
        for host, expected in (("any.example", status), ("localhost:1", 200)):
            async with client.get("/metrics", headers={"Host": host}) as response:
                assert response.status == expected
                assert expected == 200 or "--allowed-hosts" in (await response.json())["error"]
        async with client.get("/health", headers={"Host": "any.example"}) as response:
            assert (response.status == 403) == (status == 403)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "attacker.example"}, 403),
    ],
)
def test_pages_stop_no_step_loop_for_a_check(headers: dict[str, str], status: int) -> None:
    checks: list[int] = []

    def check() -> str:
        checks.append(1)
        return ""

    port = free_port()
    page = Page(Telemetry("e0"), "127.0.0.1", port, check)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/debug/accounting", body=b"", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, len(checks)) == (status, int(status == 200))
        assert json.loads(answer.read())
        connection.close()
    finally:
        page.close()
