"""The scheduler driven over an executor whose every token depends on what the block tables really hold."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container
from typing import Any, Literal, get_args

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.blocks import BlockPool, HostPool
from engine.core.isolation import FAILED_TWICE
from engine.core.limits import Admission, Allocation, Event, Limits
from engine.core.plan import StepPlan, StepResult
from engine.core.policy.fairness import Shares
from engine.core.policy.step_cost import StepCostModel
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence, State
from engine.core.swapping import Preempt
from engine.executor.base import ModelInfo, ScriptedExecutor
from engine.wire.messages import Beams, Delta, Finish, Generate, Sampling
from tests.core.oracle import EOS, VOCAB, OracleExecutor, StepFails, reference, reference_beams
from tests.pace import python_s

FAR = 2**60


class Rig:
    """A scheduler, an oracle, and a client that pieces every answer together."""

    def __init__(
        self,
        blocks: int = 64,
        size: int = 4,
        *,
        max_seqs: int = 8,
        step_tokens: int = 64,
        chunk_tokens: int = 64,
        threshold: float = 1.0,
        depth: int = 2,
        caching: bool = True,
        max_model_len: int = 10_000,
        admission: Admission = "threshold",
        preempt: Preempt = "recompute",
        host_blocks: int = 0,
        allocation: Allocation = "paged",
        bad: int | None = None,
    ) -> None:
        """`bad`: each step fails that samples for a request of BAD_SEED at this output position or later."""
        self._bad = {} if bad is None else {BAD_SEED: bad}
        self._caching, self._shape = (
            caching and allocation == "paged",
            (blocks, size, max_seqs, depth, host_blocks),
        )
        self.limits = Limits(
            max_seqs=max_seqs,
            step_tokens=step_tokens,
            chunk_tokens=chunk_tokens,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            admit_threshold=threshold,
            eos_ids=frozenset([EOS]),
            fingerprint="oracle",
            admission=admission,
            preempt=preempt,
            block_bytes=64,
            allocation=allocation,
            beams=True,
        )
        self.start()
        self.requests: dict[str, Generate] = {}
        self.answers: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.deltas: list[Delta] = []
        self.over: set[str] = set()
        self.milestones: dict[tuple[str, int], list[str]] = defaultdict(list)
        self.plans: list[StepPlan] = []
        self.failures: list[dict[tuple[str, int], int]] = []  # of each failed step: key -> known tokens
        self.now = 0

    def start(self) -> None:
        blocks, size, max_seqs, depth, host_blocks = self._shape
        self.pool = BlockPool(blocks, size, caching=self._caching, note_discarded=True)
        self.host, self.step_cost = HostPool(host_blocks), StepCostModel(swap_bytes_per_s=64e3)
        self.core = Scheduler(self.pool, self.limits, self.host, self.step_cost)
        self.executor = OracleExecutor(blocks, size, max_seqs, depth, host_blocks)
        self.executor.bad = self._bad
        self.decoding: set[int] = set()  # slots that decode after the last plan, by the plans alone
        original = self.core.preemption.preempt_for_fairness

        def spy(victim: Sequence) -> None:
            assert not victim.preempted_for_fairness
            assert any(seq.request.tenant != victim.request.tenant for seq in self.core.waiting)
            original(victim)

        self.core.preemption.preempt_for_fairness = spy  # type: ignore[method-assign, assignment]
        self.favoured: list[Sequence] = []  # by the last plan, in order
        find = self.core.fairness.favoured

        def check(named: Container[int]) -> tuple[Sequence, list[Sequence]] | None:
            found = find(named)
            if found is not None:
                self.favoured.append(found[0])
                self.check_order(found[0], named)
            return found

        self.core.fairness.favoured = check  # type: ignore[method-assign]

    def check_order(self, chosen: Sequence, named: Container[int]) -> None:
        """While a sequence is swapped out, only a tenant below its share starts one that never ran.

        A swapped sequence that comes first in the queue of a tenant below its share was not passed if it fits."""
        core, waiting = self.core, list(self.core.waiting)
        if chosen.started_before or not any(seq.host for seq in waiting):
            return
        crowd = Shares(core.batch.holders()).crowd()
        assert chosen.request.tenant not in crowd, "a tenant at its share started a sequence before a swapped one"
        first: dict[str, Sequence] = {}
        for seq in waiting:
            first.setdefault(seq.request.tenant, seq)
        assert chosen is first[chosen.request.tenant], "a tenant's own swapped sequence was passed"
        for tenant, seq in first.items():
            if seq.host and tenant not in crowd and seq.sampled_in <= core.batch.committed:
                assert core.swapping.leaves(seq) or core.fairness._victims(seq, named) is None

    def crash(self) -> None:
        """The engine dies with its state; a new one gets the emitted tokens."""
        self.start()
        for request in self.requests.values():
            keys = [(request.id, index) for index in range(request.n)]
            if request.id not in self.over:
                said = [None if key in self.finishes else list(self.answers[key]) for key in keys]
                self.core.accept(request, said if any(one != [] for one in said) else None)
        self.collect_outputs()

    def add(
        self,
        prompt: list[int],
        new: int,
        *,
        n: int = 1,
        salt: str = "",
        deadline: int = FAR,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        beams: Beams | None = None,
        **sampling: Any,
    ) -> str:
        request = Generate(
            id=f"r{len(self.requests)}",
            gateway="gw",
            token_ids=prompt,
            max_new_tokens=new,
            sampling=Sampling(**sampling),
            deadline_ms=deadline,
            cache_salt=salt,
            n=n,
            priority=priority,
            tenant=tenant,
            weight=weight,
            beams=beams,
        )
        self.requests[request.id] = request
        self.core.accept(request)
        self.collect_outputs()
        return request.id

    def submit(self) -> bool:
        swapped = [seq for seq in self.core.waiting if seq.host]
        fresh = [seq for seq in self.core.waiting if not seq.started_before]
        self.favoured.clear()
        plan = self.core.plan(self.now)
        if any(seq.host for seq in swapped):  # `check_order` says which of the favoured ones may start
            started = [seq for seq in fresh if seq.started_before and seq not in self.favoured]
            assert not started, "a new sequence started before a swapped one"
        self.collect_outputs()
        if plan is None:
            return False
        self.decoding -= set(plan.freed_slots)
        given = sum(len(piece.token_ids) for piece in plan.slices)
        assert given + len(self.decoding) <= self.limits.step_tokens
        assert all(len(piece.token_ids) <= self.limits.chunk_tokens for piece in plan.slices)
        named = {piece.slot for piece in plan.slices} | {fork.slot for fork in plan.forks}
        assert not named & self.decoding
        assert len(self.decoding | named) <= self.limits.max_seqs
        self.decoding |= {piece.slot for piece in plan.slices if piece.sampler} | {fork.slot for fork in plan.forks}
        self.plans.append(plan)
        self.executor.submit(plan)
        return True

    def commit(self) -> StepResult | None:
        """None: the step failed."""
        try:
            result = self.executor.collect()
        except StepFails:
            self.fail()
            return None
        self.core.commit(result)
        self.collect_outputs()
        return result

    def fail(self) -> None:
        """A step failed.  Only a request that was alone in it, for the second time at one position, may end."""
        inside = {(seq.request.id, seq.index): seq.known for seq in self.core.live() if self.core.batch.in_flight(seq)}
        before = set(self.finishes)
        self.executor.reset()
        self.decoding.clear()
        _, guilty = self.core.step_failed()
        self.collect_outputs()
        ended = set(self.finishes) - before
        assert {name for name, _ in ended} == ({guilty} if guilty else set())
        for key in ended:
            assert self.finishes[key] == Finish("error", message=FAILED_TWICE)
            assert {name for name, _ in inside} == {key[0]}
            assert any(earlier.get(one) == known for earlier in self.failures for one, known in inside.items())
        self.failures.append(inside)
        assert self.core.running == self.core.paused == self.core.swapping.sequences == 0

    def collect_outputs(self) -> None:
        out = self.core.outputs()
        for delta in out.deltas.get("gw", ()):
            key = delta.id, delta.index
            assert key not in self.finishes, "something after the Finish"
            assert delta.first == len(self.answers[key]), "a token lost or repeated"
            self.answers[key] += delta.token_ids
            self.deltas.append(delta)
            request = self.requests[delta.id]
            if delta.first == 0 and delta.token_ids and (delta.prompt_logprobs or delta.index == 0):
                scored = request.token_ids[1:] if request.sampling.prompt_logprobs >= 0 else []
                assert [said.logprob for said in delta.prompt_logprobs or []] == [-float(token) for token in scored]
            if delta.finish is not None:
                self.finishes[key] = delta.finish
        for request_id in out.finished:
            assert request_id not in self.over
            self.over.add(request_id)
        for event in out.events:
            self.note(event)
        filled, allocated = self.core.used_positions()
        assert self.core.wasted_positions() == allocated - filled
        self.core.auditor.whole()

    def note(self, event: Event) -> None:
        """Milestones are in a sensible order, the last one once."""
        key = event.request.id, event.index
        past = self.milestones[key]
        assert "ended" not in past
        if event.kind == "first":
            assert "first" not in past
            assert self.answers[key], "said before the token was"
        elif event.kind == "resumed":
            assert any("started" in self.milestones[event.request.id, i] for i in range(event.request.n))
        elif event.kind == "ended" and event.reason is not None:
            assert self.finishes[key].reason == event.reason
            assert event.tokens == len(self.answers[key])
            assert ("first" in past) == (event.tokens > 0)
        past.append(event.kind)

    def run(self) -> None:
        """Until nothing is left; as the loop does it, `depth` steps in flight."""
        for _ in range(100_000):
            submitted = self.submit()
            if self.executor.plans and (not submitted or len(self.executor.plans) == self.executor.depth):
                self.commit()
            elif not submitted:
                break
        assert self.core.idle
        assert self.pool.available == self.pool.total
        assert self.host.available == self.host.total
        self.verify()

    def verify(self) -> None:
        """Every continuation that was not ended from outside has the text of the reference."""
        for request in self.requests.values():
            if request.beams is not None:
                self.verify_beams(request, request.beams)
                continue
            for index in range(request.n):
                finish = self.finishes.get((request.id, index))
                got = self.answers[request.id, index]
                stops = frozenset(request.sampling.stop_token_ids)
                if not request.sampling.ignore_eos:
                    stops |= self.limits.eos_ids
                room = min(self.limits.max_model_len, self.pool.total * self.pool.block_size)
                limit = min(len(request.token_ids) + request.max_new_tokens, room)
                want = reference(request.token_ids, request.sampling.seed, index, limit, stops)
                assert got == want[: len(got)]
                if finish is not None and finish.reason in ("stop", "length"):
                    assert got == want
                    assert finish.reason == ("stop" if got[-1] in stops else "length")

    def verify_beams(self, request: Generate, beams: Beams) -> None:
        """Every answer that was sent is the one of a search on contexts, with its reason."""
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.limits.eos_ids)
        room = min(self.limits.max_model_len, self.pool.total * self.pool.block_size)
        limit = min(len(request.token_ids) + request.max_new_tokens, room)
        want = reference_beams(request.token_ids, beams, limit, stops, sampling.min_tokens)
        for index in range(request.n):
            finish, got = self.finishes[request.id, index], self.answers[request.id, index]
            if finish.reason in ("stop", "length"):
                assert (got, finish.reason == "stop") == want[index]
            else:
                assert got == []


BAD_SEED = 7  # of requests whose steps fail from their third token on
PREFIXES = [list(range(1, 13)), list(range(20, 41)), [7] * 9]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests with shared prefixes, siblings, salts and stops run on a pool too small for them.  The host has room for
    all, some or none of the blocks of preempted sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(blocks=18, size=4, max_seqs=5, step_tokens=16, chunk_tokens=7, bad=2)
        self.faults = False  # steps failed that no request made fail

    @initialize(
        admission=st.sampled_from(get_args(Admission)),
        allocation=st.sampled_from(["paged", "paged", "paged", "static"]),
        preempt=st.sampled_from(get_args(Preempt)),
        host_blocks=st.sampled_from([0, 6, 40]),
        caching=st.booleans(),
    )
    def choose(
        self, admission: Admission, allocation: Allocation, preempt: Preempt, host_blocks: int, caching: bool
    ) -> None:
        self.rig = Rig(
            blocks=18,
            size=4,
            max_seqs=5,
            step_tokens=16,
            chunk_tokens=7,
            admission=admission,
            allocation=allocation,
            preempt=preempt,
            host_blocks=host_blocks,
            caching=caching,
            bad=2,
        )

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, VOCAB - 1), max_size=12),
        new=st.integers(1, 30),
        n=st.integers(1, 3),
        seed=st.sampled_from([0, 1, 2, 3, BAD_SEED]),
        salt=st.sampled_from(["", "tenant"]),
        ignore_eos=st.booleans(),
        life=st.sampled_from([FAR, FAR, 40]),
        priority=st.sampled_from([0, 0, 5]),
        tenant=st.sampled_from([("", 1.0), ("", 1.0), ("light", 0.5), ("heavy", 3.0)]),
        prompt_logprobs=st.sampled_from([-1, -1, 0]),
    )
    def add(
        self,
        prefix: list[int],
        tail: list[int],
        new: int,
        n: int,
        seed: int,
        salt: str,
        ignore_eos: bool,
        life: int,
        priority: int,
        tenant: tuple[str, float],
        prompt_logprobs: int,
    ) -> None:
        deadline = FAR if life == FAR else self.rig.now + life
        who: dict[str, Any] = {
            "salt": salt,
            "deadline": deadline,
            "priority": priority,
            "tenant": tenant[0],
            "weight": tenant[1],
        }
        what: dict[str, Any] = {"seed": seed, "ignore_eos": ignore_eos, "prompt_logprobs": prompt_logprobs}
        self.rig.add(prefix + tail, new, n=n, **what, **who)

    @precondition(lambda self: self.rig.limits.allocation == "paged")
    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, VOCAB - 1), max_size=4),
        new=st.integers(1, 14),
        width=st.integers(1, 4),
        fewer=st.integers(0, 2),
        penalty=st.sampled_from([1.0, 2.0, -1.0]),
        early=st.sampled_from([True, False, "never"]),
        life=st.sampled_from([FAR, FAR, 40]),
        tenant=st.sampled_from(["", "", "light"]),
    )
    def add_beams(
        self,
        prefix: list[int],
        tail: list[int],
        new: int,
        width: int,
        fewer: int,
        penalty: float,
        early: bool | Literal["never"],
        life: int,
        tenant: str,
    ) -> None:
        deadline = FAR if life == FAR else self.rig.now + life
        beams = Beams(width, penalty, early)
        n = max(1, width - fewer)
        self.rig.add(prefix + tail, new, n=n, beams=beams, deadline=deadline, tenant=tenant, stop_token_ids=[1, 2])

    @precondition(lambda self: len(self.rig.executor.plans) < 2)
    @rule()
    def submit(self) -> None:
        self.rig.now += 1
        self.rig.submit()

    @precondition(lambda self: self.rig.executor.plans)
    @rule()
    def commit(self) -> None:
        self.rig.commit()

    @rule(steps=st.integers(1, 12))
    def several_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.now += 1
            submitted = self.rig.submit() if len(self.rig.executor.plans) < 2 else True
            if self.rig.executor.plans and (not submitted or len(self.rig.executor.plans) == 2):
                self.rig.commit()

    @rule(bytes_per_s=st.sampled_from([1.0, 64e3, 64e6]), prompt_tokens=st.integers(0, 16))
    def measured(self, bytes_per_s: float, prompt_tokens: int) -> None:
        """In mode "auto" sometimes the one is cheaper, sometimes the other."""
        self.rig.step_cost.record_swap(int(bytes_per_s), 1.0)
        self.rig.step_cost.record_step(0.01, 3, prompt_tokens)

    @rule()
    def crash(self) -> None:
        self.rig.crash()

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), index=st.integers(-1, 2))
    def abort(self, data: st.DataObject, index: int) -> None:
        self.rig.core.abort(data.draw(st.sampled_from(sorted(self.rig.requests))), index)
        self.rig.collect_outputs()

    @precondition(lambda self: self.rig.executor.plans)
    @rule()
    def executor_fails(self) -> None:
        self.faults = True
        self.rig.fail()

    @invariant()
    def room_agrees_with_the_mode(self) -> None:
        """`room` offers no block that is held, kept free by the mode, or needed by a waiting sequence.

        In mode "reserve" it leaves what all running sequences need at their greatest length."""
        core, size = self.rig.core, self.rig.pool.block_size
        tokens, requests = core.room()
        if not core.requests:
            assert (tokens, requests) == (core.pool.total * size, self.rig.limits.max_seqs - core.batch.slots.cooling)
            return
        assert 0 <= requests <= core.batch.slots.free
        assert tokens % size == 0
        kept = 1 if self.rig.limits.admission == "watermark" and self.rig.limits.allocation == "paged" else 0
        queued = sum(seq.known // size for seq in core.waiting)
        assert tokens == 0 or tokens // size + queued <= core.pool.available - kept
        if self.rig.limits.admission == "reserve" and self.rig.limits.allocation == "paged":
            started = [seq for seq in core.live() if seq.state in (State.PREFILLING, State.DECODING)]
            growth = sum(-(-seq.limit // size) - len(seq.table) for seq in started)
            assert tokens == 0 or tokens // size <= core.pool.available - growth

    @invariant()
    def the_queue_puts_preempted_sequences_first(self) -> None:
        """No room is offered while a sequence is swapped out.  Rig.submit checks the starts."""
        core = self.rig.core
        if core.swapping.sequences:
            assert core.room() == (0, 0)
        places = [(not seq.started_before, seq.rank) for seq in core.waiting]
        assert places == sorted(places)

    @invariant()
    def what_tenants_would_give_up_is_theirs(self) -> None:
        """Rig.start checks each sequence that is preempted for fairness."""
        core = self.rig.core
        crowd, tokens = core.yielding()
        assert set(crowd) <= {request.tenant for request in self.rig.requests.values()}
        assert 0 <= tokens <= core.pool.total * core.pool.block_size
        assert not tokens or crowd
        if len({request.tenant for request in self.rig.requests.values()}) < 2:
            assert core.report.totals.yields == 0

    @invariant()
    def static_tables_are_runs_nobody_shares(self) -> None:
        if self.rig.limits.allocation == "static":
            core, tables = self.rig.core, [seq.table for seq in self.rig.core.live() if seq.table]
            assert all(table == list(range(table[0], table[0] + len(table))) for table in tables)
            assert core.predicted_peak() == sum(map(len, tables)) == core.pool.total - core.pool.available
            assert core.report.totals.preemptions == core.report.totals.cached_prompt_tokens == 0

    @invariant()
    def waste_is_below_one_block_a_sequence(self) -> None:
        if self.rig.limits.allocation == "static":
            return
        filled, allocated = self.rig.core.used_positions()
        tails = {seq.table[-1] for seq in self.rig.core.live() if seq.table}
        assert 0 <= allocated - filled <= 3 * len(tails)
        assert allocated == 4 * (self.rig.pool.total - self.rig.pool.available)

    def teardown(self) -> None:
        self.rig.run()
        for request in self.rig.requests.values():
            for index in range(request.n):
                finish = self.rig.finishes[request.id, index]
                refused = request.beams is not None and "blocks; this engine has 18" in finish.message
                assert finish.reason != "error" or self.faults or request.sampling.seed == BAD_SEED or refused
        assert self.rig.over == set(self.rig.requests)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_static_allocation_holds_the_greatest_length_from_start_to_end() -> None:
    """Two of four fit at once, though each generates 3 of its 24 tokens: the waste that paging ends."""
    rig = Rig(blocks=16, size=4, allocation="static")
    stop = reference([5] * 8, 0, 0, 11, frozenset())[2]
    ids = [rig.add([5] * 8, 24, stop_token_ids=[stop], ignore_eos=True) for _ in range(4)]
    rig.submit()
    assert [seq.table for seq in rig.core.live()] == [list(range(8)), list(range(8, 16)), [], []]
    assert rig.core.used_positions() == (16, 64)
    assert rig.core.room() == (0, 4)
    assert rig.core.batch.reserved_blocks == 16
    rig.run()
    assert all(len(rig.answers[request, 0]) == 3 for request in ids)
    assert rig.core.batch.reserved_blocks == 0


def test_static_continuations_share_nothing() -> None:
    rig = Rig(blocks=16, size=4, allocation="static")
    rig.add([5] * 8, 8, n=3, ignore_eos=True)
    rig.submit()
    assert [len(seq.table) for seq in rig.core.live()] == [4, 4, 4]
    rig.run()
    assert rig.core.report.totals.prompt_tokens == 24


def test_static_allocation_refuses_a_pool_that_caches() -> None:
    with pytest.raises(ValueError, match="static allocation needs a pool without a prefix cache"):
        Scheduler(BlockPool(8, 4), Limits(8, 64, 64, 100, 50, 0.9, frozenset(), "x", allocation="static"))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("caching", [True, False])
def test_same_text_whatever_the_chunks(depth: int, chunk: int, caching: bool) -> None:
    rig = Rig(step_tokens=520, chunk_tokens=chunk, depth=depth, caching=caching)
    for i in range(12):
        rig.add([1 + i % 3] * (3 + 5 * i), 5 + i, n=1 + i % 3, seed=i)
    rig.run()
    assert len(rig.finishes) == 24


def test_preemption_newest_first_all_or_nothing_and_the_text_is_the_same() -> None:
    """Under memory pressure the newest sequence gives up everything, resumes before any newer one, and its text is the
    same."""
    rig = Rig(blocks=12, size=4, caching=False)
    ids = [rig.add([5 + i] * 8, 24, ignore_eos=True, seed=i) for i in range(4)]
    victims: list[str] = []
    original = rig.core.preemption.preempt

    def spy(seq: Any, *, swap: bool = True) -> None:
        seated = [s for s in rig.core.live() if s.slot >= 0]
        assert seq.arrival == max(s.arrival for s in seated)
        original(seq, swap=swap)
        assert seq.table == []
        victims.append(seq.request.id)

    rig.core.preemption.preempt = spy  # type: ignore[method-assign]
    rig.run()
    assert victims
    assert rig.core.report.totals.preemptions == len(victims)
    assert rig.core.report.totals.recomputed_tokens > 0
    ended = [delta.id for delta in rig.deltas if delta.finish]
    assert ended[0] == ids[0]


def test_first_come_first_served() -> None:
    """With one slot, equal requests end in the order of their arrival."""
    rig = Rig(max_seqs=1)
    ids = [rig.add([9, 9, i + 1], 5, ignore_eos=True) for i in range(5)]
    rig.run()
    assert [delta.id for delta in rig.deltas if delta.finish] == ids


def test_a_short_request_joins_and_leaves_a_running_batch() -> None:
    """Iteration-level batching."""
    rig = Rig()
    long = rig.add([1] * 8, 60, ignore_eos=True)
    for _ in range(5):
        rig.submit()
        rig.commit()
    short = rig.add([2] * 8, 3, ignore_eos=True)
    rig.run()
    order = [delta.id for delta in rig.deltas if delta.finish]
    assert order == [short, long]


def test_chunked_prefill_keeps_decodes_going() -> None:
    rig = Rig(blocks=200, step_tokens=16, chunk_tokens=16)
    talker = rig.add([1] * 4, 100, ignore_eos=True)
    rig.submit()
    rig.commit()
    rig.add([2] * 150, 1, ignore_eos=True)
    before = len(rig.answers[talker, 0])
    for _ in range(8):
        rig.submit()
        rig.commit()
    assert len(rig.answers[talker, 0]) == before + 8  # a token every step while the prompt is chunked in
    rig.run()


def test_second_request_finds_the_shared_prefix() -> None:
    """Same 512-token system prompt: 512 tokens cached, prefill down by 95 % and more."""
    rig = Rig(blocks=200, size=16, step_tokens=2048, chunk_tokens=2048)
    system = [1 + i % 40 for i in range(512)]
    rig.add([*system, 1, 2, 3], 4, ignore_eos=True)
    rig.run()
    first = rig.executor.forward_tokens
    rig.add([*system, 4, 5, 6, 7], 4, ignore_eos=True)
    rig.run()
    assert [d.cached_tokens for d in rig.deltas if d.first == 0] == [0, 512]
    assert rig.executor.forward_tokens - first <= 0.05 * 515
    rig.add([*system, 4, 5, 6, 7], 4, salt="tenant", ignore_eos=True)
    rig.run()
    assert rig.deltas[-4].cached_tokens == 0


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    rig = Rig(size=4)
    for _ in range(2):
        rig.add([3] * 16, 4, ignore_eos=True)
        rig.run()
    assert [d.cached_tokens for d in rig.deltas if d.first == 0] == [0, 12]


def test_generated_text_is_reused_as_a_prefix() -> None:
    """Multi-turn chat: the next turn's prompt contains the last answer."""
    rig = Rig(size=4)
    first = rig.add([3] * 6, 11, ignore_eos=True)
    rig.run()
    rig.add([3] * 6 + rig.answers[first, 0] + [1], 4, ignore_eos=True)
    rig.run()
    assert [d.cached_tokens for d in rig.deltas if d.first == 0] == [0, 16]


@pytest.mark.parametrize(("n", "prompt", "copies"), [(2, 6, 1), (2, 8, 0), (8, 8, 0), (4, 7, 3), (1, 6, 0)])
def test_copy_on_write_copies_only_the_shared_partly_filled_block(n: int, prompt: int, copies: int) -> None:
    """N continuations of a prompt copy n-1 blocks, or none when the prompt ends with a block."""
    rig = Rig(size=4, max_seqs=8)
    rig.add([1 + i for i in range(prompt)], 6, n=n, ignore_eos=True)
    rig.run()
    assert rig.executor.copied == rig.core.report.totals.copied_blocks == copies
    assert rig.core.report.totals.prompt_tokens == prompt  # one prefill


def test_parallel_samples_share_the_prompt() -> None:
    """Blocks saved by sharing, ShareGPT-like lengths (161 in, 338 out), n = 2..6: at least 16.2 % (SOSP 2023)."""
    for n in range(2, 7):
        rig = Rig(blocks=400, size=16, step_tokens=512, chunk_tokens=512)
        rig.add([1] * 161, 338, n=n, ignore_eos=True)
        shared = alone = 0
        while rig.submit():
            rig.commit()
            live = list(rig.core.live())
            shared += len({block for seq in live for block in seq.table})
            alone += sum(len(seq.table) for seq in live)
        assert 1 - shared / alone >= 0.162


def test_first_finishing_sibling_leaves_the_others_intact() -> None:
    """Siblings stop at different times; freed blocks are poisoned; texts stay right."""
    for seed in range(20):
        rig = Rig(size=4)
        rig.add([2, 3, 5, 7, 11, 13], 40, n=5, seed=seed)
        rig.add([2, 3, 5, 7, 11, 13, 17], 40, n=3, seed=seed + 100)
        rig.run()
        lengths = {len(answer) for answer in rig.answers.values()}
        if len(lengths) > 2:
            break
    else:
        pytest.fail("no seed lets siblings end at different times: the test shows nothing")


@pytest.mark.parametrize("ends_known", [True, False])
def test_forecast_counts_a_shared_prefix_once(ends_known: bool) -> None:
    """Thirteen requests behind one system prompt of 40 blocks in a pool of 120: all run at once."""
    rig = Rig(blocks=120, size=4, max_seqs=64, step_tokens=512, chunk_tokens=512, admission="forecast")
    system = [1 + i % 40 for i in range(160)]
    rig.add([*system, 1], 6, ignore_eos=ends_known)
    rig.submit()
    rig.commit()
    for i in range(11):
        rig.add([*system, 2 + i], 6, ignore_eos=ends_known)
    rig.add([*system, 30], 6, n=4, ignore_eos=ends_known)
    rig.submit()
    assert rig.core.running + 3 >= 13  # its siblings join after its prompt
    assert not rig.core.waiting
    held = rig.pool.total - rig.pool.available
    assert held <= rig.core.predicted_peak() <= (40 + 16 * 3 if ends_known else 120)
    rig.run()
    assert rig.core.report.totals.preemptions == 0
    assert rig.core.predicted_peak() == 0


def test_forecast_knows_when_the_others_end() -> None:
    """Both at their greatest length need 22 blocks of 20; but when the second has grown, the first will be gone."""
    for admission, running in (("forecast", 2), ("reserve", 1)):
        rig = Rig(blocks=20, size=4, admission=admission)  # type: ignore[arg-type]
        rig.add([1] * 30, 4, ignore_eos=True)
        rig.add([2] * 8, 44, ignore_eos=True)
        rig.submit()
        assert rig.core.running == running
        assert (rig.core.room()[0] > 0) == (running == 2)
        rig.run()
        assert rig.core.report.totals.preemptions == 0
        assert rig.core.room() == (80, 8)


def test_watermark_keeps_a_twentieth_free_and_none_keeps_nothing() -> None:
    for admission, running in (("watermark", 1), ("none", 2)):
        rig = Rig(blocks=20, size=4, admission=admission)  # type: ignore[arg-type]
        rig.add([1] * 39, 1, ignore_eos=True)
        rig.add([2] * 39, 1, ignore_eos=True)
        rig.submit()
        assert rig.core.running == running
        rig.run()


def test_only_ends_of_their_own_are_learnt() -> None:
    rig = Rig()
    rig.add([1] * 4, 30, ignore_eos=True)  # its length does not show what the model would generate
    rig.run()
    assert rig.core.admission.forecast.lengths.lengths("").weight == 0
    rig.add([1] * 4, 3)
    gone = rig.add([2] * 4, 500, seed=3)
    rig.submit()
    rig.commit()
    rig.core.abort(gone)  # seen to live on
    rig.collect_outputs()
    rig.run()
    assert rig.core.admission.forecast.lengths.lengths("").weight == pytest.approx(2, abs=0.01)
    assert max(rig.core.admission.forecast.calibration.judged) <= 1  # not the one that was aborted


def test_lengths_are_learnt_by_tenant_whatever_its_salts_are() -> None:
    rig = Rig()
    for at in range(3):
        rig.add([1] * 4, 3, tenant="acme", salt=f"salt {at}")
    rig.add([1] * 4, 3, salt="the client's own choice")
    rig.run()
    assert list(rig.core.admission.forecast.lengths._tenants) == ["acme"]
    assert rig.core.admission.forecast.lengths._tenants["acme"].weight == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("leaves", [None, 0, 1])
def test_every_continuation_gets_the_log_probabilities_of_the_prompt(depth: int, leaves: int | None) -> None:
    """Forks share their leader's; whichever of them is aborted, the others still have them."""
    rig = Rig(depth=depth, chunk_tokens=3)
    prompt = list(range(1, 9))
    request = rig.add(prompt, 3, n=3, ignore_eos=True, prompt_logprobs=0)
    while rig.submit():
        if leaves is not None and rig.core.step == 3:  # the last chunk is on its way
            rig.core.abort(request, leaves)
            rig.collect_outputs()
        if len(rig.executor.plans) == depth:
            rig.commit()
    rig.run()
    firsts = {delta.index: delta for delta in rig.deltas if delta.token_ids and delta.first == 0}
    assert set(firsts) == {0, 1, 2} - {leaves}
    for delta in firsts.values():
        assert delta.prompt_logprobs is not None
        assert [entry.logprob for entry in delta.prompt_logprobs] == [-float(token) for token in prompt[1:]]


def test_in_a_full_pool_the_small_wait_with_their_blocks_and_the_large_go_on() -> None:
    """Two that could outgrow the pool together.  The later one pauses, computes nothing twice, and its text is the
    same."""
    rig = Rig(blocks=12, size=4, admission="forecast")
    sizes = {rig.add([2, 3, 5] * 6, 20, seed=1): 5, rig.add([7, 11], 20, seed=2): 1}
    for seq in rig.core.waiting:
        assert seq.stops  # no end is known
    rig.core.admission.forecast.fits = lambda *_: True  # type: ignore[method-assign]  # a forecast that is wrong
    while not rig.core.paused and not rig.core.idle:
        rig.submit()
        rig.commit()
        rig.core.auditor.whole()
    (paused,) = rig.core.batch.paused
    assert sizes[paused.request.id] == 1
    assert paused.table
    assert rig.core.running == 1
    assert rig.core.room()[0] == 0
    assert rig.core.predicted_peak() >= len(paused.table)  # a sequence that waits will resume, and counts
    rig.run()
    assert rig.core.report.totals.pauses > 0
    assert rig.core.report.totals.preemptions == rig.core.report.totals.recomputed_tokens == 0


@pytest.mark.parametrize("over", ["abort", "deadline"])
def test_who_is_paused_can_end_in_every_way(over: str) -> None:
    rig = Rig(blocks=12, size=4, admission="forecast")
    rig.add([2, 3, 5] * 6, 20, seed=1)
    rig.add([7, 11], 20, seed=2, deadline=1000)
    rig.core.admission.forecast.fits = lambda *_: True  # type: ignore[method-assign]
    while not rig.core.paused:
        rig.submit()
        rig.commit()
    if over == "abort":
        rig.core.abort("r1")
    else:
        rig.now = 2000
    rig.run()
    reason = {"abort": "cancelled", "deadline": "deadline"}[over]
    assert rig.finishes["r1", 0].reason == reason
    assert rig.core.paused == 0
    assert rig.pool.available == rig.pool.total


def test_who_is_paused_when_a_step_fails_says_the_same() -> None:
    rig = Rig(blocks=12, size=4, admission="forecast")
    rig.add([2, 3, 5] * 6, 20, seed=1)
    rig.add([7, 11], 20, seed=2)
    rig.core.admission.forecast.fits = lambda *_: True  # type: ignore[method-assign]
    while not rig.core.paused:
        rig.submit()
        rig.commit()
    rig.fail()
    rig.run()
    assert {finish.reason for finish in rig.finishes.values()} <= {"stop", "length"}


def test_threshold_holds_new_work_back() -> None:
    """At 50 %, a second request waits until the first has left."""
    rig = Rig(blocks=20, size=4, threshold=0.5)
    rig.add([1] * 30, 2, ignore_eos=True)
    rig.add([2] * 30, 2, ignore_eos=True)
    rig.submit()
    assert rig.core.running == 1
    assert len(rig.core.waiting) == 1
    assert rig.core.room()[0] == 0
    rig.run()


def test_requests_that_cannot_run_are_refused_with_both_numbers() -> None:
    rig = Rig(blocks=4, size=4, max_seqs=4)
    rig.add([1] * 16, 4)
    rig.add([1, VOCAB], 4)
    rig.add([1, 2], 4, n=5)
    rig.run()
    messages = [finish.message for finish in rig.finishes.values()]
    assert messages[0] == "the prompt has 16 tokens; this engine holds 16, output included"
    assert messages[1] == f"the prompt must hold token ids from 0 to {VOCAB - 1}, at least one"
    assert messages[2] == "n is 5; this engine runs at most 4 sequences"
    assert rig.over == {"r0", "r1", "r2"}


def test_model_length_ends_a_sequence() -> None:
    rig = Rig(max_model_len=20)
    request = rig.add([1] * 15, 100, ignore_eos=True)
    rig.run()
    assert len(rig.answers[request, 0]) == 5
    assert rig.finishes[request, 0].reason == "length"


def test_abort_frees_blocks_at_once_and_a_failed_row_ends_its_request_alone() -> None:
    rig = Rig(size=4)
    gone = rig.add([1] * 9, 50, n=2, ignore_eos=True)
    bad = rig.add([2] * 9, 50, ignore_eos=True)
    good = rig.add([3] * 9, 50, ignore_eos=True)
    for _ in range(4):
        rig.submit()
        rig.commit()
    held = rig.pool.total - rig.pool.available
    rig.core.abort(gone)
    rig.collect_outputs()
    assert rig.pool.total - rig.pool.available < held
    rig.submit()
    result = rig.executor.collect()
    row = next(seq.slot for seq in rig.core.live() if seq.request.id == bad)
    rig.core.commit(StepResult(result.step, result.slots, result.tokens, failed={row: "not a number"}))
    rig.collect_outputs()
    rig.run()
    assert rig.finishes[gone, 0].reason == rig.finishes[gone, 1].reason == "cancelled"
    assert rig.finishes[bad, 0] == Finish("error", message="not a number")
    assert rig.finishes[good, 0].reason == "length"


@pytest.mark.parametrize("fault", ["failed", "impossible"])
def test_the_cache_loses_a_prefix_only_to_logits_that_are_not_finite(fault: str) -> None:
    """A request whose own settings leave no token has computed its prompt as any other has."""
    rig = Rig(size=4)
    before, bad = rig.add([1] * 41, 1), rig.add([1] * 41, 20, n=2, ignore_eos=True)
    rig.submit()
    rig.commit()
    rig.submit()
    result = rig.executor.collect()
    row = next(seq.slot for seq in rig.core.live() if seq.request.id == bad)
    told = {fault: {row: "no token"}}
    rig.core.commit(msgspec.structs.replace(result, **told))
    rig.collect_outputs()
    rig.run()
    assert rig.over == {before, bad}
    assert rig.finishes[bad, 0] == rig.finishes[bad, 1] == Finish("error", message="no token")
    after = rig.add([1] * 41, 1)
    rig.run()
    [delta] = [delta for delta in rig.deltas if delta.id == after]
    assert delta.cached_tokens == (40 if fault == "impossible" else 0)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_continuation_ends_and_the_others_go_on(index: int, after: int) -> None:
    """Before it was seated, while its prompt is computed in chunks, right after the fork, and later."""
    rig = Rig(chunk_tokens=5)
    request = rig.add([1] * 9, 12, n=3, ignore_eos=True)
    for _ in range(after):
        rig.submit()
        rig.commit()
    for _ in range(2):
        rig.core.abort(request, index)
        rig.collect_outputs()
    rig.run()
    reasons = [rig.finishes[request, i].reason for i in range(3)]
    assert reasons == ["cancelled" if i == index else "length" for i in range(3)]
    assert rig.over == {request}
    assert len(rig.answers[request, index]) == max(0, after - 1)


def test_a_request_that_went_to_another_engine_is_dropped_without_a_word() -> None:
    rig = Rig()
    lost = rig.add([1] * 9, 50, n=2, ignore_eos=True)
    kept = rig.add([2] * 9, 10, ignore_eos=True)
    for _ in range(3):
        rig.submit()
        rig.commit()
    said = len(rig.deltas)
    rig.core.drop(lost)
    rig.core.drop("unknown")
    rig.collect_outputs()
    assert len(rig.deltas) == said
    rig.run()
    assert rig.over == {kept}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 9, 14])
def test_who_was_begun_elsewhere_goes_on_from_its_last_token(steps: int, caching: bool) -> None:
    rig = Rig(size=4, caching=caching)
    three = rig.add(list(range(1, 9)), 20, n=3, seed=1, ignore_eos=True)
    rig.add([5] * 3, 30, seed=2)
    rig.add([5] * 3, 30, seed=3, ignore_eos=True)
    rig.core.abort(three, 1)
    for _ in range(3):
        for _ in range(steps):
            if rig.submit():
                rig.commit()
        rig.crash()
    rig.run()
    assert rig.finishes[three, 1] == Finish("cancelled")


@pytest.mark.parametrize(("caching", "computed"), [(True, 12 + 4), (False, 12 + 12)])
def test_recompute_is_one_prefill_and_shared_blocks_are_found(caching: bool, computed: int) -> None:
    rig = Rig(size=4, caching=caching)
    rig.add(list(range(1, 9)), 20, n=2, seed=1, ignore_eos=True)
    for _ in range(4):
        rig.submit()
        rig.commit()
    rig.crash()
    rig.submit()
    rig.commit()
    assert rig.executor.forward_tokens == computed
    assert {len(tokens) for tokens in rig.answers.values()} == {5}
    totals = rig.core.report.totals
    assert (totals.prompt_tokens, totals.generated_tokens) == (0, 2)  # its prompt was counted where it began
    rig.run()


def test_what_another_engine_said_is_taken_as_it_is() -> None:
    rig = Rig(blocks=8, size=4, max_model_len=16)
    request = Generate("r", "gw", [1, 2, 3], 50, Sampling(), FAR, n=3)
    rig.requests["r"] = request
    rig.core.accept(request, [None, None, None])
    rig.collect_outputs()
    assert rig.over == {"r"}  # it had ended, but the result had not arrived
    assert rig.core.idle

    long = [1 + i % (VOCAB - 1) for i in range(13)]
    rig.over, rig.requests = set(), {}
    rig.core.accept(request, [long, None, None])  # an engine that could hold more accepted it
    out = rig.core.outputs()
    assert out.deltas["gw"] == [Delta("r", 13, [], Finish("length"), 0)]
    assert out.finished == ["r"]
    rig.core.accept(request, [[VOCAB], None, None])
    [delta] = rig.core.outputs().deltas["gw"]
    assert delta.finish is not None
    assert delta.finish.reason == "error"
    assert rig.core.idle


def test_deadline_ends_waiting_and_running_requests() -> None:
    rig = Rig(max_seqs=1)
    running = rig.add([1] * 4, 50, ignore_eos=True, deadline=1000)
    waiting = rig.add([1] * 4, 50, ignore_eos=True, deadline=500)
    rig.submit()
    rig.commit()
    rig.now = 600
    rig.submit()
    assert rig.finishes[waiting, 0].reason == "deadline"
    rig.now = 1000
    rig.submit()
    assert rig.finishes[running, 0].reason == "deadline"
    rig.run()


def test_a_request_delivered_twice_runs_once() -> None:
    rig = Rig()
    request = rig.add([1] * 4, 6, ignore_eos=True)
    rig.core.accept(rig.requests[request])
    rig.run()
    assert len(rig.answers[request, 0]) == 6


def steady_step_seconds(seqs: int) -> float:
    """CPU seconds of plan + commit in a steady decode step."""
    pool = BlockPool(seqs * 40, 16)
    info = ModelInfo("scripted", "scripted", 1000, 4096, [0], 0)
    limits = Limits(seqs, 4096, 4096, 4096, 1000, 1.0, frozenset([0]), "scripted")
    core, executor = Scheduler(pool, limits), ScriptedExecutor(info, pool.total)
    for i in range(seqs):
        core.accept(Generate(f"r{i}", "gw", [2] * (5 + i % 16), 600, Sampling(seed=i), FAR))
    for _ in range(20):
        plan = core.plan(0)
        assert plan is not None
        executor.submit(plan)
        core.commit(executor.collect())
        core.outputs()
    best = float("inf")
    for _ in range(10):
        spent = 0.0
        for _ in range(16):
            begin = time.process_time()
            plan = core.plan(0)
            assert plan is not None
            spent += time.process_time() - begin
            executor.submit(plan)
            result = executor.collect()
            begin = time.process_time()
            core.commit(result)
            core.outputs()
            spent += time.process_time() - begin
        best = min(best, spent / 16)
    return best


@pytest.mark.perf
def test_a_steady_step_is_planned_in_time_of_what_changes() -> None:
    """256 decoding sequences: plan and commit take the CPU time of 12,000 turns of a plain loop, some 0.5 ms."""
    assert steady_step_seconds(256) < 1.2 * python_s()
