"""The plan builder: the parts of Scheduler.plan(), in the order in which they run.

begin_plan        start with empty edits
attend_decoding   decoding sequences due in the calendar get a block or a private copy of a shared block, pause, or end
advance_groups    stepped groups compute the tokens that their search has chosen
jump              sequences with tokens that a grammar forced compute all of them in one slice
draft             sequences with drafts compute them after their last token
start_favoured    sequences of tenants below their share start first; other tenants' sequences are preempted for them
continue_prompts  started prompts advance by a chunk, except long prompts
resume_paused     paused sequences get a slot again
start_waiting     waiting sequences start in queue order, while slots, token budget and blocks last
continue_long     long prompts advance with the rest of the budget
finish            the StepPlan
"""

from __future__ import annotations

from quire.engine.core.batch import Batch, IssuedPlan
from quire.engine.core.blocks import BlockPool
from quire.engine.core.checkpoints import CheckpointPolicy
from quire.engine.core.drafts import Drafts
from quire.engine.core.forced import MIN_JUMP, ForcedTokens
from quire.engine.core.groups import Groups
from quire.engine.core.isolation import Isolation
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.limits import Limits
from quire.engine.core.plan import Fork, Sampler, Slice, Start, StepPlan
from quire.engine.core.plan_edits import PlanEdits
from quire.engine.core.policy.adapters import AdapterSlots
from quire.engine.core.policy.admission import AdmissionPolicy
from quire.engine.core.policy.allocation import AllocationPolicy
from quire.engine.core.policy.fairness import PREEMPTIBLE, Fairness
from quire.engine.core.policy.prompt_budget import SHORT_SHARE, split_by_length
from quire.engine.core.preemption import Preemption
from quire.engine.core.report import SchedulerReport
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.swapping import Swapping
from quire.engine.core.waiting_queue import WaitingQueue

# Maximum prompt blocks that one plan looks up in the prefix cache, about 13 ms; a longer prompt is looked up alone.
MAX_SEARCHED = 8_192


class PlanBuilder:
    """Moves sequences between queue and batch, gives them blocks, and makes one plan at a time of these changes."""

    def __init__(
        self,
        pool: BlockPool,
        batch: Batch,
        waiting: WaitingQueue,
        report: SchedulerReport,
        *,
        edits: PlanEdits,
        allocation: AllocationPolicy,
        admission: AdmissionPolicy,
        isolation: Isolation,
        fairness: Fairness,
        preemption: Preemption,
        swapping: Swapping,
        groups: Groups,
        forced: ForcedTokens,
        drafts: Drafts,
        adapters: AdapterSlots,
        checkpoints: CheckpointPolicy,
    ) -> None:
        self._pool, self._batch, self._waiting, self._report = pool, batch, waiting, report
        self._edits, self._allocation, self._admission = edits, allocation, admission
        self._isolation, self._fairness = isolation, fairness
        self._preemption, self._swapping, self._groups = preemption, swapping, groups
        self._forced, self._drafts, self.checkpoints = forced, drafts, checkpoints
        self._adapters = adapters
        self._step = 0  # step number of the plan being built
        self._chunk_tokens = 0
        self._decoding = 0  # sequences that decode in the plan
        self._budget = 0  # prompt tokens that the plan can still take
        self._long_budget = 0  # prompt tokens set aside for long prompts
        self._awaits_slot = False  # a favoured sequence waits for a slot that steps in flight still use: start no other

    @property
    def layers(self) -> LayerGroups:
        """Block tables of sliding-window layers, which grow and shrink with the tables of full-attention layers."""
        return self._edits.layers

    def begin_plan(self, limits: Limits) -> None:
        """Reset the state of the last plan."""
        self._step = self._batch.step + 1
        self.layers.begin_plan()
        self._chunk_tokens = limits.chunk_tokens
        self._forced.begin_plan()
        self._awaits_slot = False

    def attend_decoding(self) -> None:
        """Give blocks to the decoding sequences that are due, by `order`; the last one is preempted first."""
        for seq in self._batch.pop_due(self._step):
            if seq.due == self._step:
                self._attend(seq)
        self._decoding = self._batch.decoding

    def advance_groups(self) -> int:
        """Plan one token for every member of each stepped group, or for no member.  Returns the number of tokens.

        These tokens count as decoding, because a plan cannot postpone them as it postpones prompt tokens."""
        before = self._decoding
        for group in self._groups.in_step():
            if not group.in_step or not self._preemption.make_room(group.leader, group.blocks_to_step()):
                continue  # the group was preempted for an older sequence
            members = group.members(group.leader)
            self._budget = len(members)
            for seq in members:
                self._advance(seq)
            self._decoding += len(members)
        return self._decoding - before

    def jump(self, budget: int, free: int) -> int:
        """Let decoding sequences compute their forced tokens in one slice each (forced.py).

        `budget`: maximum prompt tokens of the step; 0: the step measures pure decoding and takes no jumps.  `free`:
        maximum tokens that still fit the step.  Jumps use the prompt budget, so that sequences which only decode are
        protected from long steps; half of it is left to waiting prompts.  A jump preempts no sequence: without a free
        block the jump is shorter, or the sequence decodes one token.  In a step without prompts, jumps run only if they
        save time (JumpCosts).  Returns the computed tokens, minus the one token that each jumping sequence would decode
        anyway."""
        ready = self._forced.ready(self._step)
        if not ready or budget <= 0:
            return 0
        max_tokens = min(budget, free)
        if self._waiting or self._batch.prefilling:
            max_tokens //= 2
        elif len(ready) == self._batch.decoding:
            max_tokens = free
        tokens = min(max_tokens, sum(seq.known - seq.computed_before(self._step) - 1 for seq in ready))
        if not self._batch.prefilling and not self._forced.costs.pay(tokens, self._decoding):
            return 0
        left = max_tokens
        for seq in ready:
            start = seq.computed_before(self._step)
            end = self._writable_end(seq, start, min(seq.known - start, left + 1))
            if end - start < MIN_JUMP:
                continue
            self.layers.advance(seq, start)
            self._edits.grow(seq, max(0, -(-end // self._pool.block_size) - len(seq.table)))
            self._edits.slices.append(Slice(seq.slot, start, seq.tokens[start:end], sampler_of(seq, end)))
            self._edits.named.add(id(seq))
            self._batch.jump(seq, end, self._step)
            # Steps in flight compute the tokens before `start`.
            self._seal_computed(seq, start - self._batch.steps_in_flight, end)
            self._decoding -= 1
            self._forced.jumped(end - start)
            left -= end - start - 1
        self._report.totals.jumped_tokens += max_tokens - left
        return max_tokens - left

    def draft(self, budget: int, free: int) -> int:
        """Let decoding sequences compute drafts after their last token (drafts.py).

        `budget`, `free`: as for `jump`; half of the budget is left to waiting prompts.  Returns the number of draft
        tokens."""
        if budget <= 0 or free <= 0:
            return 0
        max_tokens = min(budget, free)
        if self._waiting or self._batch.prefilling:
            max_tokens //= 2
        elif self._drafts.found == self._batch.decoding:  # every decoding sequence drafts, so drafts delay no other
            max_tokens = free
        for seq, draft, count in self._drafts.choose(self._step, max_tokens):
            start = seq.computed_before(self._step)
            count = self._writable_end(seq, start, count + 1) - start - 1
            if count <= 0 or id(seq) in self._edits.named:
                continue
            self.layers.advance(seq, start)
            tokens = self._drafts.begin(seq, draft, count, self._step)
            self._edits.grow(seq, max(0, -(-(start + 1 + count) // self._pool.block_size) - len(seq.table)))
            self._edits.slices.append(Slice(seq.slot, start, [seq.tokens[start], *tokens], drafts=count))
            self._edits.named.add(id(seq))
            self._decoding -= 1
        return self._drafts.planned[1]

    def _writable_end(self, seq: Sequence, start: int, count: int) -> int:
        """Return the end of a slice of at most `count` tokens from `start` that fits without a preemption."""
        end = start + min(self._chunk_tokens, count)
        more = -(-end // self._pool.block_size) - len(seq.table)
        if more <= 0:
            return end
        spare = self._pool.available - self._batch.promised_blocks()
        return end if more <= spare and self._admission.may_grow(seq) else len(seq.table) * self._pool.block_size

    def start_favoured(self, budget: int) -> None:
        """Start sequences of tenants below their share; they may use all `budget` prompt tokens of the step."""
        self._budget = budget
        self._batch.slots.reclaim(self._batch.committed)
        while self._budget > 0 and (favoured := self._fairness.favoured(self._edits.named)) is not None:
            seq, victims = favoured
            for victim in victims:
                if victim.state in PREEMPTIBLE:  # else it was preempted together with another member of its group
                    self._preemption.preempt_for_fairness(victim)
            if self._batch.slots.free <= len(seq.siblings):
                self._awaits_slot = True
                return
            self._start(seq)

    def continue_prompts(self, started: list[Sequence]) -> list[Sequence]:
        """Advance the prompts that started before this plan, except long prompts, which are returned for later.

        While there are long prompts, all other prompts share SHORT_SHARE of the budget; the prompt with the fewest
        remaining tokens goes first."""
        short, long = split_by_length(started, self._budget)
        if long:
            self._long_budget = self._budget - int(SHORT_SHARE * self._budget)
            self._budget -= self._long_budget
            short.sort(key=lambda seq: seq.known - seq.computed)
        self._advance_prompts(short)
        return long

    def continue_long(self, long: list[Sequence]) -> None:
        """Advance long prompts, the oldest first, with their own share of the budget and the unused share of short
        prompts."""
        if long:
            self._budget += self._long_budget
            self._advance_prompts(long)

    def _advance_prompts(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq.state is State.PREFILLING:  # else this plan has preempted it
                self._advance(seq)

    def resume_paused(self) -> None:
        """Resume paused sequences, oldest first.  If all are paused and no block is free, preempt the newest."""
        batch = self._batch
        self._admission.begin_starts()
        if batch.paused and not batch.running and not batch.steps_in_flight:
            while not self._pool.available:
                self._preemption.preempt(batch.paused[-1])
            self._admission.forget_sizes()
        elif (largest := self._admission.sequence_to_preempt()) is not None and id(largest) not in self._edits.named:
            self._preemption.preempt(largest)
            self._admission.forget_sizes()
        for seq in list(batch.paused):
            if seq.state is not State.PAUSED or seq.sampled_in > batch.committed:
                continue
            if batch.slots.free and self._admission.may_grow(seq):
                if self._budget <= 0 or self._awaits_slot:
                    return
                self._report.record("continued", seq)
                batch.resume(seq)
                state, adapter = self.checkpoints.unpark(seq), self._adapters.slot_of(seq)
                self._edits.starts.append(Start(seq.slot, list(seq.table), state, adapter))
                self.layers.resume(seq)
                self._advance(seq)

    def start_waiting(self) -> None:
        """Start waiting sequences in queue order, until the first one that cannot start.

        Cached prefixes take no budget, so the search for them has a bound of its own: the next plan continues."""
        searched = 0
        while self._budget > 0 and self._waiting and not self._batch.paused and not self._awaits_slot:
            head = self._isolation.first(self._adapters.startable(self._waiting))
            if head is None or head.sampled_in > self._batch.committed:  # a step in flight still samples its last token
                return
            blocks = head.known // self._pool.block_size
            if searched and searched + blocks > MAX_SEARCHED:
                return
            searched += blocks
            if self._batch.slots.free < 1 + len(head.siblings) or not self._admission.may_start(head):
                return
            self._start(head)

    def finish(self) -> StepPlan | None:
        """Return the plan and issue its step; None when there is nothing to compute."""
        edits, pool, swapping = self._edits, self._pool, self._swapping
        copies, table_edits = edits.table_edits()
        starts, slices, forks = edits.starts, edits.slices, edits.forks
        poison, pool.discarded = pool.discarded, []  # before edits.clear() frees the sources of this plan's copies
        edits.clear()
        if not slices and not self._batch.decoding and not swapping.planned:
            pool.discarded += poison
            return None
        prompt_tokens = sum(len(piece.token_ids) for piece in slices)
        drafting, drafts = self._drafts.planned
        step = self._batch.issue(
            IssuedPlan(
                self._decoding,
                prompt_tokens,
                jumps=self._forced.jumps,
                jump_tokens=self._forced.jump_tokens,
                swaps=swapping.planned,
                sealed=edits.take_sealed(),
                drafting=drafting,
                drafts=drafts,
            )
        )
        freed_slots, (swap_out, swap_in) = self._batch.slots.take_vacated(), swapping.take_copies()
        self._drafts.vacate(freed_slots)
        look_ahead = self._forced.costs.look_ahead(
            self._decoding + self._forced.jumps + drafting, bool(self._batch.prefilling)
        )
        return StepPlan(
            step,
            freed_slots,
            copies,
            starts,
            table_edits,
            slices,
            forks,
            poison,
            swap_out=swap_out,
            swap_in=swap_in,
            look_ahead=look_ahead,
            adapters=self._adapters.take_loads(),
            keep=self.checkpoints.issue(),
            guess=self._drafts.guess_in(self._decoding + drafting),
        )

    # ----------------------------------------------------------------------------------------------- one sequence

    def _attend(self, seq: Sequence) -> None:
        """End a decoding sequence that reaches its maximum length, else make its next KV position writable."""
        batch = self._batch
        seq.computed += self._step - seq.since
        seq.since = self._step
        if seq.computed + 1 == seq.limit:
            batch.remove(seq)
            seq.state = State.ENDING
            return
        index = seq.computed // self._pool.block_size
        self.layers.advance(seq, seq.computed)
        if index == len(seq.table):
            self.checkpoints.keep_answer(seq)
            if not self._admission.may_grow(seq):
                if not self.checkpoints.park(seq):
                    self._preemption.preempt(seq)
                    return
                self._report.totals.pauses += 1
                self._report.record("paused", seq)
                batch.pause(seq)
                return
            if not self._grow(seq, 1):
                return
        elif not self._make_private(seq, index):
            return
        batch.schedule(seq, self._step)

    def _make_private(self, seq: Sequence, index: int) -> bool:
        """Copy a block that other tables share, before the sequence writes to it (copy-on-write).

        False: the sequence itself was preempted because no block was free."""
        if not self._edits.is_shared(seq.table[index]):
            return True
        if not self._preemption.make_room(seq, 1):
            return False
        if self._edits.is_shared(seq.table[index]):  # a preemption may have ended the sharing
            self._edits.copy(seq, index)
            self._report.totals.copied_blocks += 1
        return True

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Append `count` blocks to a table.  False: the sequence itself was preempted because too few were free."""
        if count <= 0:
            return True
        if not self._preemption.make_room(seq, count):
            return False
        self._edits.grow(seq, count)
        return True

    def _start(self, seq: Sequence) -> None:
        """Move a waiting sequence into the batch with its cached or swapped blocks, and plan its first chunk."""
        self._waiting.remove(seq)
        totals, size = self._report.totals, self._pool.block_size
        hits = self._allocation.cached_prefix(seq)
        seq.table = self._allocation.start_table(seq, hits)
        if seq.host:
            totals.swapped_in_blocks += self._swapping.swap_in(seq)
            self._seal_computed(seq, len(hits) * size, seq.computed)
        else:
            seq.computed = len(hits) * size
            seq.prompt_logprobs = []
            totals.recomputed_tokens += max(0, seq.recompute_tokens - seq.computed)
            seq.recompute_tokens = 0
        if seq.started_before:
            self._report.record("resumed", seq, seq.known - seq.computed)
        else:
            seq.started_before = True
            seq.cached_tokens = seq.computed
            totals.prompt_tokens += seq.prompt_len
            totals.cached_prompt_tokens += seq.computed
            totals.blocks_cached_prompt_tokens += max(seq.computed, seq.junction)
            for member in (seq, *seq.siblings):
                self._admission.forecast.predict_length(member)
            self._report.record("started", seq, seq.computed)
        self._batch.admit(seq)
        state, adapter = self.checkpoints.begin(seq), self._adapters.take(seq)
        self.layers.begin(seq)
        self._edits.starts.append(Start(seq.slot, list(seq.table), state, adapter))
        self._advance(seq)

    def _advance(self, seq: Sequence) -> None:
        """Plan a slice of a sequence's known tokens that are not computed yet, at most a chunk, within the budget."""
        start, known, size = seq.computed, seq.known, self._pool.block_size
        count = min(known - start, self._budget, self._chunk_tokens)
        if count <= 0:
            return
        end = start + count
        self.layers.advance(seq, start)
        if start % size and not self._make_private(seq, start // size):
            return
        self._publish_moves(seq)
        if not self._grow(seq, -(-end // size) - len(seq.table)):
            return
        self._budget -= count
        sampling = seq.request.sampling
        targets = seq.tokens[start + 1 : end + 1] if sampling.prompt_logprobs >= 0 and known == seq.prompt_len else []
        group = self._groups.of(seq.request.id)
        candidates = group.candidate_count(seq) if end == known else 0
        sampler = sampler_of(seq) if end == known and not candidates else None
        top = max(0, sampling.prompt_logprobs) if targets else 0
        keep = self.checkpoints.keep(seq, start, end)
        slice_ = Slice(seq.slot, start, seq.tokens[start:end], sampler, targets, top, candidates, keep=keep)
        self._edits.slices.append(slice_)
        if seq.siblings or id(seq) not in self._edits.named:  # a group's first member marks all members as named
            self._edits.named.update(map(id, (*group.members(seq), *seq.siblings)))
        seq.computed = end
        self._seal_computed(seq, start, end)
        if sampler is not None:
            seq.unconfirmed = 0
            self._batch.prefilling.remove(seq)
            self._begin_decoding(seq, list(group.join(seq)))
        elif end == known and seq.siblings:
            for member in group.join(seq):
                self._publish_moves(member)
                self._advance(member)

    def _publish_moves(self, seq: Sequence) -> None:
        """Add the block-table entries that a re-fork of a group has changed to the plan."""
        fresh, entries = self._groups.of(seq.request.id).take_moves(seq)
        if fresh:
            self._edits.starts.append(Start(seq.slot, list(seq.table), adapter=self._adapters.slot_of(seq)))
        for index, block in entries:
            self._edits.set_entry(seq, index, block)
        if fresh or entries:
            self.layers.resume(seq)

    def _begin_decoding(self, seq: Sequence, siblings: list[Sequence]) -> None:
        """Let a sequence decode, now that its prompt is planned, and fork its siblings.

        All of them sample from the logits of this step."""
        for sibling in siblings:
            self.layers.fork(seq, sibling)
            self._edits.forks.append(Fork(sibling.slot, seq.slot, list(seq.table), sampler_of(sibling)))
            self._batch.begin_decoding(sibling, self._step + 1, forked=True)
        self._batch.begin_decoding(seq, self._step + 1, forked=bool(siblings))
        for member in (seq, *siblings):
            self._drafts.join(member)

    def _seal_computed(self, seq: Sequence, start: int, end: int) -> None:
        """Add the blocks that became full between tokens `start` and `end` to the prefix cache.

        The plan being built computes their last tokens."""
        size = self._pool.block_size
        for full in range(start // size + 1, end // size + 1):
            if (block := self._allocation.seal(seq, full * size)) is not None:
                self._edits.sealed.append(block)


def sampler_of(seq: Sequence, end: int | None = None) -> Sampler:
    """Build the sampling parameters of a sequence for sampling after its first `end` tokens; None: after all tokens."""
    sampling, end = seq.request.sampling, seq.known if end is None else end
    reads_history = (
        sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
        or sampling.grammar != ""
        or bool(sampling.bad_words)
    )
    return Sampler(
        sampling,
        seq.prompt_len,
        sorted(seq.stops) if end - seq.prompt_len < sampling.min_tokens else [],
        seq.tokens[:end] if reads_history else [],
        seq.index,
    )
