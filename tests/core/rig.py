"""A scheduler over an executor whose every token depends on what the block tables really hold, and a client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import Any

import pytest

from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.isolation import FAILED_TWICE
from quire.engine.core.limits import Event, Limits
from quire.engine.core.plan import Drafter, StepPlan, StepResult, WindowGroup
from quire.engine.core.policy.fairness import Shares
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.sequence import Sequence
from quire.engine.core.state_pool import StatePool
from quire.engine.core.swapping import Preempt
from quire.engine.wire.messages import Beams, Delta, Finish, Generate, Sampling
from tests.core.drafters import AllDrafts
from tests.core.oracle import EOS, VOCAB, OracleExecutor, StepFails, reference, reference_beams

FAR = 2**60
BAD_SEED = 7  # seed of requests whose steps fail from their third token on


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
        itl_stretch: float = 0.0,
        threshold: float = 1.0,
        depth: int = 2,
        caching: bool = True,
        max_model_len: int = 10_000,
        admission: str = "threshold",
        preempt: Preempt = "recompute",
        host_blocks: int = 0,
        bad: int | None = None,
        drafter: Drafter | None = None,
        adapter_slots: int = 0,
        checkpoints: int | None = None,
        windows: list[WindowGroup] | None = None,
    ) -> None:
        """`bad`: each step fails that samples for a request of BAD_SEED at this output position or later.

        `drafter`: its drafts are all computed.
        `checkpoints`: the model has recurrent state, and so many copies of it; None: it has none.
        `windows`: layers with a sliding window, which release what it has passed."""
        self._windows = windows or []
        self._drafter, self._checkpoints = drafter, checkpoints
        self._bad = {} if bad is None else {BAD_SEED: bad}
        self._caching, self._shape = caching, (blocks, size, max_seqs, depth, host_blocks)
        self.limits = Limits(
            max_seqs=max_seqs,
            step_tokens=step_tokens,
            chunk_tokens=chunk_tokens,
            itl_stretch=itl_stretch,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            admit_threshold=threshold,
            eos_ids=frozenset([EOS]),
            fingerprint="oracle",
            admission=admission,
            preempt=preempt,
            block_bytes=64,
            beams=True,
            grammars=True,
            adapter_slots=adapter_slots,
            recurrent=checkpoints is not None,
        )
        self.start()
        self.requests: dict[str, Generate] = {}
        self.answers: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.deltas: list[Delta] = []
        self.over: set[str] = set()
        self.milestones: dict[tuple[str, int], list[str]] = defaultdict(list)
        self.plans: list[StepPlan] = []
        self.failures: list[dict[tuple[str, int], int]] = []  # one per failed step: key -> known tokens
        self.now = 0

    def start(self) -> None:
        blocks, size, max_seqs, depth, host_blocks = self._shape
        self.pool = BlockPool(blocks, size, caching=self._caching, note_discarded=True)
        self.host, self.step_cost = HostPool(host_blocks), StepCostModel(swap_bytes_per_s=64e3)
        self.states = StatePool(self._checkpoints or 0)
        states = None if self._checkpoints is None else self.states
        self.core = Scheduler(self.pool, self.limits, self.host, self.step_cost, states, self._windows)
        self.core.drafts.drafter, self.core.drafts.policy = self._drafter, AllDrafts()
        self.executor = OracleExecutor(blocks, size, max_seqs, depth, host_blocks, self._checkpoints, self._windows)
        self.core.drafts.max_drafts = self.executor.rollback.places
        self.executor.bad = self._bad
        self.decoding: set[int] = set()  # slots that decode after the last plan, by the plans alone
        self.loaded: dict[int, str] = {}  # adapter slots, likewise
        self.adapted: dict[int, int] = {}  # batch slot -> its adapter slot, likewise
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
        shares = Shares(core.batch.holders())
        crowd = shares.over_share()
        assert chosen.request.tenant not in crowd, "a tenant at its share started a sequence before a swapped one"
        first: dict[str, Sequence] = {}
        for seq in waiting:
            first.setdefault(seq.request.tenant, seq)
        assert chosen is first[chosen.request.tenant], "a tenant's own swapped sequence was passed"
        for tenant, seq in first.items():
            if seq.host and tenant not in crowd and seq.sampled_in <= core.batch.committed:
                assert core.swapping.leaves(seq) or core.fairness._victims(seq, shares, named) is None

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
        adapter: str = "",
        anchors: list[int] | None = None,
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
            adapter=adapter,
            anchors=anchors or [],
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
        jumps = {piece.slot for piece in plan.slices if piece.sampler} & self.decoding
        drafting = {piece.slot for piece in plan.slices if piece.drafts}
        assert drafting <= self.decoding
        assert not drafting or not self.executor.plans, "drafts were planned before the last token was known"
        self.decoding -= jumps | drafting
        assert given + len(self.decoding) <= self.limits.step_tokens
        assert all(len(piece.token_ids) <= self.limits.chunk_tokens for piece in plan.slices)
        named = {piece.slot for piece in plan.slices} | {fork.slot for fork in plan.forks}
        assert not named & self.decoding
        assert len(self.decoding | named) <= self.limits.max_seqs
        self.decoding |= {piece.slot for piece in plan.slices if piece.sampler} | {fork.slot for fork in plan.forks}
        self.decoding |= drafting
        self.check_adapters(plan)
        self.plans.append(plan)
        self.executor.submit(plan)
        return True

    def check_adapters(self, plan: StepPlan) -> None:
        """Each sequence in the batch has its own adapter in the slot that its start named."""
        self.adapted = {slot: at for slot, at in self.adapted.items() if slot not in plan.freed_slots}
        for at, adapter in plan.adapters:
            assert 0 <= at < self.limits.adapter_slots
            assert at not in self.adapted.values(), "the adapter of a running sequence was replaced"
            self.loaded[at] = adapter
        self.adapted |= {start.slot: start.adapter for start in plan.starts}
        self.adapted |= {fork.slot: self.adapted[fork.parent] for fork in plan.forks}
        for slot, seq in enumerate(self.core.batch.slots.occupants):
            if seq is not None and seq.slot == slot and slot in self.adapted:
                at = self.adapted[slot]
                assert (self.loaded[at] if at >= 0 else "") == seq.request.adapter

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
        self.loaded.clear()
        self.adapted.clear()
        _, guilty = self.core.step_failed()
        self.collect_outputs()
        ended = set(self.finishes) - before
        assert {name for name, _ in ended} == ({guilty} if guilty else set())
        for key in ended:
            assert (self.finishes[key].reason, self.finishes[key].message) == ("error", FAILED_TWICE)
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
        filled, allocated = self.core.occupancy.used_positions()
        assert self.core.occupancy.wasted_positions() == allocated - filled
        tables = [block for seq in self.core.live() for block in seq.table]
        assert self.core.occupancy.shared_fraction() == pytest.approx(
            1 - len({*tables}) / len(tables) if tables else 0.0
        )
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
            if len(self.executor.plans) == self.executor.depth:  # a test may have left steps in flight
                self.commit()
            submitted = self.submit()
            if self.executor.plans and (not submitted or len(self.executor.plans) == self.executor.depth):
                self.commit()
            elif not submitted:
                break
        assert not self.executor.plans
        assert self.core.idle
        assert self.pool.available == self.pool.total
        assert self.host.available == self.host.total
        assert self.states.held == 0
        self.verify()

    def verify(self) -> None:
        """Every choice that was not ended from outside has the text of the reference."""
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
