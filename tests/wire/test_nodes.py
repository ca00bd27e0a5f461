"""Which node of a cluster is asked next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import MovedError

from quire.engine.wire.nodes import Address, Nodes, has_hash_tag
from tests.wire.redis_cluster import slot_of

A, B, C = Address("a", 6379), Address("b", 7001), Address("c", 7002)
SLOTS = [[0, 8191, [b"a", 6379, b"id-a"], [b"b", 7001, b"id-b", []]], [8192, 16383, [b"c", 7002, b"id-c"]]]


def cluster() -> Nodes:
    nodes = Nodes({"host": "a"})
    nodes.learn(SLOTS)
    return nodes


def moved(host: str, port: int) -> MovedError:
    return MovedError(f"1234 {host}:{port}")


def test_outside_a_cluster_the_address_never_changes() -> None:
    nodes = Nodes({"host": "a", "port": "6380"})
    nodes.lost(nodes.current)
    assert nodes.current == nodes.seed == Address("a", 6380)
    socket = Nodes({"path": "/run/redis.sock"})
    socket.lost(socket.current)
    socket.redirect(moved("b", 7001))
    assert socket.current is None


def test_a_redirection_is_followed_and_a_node_without_an_address_is_at_the_same_host() -> None:
    nodes = cluster()
    for error, expected in ((moved("b", 7001), B), (moved("", 7005), Address("b", 7005)), (moved("?", 7001), B)):
        nodes.redirect(error)
        assert nodes.current == expected
    nodes.learn([[0, 5, [None, 7009, b"id"]]])
    nodes.redirect(moved("d", 1))
    seen = set()
    for _ in range(6):
        nodes.lost(nodes.current)
        seen.add(nodes.current)
    assert seen == {A, B, C, Address("b", 7005), Address("b", 7009), Address("d", 1)}


@given(st.lists(st.sampled_from([A, B, C])))
def test_every_node_is_asked_while_one_is_dead_to_which_the_others_redirect(order: list[Address]) -> None:
    """Before a failover is over, every live node names the dead master."""
    nodes = cluster()
    for address in order:
        nodes.lost(address)
    dead, asked = nodes.current, set()
    assert dead is not None
    for _ in range(4):
        nodes.lost(dead)
        asked.add(nodes.current)
        assert nodes.current != dead
        nodes.redirect(moved(*dead))
    assert asked == {A, B, C} - {dead}


def test_attempts_that_fail_together_count_once() -> None:
    nodes = cluster()
    nodes.lost(A)
    chosen = nodes.current
    for _ in range(7):  # they were under way at the same node
        nodes.lost(A)
    assert nodes.current == chosen != A


@given(st.text(alphabet="{}:ab", max_size=5), st.text(max_size=8), st.text(max_size=8))
def test_the_hash_tag_is_redis_own(namespace: str, one: str, other: str) -> None:
    if has_hash_tag(namespace):
        assert slot_of(f"{{{namespace}}}:{one}") == slot_of(f"{{{namespace}}}:{other}")
    else:
        assert len({slot_of(f"{{{namespace}}}:{key}") for key in ("layout", "waiting", "due")}) > 1
