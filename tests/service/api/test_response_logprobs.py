"""Log probabilities of `/v1/responses`: they join to the text of each message, complete and streamed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseTextDeltaEvent

from quire.engine.wire.messages import TokenLogprob
from quire.service.api.openai_responses.response_logprobs import ResponseLogprobs
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.content_scores import Score
from quire.service.text.tokenizer import Tokenizer
from tests.service.api.test_api import chat
from tests.service.api.test_responses import ASK, folded, post, streamed
from tests.service.api.test_tools import model, says
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
TEXT = (
    "<think>\nThey ask 🙂.\n</think>\n\nI look, café 🙂.\n"
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\nNow wait.'
)
INCLUDE = {"include": ["message.output_text.logprobs"]}


def texts_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for item in response["output"] if item["type"] == "message" for part in item["content"]]


def joined(entries: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


@pytest.mark.parametrize(("fields", "alternatives"), [(INCLUDE, 0), ({**INCLUDE, "top_logprobs": 2}, 2)])
@pytest.mark.parametrize("burst", [1, 9])
async def test_entries_join_to_the_text(
    serve: Serve,
    engine: EngineMaker,
    tools_tokenizer: Tokenizer,
    fields: dict[str, Any],
    alternatives: int,
    burst: int,
) -> None:
    served = await serve(tools_tokenizer)
    body = {**ASK, "tools": [TOOL], **fields}
    async with model(engine, says(tools_tokenizer, TEXT)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        fake.burst = burst
        status, whole = await post(served.session, body)
        found = await streamed(served.session, body)
    assert status == 200, whole
    Response.model_validate(whole)
    assert whole["top_logprobs"] == alternatives
    texts = texts_of(whole)
    assert texts[0]["text"] == "I look, café 🙂."
    assert texts[0]["logprobs"]
    for part in texts:
        assert joined(part["logprobs"]) == part["text"]
        assert all(len(entry["top_logprobs"]) == alternatives for entry in part["logprobs"])
    last = folded(found)
    assert texts_of(last) == texts
    deltas: dict[int, list[Any]] = {}
    for event in found:
        if event["type"] == "response.output_text.delta":
            ResponseTextDeltaEvent.model_validate(event)
            deltas.setdefault(event["output_index"], []).extend(event["logprobs"])
    assert list(deltas.values()) == [part["logprobs"] for part in texts]


async def test_without_being_asked_there_are_none(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer
) -> None:
    served = await serve(tools_tokenizer)
    async with model(engine, says(tools_tokenizer, "No.")) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        _, plain = await post(served.session, ASK)
        _, stored = await post(served.session, {**ASK, **INCLUDE})
        async with served.session.get(f"/v1/responses/{stored['id']}") as response:
            again = await response.json()
        asked = [one.sampling.logprobs for one in fake.seen]
    assert [part["logprobs"] for part in texts_of(plain)] == [[]]
    assert asked == [-1, 0]
    assert again == stored


def entries(parts: list[bytes]) -> ChoiceDelta:
    at = TokenLogprob(-1.0, [])
    return ChoiceDelta(0, "", [1] * len(parts), content=[Score(1, at, part) for part in parts])


@given(
    st.lists(st.text("ab🙂é", min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
    st.booleans(),
)
def test_each_entry_joins_its_block_however_texts_and_tokens_are_cut(
    texts: list[str], sizes: list[int], late: bool
) -> None:
    """Tokens end with their block, where characters end, too.  `late`: all entries come after all texts."""
    scores = ResponseLogprobs(chat(logprobs=True), [])
    pieces = []
    for text in texts:
        data, at = text.encode(), 0
        parts: list[bytes] = []
        while at < len(data):
            parts.append(data[at : at + sizes[len(parts) % 40]])
            at += len(parts[-1])
        pieces.append(entries(parts))
    if not late:
        for piece in pieces:
            scores.add(piece)
    given_entries = [scores.grow(at, text) for at, text in enumerate(texts)]
    if late:
        for piece in pieces:
            scores.add(piece)
        scores.end()
    else:
        assert given_entries == [scores.of(at) for at in range(len(texts))]
    for at, text in enumerate(texts):
        assert joined([msgspec.json.decode(entry) for entry in scores.of(at)]) == text
