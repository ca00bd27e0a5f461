"""Write host and port as URLs and logs name them: an IPv6 address stands in brackets."""

from __future__ import annotations

# What a client of the same machine connects to, for addresses that a server listens at.
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def host_and_port(host: str, port: int | None) -> str:
    """Return `host:port`; `[host]:port` for an IPv6 address.  Without a port the host alone, in the same brackets."""
    name = f"[{host}]" if ":" in host else host
    return f"{name}:{port}" if port is not None else name


def local_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens at `host`, which may mean all addresses."""
    return f"http://{host_and_port(LOCAL.get(host, host), port)}"
