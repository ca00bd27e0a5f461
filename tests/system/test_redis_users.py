"""The Redis user of docs/operations.md may do what gateways and engines need, and nothing of an administrator."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.pace import patience
from tests.system.processes import ROOT
from tests.system.stack import Stack

pytestmark = pytest.mark.system
PASSWORD = "swordfish"
NAMESPACE = "quire"  # the page's


def acl_line() -> str:
    """The page's command, on one line."""
    page = (ROOT / "docs/operations.md").read_text()
    [lines] = re.findall(r"^    (ACL SETUSER .*(?:\n      .*)*)$", page, re.MULTILINE)
    return re.sub(r"\s*\\\n\s*", " ", lines).replace("PASSWORD", PASSWORD)


@pytest.fixture
def server(redis_binary: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=redis_binary) as server:
        yield server


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def allow(admin: redis.Redis, server: EmbeddedRedis) -> str:
    """Create the user.  Returns the URL that names it."""
    admin.execute_command(*acl_line().split())  # type: ignore[no-untyped-call]
    return f"{server.url.replace('unix://', 'unix://quire@')}?password={PASSWORD}"


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{url}{path}", json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=patience(60)) as answer:
        return json.load(answer)


def test_the_user_may_run_every_command_of_the_scripts() -> None:
    rights = {word[1:] for word in acl_line().split() if word.startswith("+")}
    texts = [file.read_text() for file in (ROOT / "engine/wire/redis").rglob("*.lua")]
    wanted = {name.lower() for text in texts for name in re.findall(r"call\(\s*['\"](\w+)['\"]", text)}
    assert wanted
    assert wanted <= rights


def test_the_user_suffices_for_a_gateway_and_an_engine(
    server: EmbeddedRedis, admin: redis.Redis, checkpoint: Callable[[str], Path]
) -> None:
    url = allow(admin, server)
    with Stack(url, NAMESPACE, checkpoint("llama")) as stack:
        ask: dict[str, Any] = {"prompt": [20, 30, 40] * 7, "max_tokens": 20, "ignore_eos": True}
        assert post(stack.url, "/v1/completions", **ask)["usage"]["completion_tokens"] == 20
        assert len(post(stack.url, "/v1/completions", **ask, n=3)["choices"]) == 3
        first = post(stack.url, "/v1/responses", input="Hi", max_output_tokens=5)
        post(stack.url, "/v1/responses", input="On", previous_response_id=first["id"], max_output_tokens=5)
        with urllib.request.urlopen(f"{stack.url}/engine/state", timeout=patience(60)) as state:
            assert state.status == 200
    refused = {entry["object"] for entry in admin.acl_log()}
    # redis-py sends its version by CLIENT SETINFO, a start queries the commands; both continue without these rights.
    assert refused <= {"client", "command|info", "command"}


@pytest.mark.parametrize(
    "command", ["FLUSHALL", "KEYS *", "CONFIG GET *", "GET other:key", "PUBLISH other x", "CLIENT LIST"]
)
def test_the_user_may_do_nothing_else(command: str, server: EmbeddedRedis, admin: redis.Redis) -> None:
    with redis.Redis.from_url(allow(admin, server)) as user, pytest.raises(redis.exceptions.NoPermissionError):
        user.execute_command(*command.split())
