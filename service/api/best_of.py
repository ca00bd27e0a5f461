"""`best_of`: computes `best_of` choices and returns the `n` most probable ones.

Choices are ranked by the mean log probability of their tokens, as at OpenAI.  So engines report log probabilities even
if the request has no `logprobs`; they are removed after the ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.service.common.limits import LIMITS, shown
from quire.service.common.refusal import bad_request
from quire.service.config import GatewayConfig

NAME = "best_of"


def computed(best_of: int | None, n: int, *, stream: bool, config: GatewayConfig) -> int:
    """Return the number of choices to compute per prompt.  Raises Refusal."""
    if best_of is None or best_of == n:
        return n
    most = int(LIMITS["n"].bounds(config)[1])
    if not n <= best_of <= most:
        limit = f">= {n} and <= {most}"
        message = f"best_of: must be {limit}, n and the maximum of choices per prompt, got {shown(best_of)}"
        raise bad_request("invalid_value", message, NAME, limit, shown(best_of))
    if stream:
        raise bad_request("unsupported", "best_of: only a value equal to n with stream=true", NAME, n, best_of)
    return best_of


def with_scores(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a ValidRequest, with log probabilities enabled if `best_of` needs them for ranking."""
    sampling = fields["sampling"]
    if not fields["best"] or sampling.logprobs >= 0:
        return fields
    return {**fields, "sampling": msgspec.structs.replace(sampling, logprobs=0), "hide_logprobs": True}


def likeliest(answers: Sequence[Sequence[float]], count: int) -> list[int]:
    """Return the indices of the `count` answers with the highest mean log probability, the highest first.

    `answers`: log probabilities of each answer's tokens.  If two means are equal, the earlier answer is first; empty
    answers are last."""
    means = [sum(one) / len(one) if one else float("-inf") for one in answers]
    return sorted(range(len(means)), key=lambda at: -means[at])[:count]
