"""Forced tokens: tokens that are known before a step samples them, because a grammar allows no others (jump-forward).

A result may name tokens that must follow the sampled one (`StepResult.forced`).  They join the known tokens at once.
So `known - computed` of a decoding sequence exceeds 1, and the next plan computes all of them in one slice: a jump.

    tokens     0 ......... computed | t | f1 f2 f3         result of step 7: slot 3 sampled t, forced [f1 f2 f3]
    plan 8                          [t   f1 f2 f3] ──> samples what follows f3; four tokens in one step
    plan 8 was issued already:
    step 8                          [t] ──> samples f1     the mask allows nothing else: nothing is appended
    plan 9                              [f1 f2 f3] ──> samples what follows f3

A jump is never needed.  A slot that is left alone samples the forced tokens one by one, because its mask allows only
the next one.  So a plan jumps only where that takes no block from another sequence, and the text does not depend on it.

The method, on compressed states of a grammar: "Fast JSON Decoding for Local LLMs with Compressed Finite State Machine"
(SGLang, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from quire.engine.core.blocks import AccountingError
from quire.engine.core.policy.jumps import JumpCosts
from quire.engine.core.report import SchedulerReport
from quire.engine.core.sequence import Sequence, State

# Fewest tokens of a jump, the one sampled last included.  A jump turns a decode step into one with a slice, so it has
# to save two steps.  5 answers of 96 tokens by SmolLM2-135M, of the schemas of `python -m quire.engine.tools
# structured`, took 478 steps without jumps, and 421, 430, 436 and 463 with a FEWEST of 2, 3, 4 and 6.
FEWEST = 3


class ForcedTokens:
    """Appends forced tokens to their sequences, and knows which sequences have some to compute."""

    def __init__(self, report: SchedulerReport, costs: JumpCosts) -> None:
        self._report = report
        self.costs = costs
        self.jumps = 0  # sequences that jump in the plan in the making
        self.jump_tokens = 0  # tokens of their slices
        self._ahead: dict[int, Sequence] = {}  # sequences with forced tokens that a plan may compute, by id

    def append(self, seq: Sequence, sampled: Tokens[int], forced: Tokens[int]) -> list[int]:
        """Take a result of a sequence: append what it adds to the known tokens.  Returns these tokens.

        `sampled`: the token that a step sampled, behind the drafts that it accepted.

        They end at the first stop token and at the sequence's limit.  Raises AccountingError if a token is not the one
        that was forced at its position."""
        tokens, fresh = seq.tokens, list[int]()
        first = len(tokens) - seq.unconfirmed
        for at, token in enumerate((*sampled, *forced), first):
            if at < len(tokens):
                if tokens[at] != token:
                    raise AccountingError(f"{seq.request.id}: token {token} at {at}, where {tokens[at]} was forced")
                continue
            tokens.append(token)
            fresh.append(token)
            if token in seq.stops or len(tokens) == seq.limit:
                break
        self._report.totals.forced_tokens += max(0, len(fresh) - max(0, len(sampled) - seq.unconfirmed))
        seq.unconfirmed = max(0, len(tokens) - first - len(sampled))
        if seq.unconfirmed:
            self._ahead[id(seq)] = seq
        return fresh

    def begin_plan(self) -> None:
        """Count the jumps of the next plan."""
        self.jumps = self.jump_tokens = 0

    def jumped(self, tokens: int) -> None:
        """A sequence of the plan jumps over known tokens, which are `tokens` to compute."""
        self.jumps += 1
        self.jump_tokens += tokens

    def ready(self, step: int) -> list[Sequence]:
        """Return the decoding sequences that have enough to compute for a jump in `step`, by rank."""
        if not self._ahead:
            return []
        decoding = (seq for seq in self._ahead.values() if seq.state is State.DECODING)
        found = [seq for seq in decoding if seq.known - seq.computed_before(step) >= FEWEST]
        self._ahead = {id(seq): seq for seq in found}
        return sorted(found, key=lambda seq: seq.rank)
