"""The scheduler: decides which tokens of which sequences the next step computes.

START HERE: `plan()` and `commit()` are the policy.  Everything obeys one rule: *computed catches up with known*. Known
tokens: prompt and output so far.  Computed tokens: those with KV. A prompt, a chunk of it, a cache hit, a decode and a
resume after preemption differ only in the distance between the two.

    accept --> OpenRequests --> WaitingQueue --plan()--> Batch --StepPlan--> executor
                                     ^                     |                    |
                                     +----- preemption ----+                    v
    outputs() <-- SchedulerReport <--------------------- commit() <------- StepResult

Planning a steady decode step takes O(sequences that changed) (see batch.py).  Committing takes O(tokens), since every
token has to be delivered.

Pure: no clock, no randomness, no I/O.  Time arrives as an argument, tokens arrive as results, and everything for
clients leaves as `Outputs`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.engine.core.accounting import Auditor
from quire.engine.core.batch import Batch, IssuedPlan
from quire.engine.core.blocks import BlockPool, HostPool
from quire.engine.core.checkpoints import checkpoint_policy
from quire.engine.core.drafts import Drafts, logprobs_of
from quire.engine.core.forced import ForcedTokens
from quire.engine.core.groups import Groups
from quire.engine.core.headroom import Headroom
from quire.engine.core.isolation import FAILED_TWICE, Isolation
from quire.engine.core.layer_groups import LayerGroups, WindowGroups
from quire.engine.core.limits import Limits, Outputs
from quire.engine.core.occupancy import Occupancy
from quire.engine.core.open_requests import OpenRequests, refusal
from quire.engine.core.plan import StepPlan, StepResult, WindowGroup
from quire.engine.core.plan_builder import PlanBuilder
from quire.engine.core.plan_edits import PlanEdits
from quire.engine.core.policy.adapters import AdapterSlots
from quire.engine.core.policy.admission import admission_policy
from quire.engine.core.policy.allocation import allocation_policy
from quire.engine.core.policy.claims import Claims
from quire.engine.core.policy.drafts import DraftController
from quire.engine.core.policy.fairness import Fairness
from quire.engine.core.policy.guesses import GuessCosts
from quire.engine.core.policy.jumps import JumpCosts
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.preemption import Preemption
from quire.engine.core.report import SchedulerReport, finish_of, full_delta
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.state_pool import StatePool
from quire.engine.core.swapping import Swapping
from quire.engine.core.waiting_queue import WaitingQueue
from quire.engine.wire.messages import CONSTRAINT, Delta, Finish, FinishReason, Generate


class Scheduler:
    """Owns every sequence from accept() to its Finish.  Not thread-safe: the engine loop owns it."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        host: HostPool | None = None,
        step_cost: StepCostModel | None = None,
        states: StatePool | None = None,
        windows: list[WindowGroup] | None = None,
    ) -> None:
        """`host`: host memory for swapping; None: preempted sequences are recomputed.

        `states`: memory for copies of recurrent state; None: the model has no recurrent layers.
        `windows`: groups of sliding-window layers, each with block tables of its own; None: the model has none.

        Raises KeyError for an admission mode that is not registered."""
        self.pool, self.limits = pool, limits
        self.step_cost = step_cost or StepCostModel()
        self.requests = OpenRequests()
        self.waiting = WaitingQueue()
        self.batch = Batch(limits.max_seqs, pool.block_size)
        self.report = SchedulerReport(self.batch, pool.block_size)
        checkpoints = checkpoint_policy(pool, states, limits.fingerprint)
        self.report.totals.states = checkpoints.counts
        layers = layer_groups(pool, windows or [], self.batch, host := host or HostPool(), limits)
        swaps = limits.preempt, limits.block_bytes
        self.swapping = Swapping(pool, host, self.step_cost, *swaps, checkpoints, layers)
        self.allocation = allocation_policy(pool, limits, checkpoints, layers)
        self.admission = admission_policy(pool, limits, self.batch, self.allocation)
        self.adapters = AdapterSlots(limits.adapter_slots, self.batch, self.waiting)
        self.claims = Claims(self.step_cost, self.batch, self.waiting, self.adapters)
        self.groups = Groups(pool, self.batch, limits, layers)
        self.forced = ForcedTokens(self.report, JumpCosts(self.step_cost))
        self.drafts = self._build_drafts(layers)
        self.isolation = Isolation()
        self.fairness = Fairness(
            *(self.requests, self.batch, self.waiting, self.admission, self.isolation, self.swapping, self.adapters)
        )
        edits = PlanEdits(pool, layers)
        self.preemption = Preemption(
            pool, self.batch, self.waiting, self.swapping, self.fairness, edits, self.report, self.groups
        )
        self.builder = PlanBuilder(
            *(pool, self.batch, self.waiting, self.report),
            edits=edits,
            allocation=self.allocation,
            admission=self.admission,
            isolation=self.isolation,
            fairness=self.fairness,
            preemption=self.preemption,
            swapping=self.swapping,
            groups=self.groups,
            forced=self.forced,
            drafts=self.drafts,
            adapters=self.adapters,
            checkpoints=checkpoints,
        )
        self.headroom = self._build_headroom()
        self.occupancy = Occupancy(pool, self.batch, self.requests, layers, limits.block_bytes)
        parts = self.requests, self.batch, self.waiting, self.swapping, self.allocation, self.report
        self.auditor = Auditor(pool, *parts, checkpoints, layers)

    def _build_drafts(self, layers: LayerGroups) -> Drafts:
        policy = DraftController(self.step_cost, self.limits.tile_tokens)
        guesses = GuessCosts(self.step_cost, policy.extra_s)
        return Drafts(self.pool, self.batch, self.allocation, self.report, policy, guesses, layers)

    def _build_headroom(self) -> Headroom:
        return Headroom(
            *(self.pool, self.limits, self.step_cost),
            batch=self.batch,
            waiting=self.waiting,
            requests=self.requests,
            layers=self.builder.layers,
            admission=self.admission,
            claims=self.claims,
            isolation=self.isolation,
            fairness=self.fairness,
            swapping=self.swapping,
        )

    # ------------------------------------------------------------------------------------------------------- requests

    def accept(self, request: Generate, outputs: list[list[int] | None] | None = None, *, fault: str = "") -> None:
        """Queue a request.  A request that can never run ends with an error that names the limit and the value.

        `fault`: why the request's grammar or adapter cannot be used; the request then ends with this error.

        `outputs`: tokens that an earlier engine has emitted, one entry per sequence; None: the sequence has finished.
        The engine treats such sequences as preempted ones: it recomputes the known tokens and continues after them.
        A request that is delivered twice runs once."""
        if request.id in self.requests:
            return
        room = min(self.limits.max_model_len, self.pool.total * self.pool.block_size)
        sequences = self.requests.sequences(request, self.groups.outputs(request, outputs), self.limits, room)
        if not sequences:
            self.report.finish_request(request.id)
            return
        self.claims.note(len(request.token_ids))
        self.requests.open(request, sequences)
        self.groups.open(request, sequences, outputs)
        fault = fault or refusal(request, outputs, self.limits, room)
        fault = fault or self.groups.refusal(request, sequences[0].limit)
        fresh = [seq for seq in sequences if seq.known == seq.prompt_len and self.allocation.shares_prompt]
        if fault := fault or self.builder.layers.reservations.refusal(sequences[0], max(1, len(fresh))):
            self._end_request(request.id, "error", fault, code=CONSTRAINT)
        else:
            self._enqueue(sequences, fresh)

    def abort(self, request_id: str, index: int = -1) -> None:
        """End one sequence of a request now, or all of them (-1).  Unknown and finished requests are ignored."""
        if index < 0:
            self._end_request(request_id, "cancelled")
            return
        group = self.groups.of(request_id)
        for seq in group.withdraw(index, self.requests.unfinished(request_id)):
            self._cut_short(seq, Finish("cancelled"))
            if (successor := group.successor(seq)) is not None:
                self.waiting.add(successor)

    def drop(self, request_id: str) -> None:
        """Forget a request without a Finish: another engine answers it now.  Unknown ids are ignored."""
        for seq in self.requests.unfinished(request_id):
            self._end(seq, None)

    def reset_prefix_cache(self, most: int | None = None) -> bool:
        """Empty the prefix cache, or remove at most `most` blocks from it.  Returns whether it is empty.

        If it is empty, no sequence that starts from now on finds a block that was sealed before.  Running sequences
        keep their blocks, and still seal the blocks that they fill from now on.  O(removed blocks)."""
        if not self.pool.forget_all(most):
            return False
        self.builder.layers.forget_all()
        self.builder.checkpoints.forget_all()
        return True

    def step_failed(self) -> tuple[int, str | None]:
        """Requeue every running sequence: the executor has dropped the steps in flight and freed all slots.

        As after a preemption, a sequence keeps its tokens and frees its blocks.  Returns the number of requeued
        sequences, and the id of a request that ended because it failed twice at the same position, or None.

        Cached blocks that finished steps wrote stay cached: the failed steps have not written to them."""
        leaders = self.groups.leaders(self.live())
        lost = [seq for seq in leaders if self.batch.in_flight(seq)]
        back = [seq for seq in leaders if seq.state not in (State.WAITING, State.FINISHED)]
        departed = self.batch.departed()
        for seq in back:
            self.report.record("requeued", seq)
            self.preemption.requeue(seq, min(seq.computed_before(self.batch.step + 1), seq.known - 1))
        for seq in self.waiting:  # the copy of its blocks to the host may belong to a step that never ran
            if seq.host:
                seq.recompute_tokens = seq.computed
                self.swapping.free_all_blocks(seq)
        self.builder.checkpoints.step_failed(self.batch.committed)
        self.builder.layers.step_failed(self.batch.committed)
        self.pool.forget(self.batch.abandon_steps())
        self.drafts.reset()
        self.adapters.forget()
        if (guilty := self.isolation.failed(lost, departed)) is not None:
            self._end_request(guilty, "error", FAILED_TWICE)
        return len(back), guilty

    # ------------------------------------------------------------------------------------------------------- the step

    def plan(self, now_ms: int) -> StepPlan | None:
        """Build the plan of the next step; None when there is nothing to compute.  Earlier steps may still be in
        flight.

        Also returns None while the scheduler needs the result of the step in flight first: that step verifies drafts,
        or the next step should verify drafts that follow the tokens which that step samples, or only groups step.
        The groups in that step then join the others; otherwise two halves would take turns, each in its own steps."""
        for request_id in self.requests.expired(now_ms):
            self._end_request(request_id, "deadline")
        builder, batch = self.builder, self.batch
        if batch.verifying or self.drafts.wait_for_tokens(self.limits.step_tokens - batch.decoding):
            return None
        if batch.steps_in_flight and not batch.decoding and self.groups.in_step():
            return None
        builder.begin_plan(self.limits)
        builder.attend_decoding()
        group_tokens = builder.advance_groups()
        started = list(batch.prefilling)
        budget = self.headroom.prompt_budget()
        if budget > 0:  # 0: this step takes no prompts, to measure the time of a decode-only step
            self.admission.forecast.step_tokens = budget
        free = self.limits.step_tokens - batch.decoding - group_tokens
        jumped = builder.jump(budget, free)
        drafted = builder.draft(budget - jumped, free - jumped)
        builder.start_favoured(min(budget, free) - jumped - drafted)
        long = builder.continue_prompts(started)
        builder.resume_paused()
        builder.start_waiting()
        builder.continue_long(long)
        self.admission.judge_predictions(batch.step + 1)
        return builder.finish()

    def commit(self, result: StepResult) -> None:
        """Append a step's sampled tokens, seal full blocks, and end sequences at a stop token or their maximum length.

        Results arrive in the order of their plans.  Raises AccountingError when a result is missing."""
        self._record_times(result, self.batch.commit(result.step))
        self._end_failed(result)
        occupants, deltas, block_size = self.batch.slots.occupants, self.report.deltas, self.pool.block_size
        step, several, generated = result.step, result.forced.keys() | result.accepted.keys(), 0
        irregular = list[Sequence]()  # sequences that did not append exactly the one sampled token
        for slot, token in zip(result.slots, result.tokens, strict=True):
            seq = occupants[slot]
            # The sequence ended while this step ran, or a jump meanwhile appended this token and sealed its block.
            if seq is None or seq.state is State.FINISHED or step < seq.jumped_in:
                irregular += [] if seq is None else [seq]
                continue
            tokens = seq.tokens
            if (computed := len(tokens) - seq.unconfirmed) % block_size == 0 and seq.table:
                self.allocation.seal(seq, computed)
            if seq.unconfirmed or slot in several:
                irregular.append(seq)
                if not (fresh := self._append_several(seq, slot, token, result)):
                    continue
                self.waiting.grown(seq)
            else:
                tokens.append(token)
                fresh = [token]
            known = len(tokens)
            finish = finish_of(seq) if fresh[-1] in seq.stops or known == seq.limit else None
            request = seq.request
            first = known - len(fresh) - len(request.token_ids)
            if first == 0:
                self.report.record("first", seq)
            if first == 0 or slot in result.logprobs or slot in result.accepted:
                delta = full_delta(seq, first, finish, logprobs_of(result, slot, len(fresh)))
            else:
                delta = Delta(request.id, first, fresh, finish, seq.index)
            deltas[request.gateway].append(delta)
            generated += len(fresh)
            if finish is not None:
                self.admission.forecast.learn(seq, ended=finish.reason == "stop")
                self._end(seq, finish.reason)
        self.report.totals.generated_tokens += generated + self._advance_groups(result)
        self.drafts.take(result, irregular)
        self.batch.slots.reclaim(self.batch.committed)

    def outputs(self) -> Outputs:
        """Return everything reported since the last call: deltas by gateway, finished requests, and milestones."""
        return self.report.take_outputs()

    # -------------------------------------------------------------------------------------------------------- queries

    @property
    def running(self) -> int:
        """Sequences that prefill or decode."""
        return self.batch.running

    @property
    def paused(self) -> int:
        """Number of paused sequences: they keep their blocks and wait without a slot until other sequences end."""
        return len(self.batch.paused)

    @property
    def step(self) -> int:
        """The number of the last plan issued."""
        return self.batch.step

    @property
    def committed(self) -> int:
        """The number of the last step whose result arrived."""
        return self.batch.committed

    @property
    def idle(self) -> bool:
        """No request is open, and no step is in flight."""
        return not self.requests and not self.batch.steps_in_flight

    def live(self) -> Iterator[Sequence]:
        """Every sequence between accept() and its Finish."""
        return self.requests.live()

    def _append_several(self, seq: Sequence, slot: int, token: int, result: StepResult) -> list[int]:
        """Append accepted drafts, the sampled token after them, and the tokens that a grammar forces after that token.

        Returns the tokens that were not known before."""
        count = result.accepted.get(slot, 0)
        drafts = self.drafts.accepted(slot, count) if slot in result.accepted else []
        fresh = self.forced.append(seq, [*drafts, token], result.forced.get(slot, ()))
        if slot in result.accepted:
            self.drafts.settle(seq, count)
        return fresh

    # -------------------------------------------------------------------------------------------------------- endings

    def _enqueue(self, sequences: list[Sequence], fresh: list[Sequence]) -> None:
        """Queue the sequences of a request.  `fresh`: those without output, which share one prefill.

        The first of them computes it; with static allocation each computes its own.  Sequences with output have forked
        on an earlier engine and are queued one by one."""
        if fresh:
            leader, *leader.siblings = fresh
            self.waiting.add(leader)
        for seq in sequences:
            if seq.known >= seq.limit:  # an earlier engine with a larger KV cache generated more than fits here
                self._cut_short(seq, Finish("length"))
            elif seq not in fresh:
                self.waiting.add(seq)

    def _record_times(self, result: StepResult, issued: IssuedPlan) -> None:
        """Pass a step's measured time to the cost models."""
        step_s = result.step_s - result.guess_s  # GuessCosts weighs the head's time
        if step_s > 0 and not issued.swaps:
            if issued.drafting and issued.prompt_tokens == issued.drafting + issued.drafts:
                idle_s = max(0.0, step_s - result.device_s) if self.drafts.run_ahead else 0.0
                seqs, accepted = issued.decoding + issued.drafting, sum(result.accepted.values())
                self.drafts.policy.record(step_s, seqs, issued.drafts, accepted, idle_s)
            elif issued.jumps and issued.prompt_tokens == issued.jump_tokens:
                self.forced.costs.record(step_s, issued.decoding + issued.jumps)
            else:
                self.step_cost.record_step(step_s, issued.decoding, issued.prompt_tokens)
        if result.swap_s:
            self.step_cost.record_swap(result.swapped_bytes, result.swap_s)

    def _end_failed(self, result: StepResult) -> None:
        """Take a step's prompt logprobs, then end the requests that could not sample."""
        occupants = self.batch.slots.occupants
        for slot, logprobs in result.prompt_logprobs.items():
            if (seq := occupants[slot]) is not None:
                seq.prompt_logprobs.extend(logprobs)
        for slot, message in result.failed.items():
            if (seq := occupants[slot]) is not None:
                self.builder.checkpoints.forget(seq)
                self.builder.layers.forget(seq)
                self.pool.forget(seq.table)  # its KV cache may be wrong: remove its blocks from the prefix cache
                self._end_request(seq.request.id, "error", message)
        for slot, message in result.impossible.items():  # its KV cache is correct and stays in the prefix cache
            if (seq := occupants[slot]) is not None:
                self._end_request(seq.request.id, "error", message, code=CONSTRAINT)

    def _end_request(self, request_id: str, reason: FinishReason, message: str = "", code: str = "") -> None:
        """End every unfinished sequence of a request, each with a Finish."""
        for seq in self.requests.unfinished(request_id):
            self._cut_short(seq, Finish(reason, message=message, code=code))

    def _advance_groups(self, result: StepResult) -> int:
        """Choose the next tokens of each stepped group whose candidates have arrived.  Returns their number.

        A group whose search is done reports its complete choices and ends."""
        tokens = 0
        for group in self.groups.take(result):
            tokens += group.advance()
            if not group.done:
                continue
            for choice in group.finished():
                if choice.finish.reason == "cancelled":
                    self._cut_short(choice.seq, choice.finish)
                else:
                    self.report.finish_choice(choice)
            for seq in self.requests.unfinished(group.leader.request.id):
                self._end(seq, "stop")
        return tokens

    def _cut_short(self, seq: Sequence, finish: Finish) -> None:
        """End a sequence before a stop token or its maximum length, with a Finish for the client."""
        if self.groups.of(seq.request.id).awaits(seq):
            self.admission.forecast.learn(seq, ended=False)
            if searched := self.groups.of(seq.request.id).take_computed():
                finish = msgspec.structs.replace(finish, searched=searched)
            self.report.finish(seq, finish)
        self._end(seq, finish.reason)

    def _end(self, seq: Sequence, reason: FinishReason | None) -> None:
        """End a sequence: free its slot and all its blocks.  `reason` None: another engine sends the Finish."""
        if self.groups.of(seq.request.id).awaits(seq):
            self.report.record("ended", seq, seq.sent, reason)
        if seq.queued_tokens:
            self.waiting.remove(seq)
        self.drafts.leave(seq, complete=reason in ("stop", "length"))
        self.batch.depart(seq)
        self.report.totals.released_blocks += len(seq.table)
        self.swapping.free_all_blocks(seq)
        seq.state = State.FINISHED
        if self.requests.close(seq):
            self.groups.close(seq.request.id)
            if reason is not None:
                self.report.finish_request(seq.request.id)


def layer_groups(
    pool: BlockPool, windows: list[WindowGroup], batch: Batch, host: HostPool, limits: Limits
) -> LayerGroups:
    """Return the layer groups of a model with these window groups; an empty list: all layers attend to every token."""
    if not windows:
        return LayerGroups()
    return WindowGroups(
        pool,
        windows,
        batch,
        fingerprint=limits.fingerprint,
        host_blocks=host.total,
        step_tokens=limits.step_tokens,
        max_model_len=limits.max_model_len,
    )
