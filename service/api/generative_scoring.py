"""POST /generative_scoring, as in vLLM: the probability of a label token after a query and each of several items.

    ScoringBody --parse--> ValidRequest with one prompt per item --as a completion--> deltas of one token
    deltas --ScoreFormat--> {"object": "list", "data": [{"index": 0, "object": "score", "score": 0.7}, ...]}

`scoring.py` makes the prompts and computes scores.  `NAMES` translates field names in refusals to this format's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.engine.wire.messages import Sampling
from quire.service.api import api, decoding
from quire.service.api.bodies import CompletionBody
from quire.service.api.format import Format
from quire.service.api.scoring import Scoring
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Pacer, Turns
from quire.service.common.refusal import bad_request, check, renaming
from quire.service.config import GatewayConfig
from quire.service.output.choice_delta import ChoiceDelta

PREFIX = "generative-scoring-"  # prefix of the answer's id
# Field of a completion (regex) -> field of this format, for refusals.
NAMES = ((r"prompt|n(?=$|\W)", "items"), (r"logprob_token_ids|logprobs", "label_token_ids"))


class ScoringBody(msgspec.Struct, kw_only=True):
    """Body of POST /generative_scoring."""

    query: str | list[int]
    items: list[str | list[int]]
    label_token_ids: list[int]
    model: str | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | str | None = None
    request_id: str | None = None  # no effect, as in a completion
    user: str | None = None  # no effect
    # Extensions of Quire, as in a completion.
    timeout: float | None = None
    cache_salt: str | None = None


def parse(
    body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: api.Served = api.NO_DEFAULTS
) -> ValidRequest:
    """Parse the body of POST /generative_scoring.  Raises Refusal."""
    asked, unknown = decoding.decode_all(body, ScoringBody, "scoring", config)
    for name, counted in (("items", "item"), ("label_token_ids", "token id")):
        if not getattr(asked, name):
            raise bad_request("invalid_value", f"{name}: must not be empty, at least 1 {counted}", name, ">= 1", 0)
    if len(set(map(type, asked.items))) > 1:
        raise bad_request("invalid_type", "items: texts and lists of token ids cannot be mixed", "items")
    with renaming(NAMES):
        for key, count in (("prompt", len(asked.items)), ("logprob_token_ids", len(asked.label_token_ids))):
            check(key, count, config)
        fields = {name: getattr(asked, name) for name in ("model", "priority", "timeout", "cache_salt")}
        same = CompletionBody(prompt=[*asked.items], max_tokens=1, **fields)
        valid = api.completion_request(same, config, served_name, timeout_s, served, unknown)
    scoring = Scoring(
        query=asked.query,
        labels=list(dict.fromkeys(asked.label_token_ids)),
        softmax=asked.apply_softmax is not False,
        item_first=bool(asked.item_first),
    )
    return msgspec.structs.replace(
        valid,
        prompts=asked.items,
        sampling=Sampling(temperature=0.0, ignore_eos=True, logprobs=0, logprob_token_ids=scoring.labels),
        special=asked.add_special_tokens is not False,
        scoring=scoring,
    )


class ScoreFormat(Format):
    """Writes the non-streaming answer to POST /generative_scoring."""

    async def whole(self, deltas: list[ChoiceDelta], pacer: Pacer) -> list[bytes]:
        """Return the body, with the score of each item in order."""
        scoring = self._valid.scoring
        assert scoring is not None
        turns, scores = Turns(pacer), dict[int, float]()
        for delta in deltas:
            await turns.pause()
            self._usage.add(delta)
            for found in delta.logprobs or ():
                scores[delta.choice] = scoring.score(dict(found.top))
        answer: dict[str, Any] = {
            "id": PREFIX + self.request_id.partition("-")[2],
            "object": "list",
            "created": self._created,
            "model": self._model,
            "data": [{"index": at, "object": "score", "score": scores[at]} for at in sorted(scores)],
            "usage": self._usage.fields(),
        }
        return [msgspec.json.encode(answer)]
