"""Nodes: the address of the Redis Cluster node that serves this namespace.

All keys of a namespace begin with the hash tag `{namespace}`, so they are in one slot, which one node at a time serves.
So a Link talks to one address, which this class chooses:

    MOVED to another node  ---> redirect()  to that node
    no answer, CLUSTERDOWN ---> lost()      to another known node, which serves the slot or redirects to the right node

Without a cluster only the URL's address is known, and both methods change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from redis.exceptions import MovedError

UNKNOWN_HOSTS = ("", "?")  # a node that does not know its own address: use the address under which it was reached


class Address(NamedTuple):
    """Address of one server."""

    host: str
    port: int


class Nodes:
    """The known addresses of one deployment's Redis, shared by the links of one process."""

    def __init__(self, connection: Mapping[str, Any]) -> None:
        """`connection`: redis-py's connection arguments for the URL; a Unix socket has no address."""
        host, port = connection.get("host"), connection.get("port", 6379)
        self.seed = Address(host, int(port)) if host else None
        self.current = self.seed  # None: a Unix socket
        self._known = [self.seed] if self.seed else []
        self._asked = 0  # index in `_known` of the last address that lost() chose

    def learn(self, slots: list[Any]) -> None:
        """Add every node of a CLUSTER SLOTS reply, replicas included, since a replica redirects to its master."""
        for _, _, *nodes in slots:
            for host, port, *_ in nodes:
                self._remember(host.decode() if host else "", int(port))

    def redirect(self, error: MovedError) -> None:
        """Use the node that a MOVED error names from now on; ignored for a Unix socket."""
        if self.seed is not None:
            self.current = self._remember(error.host, error.port)

    def lost(self, address: Address | None) -> None:
        """Use the next known node, because an attempt at `address` failed; ignored if another node is in use."""
        if address is None or address != self.current or len(self._known) == 1:
            return
        self._asked = (self._asked + 1) % len(self._known)
        if self._known[self._asked] == address:
            self._asked = (self._asked + 1) % len(self._known)
        self.current = self._known[self._asked]

    def _remember(self, host: str, port: int) -> Address:
        assert self.current is not None
        found = Address(self.current.host if host in UNKNOWN_HOSTS else host, port)
        if found not in self._known:
            self._known.append(found)
        return found


def has_hash_tag(namespace: str) -> bool:
    """Return whether keys `{namespace}:...` share a slot: Redis hashes the text between "{" and the first "}"."""
    return bool(namespace) and not namespace.startswith("}")
