"""The batch: which sequences run, in which slots, and the steps that have been planned and committed.

A decoding sequence is not looked at until it needs a block or reaches its length.  Both steps are known in advance, so
the sequence is entered in a calendar under the earlier one.  So a steady step takes O(sequences that changed).

    admit --> prefilling --last known token--> decoding --calendar--> a block, a pause, or the end
                  ^                               |
                  +----- resume ---- paused <-----+   no slot, but every block
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.engine.core.blocks import AccountingError
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.slots import Slots


class IssuedPlan(NamedTuple):
    """What the scheduler remembers of a plan until its result arrives."""

    decoding: int  # sequences that decode in it
    prompt_tokens: int  # prompt tokens of all slices
    jumps: int  # sequences that compute forced tokens in a slice
    jump_tokens: int  # jump-forward tokens among them
    swaps: bool  # it copies blocks to or from the host
    sealed: list[int]  # blocks that entered the prefix index before they were written
    drafting: int = 0  # sequences that compute drafts
    drafts: int = 0  # tokens that these compute behind their last known ones


class Batch:
    """Owner of the slots, of the prefilling, decoding and paused sequences, and of the step numbers."""

    def __init__(self, max_seqs: int, block_size: int) -> None:
        self.slots = Slots(max_seqs)
        self.step = 0  # the last plan issued
        self.committed = 0  # the last step whose result arrived
        self.prefilling: list[Sequence] = []  # sequences in prefill, by rank
        self.paused: list[Sequence] = []  # paused sequences, by rank
        self.decoding = 0  # sequences that compute one token each step without being named in a plan
        self.reserved_blocks = 0  # what static allocation would hold for all of these
        self._block_size = block_size
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # the calendar: step -> decoding sequences
        self._issued: deque[IssuedPlan] = deque()
        self._departed: list[tuple[int, str]] = []  # last steps of ended sequences, while in flight; their requests

    @property
    def running(self) -> int:
        """Sequences with a slot that compute: those that prefill and those that decode."""
        return self.decoding + len(self.prefilling)

    @property
    def late(self) -> int:
        """Steps in flight: how many plans are ahead of the last result."""
        return self.step - self.committed

    @property
    def verifying(self) -> bool:
        """Whether a step with drafts is in flight.  Lengths are not known before its result, so it is the last one."""
        return bool(self._issued) and self._issued[-1].drafting > 0

    def issue(self, plan: IssuedPlan) -> int:
        """Record that the next plan is issued.  Returns its step number."""
        self.step += 1
        self._issued.append(plan)
        return self.step

    def commit(self, step: int) -> IssuedPlan:
        """Record that the result of `step` arrived.  Raises AccountingError when it is not the oldest step in
        flight."""
        if step != self.committed + 1:
            raise AccountingError(f"result of step {step} after step {self.committed}")
        self.committed = step
        if self._departed:
            self._departed = [entry for entry in self._departed if entry[0] > step]
        return self._issued.popleft()

    def abandon_steps(self) -> list[int]:
        """Give up every step in flight and free every slot.  Returns the blocks that those steps had sealed."""
        sealed = [block for plan in self._issued for block in plan.sealed]
        self._issued.clear()
        self._departed.clear()
        self.committed = self.step
        self.slots.reset()
        return sealed

    # ------------------------------------------------------------------------------------------ sequences in and out

    def admit(self, seq: Sequence) -> None:
        """Start the prefill of a sequence; its siblings get slots at once, for the fork at the end of the prompt."""
        seq.state = State.PREFILLING
        for member in (seq, *seq.siblings):
            self._assign_slot(member)
        insort(self.prefilling, seq, key=lambda s: s.rank)

    def resume(self, seq: Sequence) -> None:
        """Give a slot to a paused sequence; it keeps its table."""
        self.remove(seq)
        seq.state = State.PREFILLING
        self._assign_slot(seq)
        insort(self.prefilling, seq, key=lambda s: s.rank)

    def join(self, seq: Sequence) -> None:
        """Let a sibling that has a slot compute tokens of its own."""
        seq.state = State.PREFILLING
        insort(self.prefilling, seq, key=lambda s: s.rank)

    def begin_decoding(self, seq: Sequence, step: int, *, forked: bool) -> None:
        """From `step` on the sequence computes one token each step; `forked`: it shares its last block."""
        seq.state = State.DECODING
        seq.since = step
        self.decoding += 1
        self.schedule(seq, step, now=forked)

    def jump(self, seq: Sequence, end: int, step: int) -> None:
        """Let a decoding sequence compute all tokens before `end` in `step`, and decode on from the next step."""
        seq.unconfirmed = seq.known - end
        seq.jumped_in = step
        seq.computed = end
        seq.since = step + 1
        self.schedule(seq, step + 1)

    def schedule(self, seq: Sequence, step: int, *, now: bool = False) -> None:
        """Enter the next step that needs the scheduler: its table is full, or its last token has been sampled."""
        full = step + len(seq.table) * self._block_size - seq.computed
        last = step + seq.limit - seq.computed - 1
        seq.due = step if now else min(full, last)
        self._due[seq.due].append(seq)

    def pop_due(self, step: int) -> list[Sequence]:
        """Return the sequences in the calendar for `step`, by rank.  Compare `due` again before using each one."""
        return sorted(self._due.pop(step, ()), key=lambda s: s.rank)

    def pause(self, seq: Sequence) -> None:
        """Take the slot, leave the blocks.  All known tokens are computed but the one sampled last and forced ones."""
        self.remove(seq)
        seq.state = State.PAUSED
        self.reserved_blocks += seq.greatest_blocks(self._block_size)
        insort(self.paused, seq, key=lambda s: s.rank)

    def remove(self, seq: Sequence) -> None:
        """Take the slot, or the place among the paused ones.  Steps in flight still report tokens for `seq`."""
        if seq.state is State.PAUSED:
            self.paused.remove(seq)
            self.reserved_blocks -= seq.greatest_blocks(self._block_size)
        if seq.slot < 0:
            return
        self.reserved_blocks -= seq.greatest_blocks(self._block_size)
        if seq.state is State.WAITING:  # a sibling that has not forked yet
            self.slots.withdraw(seq)
        else:
            self.slots.vacate(seq, self.step)
        if seq.state is State.PREFILLING:
            self.prefilling.remove(seq)
            for sibling in seq.siblings:
                self.remove(sibling)
        elif seq.state is State.DECODING:
            seq.computed = seq.computed_before(self.step + 1)
            seq.sampled_in = self.step
            seq.due = seq.drafts = 0
            self.decoding -= 1

    def depart(self, seq: Sequence) -> None:
        """Take the slot of a sequence that ends, for whatever reason, and remember that steps in flight compute it."""
        if self.in_flight(seq):
            self._departed.append((self.step, seq.request.id))
        self.remove(seq)

    def _assign_slot(self, seq: Sequence) -> None:
        self.slots.assign(seq)
        self.reserved_blocks += seq.greatest_blocks(self._block_size)

    # -------------------------------------------------------------------------------------------------------- queries

    def holders(self) -> Iterator[Sequence]:
        """Iterate over every sequence that holds blocks, or is about to.  A leader stands for siblings that have yet to
        fork.

        A vacated slot that still reports for its sequence counts only if that sequence has no other slot."""
        for slot, seq in enumerate(self.slots.occupants):
            if seq is None or seq.state is State.WAITING:
                continue
            if seq.slot == slot or seq.state is State.ENDING:
                yield seq
        yield from self.paused

    def in_flight(self, seq: Sequence) -> bool:
        """Return whether a step without a result computes the sequence, or samples its next token."""
        return (seq.slot >= 0 and seq.state is not State.WAITING) or seq.sampled_in > self.committed

    def departed(self) -> set[str]:
        """Return the requests of ended sequences that a step without a result computes."""
        return {request for _, request in self._departed}

    def promised_blocks(self) -> int:
        """Blocks that started prompts have yet to take."""
        return sum(map(self.blocks_to_take, self.prefilling))

    def blocks_to_take(self, seq: Sequence) -> int:
        """Blocks that the prompt of one started sequence has yet to take."""
        return -(-(seq.known + 1) // self._block_size) - len(seq.table) + seq.sibling_blocks

    def decoding_here(self) -> int:
        """Decoding sequences that began on this engine: all except the reassigned ones.  O(slots)."""
        occupants = self.slots.occupants
        return sum(seq is not None and seq.state is State.DECODING and not seq.reassigned for seq in occupants)

    def check(self, live: Iterable[Sequence]) -> None:
        """Raise AccountingError unless the counts agree with the states of all live sequences."""
        live = list(live)
        held = [seq for seq in live if seq.slot >= 0 or seq.state is State.PAUSED]
        reserved = sum(seq.greatest_blocks(self._block_size) for seq in held)
        if reserved != self.reserved_blocks:
            raise AccountingError(f"{reserved} blocks would be reserved, {self.reserved_blocks} are counted")
        decoding = sum(seq.state is State.DECODING for seq in live)
        if decoding != self.decoding:
            raise AccountingError(f"{decoding} sequences decode, {self.decoding} are counted")
        self.slots.check()
