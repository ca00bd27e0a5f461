"""Limits on the prompt tokens of one request."""

from __future__ import annotations

from quire.service.api.fitting import too_long, too_many_tokens
from quire.service.api.valid_request import ValidRequest

UNLIMITED = 2**62


class TokenBudget:
    """Prompt tokens that a request may still have.  `check` and `spend` are called for each of its prompts."""

    def __init__(self, valid: ValidRequest | None, longest: int, total: int) -> None:
        """`longest`: the model's context length in tokens.  `total`: maximum tokens of all prompts together."""
        self._longest, self._total, self._left = longest, total, total
        self._cut = valid is None or valid.truncate_prompt_tokens is not None  # prompts will be cut to fit
        bounded = valid is not None and not valid.at_most
        self._asked = max(1, valid.max_tokens or 0) if valid and bounded else 1  # tokens needed for the answer
        self._param = "messages" if valid is not None and valid.chat else "prompt"

    def check(self, tokens: int, *, least: bool = False) -> None:
        """Raise Refusal if a prompt of `tokens` tokens does not fit.  `least`: `tokens` is a lower bound."""
        if not self._cut and tokens + self._asked > self._longest:
            raise too_long(self._param, self._longest, tokens, self._asked, least=least)
        if tokens > self._left:
            given = self._total - self._left + tokens
            raise too_many_tokens(self._param, self._total, given, least=least)

    def spend(self, tokens: int) -> None:
        """Subtract one prompt from the budget.  Raises Refusal."""
        self.check(tokens)
        self._left -= tokens
