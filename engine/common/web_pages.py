"""Checks of HTTP requests that web pages send to a server without API keys.  Shared by gateway and engine.

Any web page can make its reader's browser send requests to 127.0.0.1.  Two headers reveal such requests.  `Host` still
has the page's name after DNS rebinding (the class of CVE-2024-28224).  A page cannot change `Origin` and
`Sec-Fetch-Site` (https://fetch.spec.whatwg.org/#origin-header, https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing (RFC 9110, section 9.2.1)
LOCAL = "localhost"
# Schemes of web pages' origins.  Programs that embed a page use other schemes, such as app://.
PAGE_SCHEMES = frozenset(
    {"http", "https", "ws", "wss", "file", "ftp", "data", "blob", "filesystem", "content", "about", "null"}
)
NOT_IN_HOST = re.compile(r"[@/?#\\]")  # characters that a URL may have around its host, but the header Host may not


def is_loopback(host: str) -> bool:
    """Return whether a host name or address, with or without brackets, is a loopback name or address."""
    name = host.strip("[]").rstrip(".").lower()
    if name == LOCAL or name.endswith(f".{LOCAL}"):
        return True
    try:
        return ipaddress.ip_address(name.split("%")[0]).is_loopback
    except ValueError:
        return False


def name_of(host: str) -> str:
    """Return the name in a Host header, lower case, without port; "" if the header is invalid (RFC 9110, 7.2)."""
    try:
        return "" if NOT_IN_HOST.search(host) else urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def allows_host(host: str | None, allowed: Collection[str]) -> bool:
    """Return whether a server without keys on a loopback address may serve a request with this Host header.

    `allowed`: further names, lower case; "*" allows any.  `host` None: allowed, since browsers always send Host."""
    if host is None or "*" in allowed:
        return True
    name = name_of(host)
    return is_loopback(name) or name in allowed


def is_foreign(method: str, host: str | None, origin: str | None, site: str | None) -> bool:
    """Return whether a web page of another origin sent a request that may change state.

    `host`, `origin`, `site`: the headers Host, Origin and Sec-Fetch-Site.  Origins such as app:// are no web pages."""
    if method in SAFE_METHODS:
        return False
    if not origin:
        return (site or "").lower() in ("cross-site", "same-site")
    scheme, _, place = origin.lower().partition(":")
    return scheme in PAGE_SCHEMES and (scheme not in ("http", "https") or place != f"//{(host or '').lower()}")
