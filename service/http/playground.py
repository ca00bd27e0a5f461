"""The playground, a page at `/` to chat and to watch the engines, and the API reference, a page at `/docs`.

    GET /              web/index.html
    GET /web/{name}    the files of web/: plain ES modules, styles, the icon
    GET /docs          the same HTML with api_docs/docs.js instead of web/app.js, which draws /openapi.json
    GET /docs/{name}   the files of api_docs/, needed by the API reference only

The files are read once, at start.  The pages use relative URLs, so they work under any path prefix.  A browser
revalidates a file each time, and gets 304 if it has not changed.  The Content-Security-Policy lets the pages load
resources from, and connect to, this server only, and forbids turning strings into scripts.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import web

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
# Content-Security-Policy.  lit-html and dompurify are the only modules that may turn a string into markup.
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html dompurify"
)
FOLDERS = {"web/": "web", "docs/": "api_docs"}  # URL path -> folder in service/
FRAME = "web/index.html"
DOCS = "docs"  # key of the page at /docs, which is made from FRAME
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser may cache a file, but must revalidate it
}


class Playground:
    """The files of the playground and the API reference, in memory."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix`: optional prefix of all paths, without a slash at its end."""
        self._prefix = prefix
        self._files = {
            name: (found.read_bytes(), TYPES[name.rpartition(".")[2]])
            for path, folder in FOLDERS.items()
            for name, found in _files(resources.files("quire.service") / folder, path)
        }
        frame, kind = self._files[FRAME]
        reference = frame.replace(b"web/app.js", b"docs/docs.js").replace(b"<title>Quire", b"<title>Quire API")
        self._files[DOCS] = reference, kind
        self._tags = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, (body, _) in self._files.items()}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the two pages, without the prefix."""
        return [
            web.get("/", self.index),
            web.get("/web/{name:.+}", self.web_file),
            web.get("/docs", self.docs),
            web.get("/docs/{name:.+}", self.docs_file),
        ]

    async def index(self, request: web.Request) -> web.Response:
        """GET /."""
        return self._answer(request, FRAME)

    async def docs(self, request: web.Request) -> web.Response:
        """GET /docs."""
        return self._answer(request, DOCS)

    async def web_file(self, request: web.Request) -> web.Response:
        """GET /web/{name}.  Raises HTTPNotFound."""
        return self._answer(request, f"web/{request.match_info['name']}")

    async def docs_file(self, request: web.Request) -> web.Response:
        """GET /docs/{name}.  Raises HTTPNotFound."""
        return self._answer(request, f"docs/{request.match_info['name']}")

    async def slash(self, request: web.Request) -> web.Response:
        """Redirect from the prefix without a slash to the page, since relative URLs need the slash."""
        return web.Response(status=307, headers={"Location": f"{self._prefix}/"})

    def _answer(self, request: web.Request, name: str) -> web.Response:
        if name not in self._files:
            raise web.HTTPNotFound
        tag = self._tags[name]
        headers = {**HEADERS, "ETag": tag}
        known = request.headers.get("If-None-Match", "")
        if known == "*" or tag in [one.strip().removeprefix("W/") for one in known.split(",")]:
            return web.Response(status=304, headers=headers)
        body, kind = self._files[name]
        return web.Response(body=body, headers={**headers, "Content-Type": kind})


def _files(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    """Return (path relative to the folder, file) for each file below a folder."""
    found = []
    for one in folder.iterdir():
        found += _files(one, f"{prefix}{one.name}/") if one.is_dir() else [(prefix + one.name, one)]
    return found
