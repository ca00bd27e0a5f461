"""Random runs of the scheduler, for hypothesis: every operation checks what must always hold."""

from __future__ import annotations

from typing import Any, Literal, get_args

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine.core.sequence import State
from quire.engine.core.swapping import Preempt
from quire.engine.wire.messages import Beams
from quire.loadtest.studies.baselines import MODES
from tests.core.oracle import FORCED, VOCAB
from tests.core.rig import BAD_SEED, FAR, Rig

PREFIXES = [list(range(1, 13)), list(range(20, 41)), [7] * 9]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests with shared prefixes, siblings, salts and stops run on a pool too small for them.  Host memory fits all,
    some or none of the blocks of preempted sequences."""

    refused = "blocks; this engine has 18"  # in the error of beams that this engine never runs

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(blocks=18, size=4, max_seqs=5, step_tokens=16, chunk_tokens=7, bad=2)
        self.faults = False  # steps failed that no request made fail

    @initialize(
        admission=st.sampled_from(MODES),
        preempt=st.sampled_from(get_args(Preempt)),
        host_blocks=st.sampled_from([0, 6, 40]),
        caching=st.booleans(),
    )
    def choose(self, admission: str, preempt: Preempt, host_blocks: int, caching: bool) -> None:
        self.rig = Rig(
            blocks=18,
            size=4,
            max_seqs=5,
            step_tokens=16,
            chunk_tokens=7,
            admission=admission,
            preempt=preempt,
            host_blocks=host_blocks,
            caching=caching,
            bad=2,
        )
        self.equip()

    def equip(self) -> None:
        """Give the rig what a machine adds to it.

        An override of `choose` is not called: hypothesis keeps the function that has the decorator."""

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
        grammar=st.sampled_from(["", "", FORCED]),
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
        grammar: str,
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
        what["grammar"] = grammar
        self.rig.add(prefix + tail, new, n=n, **what, **who)

    @precondition(lambda self: self.rig.limits.admission != "static")
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

    @rule()
    def reset_prefix_cache(self) -> None:
        """Teardown compares the text of every request that ran meanwhile with the reference."""
        rig, held = self.rig, [list(seq.table) for seq in self.rig.core.live()]
        available = rig.pool.available
        rig.core.reset_prefix_cache()
        rig.core.auditor.whole()
        assert [seq.table for seq in rig.core.live()] == held
        assert (rig.pool.available, rig.pool.idle) == (available, 0)

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

        In mode "reserve" it leaves what all running sequences need at their maximum length."""
        core, size = self.rig.core, self.rig.pool.block_size
        tokens, requests = core.headroom.startable()
        if not core.requests:
            windows = core.builder.layers.reservations.sequences_left()
            slots = self.rig.limits.max_seqs - core.batch.slots.cooling
            assert (tokens, requests) == (core.pool.total * size, min(slots, windows))
            return
        assert 0 <= requests <= core.batch.slots.free
        assert tokens % size == 0
        kept = 1 if self.rig.limits.admission == "watermark" else 0
        queued = sum(seq.known // size for seq in core.waiting)
        assert tokens == 0 or tokens // size + queued <= core.pool.available - kept
        if self.rig.limits.admission == "reserve":
            started = [seq for seq in core.live() if seq.state in (State.PREFILLING, State.DECODING)]
            growth = sum(-(-seq.limit // size) - len(seq.table) for seq in started)
            assert tokens == 0 or tokens // size <= core.pool.available - growth

    @invariant()
    def the_queue_puts_preempted_sequences_first(self) -> None:
        """No free capacity is reported while a sequence is swapped out.  Rig.submit checks the starts."""
        core = self.rig.core
        if core.swapping.sequences:
            assert core.headroom.startable() == (0, 0)
        places = [(not seq.started_before, seq.order) for seq in core.waiting]
        assert places == sorted(places)

    @invariant()
    def what_tenants_would_give_up_is_theirs(self) -> None:
        """Rig.start checks each sequence that is preempted for fairness."""
        core = self.rig.core
        crowd, tokens, own = core.headroom.yielding()
        assert set(crowd) <= {request.tenant for request in self.rig.requests.values()}
        assert 0 <= tokens <= core.pool.total * core.pool.block_size
        assert not tokens or crowd
        assert not set(crowd) & set(own)
        if len({request.tenant for request in self.rig.requests.values()}) < 2:
            assert core.report.totals.yields == 0

    @invariant()
    def static_tables_are_runs_nobody_shares(self) -> None:
        if self.rig.limits.admission == "static":
            core, tables = self.rig.core, [seq.table for seq in self.rig.core.live() if seq.table]
            assert all(table == list(range(table[0], table[0] + len(table))) for table in tables)
            assert core.headroom.predicted_peak() == sum(map(len, tables)) == core.pool.total - core.pool.available
            assert core.report.totals.preemptions == core.report.totals.cached_prompt_tokens == 0

    @invariant()
    def waste_is_below_one_block_a_sequence(self) -> None:
        if self.rig.limits.admission == "static":
            return
        filled, allocated = self.rig.core.occupancy.used_positions()
        tails = {seq.table[-1] for seq in self.rig.core.live() if seq.table}
        drafts = sum(piece.drafts for plan in self.rig.executor.plans for piece in plan.slices)
        assert 0 <= allocated - filled <= 3 * len(tails) + drafts
        assert allocated == 4 * (self.rig.pool.total - self.rig.pool.available)

    def teardown(self) -> None:
        self.rig.run()
        for request in self.rig.requests.values():
            for index in range(request.n):
                finish = self.rig.finishes[request.id, index]
                refused = request.beams is not None and self.refused in finish.message
                assert finish.reason != "error" or self.faults or request.sampling.seed == BAD_SEED or refused
        assert self.rig.over == set(self.rig.requests)
