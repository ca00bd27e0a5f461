"""Open requests: replays are dropped, gaps are noticed, and everything ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.clock import RedisClock
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.engine.wire.messages import Delta, Finish, Generate, Sampling, TokenBatch, TokenLogprob
from quire.engine.wire.records import (
    Attached,
    DuplicateRequest,
    Fleet,
    IdempotencyKey,
    Lane,
    Place,
    Queue,
    QueueBounds,
    Usage,
)
from quire.engine.wire.token_log import LoggedOutput
from quire.service.common import supervision
from quire.service.common.metrics import Telemetry
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery import admission, queue_updates
from quire.service.delivery.admission import JITTER, Cost, Decision, Promised
from quire.service.delivery.mailbox import LOST, MAILBOX_BYTES, REQUEST_LOST, Backlog, Mailbox
from quire.service.delivery.streams import SUBMITS, AlreadySubmitted, Streams
from tests.service.fakes import a_load, settled


def drain(mailbox: Mailbox) -> tuple[list[int], Finish | None]:
    tokens, _, finish = mailbox.take()
    return tokens, finish


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 6), st.booleans()), max_size=20))
def test_any_cuts_and_replays_give_each_token_once(deltas: list[tuple[int, int, bool]]) -> None:
    """(how far back, how many tokens, taken at once): a dead engine is replaced by one that starts further back."""
    mailbox, got, at = Mailbox(0, Backlog(2**20)), list[int](), 0

    def take() -> Finish | None:
        tokens, found, finish = mailbox.take()
        assert [entry.logprob for entry in found or ()] == [float(token) for token in tokens]
        got.extend(tokens)
        return finish

    def put(first: int, stop: int, finish: Finish | None = None) -> bool:
        logprobs = [TokenLogprob(float(position)) for position in range(first, stop)]
        return mailbox.merge(Delta("r", first, list(range(first, stop)), finish, logprobs=logprobs))

    for back, count, taken in deltas:
        first = max(0, at - back)
        assert put(first, first + count) == (first + count > at)
        at = max(at, first + count)
        if taken:
            assert take() is None
    assert put(0, at, Finish("length"))
    assert take() == Finish("length")
    assert got == list(range(at))
    assert not put(0, at + 1, Finish("stop"))


def test_a_gap_is_filled_from_the_log() -> None:
    mailbox = Mailbox(0, Backlog(2**20))
    mailbox.merge(Delta("r", 0, [1]))
    assert mailbox.merge(Delta("r", 2, [3], Finish("length")))
    assert drain(mailbox) == ([1], None)
    assert mailbox.behind
    mailbox.refill(LoggedOutput([2, 3], Finish("length")))
    assert drain(mailbox) == ([2, 3], Finish("length"))


def test_a_gap_that_the_log_cannot_fill_ends_in_an_error() -> None:
    for said in (None, LoggedOutput([])):
        mailbox = Mailbox(0, Backlog(2**20))
        assert mailbox.merge(Delta("r", 2, [], None))
        mailbox.refill(said)
        tokens, finish = drain(mailbox)
        assert tokens == []
        assert finish == (REQUEST_LOST if said is None else LOST)


def test_the_first_delta_brings_what_the_prompt_brought() -> None:
    mailbox = Mailbox(0, Backlog(2**20))
    mailbox.merge(Delta("r", 0, [1], cached_tokens=48, prompt_logprobs=[TokenLogprob(-1.0)]))
    mailbox.merge(Delta("r", 1, [2]))
    assert mailbox.cached_tokens == 48
    assert mailbox.prompt_logprobs == [TokenLogprob(-1.0)]
    assert drain(mailbox) == ([1, 2], None)


class Wire:
    """A bus that only records calls."""

    def __init__(self) -> None:
        self.clock = RedisClock()
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.asked: list[QueueBounds] = []
        self.down = self.full = False
        self.rounds = 0
        self.duplicate: DuplicateRequest | None = None
        self.logs: dict[str, list[LoggedOutput]] = {}
        self.reads: list[tuple[str, int, int, int]] = []
        self.attached: list[str] = []
        self.settled: list[tuple[str, str, list[int]]] = []
        self.kept: list[str] = []
        self.refusals = 0
        self.lane: Lane = "on_time"  # lane that submits join
        self.queue_full = False
        self.waiting: dict[str, Place] = {}  # what `places` answers
        self.placed = 0  # how often it was asked
        self.fleets = [Fleet(engines=[a_load()], queued=2, queued_tokens=20, time_ms=1)]
        self.incoming: asyncio.Queue[TokenBatch] = asyncio.Queue()

    async def submit(
        self,
        *requests: Generate,
        bounds: QueueBounds,
        record: bytes = b"",
        idempotency_key: IdempotencyKey | None = None,
    ) -> Queue:
        if self.down or self.full:
            raise BusDown("full" if self.full else "gone")
        if self.duplicate is not None:
            return Queue(1, 3, 0, {}, duplicate=self.duplicate)
        self.asked.append(bounds)
        if self.queue_full or len(self.asked) <= self.refusals:
            return Queue(1, 3, 0, {}, full=self.queue_full)
        self.submitted += [request.id for request in requests]
        return Queue(1, 3, 0, {}, lane=self.lane, ahead=4)

    async def places(self, request_ids: Sequence[str]) -> dict[str, Place]:
        self.placed += 1
        if self.down:
            raise BusDown("gone")
        return {name: self.waiting[name] for name in request_ids if name in self.waiting}

    def withdraw(self, request_id: str, index: int = -1) -> None:
        self.cancelled.append(request_id if index < 0 else f"{request_id} {index}")

    async def withdrawn(self) -> None:
        pass

    async def fleet(self) -> Fleet:
        if self.down:
            raise BusDown("gone")
        return self.fleets[0]

    async def attach(self, request_id: str, *, listen: bool = True) -> Attached | None:
        self.attached += [request_id] if listen else []
        found = self.logs.get(request_id)
        return Attached(b"record", found) if found is not None else None

    async def log(self, request_id: str, index: int, first: int, count: int) -> LoggedOutput | None:
        self.reads.append((request_id, index, first, count))
        if request_id not in self.logs:
            return None
        said = self.logs[request_id][index]
        end = first + count
        finish = said.finish if end >= len(said.token_ids) else None
        return LoggedOutput(said.token_ids[first:end], finish, said.logprobs[first:end] if said.logprobs else None)

    async def settle(self, delivered: list[tuple[str, str, list[int]]]) -> list[Usage]:
        self.settled += delivered
        return [Usage(order_id, tenant, 0, sum(counts), 0) for order_id, tenant, counts in delivered]

    async def keep(self, request_ids: list[str]) -> None:
        self.kept += request_ids

    async def batches(self) -> AsyncIterator[TokenBatch]:
        while True:
            yield await self.incoming.get()
            self.rounds += 1

    @property
    def operations(self) -> Wire:
        return self

    async def probe(self) -> None:
        if self.full:
            raise BusDown("full")


@pytest.fixture
async def wire() -> Wire:
    return Wire()


@pytest.fixture
async def streams(wire: Wire) -> AsyncIterator[Streams]:
    made = Streams(cast(GatewaySide, wire), GatewayConfig(heartbeat_s=0.05, fleet_s=0.01), Telemetry("g"))
    await made.start()
    yield made
    await made.stop()
    assert len(made) == 0
    assert made.submissions.backlog.held == 0


COST = Cost(prompt_tokens=3, timeout_s=60.0)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[Fleet]:
    """Admission decides by a script: bounds that grow, and a wait of 5 s.  Returns the readings that it decides on."""
    seen: list[Fleet] = []

    def decide(
        cost: Cost, fleet: Fleet, now_ms: int, config: GatewayConfig, jitter: float, promised: Promised
    ) -> Decision:
        seen.append(fleet)
        return Decision(QueueBounds(10 * len(seen)), 0.5, 5.0)

    monkeypatch.setattr(admission, "decide", decide)
    return seen


def requests(prompts: int = 1, n: int = 1) -> list[Generate]:
    deadline_ms = int(time.time() * 1000) + 60_000
    return [Generate(f"r.{at}", "g", [1, 2, 3], 9, Sampling(), deadline_ms, n=n) for at in range(prompts)]


async def put(wire: Wire, *deltas: Delta) -> None:
    wire.incoming.put_nowait(TokenBatch("e0", list(deltas)))


async def test_deltas_find_their_choice(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(prompts=2, n=2), COST) as opened:
        assert wire.submitted == ["r.0", "r.1"]
        await put(wire, Delta("r.1", 0, [5], index=0), Delta("r.0", 0, [6], index=1), Delta("other.0", 0, [7]))
        changed = await anext(opened)
        assert [(mailbox.choice, drain(mailbox)[0]) for mailbox in changed] == [(2, [5]), (1, [6])]
        await put(wire, *(Delta(f"r.{at}", int(at != i), [], Finish("stop"), index=i) for at in (0, 1) for i in (0, 1)))
        for mailbox in await anext(opened):
            opened.end(mailbox.choice)
        with pytest.raises(StopAsyncIteration):
            await anext(opened)
    await asyncio.sleep(0)
    assert wire.cancelled == []  # the engine has ended all of it already


async def test_leaving_early_cancels_only_what_still_runs(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(prompts=2), COST) as opened:
        await put(wire, Delta("r.0", 0, [1], Finish("stop")))
        await anext(opened)
    await asyncio.sleep(0)
    assert wire.cancelled == ["r.1"]


async def test_a_choice_that_is_done_early_stops_alone(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(prompts=2, n=3), COST) as opened:
        await put(wire, *(Delta("r.1", 0, [1], index=index) for index in range(3)))
        await anext(opened)
        opened.end(4)
        await put(wire, Delta("r.1", 1, [2], Finish("length"), index=2))
        assert [mailbox.choice for mailbox in await anext(opened)] == [5]
        opened.end(5)
        assert wire.cancelled == ["r.1 1"]
        opened.end(3)  # no client reads the second prompt any more
        await asyncio.sleep(0)
        assert wire.cancelled == ["r.1 1", "r.1"]
    await asyncio.sleep(0)
    assert wire.cancelled == ["r.1 1", "r.1", "r.0"]


async def test_a_gap_without_a_log_stops_the_engine(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(), COST) as opened:
        await put(wire, Delta("r.0", 3, [1]))
        [mailbox] = await anext(opened)
        finish = drain(mailbox)[1]
        assert finish is not None
        assert finish.reason == "error"
    await asyncio.sleep(0)
    assert wire.cancelled == ["r.0"]


async def test_a_deadline_ends_every_choice_and_the_engines_work(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(n=2), msgspec.structs.replace(COST, timeout_s=0.02)) as opened:
        changed = await anext(opened)
        assert [drain(mailbox) for mailbox in changed] == [([], Finish("deadline"))] * 2
    await asyncio.sleep(0)
    assert wire.cancelled == ["r.0"]


async def test_a_queue_out_of_reach_is_503(streams: Streams, wire: Wire) -> None:
    wire.down = True
    with pytest.raises(Refusal) as caught:
        async with streams.open(requests(prompts=3), COST):
            pytest.fail("must not open")
    assert caught.value.status == 503
    assert len(streams) == 0


async def test_a_queue_that_has_grown_is_decided_on_again(streams: Streams, wire: Wire, decisions: list[Fleet]) -> None:
    wire.refusals = 1
    async with streams.open(requests(prompts=2), COST):
        assert [fleet.queued_tokens for fleet in decisions] == [20, 3]
        assert wire.submitted == ["r.0", "r.1"]
        assert wire.asked == [QueueBounds(10), QueueBounds(20)]
    wire.refusals = 100
    with pytest.raises(Refusal) as caught:
        async with streams.open(requests(), COST):
            pytest.fail("must not open")
    assert caught.value.status == 429
    assert len(streams) == 0


async def test_admission_decides_with_the_clock_and_the_jitter_of_the_streams(wire: Wire) -> None:
    """Idle engines admit at once.  Seen an hour later they count as full and standing still: 429 and a long pause."""
    later_ms = 0
    made = Streams(
        cast(GatewaySide, wire),
        GatewayConfig(fleet_s=60.0),
        Telemetry("g"),
        now_ms=lambda: int(time.time() * 1000) + later_ms,
        jitter=lambda: 0.5,
    )
    load = a_load(step_s=0.01, tokens_per_s=100.0, blocks_per_s=10.0, prompt_tokens=1000, generated_tokens=1000)
    wire.fleets[0] = Fleet(engines=[load], queued=0, queued_tokens=0, time_ms=1)
    await made.start()
    async with made.open(requests(), COST):
        assert wire.submitted == ["r.0"]
    later_ms = 3_600_000
    with pytest.raises(Refusal) as caught:
        async with made.open(requests(), COST):
            pytest.fail("must not open")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0 + JITTER * 0.5)
    await made.stop()


async def test_a_full_queue_is_503(streams: Streams, wire: Wire) -> None:
    wire.queue_full = True
    with pytest.raises(Refusal) as caught:
        async with streams.open(requests(), COST):
            pytest.fail("must not open")
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "queue_full", 5.0)


async def test_a_late_request_begins_with_its_place_and_is_updated(
    streams: Streams, wire: Wire, decisions: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_updates, "UPDATE_S", 0.02)
    wire.lane, wire.waiting["r.0"] = "late", Place("late", 3)
    async with streams.open(requests(), COST) as opened:
        opened._heartbeat_s = 1000.0
        waiting = opened.waiting
        assert waiting is not None
        assert waiting.comment() == b": queued place=4 wait_s=5.0\n"
        assert waiting.headers() == {"x-queue-lane": "late", "x-queue-place": "4", "x-queue-wait": "5.000"}
        assert await anext(opened) == []  # at once
        assert await anext(opened) == []  # with the next reading
        assert waiting.ahead == 3
        assert waiting.comment() == b": queued place=3\n"  # an idle engine's pace is not known
        await put(wire, Delta("r.0", 0, [1]))
        assert len(await anext(opened)) == 1
        assert waiting.waited_s is not None
        assert waiting.headers().keys() == {"x-queue-lane", "x-queue-wait"}


async def test_tokens_that_are_quicker_than_the_reply_to_a_submit_end_the_wait(
    streams: Streams, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = wire.submit

    async def slowly(*requests: Generate, **more: Any) -> Queue:
        queue = await submit(*requests, **more)
        streams.deliver(TokenBatch("e0", [Delta("r.0", 0, [1])]))
        return queue

    monkeypatch.setattr(wire, "submit", slowly)
    wire.lane = "late"
    async with streams.open(requests(), COST) as opened:
        assert opened.waiting is not None
        assert opened.waiting.headers().keys() == {"x-queue-lane", "x-queue-wait"}
        assert len(await anext(opened)) == 1


async def test_places_are_read_in_one_batch_and_only_of_what_waits(
    streams: Streams, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_updates, "UPDATE_S", 0.02)
    wire.waiting["r.0"] = Place("late", 3)
    async with streams.open(requests(), COST) as opened:
        assert opened.waiting is not None
        await settled(lambda: opened.waiting.lane == "late")  # type: ignore[union-attr]  # it was overdue
        del wire.waiting["r.0"]  # claimed
        asked = wire.placed
        await settled(lambda: wire.placed > asked)
        asked = wire.placed
        await asyncio.sleep(0.1)
        assert wire.placed == asked


async def test_a_crowd_submits_a_few_at_a_time_and_learns_of_an_outage_together(
    streams: Streams, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many arrive at once: those that wait for their turn wait for no connection, and find no outage again."""
    submit, inside, most, asked = wire.submit, 0, 0, 0

    async def slowly(*requests: Generate, **more: Any) -> Queue:
        nonlocal inside, most, asked
        inside, asked = inside + 1, asked + 1
        most = max(most, inside)
        await asyncio.sleep(0.001)
        inside -= 1
        return await submit(*requests, **more)

    async def ask(number: int) -> int:
        request = msgspec.structs.replace(requests()[0], id=f"r{number}.0")
        try:
            async with streams.open([request], COST):
                return 200
        except Refusal as refusal:
            return refusal.status

    monkeypatch.setattr(wire, "submit", slowly)
    assert await asyncio.gather(*map(ask, range(200))) == [200] * 200
    assert most == SUBMITS
    asked, wire.full = 0, True
    assert await asyncio.gather(*map(ask, range(200))) == [503] * 200
    assert asked <= 2 * SUBMITS


async def test_silence_beats_and_news_postpones_it(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(), COST) as opened:
        assert await anext(opened) == []
        await put(wire, Delta("r.0", 0, [1]))
        assert len(await anext(opened)) == 1
        began = time.monotonic()
        assert await anext(opened) == []
        assert time.monotonic() - began > 0.03


async def test_the_fleet_is_seen_on_this_clock_and_our_own_orders_count_at_once(streams: Streams, wire: Wire) -> None:
    assert streams.fleet.queued_tokens == 20
    wire.fleets[0] = Fleet(engines=[a_load(time_ms=5, running=7)], queued=0, queued_tokens=0, time_ms=1)
    before_ms = time.time() * 1000
    await settled(lambda: any(load.running == 7 for load in streams.fleet.engines))
    seen = streams.fleet.engines[0].time_ms
    assert before_ms - 100 <= seen <= time.time() * 1000 + 100  # the engine's own clock stands in 1970
    await asyncio.sleep(0.05)
    assert streams.fleet.engines[0].time_ms == seen  # the same reading again is no sign of life
    before_ms = time.time() * 1000
    wire.fleets[0] = msgspec.structs.replace(wire.fleets[0], time_ms=90_000, exchanged_ms={"e0": 88_000})
    await settled(lambda: "e0" in streams.fleet.exchanged_ms)
    exchanged_ms = streams.fleet.exchanged_ms["e0"] + 2000
    assert before_ms - 100 <= exchanged_ms <= time.time() * 1000 + 100  # but this one is
    async with streams.open(requests(), COST):
        assert streams.fleet.queued_tokens == 3
    wire.fleets[0] = Fleet(engines=[], queued=0, queued_tokens=0, time_ms=1)
    await settled(lambda: streams.fleet.engines == [])


async def test_a_reader_that_breaks_starts_again_and_no_other_part_hides_it(
    streams: Streams, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "BACKOFF_S", (0.3, 0.3))
    async with streams.open(requests(), COST) as opened:
        await put(wire, Delta("r.0", 0, [1]))
        assert drain((await anext(opened))[0]) == ([1], None)
        wire.incoming.put_nowait(cast(TokenBatch, None))
        await settled(lambda: streams.trouble is not None)
        readings = streams.fleet_watch.readings
        await settled(lambda: streams.fleet_watch.readings > readings + 2)
        assert "the token reader failed" in (streams.trouble or "")
        assert any(record.exc_info and "token reader" in record.message for record in caplog.records)
        await put(wire, Delta("r.0", 1, [2], Finish("length")))
        await settled(lambda: opened.mailboxes[0].ended)
        assert drain(opened.mailboxes[0]) == ([2], Finish("length"))
        await settled(lambda: streams.trouble is None)
    assert not streams.supervisor.gave_up.is_set()


async def test_a_watch_that_breaks_starts_again(streams: Streams, wire: Wire) -> None:
    fleets, wire.fleets = wire.fleets, []  # an IndexError, which no bus raises
    await settled(lambda: "the watch over the engines failed" in (streams.trouble or ""))
    wire.fleets = fleets
    await settled(lambda: streams.trouble is None)


async def test_a_task_that_cannot_be_had_gives_up_and_is_dead_before(
    streams: Streams, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "BACKOFF_S", (0.01, 0.05))
    monkeypatch.setattr(supervision, "DEAD_S", 0.1)
    monkeypatch.setattr(supervision, "GIVE_UP_S", 0.5)
    assert not streams.supervisor.dead
    wire.fleets = []
    await settled(lambda: streams.supervisor.dead)
    await settled(streams.supervisor.gave_up.is_set)
    assert streams.trouble is not None


async def test_only_a_submit_that_could_be_clears_what_a_submit_found(streams: Streams, wire: Wire) -> None:
    wire.full = True
    with pytest.raises(Refusal):
        async with streams.open(requests(), COST):
            pytest.fail("must not open")
    readings = streams.fleet_watch.readings
    await settled(lambda: streams.fleet_watch.readings > readings + 3)
    assert streams.trouble == "full"
    wire.full = False
    await settled(lambda: streams.trouble is None)


async def test_a_log_that_may_grow_again_is_503_and_one_that_ended_400(streams: Streams, wire: Wire) -> None:
    """Redis has lost the log's end: the client has 5 tokens, and resumes."""
    for finish, status, code in ((None, 503, "answer_incomplete"), (Finish("length"), 400, "invalid_event_id")):
        wire.logs["r.0"] = [LoggedOutput([1, 2, 3], finish)]
        with pytest.raises(Refusal) as caught:
            async with streams.join(["r.0"], [[5]], "t", 60):
                pytest.fail("must not open")
        assert (caught.value.status, caught.value.code) == (status, code)
        assert (caught.value.retry_after_s is not None) == (status == 503)
    wire.logs["r.0"] = [LoggedOutput([1, 2, 3, 4, 5], None)]
    async with streams.join(["r.0"], [[5]], "t", 60):
        pass


@given(
    st.lists(
        st.tuples(st.just(0) | st.integers(0, 9), st.integers(0, 40), st.sampled_from(["take", "leave"])), max_size=30
    ),
    st.integers(1, 200),
    st.booleans(),
)
def test_a_slow_reader_gets_everything_from_a_small_mailbox_and_the_log(
    deltas: list[tuple[int, int, str]], limit: int, logprobs: bool
) -> None:
    """(tokens lost on the way, how many arrive, whether the reader takes them): one delta or one part of the log may
    wait, however large it is; more waits only up to `limit` bytes.  In the end each token was taken once."""
    backlog = Backlog(limit)
    mailbox, said, got = Mailbox(0, backlog), list[int](), list[int]()
    token_bytes, largest = 132 if logprobs else 4, 0  # of the deltas and parts so far, in tokens

    def probs(tokens: list[int]) -> list[TokenLogprob] | None:
        return [TokenLogprob(float(token)) for token in tokens] if logprobs else None

    def take() -> Finish | None:
        if mailbox.behind:
            nonlocal largest
            part = said[mailbox.at : mailbox.at + 7]
            largest = max(largest, len(part))
            over = ended if mailbox.at + len(part) == len(said) else None
            mailbox.refill(LoggedOutput(part, over, probs(part)))
        tokens, found, finish = mailbox.take()
        assert found == probs(tokens) or not tokens
        got.extend(tokens)
        return finish

    ended: Finish | None = None
    for lost, count, then in deltas:
        said += range(len(said), len(said) + lost)
        first = len(said)
        new = list(range(first, first + count))
        said += new
        mailbox.merge(Delta("r", first, new, None, logprobs=probs(new)))
        largest = max(largest, count)
        assert backlog.held == token_bytes * len(mailbox._tokens)
        assert backlog.held <= max(limit, token_bytes * largest)
        if then == "take":
            assert take() is None
    ended = Finish("length")
    mailbox.merge(Delta("r", len(said), [], ended))
    for _ in range(len(said) + 1):
        if take() is not None:
            break
    assert got == said
    assert backlog.held == 0


async def test_many_who_do_not_read_cost_no_more_than_the_backlog(wire: Wire) -> None:
    """150 readers fall behind by 6,000 tokens each; their engine ends, and what waits here stays within bounds."""
    made = Streams(cast(GatewaySide, wire), GatewayConfig(fleet_s=0.01, backlog_mib=1), Telemetry("g"))
    await made.start()
    tokens = list(range(6_000))
    deadline_ms = int(time.time() * 1000) + 60_000
    requests = [Generate(f"r{at}.0", "g", [1], 6_000, Sampling(), deadline_ms) for at in range(150)]
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(made.open([request], COST)) for request in requests]
        for first in range(0, 6_000, 100):
            finish = Finish("length") if first == 5_900 else None
            deltas = [Delta(request.id, first, tokens[first : first + 100], finish) for request in requests]
            made.deliver(TokenBatch("e0", deltas))
            assert made.submissions.backlog.held <= 2**20
        assert made.submissions.backlog.held > 2**19
        wire.logs = {request.id: [LoggedOutput(tokens, Finish("length"))] for request in requests}
        for one in opened:
            got: list[int] = []
            async for changed in one:
                for mailbox in changed:
                    taken, _, end = mailbox.take()
                    got += taken
                    if end is not None:
                        one.end(mailbox.choice)
            assert got == tokens
        assert made.submissions.backlog.held == 0
        assert max(count for *_, count in wire.reads) <= MAILBOX_BYTES // 4
    assert wire.cancelled == []
    await made.stop()
    assert sorted(wire.settled) == sorted((request.id, "", [0]) for request in requests)


async def test_a_gateway_that_was_given_up_listens_again_and_reads_what_it_missed(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(), COST) as opened:
        await put(wire, Delta("r.0", 0, [1]))
        [mailbox] = await anext(opened)
        assert drain(mailbox) == ([1], None)
        wire.logs["r.0"] = [LoggedOutput([1, 2, 3], Finish("length"))]
        wire.fleets[0] = msgspec.structs.replace(wire.fleets[0], forgotten=True)
        [mailbox] = await anext(opened)
        assert drain(mailbox) == ([2, 3], Finish("length"))
    assert wire.attached[0] == "r.0"


async def test_what_redis_interrupts_is_read_again_with_the_next_reading(
    streams: Streams, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading says once that tokens may have been missed, however often the logs cannot be read then."""
    attach, failures = wire.attach, 2

    async def interrupted(request_id: str, *, listen: bool = True) -> Attached | None:
        nonlocal failures
        if failures:
            failures -= 1
            wire.fleets[0] = msgspec.structs.replace(wire.fleets[0], forgotten=False)
            raise BusDown("gone")
        return await attach(request_id, listen=listen)

    monkeypatch.setattr(wire, "attach", interrupted)
    async with streams.open(requests(), COST) as opened:
        await put(wire, Delta("r.0", 0, [1]))
        [mailbox] = await anext(opened)
        assert drain(mailbox) == ([1], None)
        wire.logs["r.0"] = [LoggedOutput([1, 2], Finish("length"))]
        wire.fleets[0] = msgspec.structs.replace(wire.fleets[0], forgotten=True)
        [mailbox] = await anext(opened)
        assert drain(mailbox) == ([2], Finish("length"))


async def test_who_has_no_log_any_more_is_told(streams: Streams, wire: Wire) -> None:
    async with streams.open(requests(), COST) as opened:
        await put(wire, Delta("r.0", 0, [1]))
        [mailbox] = await anext(opened)
        assert drain(mailbox) == ([1], None)
        wire.fleets[0] = msgspec.structs.replace(wire.fleets[0], forgotten=True)
        [mailbox] = await anext(opened)
        assert drain(mailbox) == ([], REQUEST_LOST)


async def test_tokens_that_redis_has_lost_are_waited_for(streams: Streams, wire: Wire) -> None:
    """The reader knows the length of its answer; the engine resends the tokens that the log lacks."""
    async with streams.open(requests(), COST) as opened:
        wire.logs["r.0"] = [LoggedOutput([])]
        await put(wire, Delta("r.0", 3, [4], Finish("length")))
        reading = asyncio.create_task(anext(opened))
        await settled(lambda: len(wire.reads) >= 3)
        assert not reading.done()
        wire.logs["r.0"] = [LoggedOutput([1, 2, 3, 4], Finish("length"))]
        [mailbox] = await reading
        assert drain(mailbox) == ([1, 2, 3, 4], Finish("length"))


async def test_what_a_slow_reader_has_still_to_read_is_kept(wire: Wire) -> None:
    made = Streams(cast(GatewaySide, wire), GatewayConfig(fleet_s=0.01, retain_s=15.0), Telemetry("g"))
    await made.start()
    async with made.open(requests(), COST):
        await put(wire, Delta("r.0", 0, [1], Finish("length")))
        made.submissions._kept -= 10.0  # a while ago
        await settled(lambda: wire.kept == ["r.0"])
    await made.stop()


async def test_trouble_that_is_known_refuses_at_once_and_passes(streams: Streams, wire: Wire) -> None:
    wire.down = True
    await settled(lambda: streams.trouble is not None)
    wire.asked.clear()
    with pytest.raises(Refusal) as caught:
        async with streams.open(requests(), COST):
            pytest.fail("must not open")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)
    assert wire.asked == []  # no reader waits for known tokens
    wire.down = False
    await settled(lambda: streams.trouble is None)
    async with streams.open(requests(), COST):
        assert len(wire.asked) == 1


async def test_a_request_that_came_before_is_told(streams: Streams, wire: Wire) -> None:
    wire.duplicate = DuplicateRequest("q.0", True)
    with pytest.raises(AlreadySubmitted) as caught:
        async with streams.open(requests(), COST, idempotency_key=IdempotencyKey("k", "b")):
            pytest.fail("must not open")
    assert caught.value.duplicate.request_id == "q.0"
    assert wire.cancelled == []
