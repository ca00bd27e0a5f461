"""The flight recorder and its replay: a real Engine over scripted tokens, recorded, and lived through again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.engine.config import EngineConfig
from quire.engine.core.limits import Admission, Event, Outputs, Totals
from quire.engine.core.plan import Sampler, Slice, StepPlan, StepResult
from quire.engine.executor.base import ModelInfo, ScriptedExecutor, StepError
from quire.engine.loop import Engine
from quire.engine.observers import log_file, recorder
from quire.engine.observers.turn_record import TurnRecord
from quire.engine.orders import Order, Report, ResetPrefixCache, Resume
from quire.engine.tools import replay, simulate
from quire.engine.wire.messages import Abort, Generate, Sampling, TokenLogprob

INFO = ModelInfo("m", "f00d", 1000, 512, [0], 64)
MODES = get_args(Admission)
TURN = TurnRecord(marks=[], unix_ms=0, was_idle=False, orders=[], totals=Totals(), count_wasted_slots=lambda: 0)


class Ends(ScriptedExecutor):
    """Outputs of lengths that nobody can know, steps and swaps that take as long as they like, samples that are not
    usable; loses the steps it is told to."""

    max_seqs, step_tokens = 12, 96
    swap_bytes_per_s = 2e6

    def __init__(self, blocks: int, seed: int, lost: frozenset[int] = frozenset()) -> None:
        super().__init__(INFO, blocks, host_blocks=20)
        self._seed, self._lost = seed, lost

    def token(self, sampler: Sampler, position: int) -> int:
        rng = random.Random(f"{self._seed} {sampler.sampling.seed} {sampler.sibling}")
        return 0 if position + 1 == min(300, int(rng.lognormvariate(3, 1)) + 1) else super().token(sampler, position)

    def collect(self) -> StepResult:
        if self._plans[0].step in self._lost:
            self._plans.clear()
            self._decoding.clear()
            raise StepError("gone")
        rng = random.Random(f"{self._seed} {self._plans[0].step}")
        result = super().collect()
        order = rng.sample(range(len(result.slots)), len(result.slots))  # in any order, as executors may
        return msgspec.structs.replace(
            result,
            slots=[result.slots[i] for i in order],
            tokens=[result.tokens[i] for i in order],
            failed={slot: "NaN" for slot in result.slots if rng.random() < 0.001},
            impossible={slot: "no token" for slot in result.slots if rng.random() < 0.001},
            step_s=rng.uniform(0.001, 0.01),
            swapped_bytes=1000,
            swap_s=rng.choice([0.0, 0.0001, 0.01]),
            forced=self._forced(rng),
        )

    def _forced(self, rng: random.Random) -> dict[int, list[int]]:
        """Tokens that follow those just sampled, known before they are, by slot."""
        runs = {slot: rng.randrange(1, 9) for slot in self._decoding if rng.random() < 0.05}
        return {
            slot: [self.token(sampler, position + at) for at in range(runs[slot])]
            for slot, (sampler, position) in self._decoding.items()
            if slot in runs
        }


class Box:
    """Inbox and outbox, at times full; the clock moves 7 ms a turn."""

    relieved, queued = False, 0

    def __init__(self) -> None:
        self.full = False
        self.orders: list[Order] = []
        self.now_ms = 1_000_000
        self.said: list[Outputs] = []

    def drain(self, wait_s: float) -> list[Order]:
        self.now_ms += 7
        orders, self.orders = self.orders, []
        return orders

    def put(self, outputs: Outputs, report: Report) -> None:
        self.said.append(outputs)


def fly(
    path: Path, config: EngineConfig, seed: int, *, requests: int = 40, max_bytes: int = 4 << 20, resets: float = 0.0
) -> Engine:
    """Random requests, with shared prefixes, follow-ups on answers, siblings, aborts, deadlines and lost steps.

    `resets`: part of the turns that empty the prefix cache."""
    rng, others, queue = random.Random(seed), random.Random(f"resets {seed}"), random.Random(f"queue {seed}")
    first = rng.randrange(20, 90)  # then some in a row, so that suspects are isolated
    executor = Ends(config.kv_blocks, seed, frozenset(range(first, first + 8) if seed % 3 == 0 else ()))
    box = Box()
    flight = recorder.Recorder(path, config, executor, max_bytes)
    engine = Engine(config, executor, box, box, observers=[flight], clock=lambda: box.now_ms)
    prompts = [[7] * 40, list(range(2, 60)), [9] * 3]
    came = 0
    while came < requests or not engine.core.idle:
        if came < requests and rng.random() < 0.25:
            prompt = rng.choice(prompts) + [rng.randrange(2, 1000) for _ in range(rng.randrange(1, 30))]
            prompts.append(prompt + [2 + i for i in range(rng.randrange(20))])
            came += 1
            request = Generate(
                f"request {came}",
                "gw",
                prompt,
                rng.choice([5, 40, 300]),
                Sampling(seed=rng.randrange(99), ignore_eos=rng.random() < 0.2),
                box.now_ms + rng.choice([900, 10**9, 10**9]),
                rng.choice(["", "salt a", "salt b"]),
                n=rng.choice([1, 1, 1, 3]),
                priority=rng.randrange(-2, 3),
                tenant=rng.choice(["", "a tenant's name"]),
            )
            resumes = rng.random() < 0.15 and request.n == 1
            box.orders.append(Resume(request, [[7] * rng.randrange(5)]) if resumes else request)
            if rng.random() < 0.1:
                box.orders.append(request)  # delivered twice
        if rng.random() < 0.02:
            victim = f"request {rng.randrange(1, requests + 1)}"
            box.orders.append(Abort(victim, rng.random() < 0.3, rng.choice([-1, 0, 1])))
        if others.random() < resets:
            box.orders.append(ResetPrefixCache())
        box.full, box.queued = rng.random() < 0.03, queue.choice([0, 0, 3, 100])
        engine.turn()
    flight.close()
    return engine


def config(mode: str, blocks: int = 40, **other: object) -> EngineConfig:
    settings = {"admission": mode} if mode in MODES else {"allocation": mode}
    return msgspec.convert({"kv_blocks": blocks, "check_books": True, **settings, **other}, EngineConfig)


@pytest.mark.parametrize("mode", [*MODES, "static"])
@pytest.mark.parametrize("caching", [True, False])
def test_every_decision_is_made_again(mode: str, caching: bool, tmp_path: Path) -> None:
    decisions = preempted = 0
    for seed in range(4):
        engine = fly(tmp_path / "log", config(mode, prefix_cache=caching), seed)
        log = recorder.read(tmp_path / "log")
        same, difference = replay.replay(log)
        assert difference is None
        assert same == sum(len(turn.events) for turn in log.turns) > 100
        decisions += same
        totals = engine.core.report.totals
        kinds = Counter(event.kind for turn in log.turns for event in turn.events)
        assert (kinds["preempted"], kinds["paused"]) == (totals.preemptions, totals.pauses)
        preempted += totals.preemptions + totals.pauses
        if caching and mode != "static":
            assert totals.cached_prompt_tokens > 0  # hits on prompts and on answers come out again, too
    assert preempted > 0 or mode in ("reserve", "static")
    print(f"{mode}: {decisions} decisions the same, {preempted} preemptions and pauses among them")


@given(st.integers(0, 10**6), st.sampled_from(MODES), st.integers(33, 90))
@example(seed=61, mode="forecast", blocks=37)  # a prompt finds a block of a prompt's last tokens and an answer's first
@settings(max_examples=15, deadline=None)
def test_any_load_is_replayed(tmp_path_factory: pytest.TempPathFactory, seed: int, mode: str, blocks: int) -> None:
    path = tmp_path_factory.mktemp("flight") / "log"
    fly(path, config(mode, blocks), seed, requests=20)
    same, difference = replay.replay(recorder.read(path))
    assert difference is None
    assert same > 0


def test_resets_of_the_prefix_cache_are_replayed(tmp_path: Path) -> None:
    hits = []
    for resets in (0.0, 0.2):
        engine = fly(tmp_path / "log", config("forecast", 80), 5, resets=resets)
        log = recorder.read(tmp_path / "log")
        assert replay.replay(log)[1] is None
        hits.append(engine.core.report.totals.cached_prompt_tokens)
        orders = [order for turn in log.turns for order in turn.orders if isinstance(order, ResetPrefixCache)]
        assert bool(orders) == bool(resets)
    assert hits[1] < hits[0]  # a replay without them would find more


def test_siblings_that_a_log_does_not_end_differ(tmp_path: Path) -> None:
    """The log does not know their last blocks.  Equal ones would find each other in the prefix cache."""
    fly(tmp_path / "log", config("none", 81), 434814, requests=20)
    log = recorder.read(tmp_path / "log")
    same, difference = replay.replay(recorder.Log(log.header, log.turns[:88]))
    assert difference is None
    assert same > 0


def test_one_decision_that_differs_is_noticed(tmp_path: Path) -> None:
    """Each changed by the least there is: a milestone's tokens, an output's length, a step's blocks."""
    fly(tmp_path / "log", config("none"), 1)
    log = recorder.read(tmp_path / "log")
    at = next(i for i, turn in enumerate(log.turns) if any(e.reason == "stop" and e.tokens < 40 for e in turn.events))
    turn, (before, none) = log.turns[at], replay.replay(log)
    assert none is None

    def first_difference(**changed: Any) -> int:
        turns = [*log.turns]
        turns[at] = msgspec.structs.replace(turn, **changed)
        same, difference = replay.replay(recorder.Log(log.header, turns))
        assert difference is not None
        assert same < before
        return difference.turn

    longer = [msgspec.structs.replace(e, tokens=e.tokens + (e.reason == "stop")) for e in turn.events]
    assert first_difference(events=longer) <= at
    assert first_difference(events=turn.events[:-1], blocks=turn.blocks[:-1]) >= at  # it seems to go on
    assert first_difference(plan=turn.plan ^ 1) == at
    assert first_difference(now_ms=turn.now_ms + 10**10) == at  # every deadline has passed
    assert first_difference(result=None) == at


def test_no_text_and_no_name_is_written(tmp_path: Path) -> None:
    fly(tmp_path / "log", config("forecast"), 2)
    data = (tmp_path / "log").read_bytes()
    for secret in (b"a tenant", b"salt a", b"redis://", b'"gw"', b"[" + b"7," * 8):
        assert secret not in data


def test_candidates_of_beams_are_not_written() -> None:
    """They are what the answers may say next."""
    result = StepResult(1, [], [], candidates={3: ([77_001, 77_002], [-0.5, -1.5])})
    turn = TurnRecord(
        marks=[0.0],
        unix_ms=0,
        was_idle=False,
        orders=[],
        result=result,
        totals=Totals(),
        count_wasted_slots=lambda: 0,
    )
    written = msgspec.json.encode(recorder.logged(turn, 16, "f"))
    assert b"77001" not in written
    assert b"-0.5" not in written


def test_a_full_log_ends_and_what_it_has_is_replayed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    fly(path, config("forecast", 400), 1)
    everything, most = len(recorder.read(path).turns), int(0.6 * path.stat().st_size)
    fly(path, config("forecast", 400), 1, max_bytes=most)
    assert 0.9 * most < path.stat().st_size <= most
    assert [file.name for file in tmp_path.iterdir()] == ["log"]
    assert f"ends here: it has {path.stat().st_size} bytes" in caplog.text
    log = recorder.read(path)
    assert everything / 3 < len(log.turns) < everything
    same, difference = replay.replay(log)
    assert difference is None
    assert same == sum(len(turn.events) for turn in log.turns) > 40


def test_a_slow_disk_ends_the_log_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "QUEUE", 2)
    file = log_file.LogFile(tmp_path / "log", 1 << 20, rotates=False)
    busy, free = threading.Event(), threading.Event()

    def slow() -> bytes:
        busy.set()
        free.wait()
        return b"0"

    file.write(slow, 1)
    busy.wait()
    for at in range(1, 6):
        file.write(str(at).encode, 1)
    assert file.dropped == 1
    free.set()
    file.write(b"6".strip, 1)
    file.close()
    assert (tmp_path / "log").read_bytes() == b"012"


def test_the_memory_of_a_turn_grows_with_its_lists() -> None:
    """Prompts, resumed answers, scores and digests may be large; the estimate has each of them."""
    long = Generate("r", "g", [7] * 1000, 1, Sampling(), 0)
    scores = {0: [TokenLogprob(-0.5)] * 1000}
    event = Event("ended", long, 0, 1, "stop", 5, [b"d" * 32] * 1000)
    empty = recorder.memory_of(TURN)
    for changes in (
        {"orders": [long]},
        {"orders": [Resume(msgspec.structs.replace(long, token_ids=[1]), [None, [7] * 1000])]},
        {"plan": StepPlan(1, slices=[Slice(0, 0, [7] * 1000, None)])},
        {"result": StepResult(1, [], [], prompt_logprobs=scores)},
        {"result": StepResult(1, [], [], candidates={3: ([7] * 1000, [0.5] * 1000)})},
        {"outputs": Outputs({}, [], [event])},
    ):
        assert recorder.memory_of(msgspec.structs.replace(TURN, **changes)) > empty + 30_000, changes


def test_a_record_cut_short_ends_the_log_and_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    fly(path, config("forecast"), 1)
    turns, whole = len(recorder.read(path).turns), path.read_bytes()
    path.write_bytes(whole[:-3])
    assert len(recorder.read(path).turns) == turns - 1
    same, difference = replay.replay(recorder.read(path))
    assert same > 0
    assert difference is None
    older = b'{"flight_log":2}\n'
    for data, complaint in (
        *((rubbish, "is no flight log") for rubbish in (b"", b"\n", b"\x00\xff\n", b'{"a": 1}\n' * 9, b"[]\n")),
        (older, "its version is 2"),
        (b'{"flight_log":4}\n', "missing required field"),
        (whole + b'{"orders":[]}\n', "missing required field"),
    ):
        path.write_bytes(data)
        assert simulate.main(["--replay", str(path)]) == 2
        line = capsys.readouterr().err
        assert complaint in line
        assert line.count("\n") == 1
    assert simulate.main(["--replay", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_replay_says_how_many_decisions_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fly(tmp_path / "log", config("forecast"), 2)
    decisions = sum(len(turn.events) for turn in recorder.read(tmp_path / "log").turns)
    assert simulate.main(["--replay", str(tmp_path / "log")]) == 0
    assert f" turns: {decisions} decisions are as recorded, all there are" in capsys.readouterr().out


def test_a_full_disk_ends_the_recording_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "open_private", lambda _: open("/dev/full", "wb"))  # noqa: SIM115
    flight = recorder.Recorder(tmp_path / "log", config("none"), Ends(40, 1), 1 << 20)
    for _ in range(3):
        flight.observe(TURN)
    flight.close()
    assert "log ends here: [Errno 28] No space left on device" in caplog.text


@pytest.mark.perf
def test_recording_a_turn_costs_the_loop_microseconds(tmp_path: Path) -> None:
    """Below 1 % of the shortest step there is, some 5 ms."""
    flight = recorder.Recorder(tmp_path / "log", config("none"), Ends(40, 1), 1 << 20)
    best = 1.0
    for _ in range(20):
        begin = time.thread_time()
        for _ in range(100):
            flight.observe(TURN)
        best = min(best, (time.thread_time() - begin) / 100)
    flight.close()
    print(f"{1e6 * best:.1f} us a turn")
    assert best < 50e-6
