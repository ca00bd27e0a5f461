"""Adapter slots: which LoRA adapters the executor has, and which sequence may start with one.

    Generate.adapter ── slot has it ───────────────────────> starts
                     ── a slot is free, or its adapter is unused ─> loaded there by the plan that starts it
                     ── all are in use ─> waits; sequences behind it start before it

An adapter in use is never replaced: one of a sequence in the batch, or of a preempted sequence.  Among the others the
one that started a sequence longest ago goes.

A sequence that waits is overtaken at most PATIENCE times by sequences with other adapters.  Then one adapter, that with
the fewest sequences in the batch, starts no more until its slot has gone to the one that waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from quire.engine.core.batch import Batch
from quire.engine.core.sequence import Sequence
from quire.engine.core.waiting_queue import WaitingQueue

PATIENCE = 64  # starts of other adapters


class AdapterSlots:
    """Owner of the adapter slots.  Without adapters no method costs anything."""

    def __init__(self, count: int, batch: Batch, waiting: WaitingQueue) -> None:
        self.count = count
        self._batch, self._waiting = batch, waiting
        self._slots: dict[str, int] = {}  # adapter -> its slot, the one that started a sequence longest ago first
        self._loads: list[tuple[int, str]] = []  # (slot, adapter) loads for the next plan
        self._overtaken: dict[str, int] = {}  # adapter that waits -> starts of others since

    @property
    def resident(self) -> list[str]:
        """Adapters in slots."""
        return list(self._slots)

    def slot_of(self, seq: Sequence) -> int:
        """Return the slot of a started sequence's adapter; -1: the base model."""
        return self._slots[seq.request.adapter] if seq.request.adapter else -1

    def startable(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Return those of the waiting sequences, in order, that wait for no adapter slot."""
        return self._startable(waiting) if self.count else waiting

    def take(self, seq: Sequence) -> int:
        """Return the adapter slot of a sequence that starts, one of `startable`; -1: the base model."""
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
        """Return the loads that an issued plan makes, once."""
        loads, self._loads = self._loads, []
        return loads

    def forget(self) -> None:
        """The executor may have lost what its slots held: each adapter is loaded again before it is used."""
        self._slots.clear()
        self._loads.clear()

    @property
    def blocked_tokens(self) -> int:
        """Return the tokens of sequences that wait for a slot, as of the last plan: no reason to claim less."""
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
        """Return the adapters that must stay, with their sequences.  O(sequences that have started)."""
        used = Counter(seq.request.adapter for seq in self._batch.holders())
        used.update(seq.request.adapter for seq in takewhile(lambda seq: seq.started_before, self._waiting))
        return used

    def _victim(self) -> str | None:
        """Return the adapter to replace; None: all are in use."""
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
        """Return the adapter that starts no more, for one that was overtaken too often; "": none."""
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
