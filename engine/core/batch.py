"""The batch: which sequences run, in which slots, and the steps that have been planned and committed.

The scheduler does not visit a decoding sequence until the sequence needs a block or reaches its maximum length.  It is
known in advance in which step this happens, and the calendar lists the sequence under this step.  So planning a steady
step takes O(sequences that changed).

    admit --> prefilling --last known token--> decoding --calendar--> a block, a pause, or the end
                  ^                               |
                  +----- resume ---- paused <-----+   keeps its blocks, gives up its slot
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
    """Counts of a step plan that the scheduler keeps until the step's result arrives."""

    decoding: int  # sequences that decode in this step
    prompt_tokens: int  # tokens of all slices: prompts, jumps and drafts
    jumps: int  # sequences that compute forced tokens in a slice
    jump_tokens: int  # tokens in the slices of jumps; `prompt_tokens` includes them
    swaps: bool  # the plan copies blocks to or from the host
    sealed: list[int]  # blocks that entered the prefix index before the step wrote them
    drafting: int = 0  # sequences that compute drafts
    drafts: int = 0  # draft tokens of all sequences


class Batch:
    """Owner of the slots, of the prefilling, decoding and paused sequences, and of the step numbers."""

    def __init__(self, max_seqs: int, block_size: int) -> None:
        self.slots = Slots(max_seqs)
        self.step = 0  # the last plan issued
        self.committed = 0  # the last step whose result arrived
        self.prefilling: list[Sequence] = []  # sequences in prefill, by `order`
        self.paused: list[Sequence] = []  # paused sequences, by `order`
        self.decoding = 0  # sequences that compute one token each step without being named in a plan
        self.reserved_blocks = 0  # blocks that static allocation would reserve for all started sequences
        self._block_size = block_size
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # the calendar: step -> decoding sequences
        self._issued: deque[IssuedPlan] = deque()
        self._departed: list[tuple[int, str]] = []  # (last step, request id) of ended sequences, while in flight

    @property
    def running(self) -> int:
        """Number of sequences that prefill or decode."""
        return self.decoding + len(self.prefilling)

    @property
    def steps_in_flight(self) -> int:
        """Number of steps in flight: plans issued whose results have not arrived."""
        return self.step - self.committed

    @property
    def verifying(self) -> bool:
        """Whether a step with drafts is in flight.  The next plan needs its result, for the sequences' lengths."""
        return bool(self._issued) and self._issued[-1].drafting > 0

    def issue(self, plan: IssuedPlan) -> int:
        """Record that the next plan is issued.  Returns its step number."""
        self.step += 1
        self._issued.append(plan)
        return self.step

    def commit(self, step: int) -> IssuedPlan:
        """Record that the result of `step` arrived and return its counts.

        Raises AccountingError when `step` is not the oldest step in flight."""
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
        """Start the prefill of a sequence.  Its siblings get slots now, for their fork at the end of the prompt."""
        seq.state = State.PREFILLING
        for member in (seq, *seq.siblings):
            self._assign_slot(member)
        insort(self.prefilling, seq, key=lambda s: s.order)

    def resume(self, seq: Sequence) -> None:
        """Give a slot to a paused sequence, which keeps its block table."""
        self.remove(seq)
        seq.state = State.PREFILLING
        self._assign_slot(seq)
        insort(self.prefilling, seq, key=lambda s: s.order)

    def join(self, seq: Sequence) -> None:
        """Start a member of a stepped group in the slot that it has; it computes its own tokens as a prefill."""
        seq.state = State.PREFILLING
        insort(self.prefilling, seq, key=lambda s: s.order)

    def begin_decoding(self, seq: Sequence, step: int, *, forked: bool) -> None:
        """Let the sequence compute one token per step from `step` on; `forked`: siblings share its last block."""
        seq.state = State.DECODING
        seq.since = step
        self.decoding += 1
        self.schedule(seq, step, now=forked)

    def jump(self, seq: Sequence, end: int, step: int) -> None:
        """Record that one slice of `step` computes the forced tokens up to `end`; decoding resumes in the next step."""
        seq.unconfirmed = seq.known - end
        seq.jumped_in = step
        seq.computed = end
        seq.since = step + 1
        self.schedule(seq, step + 1)

    def schedule(self, seq: Sequence, step: int, *, now: bool = False) -> None:
        """Enter a decoding sequence in the calendar, at the step in which its table is full or it reaches its limit."""
        full = step + len(seq.table) * self._block_size - seq.computed
        last = step + seq.limit - seq.computed - 1
        seq.due = step if now else min(full, last)
        self._due[seq.due].append(seq)

    def pop_due(self, step: int) -> list[Sequence]:
        """Return the calendar's sequences for `step`, by `order`.  The caller must skip those whose `due` has
        changed."""
        return sorted(self._due.pop(step, ()), key=lambda s: s.order)

    def pause(self, seq: Sequence) -> None:
        """Free the slot of a sequence that keeps its blocks.  Only its last sampled token and forced tokens are not
        computed yet."""
        self.remove(seq)
        seq.state = State.PAUSED
        self.reserved_blocks += seq.max_blocks(self._block_size)
        insort(self.paused, seq, key=lambda s: s.order)

    def remove(self, seq: Sequence) -> None:
        """Free the slot of a sequence, or remove it from the paused list.  Steps in flight still report its tokens."""
        if seq.state is State.PAUSED:
            self.paused.remove(seq)
            self.reserved_blocks -= seq.max_blocks(self._block_size)
        if seq.slot < 0:
            return
        self.reserved_blocks -= seq.max_blocks(self._block_size)
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
        """Remove a sequence that ends, and remember its request while steps in flight compute it."""
        if self.in_flight(seq):
            self._departed.append((self.step, seq.request.id))
        self.remove(seq)

    def _assign_slot(self, seq: Sequence) -> None:
        self.slots.assign(seq)
        self.reserved_blocks += seq.max_blocks(self._block_size)

    # -------------------------------------------------------------------------------------------------------- queries

    def holders(self) -> Iterator[Sequence]:
        """Iterate once over every sequence that holds blocks or starts in this plan.

        Siblings that have not forked yet are left out: they hold no blocks of their own."""
        for slot, seq in enumerate(self.slots.occupants):
            if seq is None or seq.state is State.WAITING:
                continue
            if seq.slot == slot or seq.state is State.ENDING:
                yield seq
        yield from self.paused

    def in_flight(self, seq: Sequence) -> bool:
        """Return whether a step in flight computes the sequence or samples its next token."""
        return (seq.slot >= 0 and seq.state is not State.WAITING) or seq.sampled_in > self.committed

    def departed(self) -> set[str]:
        """Return the ids of requests with ended sequences that a step in flight still computes."""
        return {request for _, request in self._departed}

    def promised_blocks(self) -> int:
        """Return the number of further blocks that the started prompts and their siblings need."""
        return sum(map(self.blocks_to_take, self.prefilling))

    def blocks_to_take(self, seq: Sequence) -> int:
        """Return the number of further blocks that one started prompt and its siblings need."""
        return -(-(seq.known + 1) // self._block_size) - len(seq.table) + seq.sibling_blocks

    def decoding_here(self) -> int:
        """Return the number of decoding sequences that began on this engine, not on an earlier one.  O(slots)."""
        occupants = self.slots.occupants
        return sum(seq is not None and seq.state is State.DECODING and not seq.reassigned for seq in occupants)

    def check(self, live: Iterable[Sequence]) -> None:
        """Raise AccountingError unless the counts agree with the states of all live sequences."""
        live = list(live)
        held = [seq for seq in live if seq.slot >= 0 or seq.state is State.PAUSED]
        reserved = sum(seq.max_blocks(self._block_size) for seq in held)
        if reserved != self.reserved_blocks:
            raise AccountingError(f"{reserved} blocks would be reserved, {self.reserved_blocks} are counted")
        decoding = sum(seq.state is State.DECODING for seq in live)
        if decoding != self.decoding:
            raise AccountingError(f"{decoding} sequences decode, {self.decoding} are counted")
        self.slots.check()
