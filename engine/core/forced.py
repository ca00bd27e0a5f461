"""Forced tokens: tokens that are known before a step samples them, because a grammar allows no others (jump-forward).

A result may name tokens that must follow the sampled token (`StepResult.forced`).  The scheduler appends them at once.
So `known - computed` of a decoding sequence exceeds 1, and the next plan computes these tokens in one slice: a jump.

    tokens     0 ......... computed | t | f1 f2 f3         result of step 7: slot 3 sampled t, forced [f1 f2 f3]
    plan 8                          [t   f1 f2 f3] ──> samples the token after f3; four tokens in one step
    if plan 8 was issued before result 7:
    step 8                          [t] ──> samples f1     the mask allows no other token; f1 is known already
    plan 9                              [f1 f2 f3] ──> samples the token after f3

A jump is optional: a slot that does not jump samples the forced tokens one by one, because its mask allows only the
next forced token.  So a plan jumps only if no sequence is preempted for it, and jumps do not change the text.

Source, for compressed states of a grammar: "Fast JSON Decoding for Local LLMs with Compressed Finite State Machine"
(SGLang, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from quire.engine.core.blocks import AccountingError
from quire.engine.core.policy.jumps import JumpCosts
from quire.engine.core.report import SchedulerReport
from quire.engine.core.sequence import Sequence, State

# Minimum tokens of a jump, including the token sampled last.  A jump makes a decode step slower, so it must save two
# steps or more.  With the schemas of the study `structured`, SmolLM2-135M computed 5 answers of 96 tokens in 478 steps
# without jumps, and in 421, 430, 436, 463 steps with MIN_JUMP = 2, 3, 4, 6.
MIN_JUMP = 3


class ForcedTokens:
    """Appends forced tokens to their sequences, and lists the sequences that can jump."""

    def __init__(self, report: SchedulerReport, costs: JumpCosts) -> None:
        self._report = report
        self.costs = costs
        self.jumps = 0  # sequences that jump in the plan being built
        self.jump_tokens = 0  # tokens of the slices of these jumps
        self._ahead: dict[int, Sequence] = {}  # sequences with forced tokens that a plan may compute, by id

    def append(self, seq: Sequence, sampled: Tokens[int], forced: Tokens[int]) -> list[int]:
        """Append the tokens of a result that the sequence does not know yet.  Returns the appended tokens.

        `sampled`: the accepted drafts, and the sampled token after them.  `forced`: forced tokens that follow.

        Appending stops at the first stop token and at the sequence's limit.  Raises AccountingError if a token differs
        from the token that was forced at its position."""
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
        """Reset the jump counts for the next plan."""
        self.jumps = self.jump_tokens = 0

    def jumped(self, tokens: int) -> None:
        """Count one jump in this plan, of `tokens` forced tokens."""
        self.jumps += 1
        self.jump_tokens += tokens

    def ready(self, step: int) -> list[Sequence]:
        """Return the decoding sequences with at least MIN_JUMP tokens to compute in `step`, by `order`."""
        if not self._ahead:
            return []
        decoding = (seq for seq in self._ahead.values() if seq.state is State.DECODING)
        found = [seq for seq in decoding if seq.known - seq.computed_before(step) >= MIN_JUMP]
        self._ahead = {id(seq): seq for seq in found}
        return sorted(found, key=lambda seq: seq.order)
