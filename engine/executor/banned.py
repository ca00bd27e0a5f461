"""Banned sequences (`Sampling.bad_words`): finds the tokens of each slot that would complete a banned sequence.

The last token of a sequence is forbidden while the last generated tokens are its other tokens.
Only generated tokens count, as in transformers' NoBadWordsLogitsProcessor and in vLLM: a sequence that begins in the
prompt is not detected.  A sequence of one token is forbidden everywhere.

The sequences of a request are a trie that is read backwards from the last generated token:

    banned [5 6 7], [9 6 8], [6 4]        root ─6─> {4} ─5─> {7}        generated .. 5 6: forbidden 4 and 7
                                                      └─9─> {8}         generated .. 9 6: forbidden 4 and 8

So a step takes one look-up per token of the longest match, however many sequences are banned.  A slot's only state is
its last few tokens, so a sequence that resumes after a preemption or on another engine gets the same masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from quire.engine.core.plan import Sampler
from quire.engine.executor.followers import Follower, following

KEPT = 64  # number of cached tries, most recently used; all sequences of one request share a trie
EVERY = np.int32(-1)  # word of a mask that allows all of its 32 tokens


@dataclass(slots=True)
class Trie:
    """A node of the trie: the banned sequences whose tokens before the last one end like the generated text."""

    last: list[int] = field(default_factory=list)  # tokens each of which would complete a banned sequence
    before: dict[int, Trie] = field(default_factory=dict)  # token before the matched ones -> node that matches it, too
    depth: int = 0  # only in the root: maximum tokens that a look-up reads

    def forbidden(self, generated: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a sequence after `generated`; the list may contain a token twice."""
        node, found = self, list(self.last)
        for token in reversed(generated):
            if (further := node.before.get(token)) is None:
                break
            node = further
            found += node.last
        return found


@lru_cache(maxsize=KEPT)
def trie_of(sequences: tuple[tuple[int, ...], ...]) -> Trie:
    """Return the trie of these sequences, which have at least one token each.  Takes 0.7 us per token."""
    root = Trie(depth=max(map(len, sequences)) - 1)
    for *beginning, last in sequences:
        node = root
        for token in reversed(beginning):
            node = node.before.setdefault(token, Trie())
        node.last.append(last)
    return root


@dataclass(slots=True)
class _Row:
    """The banned sequences of one request, and its last generated tokens."""

    trie: Trie
    tail: list[int]  # the last `trie.depth` tokens, or all if there are fewer
    cleared: list[int] = field(default_factory=list)  # words of the slot's mask that are not EVERY
    fresh: bool = True  # the slot's mask has not been written yet
    error: str = ""  # followers.Row.error: the other masks report that no token is left

    def take(self, token: int) -> None:
        self.tail.append(token)
        if len(self.tail) > self.trie.depth:
            del self.tail[0]

    def find_forced(self) -> Sequence[int]:
        """Return no tokens: banned sequences forbid tokens, but force none."""
        return ()


class BannedSequences:
    """The banned sequences of all slots.  Not thread-safe: one executor owns it."""

    def __init__(self, mask: npt.NDArray[np.int32]) -> None:
        """`mask` [max_seqs, ceil(V / 32)]: what sampling reads, bit t % 32 of word t / 32: token t is allowed."""
        self._mask = mask
        self._rows: dict[int, _Row] = {}

    @property
    def active(self) -> bool:
        """Whether any slot has banned sequences.  Constant time."""
        return bool(self._rows)

    def reset(self) -> None:
        """Free every slot."""
        self._rows.clear()

    def assign(self, slot: int, sampler: Sampler) -> None:
        """Give a slot the banned sequences of the sequence that starts in it, and that sequence's last generated
        tokens."""
        trie = trie_of(tuple(map(tuple, sampler.sampling.bad_words)))
        generated = sampler.history[sampler.prompt_len :]
        self._rows[slot] = _Row(trie, generated[max(0, len(generated) - trie.depth) :])

    def free(self, slot: int) -> None:
        """Clear the banned sequences of a slot; harmless when it has none."""
        self._rows.pop(slot, None)

    def followers(self, slots: Iterable[int]) -> list[Follower]:
        """Return the followers among a step's slots that have banned sequences now."""
        return following(self._rows, slots)

    def fill(self, written: Iterable[int]) -> list[int]:
        """Forbid in each slot's mask the tokens that would complete one of its sequences.  Returns the changed slots.

        `written`: slots whose grammar has just written their mask for this step.  In other masks all other tokens are
        allowed."""
        changed = []
        written = set(written)
        for slot, row in self._rows.items():
            mask, forbidden = self._mask[slot], row.trie.forbidden(row.tail)
            if slot not in written:
                if row.fresh:
                    mask[:] = EVERY
                elif row.cleared:
                    mask[row.cleared] = EVERY
                elif not forbidden:
                    continue
            row.fresh, row.cleared = False, [token // 32 for token in forbidden]
            if forbidden:
                tokens = np.array(forbidden)
                bits = np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32))
                np.bitwise_and.at(mask.view(np.uint32), tokens // 32, ~bits)
            changed.append(slot)
        return changed
