"""Followers: the sequences whose masks depend on a step's tokens.

They are recorded when the step is launched, because a slot may have another sequence when the step is collected.

a step is launched: following(rows, slots) ─ keeps the present state of each slot ─> collected: advance(tokens)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Row(Protocol):
    """The constraint state of one sequence: which token it may sample next."""

    error: str  # why no token is allowed; empty: some token is

    def take(self, token: int) -> None:
        """Advance by the token that the sequence has sampled."""

    def find_forced(self) -> Sequence[int]:
        """Return the tokens that must follow the last token, without tokens that were returned before."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A sequence with constraint state, in one step."""

    at: int  # index of its slot among the slots that sample in the step
    slot: int
    row: Row


def following(rows: Mapping[int, Row], slots: Iterable[int]) -> list[Follower]:
    """Return a follower for each slot of a step that has a row now."""
    return [Follower(at, slot, rows[slot]) for at, slot in enumerate(slots) if slot in rows] if rows else []


def advance(followers: Iterable[Follower], tokens: Sequence[int]) -> dict[int, str]:
    """Advance each row by the token that its sequence sampled.  Returns slot -> why no token was allowed, if so.

    `tokens`: the tokens of all slots that sampled in the step, in the step's order."""
    for follower in followers:
        follower.row.take(tokens[follower.at])
    return {follower.slot: follower.row.error for follower in followers if follower.row.error}


def forced_tokens(followers: Iterable[Follower]) -> dict[int, list[int]]:
    """Return slot -> tokens that must follow the sampled token, for slots with such tokens.  Call `advance` before."""
    found = ((follower.slot, follower.row.find_forced()) for follower in followers)
    return {slot: list(forced) for slot, forced in found if forced}
