"""POST /reset_prefix_cache over HTTP and a real Redis: who may send it, how many engines get it, refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from quire.service.text.tokenizer import Tokenizer
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
PATH = "/reset_prefix_cache"


async def post(served: Served, query: str = "", key: str = "") -> tuple[int, dict[str, object]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with served.session.post(PATH + query, headers=headers) as response:
        return response.status, await response.json()


async def test_the_engines_are_told_and_counted(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve()
    assert await post(served) == (200, {"engines": 0})
    async with engine(says(byte_level_tokenizer)) as one, engine(says(byte_level_tokenizer), engine="e1") as other:
        for query in ("", "?reset_running_requests=false&reset_external=False"):
            assert await post(served, query) == (200, {"engines": 2})
        await settled(lambda: min(one.resets, other.resets) >= 1)
    assert one.aborted == other.aborted == []


async def test_the_admin_scope_is_needed_where_keys_exist(serve: Serve) -> None:
    guarded = await serve(api_keys=["plain"], admin_keys=["root"])
    for key, status, code in (("", 401, "invalid_api_key"), ("plain", 403, "admin_only")):
        found, answer = await post(guarded, key=key)
        assert (found, answer["error"]["code"]) == (status, code)  # type: ignore[index]
    assert (await post(guarded, key="root"))[0] == 200


async def test_what_would_stop_requests_or_is_unknown_is_refused_by_name(serve: Serve) -> None:
    served = await serve()
    for name in ("reset_running_requests", "reset_external"):
        status, answer = await post(served, f"?{name}=true")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported", name)  # type: ignore[index]
    async with served.session.post(PATH + "?other=1") as response:
        assert (response.status, response.headers["x-unknown-fields"]) == (200, "other")
    strict = await serve(strict_fields=True)
    status, answer = await post(strict, "?other=1")
    assert (status, answer["error"]["code"]) == (400, "unknown_field")  # type: ignore[index]
