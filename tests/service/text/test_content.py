"""What a client takes for the answer: stop strings end it, and log probabilities are of its tokens alone."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.engine.wire.messages import Delta, Finish, Generate, TokenLogprob
from quire.engine.wire.token_log import LoggedOutput
from quire.service.api import api
from quire.service.api.valid_request import ValidRequest
from quire.service.config import GatewayConfig
from quire.service.delivery.mailbox import Backlog, Mailbox
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.regions import Reading
from quire.service.text.stop_strings import with_stop_tokens
from quire.service.text.text_stream import _read, stream_of
from quire.service.text.tokenizer import Tokenizer
from tests.matrix import examples
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
OPEN = Reading("<think>\n", calls=True)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def asking(reading: Reading | None, **fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    valid = api.parse_chat(json.dumps(body).encode(), GatewayConfig(), "m", 600.0)
    return msgspec.structs.replace(valid, reading=reading)


def pieces_of(
    tokenizer: Tokenizer, valid: ValidRequest, tokens: list[int], cuts: list[int], had: int = 0
) -> list[ChoiceDelta]:
    """Pieces of an answer that ends with an EOS token, cut at `cuts`; a client that resumes has the first `had`."""
    scores = [TokenLogprob(-float(at), []) for at in range(len(tokens))] if valid.sampling.logprobs >= 0 else None
    stream, mailbox, found = stream_of(valid, tokenizer), Mailbox(0, Backlog(2**20)), list[ChoiceDelta]()
    finish = Finish("stop", stop_token=1)
    if had:
        mailbox.resume(LoggedOutput(tokens[:had], None, scores[:had] if scores else None), had)
    edges = [had, *sorted({cut for cut in cuts if had < cut < len(tokens)}), len(tokens)]
    for first, end in itertools.pairwise(edges):
        last = finish if end == len(tokens) else None
        mailbox.merge(Delta("x", first, tokens[first:end], last, logprobs=scores[first:end] if scores else None))
        found.append(_read(mailbox.take(), mailbox, stream, valid, None))
        if found[-1].finish is not None:
            break
    return found


def answer_of(pieces: list[ChoiceDelta]) -> tuple[str, str, str | None, str | int | None]:
    text, reasoning = ("".join(getattr(piece, name) for piece in pieces) for name in ("text", "reasoning"))
    return text, reasoning, pieces[-1].finish, pieces[-1].stop_reason


@pytest.mark.parametrize(
    ("stop", "text", "wanted"),
    [
        # In the reasoning and in a call it is not looked for.
        ("Question:", "The Question: what?\n</think>\n\nFinal. Question: no", ("Final. ", "stop", "Question:")),
        ("name", f"a\n</think>\n\nLook.{CALL}", ("Look.", "tool_calls", None)),
        ("think", "a\n</think>\n\nI think.", ("I ", "stop", "think")),
        # White space next to a marker is dropped; white space of the content ends it at once.
        ("\n\n", "a\n\nb\n</think>\n\nFinal.\n\nMore", ("Final.", "stop", "\n\n")),
        ("\n\n", "a\n</think>\n\nFinal.\n\n\n\n", ("Final.", "stop", "\n\n")),
        # No match is put together from both sides of a call.
        ("Look.On", f"a\n</think>\n\nLook.{CALL}On", ("Look.On", "tool_calls", None)),
        ("l.", "a\n</think>\n\nFinal", ("Final", "stop", None)),
    ],
)
@given(cuts=st.lists(st.integers(1, 60)), resumed=st.integers(0, 60))
@settings(max_examples=20, deadline=None)
def test_stop_strings_end_the_content(
    tools_tokenizer: Tokenizer, stop: str, text: str, wanted: tuple[str, str, str | None], cuts: list[int], resumed: int
) -> None:
    valid = asking(OPEN, stop=[stop])
    tokens = [*tools_tokenizer._encode(text, special=False), 1]
    content, _, finish, reason = answer_of(whole := pieces_of(tools_tokenizer, valid, tokens, cuts))
    assert (content, finish, reason) == wanted
    used = sum(len(piece.token_ids) for piece in whole)
    had = min(resumed, used - 1)
    rest, *_ = answer_of(pieces_of(tools_tokenizer, valid, tokens, cuts, had))
    assert wanted[0].endswith(rest)


def test_white_space_ends_the_content_when_it_is_written(tools_tokenizer: Tokenizer) -> None:
    """Although a marker may follow: a model that writes nothing else would run on to max_tokens."""
    valid = asking(OPEN, stop=["\n\n"])
    ids = tools_tokenizer._encode("a\n</think>\n\nFinal." + "\n" * 50, special=False)
    pieces = pieces_of(tools_tokenizer, valid, [*ids, 1], list(range(len(ids))))
    assert answer_of(pieces)[0] == "Final."
    assert sum(len(piece.token_ids) for piece in pieces) <= len(ids) - 48


TEXTS = st.lists(
    st.sampled_from(
        [
            "a",
            "<",
            "<th",
            "é🙂",
            " ",
            "\n",
            "日本",
            "<think>\nHm é.\n</think>\n\n",
            CALL,
            "<tool_call>x</tool_call>",
            "END",
        ]
    ),
    max_size=12,
).map("".join)


@given(
    text=TEXTS,
    opened=st.sampled_from([None, Reading("", calls=True), OPEN]),
    cuts=st.lists(st.integers(1, 80)),
    resumed=st.integers(0, 80),
    broken=st.lists(st.tuples(st.integers(0, 80), st.integers(2, 255)), max_size=2),
    include=st.booleans(),
)
@example(
    text="<think>\nHm.\n</think>\n\n<<", opened=Reading("", calls=True), cuts=[], resumed=0, broken=[], include=False
)
@example(text=CALL + "<<", opened=OPEN, cuts=[], resumed=0, broken=[], include=False)
@example(text=CALL + "<<", opened=Reading("", calls=True), cuts=[], resumed=0, broken=[], include=False)
@settings(max_examples=examples(300), deadline=None)
def test_log_probabilities_join_to_the_content(
    tools_tokenizer: Tokenizer,
    text: str,
    opened: Reading | None,
    cuts: list[int],
    resumed: int,
    broken: list[tuple[int, int]],
    include: bool,
) -> None:
    """Of any answer, with broken characters, too, however it is cut, and also for a client that resumes."""
    tokens = tools_tokenizer._encode(text, special=False)
    for at, token in broken:
        tokens.insert(min(at, len(tokens)), token)
    tokens.append(1)
    valid = asking(opened, stop=["END", "aé"], logprobs=True, include_stop_str_in_output=include)
    pieces = pieces_of(tools_tokenizer, valid, tokens, cuts)

    def entries(pieces: list[ChoiceDelta]) -> list[Any]:
        return [entry for piece in pieces for entry in piece.content or ()]

    found = entries(pieces)
    joined = b"".join(tools_tokenizer.vocabulary.table[one.token] if one.text is None else one.text for one in found)

    def once(text: str) -> str:  # bytes that are no character count once, whichever token they are of
        return re.sub("\ufffd+", "\ufffd", text)

    assert once(joined.decode("utf-8", "replace")) == once(answer_of(pieces)[0])
    places = [int(-one.at.logprob) for one in found]
    assert places == sorted(set(places)), "each token once, in order"
    assert all(tokens[place] == one.token for place, one in zip(places, found, strict=True))
    used = sum(len(piece.token_ids) for piece in pieces)
    had = min(resumed, used - 1)
    again = entries(pieces_of(tools_tokenizer, valid, tokens, [*cuts, had], had))
    assert again == found[len(found) - len(again) :]
    before = entries(pieces_of(tools_tokenizer, valid, tokens, [had])[:1]) if had else []
    assert before + again == found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_that_is_a_special_token_stops(
    serve: Serve, engine: EngineMaker, tools_tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    """Engines stop at the token.  Its text is in no answer, and the stop reason is the client's string."""
    served = await serve(tools_tokenizer)
    [end] = tools_tokenizer._encode("<|im_end|>", special=False)
    one, two = (tools_tokenizer._encode(text, special=False) for text in ("One", "Two"))

    def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
        if end in generate.sampling.stop_token_ids:
            return [*one, end], Finish("stop", stop_token=end)
        return [*one, end, *two, 1], Finish("stop", stop_token=1)

    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hi", "stop": ["<|im_end|>"]},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "stop_sequences": ["<|im_end|>"]},
        "/v1/responses": {"input": "Hi", "stop": "<|im_end|>"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "stop": ["###", "<|im_end|>"]},
    }
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with engine(script):
        await settled(lambda: bool(served.streams.fleet.engines))
        body = {"model": "tiny", limit: 50, "stream": stream, **bodies[path]}
        async with served.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
    assert "One" in text
    assert "Two" not in text
    if path != "/v1/responses":
        assert text.count("<|im_end|>") == 1  # as the reason alone
        assert '"<|im_end|>"' in text


def test_other_stop_strings_stay_strings(tools_tokenizer: Tokenizer) -> None:
    valid = with_stop_tokens(asking(None, stop=["<|im_end|>\n", "im_end", "a"]), tools_tokenizer.vocabulary.special)
    assert valid.sampling.stop_token_ids == []
