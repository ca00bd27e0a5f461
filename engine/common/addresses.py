"""Format host and port for URLs and logs, with brackets around IPv6 addresses."""

from __future__ import annotations

# Wildcard address of a server -> the address to which a client on the same machine connects.
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def host_and_port(host: str, port: int | None) -> str:
    """Return `host:port`, or `[host]:port` for an IPv6 address; without a port only the host, bracketed if IPv6."""
    name = f"[{host}]" if ":" in host else host
    return f"{name}:{port}" if port is not None else name


def local_url(host: str, port: int) -> str:
    """Return the URL by which clients on this machine reach a server at `host`, which may be a wildcard address."""
    return f"http://{host_and_port(LOCAL.get(host, host), port)}"
