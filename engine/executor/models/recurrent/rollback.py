"""Rolls recurrent states back to the last accepted draft (speculative decoding).

A slice computes a slot's last token t and its drafts d1 .. dk.  Its layers update the slot's state in place, and copy
it after each token but the last, as they do for the checkpoints of a prompt:

    tokens     t      d1      d2      d3
    states     | A    | B     | C     live
    accepted   0: A   1: B    2: C    3: nothing to restore

Once the step has sampled, the copy after the last accepted draft becomes the slot's state.  Nothing is computed again.
The next step may overwrite the copies, because it is planned only when the result of a step with drafts has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quire.engine.core.plan import Slice, StepPlan


class Rollback:
    """Assigns the states to which the slices of one step can roll back."""

    def __init__(self, slots: int, checkpoints: int, places: int) -> None:
        """`places`: states to roll back to, after the live states and the checkpoints; the maximum drafts of a step."""
        self.places = places
        self._slots, self._checkpoints = slots, checkpoints
        self._first: dict[int, tuple[int, int]] = {}  # by slot: first state to roll back to, and number of drafts

    def prepare(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the copies of states that its slices with drafts need.

        Raises ValueError if it has more drafts than places."""
        self._first.clear()
        drafts = sum(piece.drafts for piece in plan.slices)
        if drafts > self.places:
            raise ValueError(f"{drafts} drafts in a step, at most {self.places} can be rolled back")
        return msgspec.structs.replace(plan, slices=[*map(self._kept, plan.slices)]) if drafts else plan

    def _kept(self, piece: Slice) -> Slice:
        if not piece.drafts:
            return piece
        first = self._checkpoints + sum(drafts for _, drafts in self._first.values())
        self._first[piece.slot] = first, piece.drafts
        last_known = piece.start + len(piece.token_ids) - piece.drafts
        return msgspec.structs.replace(piece, keep=[(last_known + at, first + at) for at in range(piece.drafts)])

    def copies(self, accepted: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return the (from place, to place) copies that restore the states of slots with refused drafts.

        accepted: number of accepted drafts, by slot."""
        found = [(slot, *self._first[slot], count) for slot, count in accepted.items()]
        return [(self._slots + first + count, slot) for slot, first, drafts, count in found if count < drafts]
