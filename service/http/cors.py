"""Cross-origin requests: headers that say to browsers which pages of other origins may read this API.

    browser --OPTIONS, Origin, method and headers--> `preflight`: 204 with the allowed methods; no API key is needed
    browser --request, Origin----------------------> answer with `headers`

Without --cors-origins, CORS is off.  Browsers then let no page of another origin read an answer, or send JSON or an API
key.  Cookies are never used, so no answer allows credentials.  https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web

MAX_AGE_S = 600  # seconds for which a browser may cache the answer to a preflight
EXPOSED = (
    "x-request-id, openai-processing-ms, retry-after, retry-after-ms, x-should-retry, x-queue-lane, x-queue-place, "
    "x-queue-wait, x-answer-id, x-unknown-fields, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)


class Cors:
    """The origins whose pages may use the API."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: allowed origins, such as https://example.com; "*": any origin."""
        self._any, self._origins = "*" in origins, frozenset(origins)

    def allows(self, origin: str | None) -> bool:
        """Return whether pages of an origin may use the API."""
        return origin is not None and (self._any or origin in self._origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the headers that let the requesting page read an answer; for a forbidden origin at most Vary."""
        if not self._origins:
            return {}
        origin = request.headers.get("Origin", "")
        if self._any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": EXPOSED}
        found = {"Vary": "Origin"}  # without it a cache would give one origin's answer to another origin
        if origin in self._origins:
            found |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
        return found

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Return the answer to a CORS preflight request; None for any other request."""
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None or "Origin" not in request.headers or not self._origins:
            return None
        response = web.Response(status=204)
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if "Access-Control-Allow-Origin" in self.headers(request):
            response.headers["Access-Control-Allow-Methods"] = "GET, HEAD, POST, DELETE"
            response.headers["Access-Control-Max-Age"] = str(MAX_AGE_S)
            if re.fullmatch(r"[\w\-, ]{1,4096}", wanted, re.ASCII):
                response.headers["Access-Control-Allow-Headers"] = wanted
        return response
