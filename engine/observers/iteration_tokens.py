"""Tokens per iteration as vLLM counts them: a prompt counts completely in the step that samples its first token."""

from __future__ import annotations

from quire.engine.common import histograms
from quire.engine.common.histograms import Tally


class IterationTokens:
    """Histogram of tokens per step, derived from running totals.  Steps without output count in the next one."""

    def __init__(self) -> None:
        self.tokens = Tally(histograms.TOKENS)
        self._prompts, self._outputs = 0, 0  # totals at the last counted step

    def observe(self, prompts: int, outputs: int) -> None:
        """Record the totals after a turn.

        `prompts`: tokens of prompts whose first output token was sampled.  `outputs`: output tokens."""
        if outputs > self._outputs:
            self.tokens.add(prompts - self._prompts + outputs - self._outputs)
            self._prompts, self._outputs = prompts, outputs
