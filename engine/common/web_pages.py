"""Which HTTP requests web pages may send to a server that asks for no key.  Shared by gateway and engine.

A page of any site can make its reader's browser send requests to 127.0.0.1.  Two headers show it: `Host`, which a
rebound DNS name leaves as it was (the class of CVE-2024-28224), and `Origin` or `Sec-Fetch-Site`, which a page cannot
change (https://fetch.spec.whatwg.org/#origin-header, https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # they change nothing (RFC 9110, section 9.2.1)
LOCAL = "localhost"
# Schemes of the origins that web pages have.  Programs that embed a page have one of their own, such as app://.
PAGE_SCHEMES = frozenset(
    {"http", "https", "ws", "wss", "file", "ftp", "data", "blob", "filesystem", "content", "about", "null"}
)
NOT_IN_HOST = re.compile(r"[@/?#\\]")  # a URL may have them around its host, the header Host may not


def is_loopback(host: str) -> bool:
    """Return whether a host name or address, with or without brackets, is one of this machine's own loopback."""
    name = host.strip("[]").rstrip(".").lower()
    if name == LOCAL or name.endswith(f".{LOCAL}"):
        return True
    try:
        return ipaddress.ip_address(name.split("%")[0]).is_loopback
    except ValueError:
        return False


def name_of(host: str) -> str:
    """Return the name in a Host header, lower case, without port; "" for one that is none (RFC 9110, section 7.2)."""
    try:
        return "" if NOT_IN_HOST.search(host) else urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def allows_host(host: str | None, allowed: Collection[str]) -> bool:
    """Return whether a request with this Host header may be served by a keyless server on a loopback address.

    allowed: further names, lower case; "*" stands for any.  No browser sends a request without Host (HTTP/1.0)."""
    if host is None or "*" in allowed:
        return True
    name = name_of(host)
    return is_loopback(name) or name in allowed


def is_foreign(method: str, host: str | None, origin: str | None, site: str | None) -> bool:
    """Return whether a page of another origin has its browser send a request that changes something.

    host, origin, site: the headers Host, Origin and Sec-Fetch-Site.  No web page has an origin such as app://."""
    if method in SAFE_METHODS:
        return False
    if not origin:
        return (site or "").lower() in ("cross-site", "same-site")
    scheme, _, place = origin.lower().partition(":")
    return scheme in PAGE_SCHEMES and (scheme not in ("http", "https") or place != f"//{(host or '').lower()}")
