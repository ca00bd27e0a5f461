"""Protects a gateway without API keys from web pages of other sites: checks the headers Host and Origin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from quire.engine.common.web_pages import allows_host, is_foreign, is_loopback
from quire.service.common.refusal import Refusal
from quire.service.http.cors import Cors


class WebGuard:
    """Refuses requests that a browser sends on behalf of another site's page."""

    def __init__(
        self, *, host: str, guarded: bool, allowed_hosts: Iterable[str] = (), cors: Cors | None = None
    ) -> None:
        """`host`: address to listen on.  `guarded`: requests need an API key, which pages of other sites lack."""
        self._allowed = frozenset(name.strip("[]").lower() for name in allowed_hosts)
        # If the address is not loopback, the valid host names are unknown here: a proxy or Kubernetes checks them.
        self._checks_host = bool(self._allowed) or (not guarded and is_loopback(host))
        self._guarded, self._cors = guarded, cors or Cors(())

    def check(self, request: web.BaseRequest) -> None:
        """Raise Refusal(403) for a Host header that is no name of this server, or a page of another origin."""
        headers = request.headers
        host, origin = headers.get("Host"), headers.get("Origin")
        if self._checks_host and not allows_host(host, self._allowed):
            message = "Host: this server answers to names of this machine and to --allowed-hosts only"
            raise Refusal(403, "host_not_allowed", message, param="Host")
        if self._guarded or self._cors.allows(origin):
            return
        if is_foreign(request.method, host, origin, headers.get("Sec-Fetch-Site")):
            message = "Origin: web pages of other origins may not use this server; see --cors-origins"
            raise Refusal(403, "origin_not_allowed", message, param="Origin")


def metrics_guard(host: str, allowed_hosts: Iterable[str]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return a middleware for the metrics port, which needs no API key.  On loopback it checks the Host header.

    On other addresses a scraper may use any host name, even if `allowed_hosts` limits the host names of the API."""
    guard = WebGuard(host=host, guarded=False, allowed_hosts=allowed_hosts if is_loopback(host) else ())

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            guard.check(request)
        except Refusal as refusal:
            return web.json_response({"error": str(refusal)}, status=refusal.status)
        return await handler(request)

    return check
