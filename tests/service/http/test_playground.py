"""How the playground's files are served: size, types, policy, cache, path prefix, and `--no-web`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from yarl import URL

from quire.engine.common import settings
from quire.service.config import GatewayConfig
from quire.service.http.playground import FOLDERS, TYPES
from tests.service.fakes import Served

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "service" / "web"
MAX_BYTES = 100_000  # all files of the playground, vendored ones included
# Path below the root of the site -> file.
FILES = {
    prefix + str(path.relative_to(ROOT / "service" / folder)): path
    for prefix, folder in FOLDERS.items()
    for path in sorted((ROOT / "service" / folder).rglob("*"))
    if path.is_file()
}
Serve = Callable[..., Awaitable[Served]]


def test_the_page_is_small() -> None:
    """Of the playground, which uses nothing outside its folder.  The API reference may use the playground's files."""
    own = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in own) <= MAX_BYTES
    for path in own:
        if path.suffix in (".js", ".html") and path.parent == FOLDER:
            assert not re.search(r"docs\.js|[\"'/]\.\./", path.read_text(encoding="utf-8")), path.name


def test_the_api_reference_has_its_own_script_alone() -> None:
    """Its frame, style and helpers are the playground's; what the playground needs is no part of its folder."""
    names = {name for name in FILES if name.startswith("docs/")}
    assert names == {"docs/docs.js"}
    imported = re.findall(r' from "(.+)";', FILES["docs/docs.js"].read_text(encoding="utf-8"))
    assert len(imported) == 2
    assert all((FILES["docs/docs.js"].parent / name).resolve().is_relative_to(FOLDER) for name in imported)


def test_vendored_files_are_named_with_version_and_licence() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    vendored = [path for path in FOLDER.glob("vendor/*") if path.is_file()]
    assert vendored
    for path in vendored:
        name, version = re.fullmatch(r"([a-z-]+)-([\d.]+\d)(?:\.min)?\.js", path.name).groups()  # type: ignore[union-attr]
        assert f"{name} {version}" in notice
        assert re.search(r"licen[sc]e", path.read_text(encoding="utf-8")[:300], re.IGNORECASE)


def test_the_page_names_no_other_server() -> None:
    for name, path in FILES.items():
        if "/vendor/" not in name:
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://[a-z]", text), name


async def test_every_file_has_its_type_and_the_policy(serve: Serve) -> None:
    served = await serve(api_keys=["k"])  # the page itself needs no key
    for path, file in {"": FILES["web/index.html"], "docs": None, **FILES}.items():
        async with served.session.get(f"/{path}") as response:
            assert response.status == 200, path
            if file:
                assert await response.read() == file.read_bytes()
            assert response.headers["Content-Type"] == TYPES[file.suffix[1:] if file else "html"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Content-Security-Policy"].startswith("default-src 'self'; ")
            assert "unsafe" not in response.headers["Content-Security-Policy"]
            assert "Set-Cookie" not in response.headers


async def test_an_unchanged_file_is_not_sent_again(serve: Serve) -> None:
    served = await serve()
    async with served.session.get("/web/app.js") as response:
        tag = response.headers["ETag"]
        assert response.headers["Cache-Control"] == "no-cache"
    for known, status in ((tag, 304), (f'"other", W/{tag}', 304), ("*", 304), ('"other"', 200)):
        async with served.session.get("/web/app.js", headers={"If-None-Match": known}) as response:
            assert response.status == status, known
            assert response.headers["ETag"] == tag
            assert bool(await response.read()) == (status == 200)


async def test_nothing_else_is_served(serve: Serve) -> None:
    served = await serve()
    for folder in ("web", "docs"):
        for name in ("nothing.js", "../app.py", "%2e%2e/app.py", "/app.js", "/docs", "docs", "README.md"):
            async with served.session.get(URL(f"{served.url}/{folder}/{name}", encoded=True)) as response:
                assert response.status == 404, name
    for path in ("/web/", "/web/docs.js", "/docs/app.js"):
        async with served.session.get(URL(served.url + path, encoded=True)) as response:
            assert response.status == 404, path


async def test_the_page_is_under_the_path_prefix_too(serve: Serve) -> None:
    served = await serve(root_path="/llm/a")
    async with served.session.get("/llm/a", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (307, "/llm/a/")
    for path in ("/llm/a/", "/", "/llm/a/web/app.js", "/llm/a/docs", "/llm/a/docs/docs.js"):
        async with served.session.get(path) as response:
            assert response.status == 200, path


async def test_the_page_can_be_switched_off(serve: Serve) -> None:
    config = settings.load(GatewayConfig, ["--no-web", "--root-path", "/llm"], {}, prog="x")
    assert not config.web
    served = await serve(web=config.web, root_path=config.root_path)
    for path in ("/", "/llm", "/llm/", "/docs", "/web/app.js", "/docs/docs.js"):
        async with served.session.get(path) as response:
            assert response.status == 404, path
