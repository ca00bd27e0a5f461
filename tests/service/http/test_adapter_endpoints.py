"""LoRA adapters that gateways learn of while they run: --lora-dir, the endpoints that load and unload, allow-lists."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import CONFIG, WEIGHTS, digest_of
from quire.engine.adapters.folder import AdapterFolder
from quire.engine.adapters.names import path_within
from quire.engine.wire.adapter_list import AdapterList
from quire.engine.wire.messages import CONSTRAINT, Finish, Generate
from quire.service.http.status import Status
from quire.service.text.tokenizer import Tokenizer
from tests.service.adapters import write_tiny
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ODD = ("", ".", "..", "../outside", "good/../good", "a" * 200, "good\0", "/etc", "gооd", "-good", "good\n", " good")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of adapters: `good`; `out`, a link to a folder outside; `half`, whose weights lie outside."""
    outside = write_tiny(tmp_path / "outside")
    root = tmp_path / "dir"
    write_tiny(root / "good")
    (root / "out").symlink_to(outside)
    (write_tiny(root / "half") / WEIGHTS).unlink()
    (root / "half" / WEIGHTS).symlink_to(outside / WEIGHTS)
    return root


@pytest.fixture
async def fake(engine: EngineMaker, byte_level_tokenizer: Tokenizer) -> AsyncIterator[FakeEngine]:
    """An engine that takes adapters, and refuses those whose folder is called `bad`."""

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        if generate.adapter_path.endswith("/bad"):
            return [], Finish("error", message="lora_A holds NaN or infinity", code=CONSTRAINT)
        return [5] * generate.max_new_tokens, None

    async with engine(script) as fake:
        fake.load_changes = {"honours": ["adapter"]}
        yield fake


async def ready(served: Served) -> Served:
    await settled(lambda: any(load.honours for load in served.streams.fleet.engines))
    return served


async def complete(served: Served, model: str, key: str = "") -> tuple[int, Any]:
    return await post(served, "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}, key)


async def post(served: Served, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with served.session.post(path, json=body, headers=headers) as response:
        if response.content_type == "text/plain":
            return response.status, await response.text()
        return response.status, await response.json()


async def names(served: Served, key: str = "") -> list[str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with served.session.get("/v1/models", headers=headers) as response:
        return [card["id"] for card in (await response.json())["data"] if card["parent"] is not None]


def error_of(answer: Any) -> tuple[str, str, Any, Any]:
    error = answer["error"]
    return error["code"], error["param"], error.get("limit"), error.get("given")


async def test_a_folder_is_served_by_its_name_while_it_is_there(serve: Serve, fake: FakeEngine, root: Path) -> None:
    served = await ready(await serve(lora_dir=str(root)))
    other = await serve(lora_dir=str(root))
    assert await names(served) == []
    status, answer = await complete(served, "good")
    assert (status, answer["model"]) == (200, "good")
    first = fake.seen[-1].adapter
    assert (first, fake.seen[-1].adapter_path) == (f"good@{digest_of(root / 'good')}", str(root / "good"))
    assert await names(served) == await names(other) == ["good"]
    write_tiny(root / "good", 1.0)
    assert (await complete(served, "good"))[0] == 200
    assert fake.seen[-1].adapter == f"good@{digest_of(root / 'good')}" != first
    shutil.rmtree(root / "good")
    assert (await complete(served, "good"))[0] == 404
    assert await names(other) == []
    write_tiny(root / "late")
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        body = {"model": "late", "messages": [{"role": "user", "content": "a"}]}
        assert (await post(served, path, body))[0] == 200
    async with other.session.get("/v1/models/late") as response:
        card = await response.json()
    assert (card["root"], card["parent"]) == (str(root / "late"), (await response.json())["parent"])
    assert card["parent"]


async def test_odd_names_are_unknown_models(serve: Serve, fake: FakeEngine, root: Path) -> None:
    served = await ready(await serve(lora_dir=str(root)))
    for name in ODD[1:]:  # an empty name is the base model
        status, answer = await complete(served, name)
        assert (status, answer["error"]["code"]) == (404, "model_not_found"), name
    for name in ("out", "half"):
        status, answer = await complete(served, name)
        assert (status, answer["error"]["code"]) == (400, "invalid_adapter"), name
        assert "leads out of --lora-dir" in answer["error"]["message"]
    assert not fake.seen


async def test_damaged_files_are_refused_with_limit_and_value(serve: Serve, fake: FakeEngine, root: Path) -> None:
    served = await ready(await serve(lora_dir=str(root)))
    write_tiny(root / "wide", rank=500)
    (write_tiny(root / "cut") / WEIGHTS).write_bytes((root / "good" / WEIGHTS).read_bytes()[:-3])
    size = (root / "good" / WEIGHTS).stat().st_size
    for name, limit, given in (("wide", 128, 500), ("cut", size, size - 3)):
        status, answer = await complete(served, name)
        assert (status, *error_of(answer)) == (400, "invalid_adapter", "model", limit, given)
        status, answer = await post(served, LOAD, {"lora_name": "new", "lora_path": name})
        assert (status, *error_of(answer)) == (400, "invalid_adapter", "lora_path", limit, given)


def test_a_name_among_10000_is_looked_up_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call reads the directory, and unchanged files are read once."""
    reads: list[Path] = []

    def digest(folder: Path) -> str:
        reads.append(folder)
        return "d"

    monkeypatch.setattr("quire.engine.adapters.folder.digest_of", digest)
    for listing in ("os.listdir", "os.scandir", "pathlib.Path.iterdir"):
        monkeypatch.setattr(listing, lambda *given: pytest.fail("the directory was read"))
    folder = AdapterFolder(root)
    for _ in range(3):
        found = folder.find("good")
        assert found is not None
        assert (found.id, found.path) == ("good@d", root / "good")
    assert reads == [root / "good"]
    (root / "good" / CONFIG).touch()
    folder.find("good")
    assert len(reads) == 2


def test_a_directory_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no such directory"):
        AdapterFolder(tmp_path / "none")


async def test_what_one_gateway_loads_all_gateways_serve_until_it_is_unloaded(
    serve: Serve, fake: FakeEngine, root: Path
) -> None:
    write_tiny(root / "team" / "sql", 2.0)
    one = await ready(await serve(lora_dir=str(root)))
    two = await ready(await serve())  # it needs no directory of its own
    path = str(root / "team" / "sql")
    assert (await complete(two, "sql"))[0] == 404
    assert (await post(one, LOAD, {"lora_name": "sql", "lora_path": "team/sql"}))[0] == 200
    assert (fake.seen[-1].adapter, fake.seen[-1].max_new_tokens) == (f"sql@{digest_of(Path(path))}", 1)
    for served in (one, two):
        status, answer = await complete(served, "sql")
        assert (status, answer["model"], fake.seen[-1].adapter_path) == (200, "sql", path)
        assert await names(served) == ["sql"]
    status, answer = await post(one, LOAD, {"lora_name": "sql", "lora_path": path})
    assert (status, answer["error"]["code"]) == (400, "adapter_exists")
    assert "has already been loaded" in answer["error"]["message"]
    body = {"lora_name": "sql", "lora_path": str(root / "good"), "load_inplace": True}
    assert (await post(one, LOAD, body))[0] == 200
    await complete(two, "sql")
    assert fake.seen[-1].adapter_path == str(root / "good")
    three = await ready(await serve())  # a gateway that starts later
    assert await names(three) == ["sql"]
    assert (await post(three, UNLOAD, {"lora_name": "sql", "lora_int_id": 1}))[0] == 200
    for served in (one, two, three):
        assert (await complete(served, "sql"))[0] == 404
        assert await names(served) == []
    status, answer = await post(one, UNLOAD, {"lora_name": "sql"})
    assert (status, answer["error"]["code"]) == (404, "adapter_not_found")


async def test_a_stream_outlives_its_adapters_name(serve: Serve, fake: FakeEngine, root: Path) -> None:
    served = await ready(await serve(lora_dir=str(root)))
    assert (await post(served, LOAD, {"lora_name": "sql", "lora_path": "good"}))[0] == 200
    fake.step_s = 0.01
    body = {"model": "sql", "prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True}
    async with served.session.post("/v1/completions", json=body) as stream:
        await stream.content.readline()
        assert (await post(served, UNLOAD, {"lora_name": "sql"}))[0] == 200
        assert (await complete(served, "sql"))[0] == 404
        assert b"data: [DONE]" in await stream.content.read()


async def test_a_load_names_what_is_wrong_with_it(serve: Serve, fake: FakeEngine, root: Path) -> None:
    write_tiny(root / "bad")
    served = await ready(await serve(lora_dir=str(root), lora=f"fixed={root / 'good'}", served_name="base"))
    cases: list[tuple[dict[str, Any], int, str, str | None]] = [
        ({}, 400, "invalid_value", "lora_name"),
        ({"lora_name": "a"}, 400, "invalid_value", "lora_path"),
        ({"lora_name": "a" * 129, "lora_path": "good"}, 400, "invalid_value", "lora_name"),
        ({"lora_name": "a b", "lora_path": "good"}, 400, "invalid_value", "lora_name"),
        ({"lora_name": "base", "lora_path": "good"}, 400, "adapter_exists", "lora_name"),
        ({"lora_name": "fixed", "lora_path": "good"}, 400, "adapter_exists", "lora_name"),
        ({"lora_name": "a", "lora_path": "none"}, 404, "adapter_not_found", "lora_path"),
        ({"lora_name": "a", "lora_path": "bad"}, 400, "invalid_adapter", "lora_path"),
        ({"lora_name": 1, "lora_path": "bad"}, 400, "invalid_type", "lora_name"),
        *(
            ({"lora_name": "a", "lora_path": path}, 400, "path_not_allowed", "lora_path")
            for path in ("/etc", "..", ".", "../outside", "out", "half", "x/../../outside", "good\0", "a" * 5000)
        ),
    ]
    for body, status, code, param in cases:
        found, answer = await post(served, LOAD, body)
        assert (found, *error_of(answer)[:2]) == (status, code, param), body
    assert await names(served) == ["fixed"]
    status, answer = await post(served, UNLOAD, {"lora_name": "fixed"})
    assert (status, answer["error"]["code"]) == (400, "unsupported")
    plain = await ready(await serve())
    status, answer = await post(plain, LOAD, {"lora_name": "a", "lora_path": str(root / "good")})
    assert (status, answer["error"]["code"]) == (400, "path_not_allowed")


async def test_loads_need_the_admin_scope_and_an_engine(serve: Serve, root: Path) -> None:
    served = await serve(lora_dir=str(root), api_keys=["plain"], admin_keys=["root"], takeover_wait_s=0.0)
    body = {"lora_name": "sql", "lora_path": "good"}
    for key, status, code in (("", 401, "invalid_api_key"), ("plain", 403, "admin_only"), ("root", 503, "no_engine")):
        for path in (LOAD, UNLOAD)[: 1 if key == "root" else 2]:
            found, answer = await post(served, path, body, key)
            assert (found, answer["error"]["code"]) == (status, code)


async def test_a_tenant_sees_and_uses_its_own_adapters_only(
    serve: Serve, fake: FakeEngine, root: Path, tmp_path: Path
) -> None:
    write_tiny(root / "acme-a")
    tables = (("acme", "adapters = ['fixed', 'acme-*']\n"), ("none", "adapters = []\n"), ("all", "admin = true\n"))
    file = tmp_path / "tenants.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name, _ in tables}
    file.write_text("".join(f"[{name}]\nweight = 1\nkey_sha256 = ['{digests[name]}']\n{more}" for name, more in tables))
    served = await ready(await serve(lora_dir=str(root), lora=f"fixed={root / 'good'}", tenants=str(file)))
    assert (await post(served, LOAD, {"lora_name": "mine", "lora_path": "good"}, "all"))[0] == 200
    allowed = {"acme": {"fixed", "acme-a"}, "none": set(), "all": {"fixed", "acme-a", "good", "mine"}}
    for key in ("all", "acme", "none"):
        for model in ("fixed", "acme-a", "good", "mine"):
            status, answer = await complete(served, model, key)
            if model in allowed[key]:
                assert (status, answer["model"]) == (200, model)
            else:
                assert (status, answer) == (404, (await complete(served, "no-such-model", key))[1])
        assert set(await names(served, key)) == allowed[key]


async def test_names_with_slashes_are_models(serve: Serve, fake: FakeEngine, root: Path) -> None:
    """Encoded in the path, as the specification of URLs asks, or as they are."""
    served = await ready(await serve(lora_dir=str(root)))
    name = "team/sql:v1.2"
    assert (await post(served, LOAD, {"lora_name": name, "lora_path": "good"}))[0] == 200
    assert (await complete(served, name))[1]["model"] == name
    for written in ("team/sql:v1.2", "team%2Fsql:v1.2", "team%2Fsql%3Av1.2"):
        async with served.session.get(URL(f"/v1/models/{written}", encoded=True)) as response:
            assert (response.status, (await response.json())["id"]) == (200, name)
    assert (await post(served, UNLOAD, {"lora_name": name}))[0] == 200


async def test_the_list_of_models_is_written_on_a_thread(
    serve: Serve, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list may have 10,000 adapters, which take longer than one turn of the event loop."""
    threads = set()
    card = Status._card

    def recorded(status: Status, *words: Any) -> dict[str, object]:
        threads.add(threading.current_thread())
        return card(status, *words)

    monkeypatch.setattr(Status, "_card", recorded)
    served = await serve(lora=f"fixed={root / 'good'}")
    assert await names(served) == ["fixed"]
    assert threads
    assert threading.current_thread() not in threads


async def test_models_come_in_pages(serve: Serve, root: Path) -> None:
    lora = ",".join(f"{name}={root / 'good'}" for name in "abcd")
    served = await serve(lora=lora, served_name="base")

    async def page(query: str) -> Any:
        async with served.session.get(f"/v1/models?{query}") as response:
            answer = await response.json()
        if response.status != 200:
            return response.status, answer["error"]["param"]
        ids = [card["id"] for card in answer["data"]]
        assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        return "".join(name[0] for name in ids), answer["has_more"]

    assert await page("limit=2") == ("ba", True)
    assert await page("limit=2&after_id=a") == ("bc", True)
    assert await page("limit=2&after_id=b") == ("cd", False)
    assert await page("limit=2&before_id=d") == ("bc", True)
    assert await page("limit=1000") == await page("") == ("babcd", False)
    assert await page("after_id=d") == ("", False)
    for query, param in (
        *((f"limit={limit}", "limit") for limit in ("0", "-1", "1001", "x", "", "9" * 5000, "%C2%B2")),
        ("after_id=none", "after_id"),
        ("before_id=none", "before_id"),
        ("after_id=a&before_id=b", "before_id"),
    ):
        assert await page(query) == (400, param)


async def test_the_list_has_a_bound(
    serve: Serve, fake: FakeEngine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.wire.adapter_list.MAX_NAMES", 1)
    monkeypatch.setattr("quire.service.delivery.adapters.MAX_NAMES", 1)
    served = await ready(await serve(lora_dir=str(root)))
    assert (await post(served, LOAD, {"lora_name": "one", "lora_path": "good"}))[0] == 200
    status, answer = await post(served, LOAD, {"lora_name": "two", "lora_path": "good"})
    assert (status, *error_of(answer)) == (400, "too_many", "lora_name", 1, 2)
    assert (await complete(served, "good"))[0] == 200  # by its folder: served, and not listed
    assert await names(served) == ["one"]


@pytest.mark.parametrize("used_before", [False, True])
async def test_a_lookup_that_ends_late_replaces_no_loaded_adapter(
    serve: Serve, fake: FakeEngine, root: Path, monkeypatch: pytest.MonkeyPatch, used_before: bool
) -> None:
    """A request looks a folder up while an admin loads another folder under its name, at another gateway."""
    write_tiny(root / "team" / "sql", 2.0)
    one, two = await ready(await serve(lora_dir=str(root))), await ready(await serve(lora_dir=str(root)))
    if used_before:
        await complete(one, "good")
        write_tiny(root / "good", 3.0)  # so that the list is written again
    entered, proceed, find = threading.Event(), threading.Event(), AdapterFolder.find

    def late(folder: AdapterFolder, name: str) -> Any:
        found = find(folder, name)
        entered.set()
        proceed.wait()
        return found

    monkeypatch.setattr(AdapterFolder, "find", late)
    asking = asyncio.create_task(complete(one, "good"))
    await asyncio.to_thread(entered.wait)
    assert (await post(two, LOAD, {"lora_name": "good", "lora_path": "team/sql"}))[0] == 200
    proceed.set()
    assert (await asking)[0] == 200
    for served in (one, two):
        await complete(served, "good")
        assert fake.seen[-1].adapter_path == str(root / "team" / "sql")


@pytest.mark.parametrize("used_before", [False, True])
async def test_of_two_loads_of_a_name_at_once_one_is_refused(
    serve: Serve, fake: FakeEngine, root: Path, monkeypatch: pytest.MonkeyPatch, used_before: bool
) -> None:
    """Also if the name was looked up as a folder before, which a load may replace."""
    write_tiny(root / "team" / "sql", 2.0)
    gateways = [await ready(await serve(lora_dir=str(root))) for _ in range(2)]
    if used_before:
        await complete(gateways[0], "good")
    put, arrived = AdapterList.put, asyncio.Barrier(2)

    async def together(stored: AdapterList, *words: Any, **more: Any) -> bool:
        await arrived.wait()
        return await put(stored, *words, **more)

    monkeypatch.setattr(AdapterList, "put", together)
    paths = ("good", "team/sql")
    loads = [
        post(served, LOAD, {"lora_name": "good", "lora_path": path})
        for served, path in zip(gateways, paths, strict=True)
    ]
    statuses = [status for status, _ in await asyncio.gather(*loads)]
    assert sorted(statuses) == [200, 400]
    await complete(gateways[0], "good")
    assert fake.seen[-1].adapter_path == str(root / paths[statuses.index(200)])


async def test_two_loads_of_a_name_are_one(serve: Serve) -> None:
    """A retry stores nothing new; another adapter does not take the name."""
    served = await serve()
    stored: AdapterList = served.streams.adapters
    assert await stored.put("a", b"1", replace=False)
    assert await stored.put("a", b"1", replace=False)
    assert not await stored.put("a", b"2", replace=False)
    assert await stored.put("a", b"2", replace=True)
    assert await stored.entries() == {"a": b"2"}
    assert await stored.drop("a")
    assert await stored.get("a") is None


def test_paths_stay_below_the_directory_as_written() -> None:
    root = Path("/srv/adapters")
    for path, expected in (("a", root / "a"), ("a/b", root / "a" / "b"), ("/srv/adapters/x/../a", root / "a")):
        assert path_within(path, root) == expected
    for path in ("", ".", "..", "/srv/adapters", "/srv/adaptersx/a", "a/../..", "/etc/passwd", "a\0b"):
        assert path_within(path, root) is None
