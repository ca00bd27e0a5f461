"""Which node of a Redis Cluster serves this namespace.

All keys of a namespace begin with the hash tag `{namespace}`, so one slot holds them, and one node at a time serves
them.  A Link therefore talks to one address, and this class says to which:

    MOVED to another node  ---> redirect()  that node
    no answer, CLUSTERDOWN ---> lost()      another node, which serves the slot or names the node that does

Outside a cluster one address is known, the URL's, and both change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from redis.exceptions import MovedError

UNKNOWN_HOSTS = ("", "?")  # a node that does not know its own address: the one under which it was reached


class Address(NamedTuple):
    """Address of one server."""

    host: str
    port: int


class Nodes:
    """The addresses of one deployment's Redis.  The links of one process share it."""

    def __init__(self, connection: Mapping[str, Any]) -> None:
        """`connection`: redis-py's arguments of a connection to the URL.  A Unix socket has no address."""
        host, port = connection.get("host"), connection.get("port", 6379)
        self.seed = Address(host, int(port)) if host else None
        self.current = self.seed  # None: a Unix socket
        self._known = [self.seed] if self.seed else []
        self._asked = 0  # index in `_known` of the last address that lost() chose

    def learn(self, slots: list[Any]) -> None:
        """Remember every node of a reply to CLUSTER SLOTS, replicas included: they name the master."""
        for _, _, *nodes in slots:
            for host, port, *_ in nodes:
                self._remember(host.decode() if host else "", int(port))

    def redirect(self, error: MovedError) -> None:
        """From now on ask the node that this error names.  A Unix socket's server cannot be left."""
        if self.seed is not None:
            self.current = self._remember(error.host, error.port)

    def lost(self, address: Address | None) -> None:
        """An attempt at `address` met no server that works: ask the next node, unless another one is asked already."""
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
    """Return whether the keys `{namespace}:...` share a slot: Redis hashes what stands before the first "}", if any."""
    return bool(namespace) and not namespace.startswith("}")
