"""Beam search: request fields -> `Beams`, or a Refusal for fields that are not supported with it.

use_beam_search, n, beam_width (num_beams, best_of), length_penalty, early_stopping
    |
    |--beams_of-----> Beams, or None for a request without beam search
    |--fit_beams----> maximum output tokens with which the search fits an engine's KV cache
    v
Generate.beams ──> engine/core/beams.py ──> Finish.score of each answer, the best one first
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from quire.engine.wire.messages import Beams, EngineLoad, Sampling
from quire.service.api.sampling_fields import SamplingFields
from quire.service.api.tools import ChatOptions
from quire.service.common.limits import LIMITS, shown
from quire.service.common.refusal import Refusal, bad_request, check, limit_refusal
from quire.service.config import GatewayConfig

WIDTHS = ("beam_width", "num_beams", "best_of")  # names of the width in Quire, transformers and older vLLM releases
EARLY = ("true", "false", "never")


class BeamFields(SamplingFields, kw_only=True):
    """Fields for sampling and for beam search.  Null means absent."""

    use_beam_search: bool | None = None
    beam_width: int | None = None
    num_beams: int | None = None
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None


# Field that needs `use_beam_search` -> values that are accepted without it.
ONLY_WITH: dict[str, tuple[object, ...]] = {
    "beam_width": (1,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
}
# Field that is not supported with `use_beam_search` -> values that are accepted with it, since they have no effect.
NOT_WITH: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stop": ([],),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logprobs": (0,),
    "top_logprobs": (0,),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
    "thinking_token_budget": (),
}
REASONS = {
    "stream": "the answers are known only when the search ends",
    "stop": "a text that is cut has another score; stop_token_ids are served",
    "logprobs": "those of the answer's tokens are served, alternatives are not",
    "top_logprobs": "log probabilities of the answer's tokens are served, alternatives are not",
}


def beams_of(body: BeamFields, n: int, config: GatewayConfig) -> Beams | None:
    """Return the beam search that a body requests; None without one.  Raises Refusal.

    The width is the value of one of WIDTHS, or else `n`."""
    fields = msgspec.structs.asdict(body)
    if not body.use_beam_search:
        for name, neutral in ONLY_WITH.items():
            if fields[name] is not None and fields[name] not in neutral:
                message, limit = f"{name}: only with use_beam_search=true", f"{neutral[0]} without it".lower()
                raise bad_request("invalid_value", message, name, limit, shown(fields[name]))
        return None
    _refuse_fields(fields)
    given = {name: fields[name] for name in WIDTHS if fields[name] is not None}
    name, width = next(iter(given.items()), ("n", n))
    if not 1 <= width <= LIMITS["beam_width"].bounds(config)[1]:
        limit = LIMITS["beam_width"].text(config)
        message = f"{name}: the width of a beam search must be {limit}, got {shown(width)}"
        raise limit_refusal("beam_width", message, cast(Any, limit), param=name, given=width)
    for other, value in given.items():
        if value != width:
            message = f"{other}: must be equal to {name}, {width}, got {shown(value)}"
            raise bad_request("invalid_value", message, other, width, shown(value))
    if n > width:
        raise bad_request("invalid_value", f"n: at most the width of the beam search, {width}, got {n}", "n", width, n)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    check("length_penalty", penalty, config)
    return Beams(width, penalty, _early(body.early_stopping))


def _early(given: bool | str | None) -> bool | Literal["never"]:
    """Parse `early_stopping`.  Raises Refusal."""
    if given is None or isinstance(given, bool):
        return bool(given)
    if given not in EARLY:
        limit, value = ", ".join(EARLY), str(shown(given))
        message = f"early_stopping: must be one of {limit}, got {value!r}"
        raise bad_request("invalid_value", message, "early_stopping", limit, value)
    return "never" if given == "never" else given == "true"


def _refuse_fields(fields: Mapping[str, Any]) -> None:
    """Raise Refusal for the first field that is not supported with beam search."""
    for name, neutral in NOT_WITH.items():
        value = fields.get(name)
        if value is None or value in neutral or (value is True and name == "logprobs"):
            continue
        raise unserved(name, REASONS.get(name, ""), value)
    if fields["max_tokens"] == 0:
        raise unserved("max_tokens", "a prompt is scored without it", 0)


def unserved(name: str, why: str = "", given: Any = None) -> Refusal:
    """Return the refusal of a field that is not supported with `use_beam_search`."""
    message = f"{name}: not served with use_beam_search" + (f": {why}" if why else "")
    neutral = [value for value in NOT_WITH.get(name, ()) if isinstance(value, int)]
    limit = " or ".join(str(value).lower() for value in neutral) or "absent"
    value = given if isinstance(given, int | float | str) else None
    return bad_request("unsupported", message, name, limit, value)


def searched(sampling: Sampling, constrained: str) -> Sampling:
    """Return the sampling parameters of a beam search, which does not sample.  Raises Refusal.

    `constrained`: name of a field for structured output, or "".  The model's defaults of temperature, top_p and so on
    are dropped.  A default repetition penalty is refused, since it would change the scores."""
    if constrained:
        raise unserved(constrained)
    if sampling.repetition_penalty != 1:
        raise unserved("repetition_penalty", "the model's default is another", sampling.repetition_penalty)
    return msgspec.structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def refuse_calls(options: ChatOptions) -> None:
    """Raise Refusal for a chat whose tools need a grammar."""
    if options.demanded:
        raise unserved("tool_choice", "a call cannot be demanded of a beam")
    if options.strict:
        raise unserved(options.strict, "arguments of a beam's calls cannot be held to their schema")


def fit_beams(
    beams: Beams, prompts: list[int], rooms: list[int], *, blocks: int, size: int, bounded: bool
) -> list[int]:
    """Return the maximum output tokens per prompt with which the search fits an engine's KV cache.  Raises Refusal.

    `prompts`: tokens of each prompt.  `rooms`: for each prompt, maximum output tokens without beam search.  `blocks`:
    blocks of the pool.  `size`: tokens per block.  `bounded`: the client chose the maximum, so it is not reduced."""
    found = []
    for tokens, room in zip(prompts, rooms, strict=True):
        fits = beams.longest(tokens, blocks, size) - tokens
        if fits < (room if bounded else 1):
            need = beams.max_blocks(tokens, tokens + (room if bounded else 1), size) * size
            message = (
                f"beam_width: {beams.width} beams of {tokens} prompt tokens and {room if bounded else 1} more take "
                f"{need} tokens of the KV cache, which holds {blocks * size}"
            )
            raise limit_refusal("pool", message, blocks * size, param="beam_width", given=need)
        found.append(min(room, fits))
    return found


def require_beams(beams: Beams | None, engines: list[EngineLoad]) -> None:
    """Raise Refusal unless every engine that may claim the request can search with this beam width.

    400 if no engine can, so that a retry would not help; 503 if some can (during an upgrade)."""
    if beams is None:
        return
    claiming = [load for load in engines if not load.draining] or engines
    widest = max((load.beams for load in claiming), default=0)
    unable = sum(load.beams < beams.width for load in claiming)
    if claiming and widest < beams.width:
        if not widest:
            message = "use_beam_search: beam search is not served by the engines of this deployment"
            raise bad_request("unsupported", message, "use_beam_search")
        message = f"beam_width: the engines serve at most {widest} beams (--max-seqs), got {beams.width}"
        raise bad_request("invalid_value", message, "beam_width", widest, beams.width)
    if unable:
        message = f"beam_width: {unable} of {len(claiming)} engines cannot search with {beams.width} beams"
        raise Refusal(503, "no_engine", message, param="beam_width", retry_after_s=5.0)


def queue_extra(beams: Beams | None, block_size: int) -> int:
    """Return the tokens added to a prompt's queue cost: one block for each beam after the first.

    The beams take these blocks when the search begins."""
    return 0 if beams is None else (beams.width - 1) * block_size


def score(value: float) -> float:
    """Return a score that is finite, as JSON requires."""
    return value if math.isfinite(value) else math.copysign(9999.0, value)
