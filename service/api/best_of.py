"""A choice among sampled answers: `best_of` choices are computed, the `n` most probable are returned.

The likelihood of an answer is the mean log probability of its tokens, as at OpenAI.  Engines report log probabilities
for it, so an answer without `logprobs` holds them until it has been ranked.
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
    """Return how many choices to compute; `n` of them are returned.  Raises Refusal."""
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
    """Return the fields of a ValidRequest; those of a choice among answers ask the engine for log probabilities."""
    sampling = fields["sampling"]
    if not fields["best"] or sampling.logprobs >= 0:
        return fields
    return {**fields, "sampling": msgspec.structs.replace(sampling, logprobs=0), "hide_logprobs": True}


def likeliest(answers: Sequence[Sequence[float]], count: int) -> list[int]:
    """Return the places of the `count` answers with the highest mean, the highest first; of equal ones the first.

    `answers`: the log probabilities of each answer's tokens.  An answer without tokens is last."""
    means = [sum(one) / len(one) if one else float("-inf") for one in answers]
    return sorted(range(len(means)), key=lambda at: -means[at])[:count]
