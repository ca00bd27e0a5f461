"""Redis loses every key while requests wait and run: no sum that scripts keep is wrong or negative afterwards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.layout import QUOTA_MS
from quire.engine.wire.messages import Generate
from quire.engine.wire.quotas import Quota
from tests.wire.sides import Bus, generate
from tests.wire.test_losses import LENGTH, Computing, Losses, logged

QUOTA = Quota(requests_per_minute=10**6, tokens_per_minute=10**6, max_requests=1000)
TENANTS = ("acme", "beta")


class Flushed(Losses):
    """Requests that take quotas, engines, lapses, and FLUSHALL, in any order."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.redis: Any = self.client  # its types allow text, which this one never returns
        self.tenants: dict[str, str] = {}  # request -> its tenant, of those with quotas
        self.read: dict[str, int] = {}  # request -> tokens of its first choice that its client has

    def taken(self, tenant: str, n: int) -> Generate:
        name = f"a{len(self.names)}.0"
        self.names.append(name)
        self.tenants[name], self.read[name] = tenant, 0
        request = generate(name, gateway="g", n=n, tenant=tenant)
        take = self.gateway.quotas.take(
            tenant, QUOTA, name.removesuffix(".0"), request.deadline_ms, [(len(request.token_ids), n * LENGTH)]
        )
        assert self.run(take).used_up is None
        return request

    @rule(tenant=st.sampled_from(TENANTS), n=st.integers(1, 2), flushed=st.booleans(), queued=st.booleans())
    def submit_with_quota(self, tenant: str, n: int, flushed: bool, queued: bool) -> None:
        request = self.taken(tenant, n)
        if flushed:
            self.flush()
        if queued:
            self.run(self.gateway.submit(request))
            self.talk(self.engines[0], [], 1)
        else:
            self.run(self.gateway.quotas.restore(tenant, QUOTA, request.id.removesuffix(".0")))

    @rule()
    def flush(self) -> None:
        self.client.delete(*self.client.scan_iter(f"{{{self.namespace}}}:*"), "none")
        self.seen.clear()

    def keep(self) -> None:
        """Not a rule here: Redis goes back to no earlier state, it starts from nothing."""

    def go_back(self) -> None:
        """Not a rule here, as `keep`."""

    @rule(data=st.data(), times=st.integers(1, 2))
    @precondition(lambda self: self.tenants)
    def settle(self, data: st.DataObject, times: int) -> None:
        """A gateway settles what it has read before, whatever Redis remembers of it now."""
        name = data.draw(st.sampled_from(sorted(self.tenants)))
        for _ in range(times):
            self.run(self.gateway.settle([(name, self.tenants[name], [self.read[name]])]))

    @rule()
    def read_all(self) -> None:
        for name in self.tenants:
            if self.run(self.gateway.attach(name, listen=False)) is not None:
                self.read[name] = max(self.read[name], len(self.run(logged(self.gateway, name))[0].token_ids))

    def hash_of(self, key: str) -> dict[str, bytes]:
        found = self.redis.hgetall(f"{{{self.namespace}}}:{key}")
        return {name.decode(): value for name, value in found.items()}

    @precondition(lambda self: hasattr(self, "read"))
    @invariant()
    def sums_are_those_of_their_parts(self) -> None:
        prefix = f"{{{self.namespace}}}:"
        lanes, queued = Counter[str](), Counter[tuple[str, str]]()
        total = 0
        for entry in self.hash_of("waiting").values():
            tokens, size, lane, tenant = entry.decode().split(" ", 3)
            lanes[lane] += int(tokens)
            queued[lane, tenant] += int(tokens)
            total += int(size)
        assert {name: int(tokens) for name, tokens in self.hash_of("lanes").items()} == dict(lanes)
        for lane in ("on_time", "late"):
            found = {name: int(tokens) for name, tokens in self.hash_of(f"queued_tokens:{lane}").items()}
            assert found == {tenant: tokens for (at, tenant), tokens in queued.items() if at == lane}
        assert int(self.redis.get(f"{prefix}queued_bytes") or 0) == total
        rooms = [
            int(self.redis.hget(f"{prefix}engine:{name.decode()}", "room"))
            for name in self.redis.zrange(f"{prefix}offers", 0, -1)
        ]
        assert int(self.redis.get(f"{prefix}offered") or 0) == sum(rooms)
        assert min(rooms, default=0) >= 0

    @precondition(lambda self: hasattr(self, "read"))
    @invariant()
    def quotas_and_usage_are_within_their_bounds(self) -> None:
        prefix = f"{{{self.namespace}}}:"
        for tenant in TENANTS:
            buckets = self.run(self.gateway.quotas.look(tenant, QUOTA))
            assert 0 <= buckets.requests_ms < QUOTA_MS
            assert 0 <= buckets.tokens_ms < QUOTA_MS
            held = self.hash_of(f"quota_held:{tenant}")
            opened = {one.decode() for one in self.redis.zrange(f"{prefix}quota_open:{tenant}", 0, -1)}
            assert {name for name in held if not name.endswith(".0")} == opened
            used = self.hash_of(f"usage:{tenant}")
            assert all(int(count) >= 0 for count in used.values())
            assert int(used.get("delivered", 0)) <= int(used.get("generated", 0))


@pytest.mark.every_redis
async def test_tokens_of_a_log_that_is_gone_are_not_entered_in_the_ledger(bus: Bus) -> None:
    """Nothing would say that they were entered before, and nothing says that they were generated."""
    gateway, engine = await bus.gateway("g"), Computing(await bus.engine("e0"), "e0")
    await gateway.submit(generate("a", gateway="g", tenant="acme"))
    await engine.say()
    await engine.say(5)
    with redis.Redis.from_url(bus.url) as client:
        client.delete(*client.scan_iter(f"{{{bus.namespace}}}:*"))
        found = [await gateway.settle([("a", "acme", [5])]) for _ in range(2)]
        assert [(usage.delivered, usage.new) for [usage] in found] == [(5, 0), (5, 0)]
        assert client.hgetall(f"{{{bus.namespace}}}:usage:acme") == {}


@pytest.mark.usefixtures("patient")
def test_no_sum_is_wrong_after_redis_lost_every_key(redis_server: EmbeddedRedis) -> None:
    Flushed.server = redis_server
    run_state_machine_as_test(
        Flushed,
        settings=settings(
            max_examples=10,
            stateful_step_count=20,
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
