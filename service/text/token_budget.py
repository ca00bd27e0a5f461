"""How many tokens a request may have."""

from __future__ import annotations

from quire.service.api.fitting import too_long, too_many_tokens
from quire.service.api.valid_request import ValidRequest

UNLIMITED = 2**62


class TokenBudget:
    """How many tokens a request may still have.  Each of its prompts passes `check` and `spend`."""

    def __init__(self, valid: ValidRequest | None, longest: int, total: int) -> None:
        """`longest`: tokens of the model's context.  `total`: tokens of all prompts together."""
        self._longest, self._total, self._left = longest, total, total
        self._cut = valid is None or valid.truncate_prompt_tokens is not None  # one prompt may be longer than a context
        bounded = valid is not None and not valid.at_most
        self._asked = max(1, valid.max_tokens or 0) if valid and bounded else 1  # tokens that the answer needs
        self._param = "messages" if valid is not None and valid.chat else "prompt"

    def check(self, tokens: int, *, least: bool = False) -> None:
        """Raise Refusal when a prompt of `tokens` tokens (`least`: or more) does not fit."""
        if not self._cut and tokens + self._asked > self._longest:
            raise too_long(self._param, self._longest, tokens, self._asked, least=least)
        if tokens > self._left:
            given = self._total - self._left + tokens
            raise too_many_tokens(self._param, self._total, given, least=least)

    def spend(self, tokens: int) -> None:
        """Subtract one prompt from the budget.  Raises Refusal."""
        self.check(tokens)
        self._left -= tokens
