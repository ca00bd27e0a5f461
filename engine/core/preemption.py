"""Preemption: chooses the sequence that gives up its blocks when the pool is full, and drops or swaps its KV cache."""

from __future__ import annotations

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import BlockPool
from quire.engine.core.groups import Groups
from quire.engine.core.plan_edits import PlanEdits
from quire.engine.core.policy.fairness import PREEMPTIBLE, Fairness
from quire.engine.core.report import SchedulerReport
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.swapping import Swapping
from quire.engine.core.waiting_queue import WaitingQueue


class Preemption:
    """Frees all blocks and the slot of a running sequence, and puts the sequence back into the queue."""

    def __init__(
        self,
        pool: BlockPool,
        batch: Batch,
        waiting: WaitingQueue,
        swapping: Swapping,
        fairness: Fairness,
        edits: PlanEdits,
        report: SchedulerReport,
        groups: Groups,
    ) -> None:
        self._pool, self._batch, self._waiting, self._swapping = pool, batch, waiting, swapping
        self._fairness, self._edits, self._report, self._groups = fairness, edits, report, groups

    def make_room(self, seq: Sequence, count: int) -> bool:
        """Preempt sequences until `count` blocks are available.  Returns False if `seq` cannot have them: it was itself
        preempted, or its group is in this plan already and has to wait for the next one.

        The victim is the last sequence by `order`: the newest one of the lowest priority.  If several tenants have
        requests, sequences of tenants that hold their share or more are preempted first.  The newest sequence has the
        fewest tokens to recompute.  Sequences are planned and resumed in the same order, so a preempted sequence can
        never preempt the sequence that displaced it."""
        while self._pool.available < count:
            holders = [s for s in self._batch.holders() if s.state in PREEMPTIBLE and id(s) not in self._edits.named]
            if self._fairness.contend:
                self._fairness.sum_holdings()
                over_share = self._fairness.over_share
                holders = [s for s in holders if s.request.tenant in over_share] or holders
            victim = max(holders, key=lambda s: s.order, default=None)
            if victim is None or (id(seq) in self._edits.named and victim.order < seq.order):
                return False
            self.preempt(victim)
            if seq.state not in PREEMPTIBLE:
                return False
        return True

    def preempt(self, seq: Sequence, *, swap: bool = True) -> None:
        """Free all blocks and the slot of a sequence and of its group; the known tokens stay.

        The KV cache is copied to host memory first (swap), or computed again later (recompute)."""
        totals, group = self._report.totals, self._groups.of(seq.request.id)
        totals.preemptions += 1
        self._report.record("preempted", group.members(seq)[0])
        if not group.swappable:
            self.requeue(seq, seq.computed)
            return
        self._batch.remove(seq)
        if swap and self._swapping.pays(seq):
            # If this plan would copy a shared block for the sequence, the source block is copied to the host instead.
            totals.swap_preemptions += 1
            totals.swapped_out_blocks += self._swapping.swap_out(seq, self._edits.copies_of(seq))
        else:
            seq.recompute_tokens = seq.computed
            self._swapping.free_all_blocks(seq)
        self._edits.drop(seq)
        self._waiting.add(seq)

    def requeue(self, seq: Sequence, recompute_tokens: int) -> None:
        """Free the slots and blocks of all members of a sequence's group, and put its leader into the queue."""
        group = self._groups.of(seq.request.id)
        members = group.disband(seq)
        for member in members:
            self._batch.remove(member)
            self._swapping.free_all_blocks(member)
            self._edits.drop(member)
            member.state = State.WAITING
        group.gather(members)
        members[0].recompute_tokens = recompute_tokens
        self._waiting.add(members[0])

    def preempt_for_fairness(self, seq: Sequence) -> None:
        """Preempt a sequence so that another tenant's sequence can start; at most once in a sequence's life."""
        for member in self._groups.of(seq.request.id).members(seq):
            member.preempted_for_fairness = True
        self._report.totals.yields += 1
        self.preempt(seq, swap=False)  # the newest sequences have few tokens to recompute
