"""Drafters for tests: what they guess is right, wrong, or right up to some place, as the test says."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.core.plan import Draft
from quire.engine.core.sequence import Sequence
from quire.engine.wire.messages import Generate

Guess = Callable[[int, list[int]], list[int]]  # slot, what its sequence knows -> drafts


class AllDrafts:
    """A policy that computes all drafts that fit into a step."""

    def __init__(self) -> None:
        self.learnt: list[tuple[int, int]] = []  # (computed, accepted)

    def choose(self, drafts: list[tuple[Sequence, Draft]], seqs: int, most: int) -> list[int]:
        counts = []
        for _, draft in drafts:
            counts.append(min(len(draft.tokens), most))
            most -= counts[-1]
        return counts

    def pays(self, drafts: list[tuple[Sequence, Draft]], seqs: int, most: int) -> bool:
        return most > 0

    def expected(self, seq: Sequence, draft: Draft) -> float:
        return len(draft.tokens)

    def min_match(self, seqs: int) -> int:
        return 2

    def learn(self, seq: Sequence, draft: Draft, computed: int, accepted: int) -> None:
        self.learnt.append((computed, accepted))

    def record(self, seconds: float, seqs: int, tokens: int, accepted: int, idle_s: float) -> None:
        pass

    def forget(self, request: Generate) -> None:
        pass


class GuessingDrafter:
    """Follows the tokens of slots as a drafter does, and asks a function for drafts."""

    def __init__(self, guess: Guess) -> None:
        self.guess = guess
        self.known: dict[int, list[int]] = {}  # by slot
        self.owners: dict[int, str] = {}
        self.kept: list[tuple[str, list[int]]] = []  # (owner, tokens) of complete answers
        self.changed: set[int] = set()
        self.predicted: dict[int, list[int]] = {}
        self.source = 0  # index into DRAFT_SOURCES

    def begin(self, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]) -> None:
        self.known[slot], self.owners[slot], self.predicted[slot] = list(tokens), owner, predicted
        self.changed.add(slot)

    def extend(self, slot: int, tokens: list[int]) -> None:
        assert tokens[: len(self.known[slot])] == self.known[slot], "the drafter follows other tokens"
        self.known[slot] = list(tokens)
        self.changed.add(slot)

    def find(self, slots: list[int], tokens: list[int], min_match: int) -> list[Draft]:
        for slot, token in zip(slots, tokens, strict=True):
            if slot in self.known:
                self.known[slot].append(token)
                self.changed.add(slot)
        changed, self.changed = sorted(self.changed & self.known.keys()), set()
        found = [(slot, self.guess(slot, self.known[slot])) for slot in changed]
        return [Draft(slot, tokens, 4, self.source) for slot, tokens in found if tokens]

    def end(self, slot: int, *, keep: bool) -> None:
        known, owner = self.known.pop(slot), self.owners.pop(slot)
        if keep:
            self.kept.append((owner, known))

    def close(self) -> None:
        self.known.clear()
