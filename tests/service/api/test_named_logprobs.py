"""logprob_token_ids: asked for with log probabilities only, bounded, and shown as vLLM shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.engine.wire.messages import Sampling, TokenLogprob
from quire.service.api import api, fitting
from quire.service.api.fitting import EngineLimits
from quire.service.api.logprobs import Columns, LogprobFormat
from quire.service.api.valid_request import ValidRequest
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig

LIMITS = EngineLimits(512, 500, 16, 1000, frozenset([1]))
VOCABULARY = [b"", b"a", b"b", b"b", b"c"]
CONFIG = GatewayConfig(max_logprob_entries=100)


def parsed(*, chat: bool, **fields: Any) -> ValidRequest:
    needed = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    parse = api.parse_chat if chat else api.parse_completion
    return parse(json.dumps({**needed, **fields}).encode(), CONFIG, "tiny", 60.0)


def asking(*, chat: bool, **fields: Any) -> ValidRequest:
    return parsed(chat=chat, **{"logprobs": True if chat else 1, **fields})


@pytest.mark.parametrize("chat", [False, True])
def test_it_reaches_engines_each_token_once(chat: bool) -> None:
    sampling = asking(chat=chat, logprob_token_ids=[4, 2, 4, 9]).sampling
    assert (sampling.logprob_token_ids, sampling.alternatives) == ([4, 2, 9], 3)
    assert parsed(chat=chat, logprob_token_ids=[]).sampling == Sampling(seed=0)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"logprobs": None, "logprob_token_ids": [2]}, "invalid_value"),
        ({"logprob_token_ids": [2], "use_beam_search": True, "n": 2}, "unsupported"),
        ({"logprob_token_ids": list(range(129))}, "too_many"),
        ({"logprob_token_ids": ["x"]}, "invalid_type"),
    ],
)
def test_what_is_not_served_is_refused_by_name(chat: bool, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(Refusal) as refused:
        asking(chat=chat, **{"logprobs": True if chat else 0, **fields})
    assert (refused.value.status, refused.value.code) == (400, code)
    assert (refused.value.param or "").startswith("logprob_token_ids")


def test_token_ids_are_of_the_vocabulary_and_entries_are_bounded() -> None:
    for token in (-1, 500):
        with pytest.raises(Refusal) as refused:
            fitting.fit(asking(chat=False, logprob_token_ids=[token]), [[5]], LIMITS)
        assert (refused.value.code, refused.value.param) == ("invalid_token_id", "logprob_token_ids")
    valid = asking(chat=False, logprob_token_ids=list(range(1, 10)), max_tokens=10)
    assert fitting.bound_logprobs(valid, [[5]], [10], CONFIG) == [10]
    with pytest.raises(Refusal) as refused:
        fitting.bound_logprobs(valid, [[5]], [11], CONFIG)
    assert refused.value.code == "too_many_logprobs"


def test_a_chat_shows_the_chosen_token_and_then_these() -> None:
    form = LogprobFormat(asking(chat=True, logprob_token_ids=[4, 2]), VOCABULARY)
    [entry] = form.entries(Columns([1], [TokenLogprob(-0.5, [(4, -3.0), (2, -9e9)])], []))["content"]
    assert (entry["token"], entry["logprob"]) == ("a", -0.5)
    assert [(one["token"], one["logprob"]) for one in entry["top_logprobs"]] == [("a", -0.5), ("c", -3), ("b", -9999.0)]
    [entry] = form.entries(Columns([4], [TokenLogprob(-3.0, [(4, -3.0), (2, -4.0)])], []))["content"]
    assert [one["token"] for one in entry["top_logprobs"]] == ["c", "b"]


def test_a_completion_shows_them_by_name_and_by_id() -> None:
    found = TokenLogprob(-0.5, [(2, -3.0), (3, -4.0)])
    columns = Columns([1], [found], [0])
    form = LogprobFormat(asking(chat=False, logprob_token_ids=[2, 3]), VOCABULARY)
    assert form.entries(columns)["top_logprobs"] == [{"a": -0.5, "b": -3.0}]  # two tokens of one name
    valid = asking(chat=False, logprob_token_ids=[2, 3], return_tokens_as_token_ids=True)
    assert LogprobFormat(valid, VOCABULARY).entries(columns)["top_logprobs"] == [
        {"token_id:1": -0.5, "token_id:2": -3.0, "token_id:3": -4.0}
    ]
