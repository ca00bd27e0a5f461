"""Token masks: which tokens a slot may sample next, if its request has a grammar, banned sequences, or both.

    grammars.fill: writes the masks of its slots ─> banned.fill: forbids tokens in the masks of its slots ─> sampling

A request may have both: a token must be allowed by its grammar, and must not complete a banned sequence.  If no token
is left, the request ends with an error.  A mask is a function of the tokens generated so far.  A slot without grammar
and banned sequences has no mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quire.engine.core.plan import Sampler
from quire.engine.executor.banned import BannedSequences
from quire.engine.executor.followers import Follower
from quire.engine.executor.grammars import Grammars
from quire.engine.wire.messages import Sampling

# Error text for clients if no token may be sampled.
IMPOSSIBLE = (
    "no token is possible here: the grammar, allowed_token_ids, bad_words, min_tokens with its masked stop tokens, "
    "logit_bias and the penalties leave none"
)


class Constraints:
    """Writes the masks that sampling reads.  Not thread-safe: one executor owns it.

    Calls per step: `assign` and `free`, perhaps `begin_fill`, `fill`, `followers`, then `advance` of the followers."""

    def __init__(self, mask: npt.NDArray[np.int32], vocab_size: int, grammars: Grammars | None = None) -> None:
        """`mask` [max_seqs, ceil(V / 32)]: row = slot; `grammars` (None: no request has one) writes to it, too."""
        self.grammars = grammars
        self._mask, self._vocab_size = mask, vocab_size
        self._banned = BannedSequences(mask)

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        """Return whether a request needs a mask."""
        return bool(sampling.grammar or sampling.bad_words)

    @property
    def active(self) -> bool:
        """Whether any slot has a mask.  Constant time."""
        return self._banned.active or (self.grammars is not None and self.grammars.active)

    def reset(self) -> None:
        """Free every slot."""
        self._banned.reset()
        if self.grammars is not None:
            self.grammars.reset()

    def assign(self, slot: int, sampler: Sampler) -> None:
        """Replace the constraints of a slot by those of its sequence, advanced by the tokens generated before.

        Raises RuntimeError for a grammar if grammars are not supported: the scheduler refuses such a request."""
        self._banned.free(slot)
        if sampler.sampling.bad_words:
            self._banned.assign(slot, sampler)
        if sampler.sampling.grammar:
            if self.grammars is None:
                raise RuntimeError("a request with a grammar reached an executor that cannot follow one")
            self.grammars.assign(slot, sampler)
        elif self.grammars is not None:
            self.grammars.free(slot)

    def free(self, slot: int) -> None:
        """Clear the constraints of a slot; harmless when it has none."""
        self._banned.free(slot)
        if self.grammars is not None:
            self.grammars.free(slot)

    def begin_fill(self) -> None:
        """Start writing masks on another thread, if enough slots have grammars.  Call `fill` next, and nothing else."""
        if self.grammars is not None and self.grammars.active:
            self.grammars.begin_fill()

    def fill(self) -> set[int]:
        """Write the masks.  All tokens before this step must be known.  Returns the slots whose mask has changed."""
        written: set[int] = set()
        if self.grammars is not None and self.grammars.active:
            self.grammars.fill()
            written.update(self.grammars.slots)
        if self._banned.active:
            written.update(self._banned.fill(written))
        return written

    def draft_masks(self, drafts: Mapping[int, Sequence[int]]) -> npt.NDArray[np.int32] | None:
        """Return the mask after each of R drafts, [R, words], in the order of `drafts`; None if none of these slots has
        a grammar.  Call `fill` before.  Sequences with bad_words have no drafts (core/drafts.py)."""
        if self.grammars is None or not any(slot in self.grammars.slots for slot in drafts):
            return None
        masks = np.zeros((sum(map(len, drafts.values())), self._mask.shape[1]), np.int32)
        first = 0
        for slot, tokens in drafts.items():
            self.grammars.fill_behind(slot, tokens, masks[first : first + len(tokens)])
            first += len(tokens)
        return masks

    def followers(self, slots: Sequence[int]) -> list[Follower]:
        """Return the followers of a step's slots.  A slot with both a grammar and banned sequences has two."""
        if not self.active:
            return []
        grammars = [] if self.grammars is None else self.grammars.followers(slots)
        return grammars + self._banned.followers(slots)

    def choose(self, slot: int, wanted: int) -> int:
        """Return `wanted` if the mask of a slot allows it, else the first token that the mask allows, or -1 if it
        allows none."""
        bits = np.unpackbits(self._mask[slot].view(np.uint8), bitorder="little")[: self._vocab_size]
        if bits[wanted]:
            return wanted
        return int(bits.argmax()) if bits.any() else -1
