"""OpenAI's `prediction`: text that a client expects in its answer, such as the file that the model is to edit.

    {"type": "content", "content": TEXT}                                     one string
    {"type": "content", "content": [{"type": "text", "text": TEXT}, ...]}    or parts, which are joined

Engines take drafts for speculative decoding from this text (engine/core/drafts.py).  The answer does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quire.engine.wire.messages import Sampling
from quire.service.common.limits import shown
from quire.service.common.refusal import bad_request

# Fields that are refused together with a prediction -> values that are allowed.  OpenAI also refuses `n` above 1 and
# penalties.  Engines compute no drafts for requests with the other fields (engine/core/drafts.py::may_draft).
NOT_WITH: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "min_tokens": (0,),
}


class PredictedPart(msgspec.Struct):
    """A part of a predicted text."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct):
    """Value of the field `prediction` of a chat."""

    type: Literal["content"]
    content: str | list[PredictedPart]


def predicted_text(given: Prediction | None, fields: Mapping[str, Any]) -> str | None:
    """Return the text of a body's prediction; None without one.

    `fields`: all fields of the body.  Raises Refusal for fields that are not supported together with a prediction."""
    if given is None:
        return None
    for name, neutral in NOT_WITH.items():
        if (value := fields[name]) is not None and value not in neutral:
            limit = str(shown(neutral[0])).lower() if isinstance(neutral[0], int) else "absent"
            raise bad_request("unsupported", f"{name}: not served with prediction", name, limit, shown(value))
    return given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)


def drafts_nothing(sampling: Sampling) -> bool:
    """Return whether the model's default repetition penalty disables speculative decoding for this request."""
    return sampling.repetition_penalty != 1
