"""Adapter slots: which LoRA adapters are loaded in the executor, and which waiting sequences can start with them.

    Generate.adapter ── is in a slot ──────────────────────> the sequence starts
                     ── a slot is free or unused ──────────> the plan that starts the sequence loads the adapter there
                     ── all slots are in use ──────────────> the sequence waits; sequences behind it start before it

An adapter is in use while a sequence in the batch or a preempted sequence has it, and is not replaced then.  Of the
unused adapters, the least recently used one is replaced.

A waiting sequence is overtaken at most PATIENCE times by sequences with other adapters.  Then the adapter with the
fewest sequences in the batch starts no further sequence, until the waiting sequence's adapter has its slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from quire.engine.core.batch import Batch
from quire.engine.core.sequence import Sequence
from quire.engine.core.waiting_queue import WaitingQueue

PATIENCE = 64  # starts with other adapters before a slot is emptied for a waiting sequence


class AdapterSlots:
    """Owns the adapter slots.  Methods take O(1) if no request has an adapter."""

    def __init__(self, count: int, batch: Batch, waiting: WaitingQueue) -> None:
        self.count = count
        self._batch, self._waiting = batch, waiting
        self._slots: dict[str, int] = {}  # adapter -> slot, least recently used first
        self._loads: list[tuple[int, str]] = []  # (slot, adapter) loads for the next plan
        self._overtaken: dict[str, int] = {}  # waiting adapter -> sequences with other adapters started meanwhile

    @property
    def resident(self) -> list[str]:
        """Names of the adapters in slots."""
        return list(self._slots)

    def slot_of(self, seq: Sequence) -> int:
        """Return the adapter slot of a started sequence; -1: the base model."""
        return self._slots[seq.request.adapter] if seq.request.adapter else -1

    def startable(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Return the waiting sequences, in order, whose adapter has a slot or can get one."""
        return self._startable(waiting) if self.count else waiting

    def take(self, seq: Sequence) -> int:
        """Return the adapter slot for a sequence that starts, and plan the load of its adapter; -1: the base model.

        `seq`: one of the sequences that `startable` returned."""
        adapter = seq.request.adapter
        if not adapter:
            return -1
        if (slot := self._slots.pop(adapter, None)) is None:
            slot = self._free_slot()
            self._loads.append((slot, adapter))
            self._overtaken.pop(adapter, None)
        self._slots[adapter] = slot  # the newest
        for other in self._overtaken:
            self._overtaken[other] += 1
        return slot

    def take_loads(self) -> list[tuple[int, str]]:
        """Return the (slot, adapter) loads for the plan, once."""
        loads, self._loads = self._loads, []
        return loads

    def forget(self) -> None:
        """Empty all slots after a failed step, so that each adapter is loaded again before it is used."""
        self._slots.clear()
        self._loads.clear()

    @property
    def blocked_tokens(self) -> int:
        """Known tokens of the sequences that wait for an adapter slot, as of the last plan.

        They use no prompt budget now, so the engine claims other requests in addition."""
        if not self._overtaken:
            return 0
        return sum(seq.queued_tokens for seq in self._waiting if seq.request.adapter in self._overtaken)

    def _startable(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        yielding = self._yielding()
        has_room: bool | None = None  # whether one more adapter fits
        for seq in waiting:
            adapter = seq.request.adapter
            if not adapter:
                yield seq
            elif adapter in self._slots:
                if adapter != yielding or seq.started_before:
                    yield seq
            else:
                if has_room is None:
                    has_room = len(self._slots) < self.count or self._victim() is not None
                if has_room:
                    yield seq
                else:
                    self._overtaken.setdefault(adapter, 0)

    def _in_use(self) -> Counter[str]:
        """Count the started sequences of each adapter in use.  O(started sequences)."""
        used = Counter(seq.request.adapter for seq in self._batch.holders())
        used.update(seq.request.adapter for seq in takewhile(lambda seq: seq.started_before, self._waiting))
        return used

    def _victim(self) -> str | None:
        """Return the adapter to replace; None: all adapters are in use."""
        used = self._in_use()
        loading = {adapter for _, adapter in self._loads}
        return next((one for one in self._slots if one not in used and one not in loading), None)

    def _free_slot(self) -> int:
        if len(self._slots) < self.count:
            taken = set(self._slots.values())
            return next(slot for slot in range(self.count) if slot not in taken)
        victim = self._victim()
        assert victim is not None
        return self._slots.pop(victim)

    def _yielding(self) -> str:
        """Return the adapter that starts no further sequence, so that a waiting adapter gets its slot; "": none."""
        overdue = [adapter for adapter, starts in self._overtaken.items() if starts >= PATIENCE]
        if not overdue:
            return ""
        wanted = {seq.request.adapter for seq in self._waiting}
        for adapter in self._overtaken.keys() - wanted:  # their requests have ended
            del self._overtaken[adapter]
        if wanted.isdisjoint(overdue) or len(self._slots) < self.count:
            return ""
        used = self._in_use()
        return min(self._slots, key=lambda adapter: used[adapter])
