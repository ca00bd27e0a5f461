"""What an engine publishes of its prefix cache, against the real scheduler and pool."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.bus_thread import BusThread
from quire.engine.commands import Report, StepCosts
from quire.engine.config import EngineConfig
from quire.engine.core.blocks import BlockPool, chain_digest, root_digest
from quire.engine.core.limits import Outputs
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.observers.prefix_reports import HeldPrefixes, PromptBacklog
from quire.engine.tools.simulate import FAR, engine_limits
from quire.engine.wire import prefixes
from quire.engine.wire.clock import RedisClock
from quire.engine.wire.layout import DIGEST_BYTES
from quire.engine.wire.messages import Delta, EngineLoad, Generate, Sampling
from quire.engine.wire.prefixes import LENGTHS, PrefixReport, PublishedPrefixes, prefix_digests, split
from quire.engine.wire.records import Claim, SyncReply


class Rig:
    """A scheduler, the observer, and what Redis would know: claims add digests, reports correct them."""

    def __init__(self, blocks: int, block_size: int = 16) -> None:
        self.core = Scheduler(BlockPool(blocks, block_size), engine_limits("forecast", step_tokens=2048))
        self.executor = ScriptedExecutor(ModelInfo("m", "sim", 1000, FAR, [0], 0), blocks)
        self.observer = HeldPrefixes(self.core.pool, self)
        self.known: set[bytes] = set()

    def put_prefixes(self, gained: list[bytes], lost: list[bytes]) -> None:
        assert not set(gained) & set(lost)
        self.known = (self.known - set(lost)) | set(gained)

    def claim(self, name: str, tokens: list[int], salt: str = "", outputs: int = 2) -> None:
        digests = prefix_digests(tokens, salt)
        self.known.update(split(digests))
        sampling = Sampling(ignore_eos=True)
        self.core.accept(Generate(name, "g", tokens, outputs, sampling, FAR, salt, prefixes=digests))

    def turn(self) -> None:
        if (plan := self.core.plan(0)) is not None:
            self.executor.submit(plan)
            self.core.commit(self.executor.collect())
        self.observer.follow(self.core.outputs())

    def finish(self) -> None:
        while not self.core.idle:
            self.turn()
        self.turn()

    def finds(self, tokens: list[int], salt: str = "") -> int:
        """Tokens of a prompt that the prefix cache finds: one longer request asks it."""
        before = self.core.report.totals.cached_prompt_tokens
        sampling = Sampling(ignore_eos=True)
        self.core.accept(Generate("probe", "g", [*tokens, 1], 1, sampling, FAR, salt))
        self.finish()
        return self.core.report.totals.cached_prompt_tokens - before


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(2, 1000), k=count)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_what_is_published_is_what_the_cache_finds_at_any_block_size(block_size: int) -> None:
    rig = Rig(8192 // block_size, block_size)
    rig.claim("a", tokens(1, 1000))
    rig.finish()
    assert rig.known == set(split(prefix_digests(tokens(1, 1000), "")))
    assert rig.finds(tokens(1, 960)) == 960


def test_a_request_that_ends_before_its_prompt_was_computed_is_taken_back() -> None:
    rig = Rig(512)
    rig.claim("a", tokens(1, 1000))
    rig.core.abort("a")
    rig.finish()
    assert rig.known == set()


def test_evicted_and_reset_prefixes_are_taken_back() -> None:
    rig = Rig(100)
    rig.claim("a", tokens(1, 1000))
    rig.finish()
    rig.claim("b", tokens(2, 1000))
    rig.finish()
    first, second = (set(split(prefix_digests(tokens(seed, 1000), ""))) for seed in (1, 2))
    assert second <= rig.known
    assert 0 < len(first & rig.known) < len(first)  # eviction eats a prefix from its tail
    rig.core.reset_prefix_cache()
    rig.turn()
    assert rig.known == set()


def test_the_number_of_digests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.observers.prefix_reports.MAX_HELD", 20)
    rig = Rig(1024)
    for seed in range(4):
        rig.claim(f"r{seed}", tokens(seed, 1000))
        rig.finish()
    assert len(rig.known) == 20
    assert set(split(prefix_digests(tokens(3, 1000), ""))) <= rig.known
    assert prefixes.MAX_HELD * DIGEST_BYTES <= 2**16  # bytes of one sync that sends all digests


@given(
    work=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from((0, 256, 512)), st.integers(64, 1000)),
        min_size=4,
        max_size=12,
    )
)
def test_beyond_the_bound_the_longest_prefixes_leave_first(work: list[tuple[int, int, int, int]]) -> None:
    """An engine that looks for what another one holds asks for the shortest prefix first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.observers.prefix_reports.MAX_HELD", 20)
        rig, prompts = Rig(1024), list[list[int]]()
        for number, (trunk, branch, common, length) in enumerate(work):
            prompts.append((tokens(trunk, common) + tokens(100 + branch, 1000))[:length])
            rig.claim(f"r{number}", prompts[-1])
            if number % 3:  # some end together
                rig.finish()
        rig.finish()
    distinct = {digest for prompt in prompts for digest in split(prefix_digests(prompt, ""))}
    assert len(rig.known) == min(20, len(distinct))
    for prompt in prompts:
        known = [digest in rig.known for digest in split(prefix_digests(prompt, ""))]
        assert known == sorted(known, reverse=True)
    assert split(prefix_digests(prompts[-1], ""))[0] in rig.known


@given(
    work=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from((50, 64, 200, 600, 900)), st.booleans(), st.booleans()),
        max_size=12,
    )
)
def test_once_idle_redis_knows_exactly_what_the_cache_finds(work: list[tuple[int, int, bool, bool]]) -> None:
    """Whatever ran together, was evicted or withdrawn."""
    rig = Rig(80)
    for number, (seed, length, wait, leave) in enumerate(work):
        rig.claim(f"r{number}", tokens(seed, length))
        rig.turn()
        if leave:
            rig.core.abort(f"r{number}")
        if wait:
            rig.finish()
    rig.finish()
    pool = rig.core.pool
    for seed in range(5):
        prompt = tokens(seed, 900)
        longest = max((length for s, length, _, _ in work if s == seed), default=0)
        found = pool.lookup(_chain(prompt[: longest // 16 * 16], pool.block_size))
        held = {digest for digest, at in zip(split(prefix_digests(prompt[:longest], "")), LENGTHS, strict=False)
                if at <= len(found) * 16}  # fmt: skip
        published = set(split(prefix_digests(prompt[:longest], ""))) & rig.known
        assert held == published


def _chain(prompt: list[int], size: int) -> list[bytes]:
    found, parent = [], root_digest("sim", "")
    for at in range(0, len(prompt), size):
        parent = chain_digest(parent, prompt[at : at + size])
        found.append(parent)
    return found


# -------------------------------------------------------------------------------------------------------- syncs


def test_an_exchange_sends_what_changed_and_everything_after_a_lapse() -> None:
    published = PublishedPrefixes()
    one, two, three = b"1" * 8, b"2" * 8, b"3" * 8
    assert published.update(PrefixReport([one, two])) in (("afresh", one + two, b""), ("afresh", two + one, b""))
    published.sent(vanished=False)
    published.claimed(three)
    # Redis has a claim's digests already, and never had the other one: neither is sent.
    assert published.update(PrefixReport([three], [one, b"4" * 8])) == ("1", b"", one)
    published.sent(vanished=False)
    published.start_afresh()
    how, added, removed = published.update(PrefixReport())
    assert (how, set(split(added)), removed) == ("afresh", {two, three}, b"")
    assert published.update(None) == ("", b"", b"")
    published.claimed(one)
    assert published.update(PrefixReport()) == ("afresh", b"", b"")
    published.sent(vanished=False)
    published.sent(vanished=True)  # it holds nothing, so nothing is missing
    assert published.update(PrefixReport([two])) == ("1", two, b"")
    published.sent(vanished=True)
    assert published.update(PrefixReport([], [two])) == ("afresh", b"", b"")
    published.sent(vanished=False)
    published.claimed(bytes(8 * (prefixes.MAX_PUBLISHED // 2)))  # all the same
    published.claimed(struct.pack(f"<{prefixes.MAX_PUBLISHED}Q", *range(1, prefixes.MAX_PUBLISHED + 1)))
    assert published.update(PrefixReport([two])) == ("afresh", two, b"")


class ExchangingRig(Rig):
    """A rig whose reports reach Redis by syncs: `known` is what Redis has after them."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.published = PublishedPrefixes()
        self.put_prefixes([], [])

    def put_prefixes(self, gained: list[bytes], lost: list[bytes]) -> None:
        how, added, removed = self.published.update(PrefixReport(gained, lost))
        self.published.sent(vanished=False)
        self.known = (set() if how == "afresh" else self.known - set(split(removed))) | set(split(added))

    def claim(self, name: str, tokens: list[int], salt: str = "", outputs: int = 2) -> None:
        super().claim(name, tokens, salt, outputs)
        self.published.claimed(prefix_digests(tokens, salt))


def test_claims_beyond_the_bound_leave_in_redis_what_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """HeldPrefixes reports a digest once, so an engine that forgot it would publish it no more."""
    monkeypatch.setattr("quire.engine.wire.prefixes.MAX_PUBLISHED", 40)
    rig, digests = ExchangingRig(1024), [set(split(prefix_digests(tokens(seed, 1000), ""))) for seed in range(4)]
    rig.claim("r0", tokens(0, 1000))
    rig.finish()
    for seed in (1, 2, 3):
        rig.claim(f"r{seed}", tokens(seed, 1000))
    rig.put_prefixes([], [])
    assert rig.known == digests[0]
    rig.finish()
    assert rig.known == set.union(*digests)
    rig.core.reset_prefix_cache()
    rig.turn()
    assert rig.known == set()


def test_the_backlog_counts_what_has_no_token_yet() -> None:
    backlog = PromptBacklog()
    backlog.add("a", 100)
    backlog.add("b", 50)
    backlog.add("a", 30)  # claimed again, after another engine had it
    assert backlog.tokens == 80
    backlog.remove(["a", "unknown"])
    backlog.remove(["a"])
    assert backlog.tokens == 50


def test_a_request_with_digests_survives_the_wire() -> None:
    request = Generate("r", "g", [1], 1, Sampling(), 5, prefixes=b"\x00" * 8)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Generate) == request


# ------------------------------------------------------------------------------------------------------- bus thread


class FakeSide:
    """Takes syncs down, and claims one request in the first."""

    queue_share, watched = 0.0, False

    def __init__(self) -> None:
        self.clock = RedisClock()
        self.reports: list[PrefixReport | None] = []

    async def sync(self, *words: Any, **_: Any) -> SyncReply:
        self.reports.append(words[5])
        if len(self.reports) > 1:
            return SyncReply([], [])
        request = Generate("a", "g", [1] * 1100, 1, Sampling(), 0)
        return SyncReply([request], [], claims={"a": Claim(1024)}, retry_ms=40)


def report_of(token_s: float = 0.0, step_s: float = 0.0) -> Report:
    load = EngineLoad("e", "m", "f", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    return Report(load, 0, 0, 0, costs=StepCosts(token_s, step_s))


async def test_the_bus_thread_reports_changes_costs_and_backlog_and_asks_again_in_time() -> None:
    thread = BusThread(EngineConfig(executor="scripted", redis_url="redis://127.0.0.1:1"))
    side: Any = FakeSide()
    thread.publish_prefixes()
    thread.put_prefixes([b"1", b"2"], [])
    thread.put_prefixes([b"3"], [b"1", b"4"])
    await thread._sync(side, report_of(5e-5, 0.01))
    retries = [thread._retry_s]
    thread.put(Outputs({}, []), report_of())
    await thread._sync(side, report_of())
    assert [*retries, thread._retry_s] == [0.04, None]
    thread.put(Outputs({"g": [Delta("a", 0, [7])]}, []), report_of())
    await thread._sync(side, report_of())
    first, second, third = side.reports
    assert (first.added, first.removed) == ([b"2", b"3"], [b"1", b"4"])
    assert (first.token_us, first.step_us, first.backlog) == (pytest.approx(50.0), pytest.approx(10_000.0), 0)
    assert (second.added, second.removed, second.backlog) == ([], [], 76)
    assert third.backlog == 0  # its first token is here
    assert thread._telemetry.claims == {"held": 1, "waited": 0, "none": 0}
    thread._loop.close()


async def test_an_engine_that_publishes_nothing_says_so() -> None:
    thread = BusThread(EngineConfig(executor="scripted", redis_url="redis://127.0.0.1:1"))
    side: Any = FakeSide()
    thread.put_prefixes([b"1"], [])
    await thread._sync(side, report_of())
    assert side.reports == [None]
    thread._loop.close()
