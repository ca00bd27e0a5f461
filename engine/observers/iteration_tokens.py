"""Tokens per iteration as vLLM counts them: of each step that gave output, whole prompts with their first token."""

from __future__ import annotations

from quire.engine.common import histograms
from quire.engine.common.histograms import Tally


class IterationTokens:
    """Follows the counts of prompts and outputs.  A step without output adds to the next one that has some."""

    def __init__(self) -> None:
        self.tokens = Tally(histograms.TOKENS)
        self._prompts, self._outputs = 0, 0  # tokens counted so far

    def observe(self, prompts: int, outputs: int) -> None:
        """Take over the totals after a turn: tokens of prompts whose first token is there, and output tokens."""
        if outputs > self._outputs:
            self.tokens.add(prompts - self._prompts + outputs - self._outputs)
            self._prompts, self._outputs = prompts, outputs
