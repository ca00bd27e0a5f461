"""Stated pauses are true: in simulated bursts, clients that obey Retry-After get in at the first retry."""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from quire.engine.wire.messages import EngineLoad, Generate, Sampling
from quire.engine.wire.records import Fleet, LaneQueue, TenantQueue
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.admission import Cost
from quire.service.delivery.retry_book import MOST, RetryBook
from tests.service.fakes import a_load

RATE = 400.0  # prompt tokens per second that the engine starts
TICK_S = 0.05


@dataclass
class Client:
    """One request: its attempts, the pauses stated to it, and when it got in."""

    number: int
    tokens: int
    came_s: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    entered_s: float | None = None
    started_s: float = 0.0
    lane: str = ""


@dataclass
class Burst:
    """A gateway with its queue, an engine that starts RATE tokens per second, and clients that obey Retry-After.

    Time is virtual: a tick starts what the engine can, then answers each client that is due."""

    config: GatewayConfig
    seed: int
    stated_rate: float = RATE  # what the engine reports, which may be wrong
    book: RetryBook = field(default_factory=RetryBook)
    now_s: float = 0.0
    on_time: deque[Client] = field(default_factory=deque)
    late: deque[Client] = field(default_factory=deque)
    clients: list[Client] = field(default_factory=list)

    def load(self) -> EngineLoad:
        """A full engine that gives back twice RATE, half of it prompts'."""
        now_ms = 1_000_000 + round(1000 * self.now_s)
        load = a_load(
            total_blocks=2000, free_blocks=0, running=8, blocks_per_s=2 * self.stated_rate / 16, time_ms=now_ms
        )
        return msgspec.structs.replace(load, prompt_tokens=5000, generated_tokens=5000)

    def fleet(self) -> Fleet:
        load, late = self.load(), sum(client.tokens for client in self.late)
        total = late + sum(client.tokens for client in self.on_time)
        lanes = LaneQueue(len(self.on_time), total - late), LaneQueue(len(self.late), late)
        tenants = {"": TenantQueue(total, 0.0, 1.0, late)} if total else {}
        queued = len(self.on_time) + len(self.late)
        return Fleet([load], queued, total, load.time_ms, 0, tenants, on_time=lanes[0], late=lanes[1])

    def ask(self, client: Client) -> float | None:
        """One attempt of a client; return the stated pause, None if it got in."""
        client.came_s.append(self.now_s)
        request = Generate(f"r{client.number}", "g", [client.number, client.tokens], 10, Sampling(), 0)
        fleet = self.fleet()
        try:
            cost = Cost(client.tokens, 600.0)
            found = self.book.decide([request], cost, fleet, fleet.time_ms, self.config, self.jitter.random())
        except Refusal as refusal:
            client.told_s.append(float(refusal.headers()["Retry-After"]))
            return client.told_s[-1]
        late = fleet.on_time.tokens + client.tokens > fleet.free_tokens + found.bounds.on_time_excess
        (self.late if late else self.on_time).append(client)
        client.lane = "late" if late else "on_time"
        self.book.joined([request])
        client.entered_s = self.now_s
        return None

    def start(self, tokens: float) -> float:
        """Start queued prompts, the on-time lane's first; return what of `tokens` is left."""
        while lane := self.on_time or self.late:
            if tokens < lane[0].tokens:
                return tokens
            client = lane.popleft()
            client.started_s = self.now_s
            tokens -= client.tokens
        return 0.0

    def run(self, base: float, times: float, burst_s: float) -> None:
        """Arrivals at `base` of what the engine starts, `times` that for `burst_s` seconds, then `base` again."""
        draw, self.jitter = random.Random(self.seed), random.Random(self.seed + 1)
        arrivals: list[tuple[float, int]] = []
        at, mean = 0.0, 100
        while at < 10 + burst_s + 60:
            in_burst = 10 <= at < 10 + burst_s
            at += draw.expovariate(RATE * base * (times if in_burst else 1) / mean)
            client = Client(len(self.clients), max(10, round(draw.lognormvariate(4.4, 0.6))))
            self.clients.append(client)
            arrivals.append((at, client.number))
        heapq.heapify(arrivals)
        budget = 0.0
        while arrivals:
            self.now_s += TICK_S
            budget = self.start(budget + RATE * TICK_S)
            while arrivals and arrivals[0][0] <= self.now_s:
                client = self.clients[heapq.heappop(arrivals)[1]]
                pause_s = self.ask(client)
                if pause_s is not None:
                    heapq.heappush(arrivals, (self.now_s + pause_s, client.number))

    def refused(self) -> list[Client]:
        return [client for client in self.clients if client.told_s]

    def first_retry_success(self) -> float:
        """Share of the refused clients that got in at the first retry."""
        refused = self.refused()
        return sum(len(client.came_s) == 2 for client in refused) / len(refused)

    def on_time_share(self) -> float:
        """Share of the started requests whose last wait, in the queue, was within the target."""
        started = [client for client in self.clients if client.entered_s is not None and client.started_s > 0]
        waits = [client.started_s - client.entered_s for client in started if client.entered_s is not None]
        return sum(wait <= self.config.ttft_target_s for wait in waits) / len(waits)

    def errors(self) -> list[float]:
        """|stated - needed| / needed, where as many refused clients got in within `needed` as were refused before."""
        refused = self.refused()
        entered = sorted((c.entered_s, c.came_s[0]) for c in refused if c.entered_s is not None)
        errors = []
        for client in refused:
            first = client.came_s[0]
            later = [at for at, _ in entered if at > first]
            ahead = sum(came < first and at > first for at, came in entered)
            needed = max(1.0, later[ahead] - first)
            errors.append(abs(client.told_s[0] - needed) / needed)
        return errors


LANES = GatewayConfig(late_wait_s=10.0)
REFUSING = GatewayConfig(late_wait_s=0.0)


@pytest.mark.parametrize("stated_rate", [300, 400, 520], ids=lambda rate: f"stated rate {rate}")
@pytest.mark.parametrize("config", [LANES, REFUSING], ids=["late lane of 10 s", "no late lane"])
@pytest.mark.parametrize("seed", [1, 2])
def test_after_a_burst_obedient_clients_get_in_at_the_first_retry(
    config: GatewayConfig, seed: int, stated_rate: float
) -> None:
    burst = Burst(config, seed, stated_rate)
    burst.run(base=0.8, times=3, burst_s=20)
    assert len(burst.refused()) > 30
    assert burst.first_retry_success() >= 0.9
    assert statistics.median(burst.errors()) <= 0.2


@pytest.mark.parametrize(("stated_rate", "minimum"), [(300, 0.95), (400, 0.9), (520, 0.5)])
@pytest.mark.parametrize("seed", [1, 2])
def test_without_a_late_lane_promised_retries_start_on_time(seed: int, stated_rate: float, minimum: float) -> None:
    """Even where the engine overstates its pace by 30 % the queue does not stay beyond its bound."""
    burst = Burst(REFUSING, seed, stated_rate)
    burst.run(base=0.8, times=3, burst_s=20)
    assert burst.on_time_share() >= minimum
    assert burst.first_retry_success() >= 0.9


def test_promises_cost_no_new_request_its_place_on_time() -> None:
    """What is promised waits behind the on-time lane, so new requests still start in time after the burst."""
    burst = Burst(LANES, 1)
    burst.run(base=0.8, times=3, burst_s=10)
    new = [client for client in burst.clients if client.came_s[0] > 25]
    assert sum(client.lane == "on_time" and len(client.came_s) == 1 for client in new) >= 0.8 * len(new)


def request(number: int) -> list[Generate]:
    return [Generate(f"r{number}", "g", [number], 10, Sampling(), 0)]


def full(now_ms: int = 1_000_000, late_tokens: int = 1600) -> Fleet:
    """A full engine that starts 80 tokens per second, with `late_tokens` of work in its late lane."""
    load = a_load(total_blocks=100, free_blocks=0, running=8, blocks_per_s=10.0, time_ms=now_ms)
    load = msgspec.structs.replace(load, prompt_tokens=5000, generated_tokens=5000)
    late, total = LaneQueue(10, late_tokens), 200 + late_tokens
    tenants = {"": TenantQueue(total, 0.0, 1.0, late_tokens)}
    return Fleet([load], 12, total, now_ms, 0, tenants, on_time=LaneQueue(2, 200), late=late)


def told(book: RetryBook, number: int, at_ms: int = 0, tokens: int = 80) -> float:
    """The pause of one request of `tokens` that a full server refuses `at_ms` milliseconds after the start."""
    fleet = full(1_000_000 + at_ms)
    with pytest.raises(Refusal) as refused:
        book.decide(request(number), Cost(tokens, 600.0), fleet, fleet.time_ms, LANES, 0.0)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def test_pauses_follow_one_another_and_a_client_keeps_its_place() -> None:
    book = RetryBook()
    first, second, third = told(book, 1), told(book, 2), told(book, 3)
    assert second == pytest.approx(first + 1)
    assert third == pytest.approx(second + 1)
    assert told(book, 1, at_ms=1000) == pytest.approx(first), "it came too early, and no promise before it is left"
    assert len(book) == 3


def test_a_promise_ends_when_its_client_joins_or_does_not_come_back() -> None:
    book = RetryBook()
    pause = told(book, 1)
    book.joined(request(1))
    assert len(book) == 0
    assert told(book, 2) == pytest.approx(pause)
    assert told(book, 3, at_ms=round(1000 * pause) + 60_000) == pytest.approx(pause), (
        "no client came back, so no promise is left"
    )
    assert len(book) == 1


def test_a_promise_holds_although_others_went_first_during_the_pause() -> None:
    """On-time requests of a burst overtake the late lane, so it is longer at the retry than the refusal assumed."""
    book = RetryBook()
    pause_ms = round(1000 * told(book, 1))
    at_ms, longest_s = 1_000_000 + pause_ms, 2 * (LANES.late_wait_s + pause_ms / 1000)
    assert longest_s > 4 * LANES.late_wait_s

    def decide(number: int, wait_s: float, cost: Cost) -> None:
        fleet = full(at_ms, late_tokens=round(80 * wait_s) - 200 - cost.prompt_tokens)
        book.decide(request(number), cost, fleet, at_ms, LANES, 0.0)

    cost = Cost(80, 600.0)
    decide(1, longest_s - 1, cost)
    with pytest.raises(Refusal):
        decide(2, longest_s - 1, cost)  # a new request
    with pytest.raises(Refusal):
        decide(1, longest_s - 1, msgspec.structs.replace(cost, longest_wait_s=10.0))  # its client's own limit
    with pytest.raises(Refusal):
        decide(1, longest_s + 1, cost)


def test_the_book_is_bounded() -> None:
    book = RetryBook()
    for number in range(MOST + 5):
        told(book, number, tokens=1)
    assert len(book) == MOST
