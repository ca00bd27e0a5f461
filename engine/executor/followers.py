"""Which sequences a step's tokens concern, when slots may change hands before the step is collected.

a step is launched: following(rows, slots) ─ keeps the state of who has each slot now ─> collected: advance(tokens)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Row(Protocol):
    """What decides which token one sequence may sample next."""

    error: str  # why it allows none; empty: it does

    def take(self, token: int) -> None:
        """Take in the token that the sequence has sampled."""

    def find_forced(self) -> Sequence[int]:
        """Return the tokens that must follow the one taken in last, except those that were returned before."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A sequence with such a row, in one step."""

    at: int  # its place among the slots that sample in the step
    slot: int
    row: Row


def following(rows: Mapping[int, Row], slots: Iterable[int]) -> list[Follower]:
    """Return the slots of a step that are in the batch now."""
    return [Follower(at, slot, rows[slot]) for at, slot in enumerate(slots) if slot in rows] if rows else []


def advance(followers: Iterable[Follower], tokens: Sequence[int]) -> dict[int, str]:
    """Give each row the token that its sequence sampled.  Returns why slots allowed no token, by slot.

    `tokens`: of all slots that sampled in the step, in their order."""
    for follower in followers:
        follower.row.take(tokens[follower.at])
    return {follower.slot: follower.row.error for follower in followers if follower.row.error}


def forced_tokens(followers: Iterable[Follower]) -> dict[int, list[int]]:
    """Find the tokens that must follow what each slot sampled, if there are some.  `advance` comes before."""
    found = ((follower.slot, follower.row.find_forced()) for follower in followers)
    return {slot: list(forced) for slot, forced in found if forced}
