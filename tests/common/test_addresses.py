"""Addresses as URLs and logs name them."""

from __future__ import annotations

import pytest

from quire.engine.common.addresses import host_and_port, local_url
from quire.engine.wire.link import Link


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:80"),
        ("gateway.example", "http://gateway.example:80"),
    ],
)
def test_an_ipv6_address_stands_in_brackets(host: str, url: str) -> None:
    assert local_url(host, 80) == url


def test_without_a_port_the_host_alone() -> None:
    assert [host_and_port(host, None) for host in ("::1", "redis", "")] == ["[::1]", "redis", ""]


@pytest.mark.parametrize(
    "url", ["redis://[::1]:6379/0", "redis://[::1]/0", "redis://redis:1/0", "unix:///run/redis.sock"]
)
async def test_messages_name_the_url_of_redis_as_it_was_given(url: str) -> None:
    link = Link(url, "n", reply_s=1.0)
    assert link._name == url
    await link.close()
