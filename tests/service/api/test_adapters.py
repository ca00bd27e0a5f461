"""LoRA adapters are chosen by `model`: in all formats, listed with their base, unknown ones 404, refused by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientResponse

from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import WEIGHTS, digest_of
from quire.engine.wire.prefixes import prefix_digests
from quire.service.api.adapters import read_adapters
from quire.service.text.tokenizer import Tokenizer
from tests.service.adapters import write_tiny
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "sql")


async def model_of(response: ClientResponse) -> str:
    assert response.status == 200, await response.text()
    body = await response.json()
    return str(body["model"])


async def test_model_names_an_adapter_in_every_format(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, folder: Path
) -> None:
    served = await serve(lora=f"sql={folder}")
    expected = f"sql@{digest_of(folder)}"
    formats: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": "a" * 200},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
    }
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.load_changes = {"honours": ["adapter"]}
        await settled(lambda: any(load.honours for load in served.streams.fleet.engines))
        for path, needed in formats.items():
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            async with served.session.post(path, json={"model": "sql", limit: 1, **needed}) as response:
                assert await model_of(response) == "sql"
            assert (fake.seen[-1].adapter, fake.seen[-1].adapter_path) == (expected, str(folder))
        first = next(order for order in fake.seen if len(order.token_ids) >= 64)
        assert first.prefixes
        assert first.prefixes != prefix_digests(first.token_ids, first.cache_salt)  # the base's are others
        async with served.session.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
            await model_of(response)
        assert fake.seen[-1].adapter == ""
        async with served.session.post("/v1/completions", json={"model": "other", "prompt": "a"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        fake.load_changes = {"honours": ["no_adapter"]}
        await settled(lambda: not any("adapter" in load.honours for load in served.streams.fleet.engines))
        async with served.session.post("/v1/completions", json={"model": "sql", "prompt": "a"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "model")
            assert "LoRA adapters" in error["message"]


async def test_models_lists_adapters_with_their_base(serve: Serve, folder: Path) -> None:
    served = await serve(lora=f"sql={folder}")
    async with served.session.get("/v1/models") as response:
        base, adapter = (await response.json())["data"]
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("sql", base["id"], str(folder))
    assert base["parent"] is None
    async with served.session.get("/v1/models/sql") as response:
        assert response.status == 200


def test_a_gateway_does_not_start_with_adapters_that_it_cannot_serve(folder: Path) -> None:
    with pytest.raises(AdapterError, match="the base model has this name"):
        read_adapters(f"tiny={folder}", ["tiny"])
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(AdapterError, match="truncated"):
        read_adapters(f"sql={folder}", ["tiny"])
