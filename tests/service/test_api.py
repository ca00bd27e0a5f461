"""Requests in: each bad input is refused by field, limit and value.  Answers out: OpenAI's shapes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.messages import Sampling, TokenLogprob
from service import api
from service.api import EngineLimits, Refusal, ValidRequest
from service.config import GatewayConfig
from service.format import Format, Piece, Prompted
from service.limits import CONTENT_PARTS, TOOL_CALLS

CONFIG = GatewayConfig(max_n=4, max_stop_strings=16)
LIMITS = EngineLimits(max_model_len=100, vocab_size=50, block_size=16, total_blocks=5, eos_ids=frozenset([2]))


def completion(**fields: Any) -> ValidRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    return api.parse_completion(json.dumps(body).encode(), CONFIG, "m", 600.0)


def chat(**fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return api.parse_chat(json.dumps(body).encode(), CONFIG, "m", 600.0)


def refused(call: Any, *args: Any, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "limit", "given"),
    [
        ({"temperature": -1}, "temperature", ">= 0 and <= 2", -1),
        ({"temperature": float("nan")}, "temperature", "finite", "NaN or Infinity"),
        ({"top_p": 0}, "top_p", "> 0 and <= 1", 0),
        ({"top_k": -2}, "top_k", ">= 0 and <= 2147483647", -2),
        ({"min_p": 1.5}, "min_p", ">= 0 and <= 1", 1.5),
        ({"max_tokens": 0}, "max_tokens", ">= 1 and <= 2147483647", 0),
        ({"n": 5}, "n", ">= 1 and <= 4", 5),
        ({"n": 0}, "n", ">= 1 and <= 4", 0),
        ({"stop": ["x"] * 1000}, "stop", 16, 1000),
        ({"stop": ""}, "stop", ">= 1 and <= 256", 0),
        ({"stop": "x" * 300}, "stop", ">= 1 and <= 256", 300),
        ({"presence_penalty": 3}, "presence_penalty", ">= -2 and <= 2", 3),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2 and <= 2", -3),
        ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01 and <= 100", 0),
        ({"repetition_penalty": 1e-320}, "repetition_penalty", ">= 0.01 and <= 100", 1e-320),
        ({"repetition_penalty": 101}, "repetition_penalty", ">= 0.01 and <= 100", 101),
        ({"cache_salt": "s" * 257}, "cache_salt", 256, 257),
        ({"seed": 2**63}, "seed", f">= {-(2**63)} and <= {2**63 - 1}", 2**63),
        ({"logit_bias": {"3" * 11: 1}}, "logit_bias", 10, 11),
        ({"logit_bias": {"3": 101}}, "logit_bias", ">= -100 and <= 100", 101),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids", 1024, 2000),
        ({"timeout": 0}, "timeout", "> 0 and <= 3600", 0),
        ({"timeout": -2.5}, "timeout", "> 0 and <= 3600", -2.5),
        ({"timeout": 3601}, "timeout", "> 0 and <= 3600", 3601),
        ({"timeout": float("inf")}, "timeout", "finite", "NaN or Infinity"),
        ({"priority": "urgent"}, "priority", "high, normal, low, or a whole number from -100 (first) to 100", "urgent"),
        ({"priority": 101}, "priority", "high, normal, low, or a whole number from -100 (first) to 100", 101),
        ({"min_tokens": -1}, "min_tokens", ">= 0 and <= 2147483647", -1),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ">= 1 and <= 2147483647", 0),
    ],
)
@pytest.mark.parametrize("call", [completion, chat])
def test_a_value_out_of_range_is_named_with_its_limit(
    call: Any, fields: dict[str, Any], param: str, limit: Any, given: Any
) -> None:
    refusal = refused(call, **fields)
    assert (refusal.status, refusal.param, refusal.limit, refusal.given) == (400, param, limit, given)
    error = msgspec.json.decode(refusal.body())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: ")
    assert str(given) in error["message"] or refusal.limit == "finite"


@pytest.mark.parametrize(
    ("call", "fields", "param", "code"),
    [
        (completion, {"suffix": "x"}, "suffix", "unsupported"),
        (completion, {"best_of": 2}, "best_of", "unsupported"),
        (completion, {"logprobs": 21}, "logprobs", "invalid_value"),
        (completion, {"prompt": ""}, "prompt", "empty_prompt"),
        (completion, {"prompt": []}, "prompt", "empty_prompt"),
        (completion, {"prompt": ["a", ""]}, "prompt", "empty_prompt"),
        (completion, {"prompt": ["a", 3]}, "prompt", "invalid_type"),
        (completion, {"prompt": [[1], 3]}, "prompt", "invalid_type"),
        (completion, {"prompt": 3}, "prompt", "invalid_type"),
        (completion, {"prompt": ["a"] * 65}, "prompt", "too_many"),
        (completion, {"max_tokens": "ten"}, "max_tokens", "invalid_type"),
        (completion, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (completion, {"logit_bias": {"": 1}}, "logit_bias", "invalid_value"),
        (completion, {"logit_bias": {"\u0663": 1}}, "logit_bias", "invalid_value"),  # an Arabic three
        (completion, {"logits_processors": ["x"]}, "logits_processors", "unsupported"),
        (completion, {"prompt_logprobs": 0}, "prompt_logprobs", "unsupported"),
        (completion, {"add_special_tokens": False}, "add_special_tokens", "unsupported"),
        (completion, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (completion, {"use_beam_search": True}, "use_beam_search", "unsupported"),
        (completion, {"response_format": {"type": "grammar"}}, "response_format.type", "unsupported"),
        (chat, {"tools": [{"type": "function"}]}, "tools", "unsupported"),
        (chat, {"tool_choice": "required"}, "tool_choice", "unsupported"),
        (chat, {"messages": []}, "messages", "empty_prompt"),
        (chat, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "unsupported",
        ),
        (chat, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_type"),
        (chat, {"chat_template": "{{ 1 }}"}, "chat_template", "unsupported"),
        (chat, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "unsupported"),
        (chat, {"documents": [{"text": "x"}]}, "documents", "unsupported"),
        (chat, {"continue_final_message": True}, "continue_final_message", "unsupported"),
        (chat, {"add_generation_prompt": False}, "add_generation_prompt", "unsupported"),
        (chat, {"add_special_tokens": True}, "add_special_tokens", "unsupported"),
        (chat, {"echo": True}, "echo", "unsupported"),
        (chat, {"prompt_logprobs": 3}, "prompt_logprobs", "unsupported"),
        (chat, {"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(call: Any, fields: dict[str, Any], param: str, code: str) -> None:
    refusal = refused(call, **fields)
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code)


def test_fields_that_change_nothing_are_taken() -> None:
    chat(add_generation_prompt=True, continue_final_message=False, echo=False, chat_template_kwargs={}, documents=[])
    chat(add_special_tokens=False, prompt_logprobs=None)
    completion(add_special_tokens=True, logits_processors=[])


def test_another_model_is_not_found() -> None:
    refusal = refused(completion, model="gpt-5")
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")
    assert msgspec.json.decode(refusal.body())["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"", "invalid_json", None),
        (b"[1]", "invalid_type", "body"),
        (b'{"prompt": "x"}', "invalid_type", "model"),
        (b'{"model": "m", "prompt": "\xff\xfe"}', "invalid_utf8", None),
        (b'{"model": "m", "prompt": "\\ud800"}', "invalid_json", None),
        (b'{"model": "m", "prompt": "x", "tools": ' + b"[" * 100_000, "invalid_json", None),
    ],
)
def test_a_body_that_is_no_request(body: bytes, code: str, param: str | None) -> None:
    refusal = refused(api.parse_completion, body, CONFIG, "m", 600.0)
    assert (refusal.status, refusal.code) == (400, code)
    if param != "body":
        assert refusal.param == param


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        api.parse_chat(body, CONFIG, "m", 600.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(api.CompletionBody.__struct_fields__[1:]), JSON, max_size=5))
def test_any_field_value_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(Refusal):
        valid = completion(**fields)
        assert all(valid.prompts)
        assert 0 <= valid.sampling.temperature <= 2
        assert 1 <= valid.n <= CONFIG.max_n


def test_priorities_by_name_and_number() -> None:
    names = [completion(priority=name).priority for name in ("high", "normal", None, "low")]
    assert names == [-1, 0, 0, 1]
    assert [completion(priority=number).priority for number in (-100, 5)] == [-100, 5]


def test_the_least_an_answer_takes() -> None:
    assert completion().least_tokens(9) == 1
    assert completion(min_tokens=4).least_tokens(9) == 4
    assert completion(ignore_eos=True).least_tokens(9) == 9
    assert completion(ignore_eos=True, stop="x").least_tokens(9) == 1


def test_defaults_are_openais() -> None:
    valid = completion()
    assert valid.max_tokens == 16
    assert valid.sampling == Sampling()
    assert (valid.n, valid.stop, valid.stream, valid.echo) == (1, (), False, False)
    assert chat().max_tokens is None
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4


def test_fields_arrive() -> None:
    valid = completion(
        prompt=[[1, 2], [3]], stop=["a", "b"], seed=7, logprobs=2, echo=True, logit_bias={"5": -3}, top_k=-1, unknown=1
    )
    assert valid.prompts == [[1, 2], [3]]
    assert valid.stop == ("a", "b")
    assert valid.seeded
    assert valid.sampling == Sampling(seed=7, logprobs=2, prompt_logprobs=2, logit_bias=[(5, -3.0)])
    assert chat(logprobs=True).sampling.logprobs == 0
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts, "name": "x"}]).messages == [
        {"role": "user", "content": "a\nb", "name": "x"}
    ]


@pytest.mark.parametrize(
    ("fields", "ids", "code", "limit", "given"),
    [
        ({"max_tokens": 1}, [1] * 100, "context_length_exceeded", 100, 101),
        ({"max_tokens": 95}, [1] * 6, "context_length_exceeded", 100, 101),
        ({"max_tokens": 80}, [1] * 6, "kv_cache_exceeded", 80, 86),
        ({}, [1, 50], "invalid_token_id", 49, 50),
        ({}, [-1], "invalid_token_id", 49, -1),
        ({"stop_token_ids": [99]}, [1], "invalid_token_id", 49, 99),
        ({"logit_bias": {"77": 1}}, [1], "invalid_token_id", 49, 77),
        ({}, [], "empty_prompt", ">= 1", 0),
        ({"min_tokens": 17}, [1], "invalid_value", 16, 17),
        (
            {"min_tokens": 1, "allowed_token_ids": [2, 3], "stop_token_ids": [3]},
            [1],
            "invalid_value",
            ">= 1 token that does not end the answer",
            0,
        ),
        (
            {"min_tokens": 1, "stop_token_ids": list(range(50)), "ignore_eos": True},
            [1],
            "invalid_value",
            ">= 1 token that does not end the answer",
            0,
        ),
    ],
)
def test_what_only_the_engines_limits_can_tell(
    fields: dict[str, Any], ids: list[int], code: str, limit: Any, given: Any
) -> None:
    refusal = refused(api.fit, completion(**fields), [ids], LIMITS)
    assert (refusal.status, refusal.code, refusal.limit, refusal.given) == (400, code, limit, given)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [2]},  # min_tokens is 0: the answer may end at once
        {"min_tokens": 1, "allowed_token_ids": [2], "ignore_eos": True},
        {"min_tokens": 1, "allowed_token_ids": [2, 4]},
        {"min_tokens": 1, "stop_token_ids": list(range(49))},
    ],
)
def test_a_token_is_left_before_min_tokens(fields: dict[str, Any]) -> None:
    assert api.fit(completion(**fields), [[1]], LIMITS) == [16]


def test_chat_may_use_the_rest_of_the_context_or_of_the_pool() -> None:
    assert api.fit(chat(), [[1] * 10], LIMITS) == [70]
    assert api.fit(chat(), [[1] * 10], msgspec.structs.replace(LIMITS, total_blocks=50)) == [90]
    assert api.fit(completion(), [[1], [2]], LIMITS) == [16, 16]


def test_every_order_has_its_seed_settled() -> None:
    orders = api.generates(completion(prompt=["a", "b"], n=2), "r", "g", [[1], [2]], [5, 6], 123)
    assert [(o.id, o.gateway, o.n, o.max_new_tokens, o.deadline_ms) for o in orders] == [
        ("r.0", "g", 2, 5, 123),
        ("r.1", "g", 2, 6, 123),
    ]
    assert orders[0].sampling.seed != orders[1].sampling.seed
    seeded = api.generates(completion(prompt=["a", "b"], seed=-1), "r", "g", [[1], [2]], [5, 5], 1)
    assert [o.sampling.seed for o in seeded] == [2**63 - 1] * 2


def test_retry_after_is_whole_seconds_and_exact_milliseconds() -> None:
    refusal = Refusal(429, "rate_limit_exceeded", "later", retry_after_s=1.25)
    assert refusal.headers() == {"Retry-After": "2", "retry-after-ms": "1250"}


# ------------------------------------------------------------------------------------------------------------- out

VOCABULARY = [b"<s>", b"a", b"b", b"\xf0\x9f", b"\x99\x82", b" c"]


def form(valid: ValidRequest, prompts: list[Prompted] | None = None) -> Format:
    return Format(
        valid,
        request_id="r",
        model="m",
        created=1,
        fingerprint=None,
        prompts=prompts or [Prompted([1, 2])],
        vocabulary=VOCABULARY,
    )


def read(events: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(event id, decoded data) of each frame."""
    found = []
    for frame in events.decode().split("\n\n")[:-1]:
        event_id, data = frame.split("\n")
        assert event_id.startswith("id: ")
        assert data.startswith("data: ")
        found.append((event_id[4:], json.loads(data[6:])))
    return found


def test_fast_and_slow_chunks_have_the_same_shape() -> None:
    for call in (completion, chat):
        written = form(call(stream=True))
        *_, (_, slow) = read(written.chunk(Piece(0, "x", [1])))
        [(event_id, fast)] = read(written.chunk(Piece(0, 'y"\n🙂', [1])))
        assert event_id == "r:2"
        assert fast.keys() == slow.keys()
        assert fast["choices"][0].keys() == slow["choices"][0].keys()
        choice = fast["choices"][0]
        assert (choice["delta"]["content"] if call is chat else choice["text"]) == 'y"\n🙂'
        assert fast["object"] == ("chat.completion.chunk" if call is chat else "text_completion")


def test_a_chat_stream_begins_with_a_role_and_ends_with_a_reason() -> None:
    written = form(chat(stream=True, n=2, stream_options={"include_usage": True}))
    first = read(written.chunk(Piece(1, "x", [1], cached_tokens=1)))
    assert [event["choices"][0]["delta"] for _, event in first] == [
        {"role": "assistant", "content": ""},
        {"content": "x"},
    ]
    assert [event_id for event_id, _ in first] == ["r:,0", "r:,1"]
    assert first[0][1]["usage"] is None
    last = read(written.chunk(Piece(1, "", [2], finish="stop", stop_reason="END")))
    assert [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for _, e in last] == [({}, "stop")]
    assert last[0][1]["choices"][0]["stop_reason"] == "END"
    written.chunk(Piece(0, "", [1, 1, 1], cached_tokens=1, finish="length"))
    [(event_id, usage)] = read(written.usage_chunk())
    assert event_id == "r:3,2:usage"
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_piece_nobody_can_see_makes_no_event_but_counts() -> None:
    written = form(completion(stream=True))
    assert written.chunk(Piece(0, "", [3])) == b""
    assert [e["choices"][0]["text"] for _, e in read(written.chunk(Piece(0, "🙂", [4])))] == ["🙂"]
    assert sum(written.tokens) == 2
    assert written.usage_chunk() == b""


def test_continuous_usage_counts_up() -> None:
    written = form(completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [read(written.chunk(Piece(0, "a", [1])))[0][1]["usage"]["completion_tokens"] for _ in range(3)]
    assert counts == [1, 2, 3]


def whole_answer(written: Format, pieces: list[Piece]) -> Any:
    return json.loads(b"".join(asyncio.run(written.whole(pieces))))


def logprob(value: float, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(value, list(top))


def test_completion_logprobs_with_echo() -> None:
    valid = completion(echo=True, logprobs=1)
    written = form(valid, [Prompted([0, 1], "<s>a", [0, 3])])
    pieces = [
        Piece(0, "", [3], [logprob(-1.0, (3, -1.0))], [0], prompt_logprobs=[logprob(-2.0, (5, -0.1))]),
        Piece(0, "🙂", [4], [logprob(float("-inf"), (1, 0.0))], [0], finish="length"),
    ]
    answer = whole_answer(written, pieces)
    choice = answer["choices"][0]
    assert choice["text"] == "<s>a🙂"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "\ufffd", "\ufffd\ufffd"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0, -9999.0]
    assert choice["logprobs"]["text_offset"] == [0, 3, 4, 4]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {" c": -0.1, "a": -2.0}]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 2)


def test_chat_logprobs_carry_bytes() -> None:
    written = form(chat(logprobs=True, top_logprobs=2, return_token_ids=True))
    answer = whole_answer(written, [Piece(0, "a", [1], [logprob(-0.5, (1, -0.5), (3, -1.5))], [0], finish="stop")])
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "a", "refusal": None}
    assert choice["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": [0xF0, 0x9F]},
            ],
        }
    ]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([1], [1, 2])


def test_streamed_and_whole_agree() -> None:
    def pieces() -> list[Piece]:
        return [
            Piece(1, "x", [1]),
            Piece(0, "a", [1]),
            Piece(0, "b", [2], finish="stop"),
            Piece(1, "y", [1], finish="stop"),
        ]

    prompts = [Prompted([1], "P"), Prompted([2], "Q")]
    streamed = form(completion(stream=True, echo=True), prompts)
    texts = ["", ""]
    for piece in pieces():
        for _, event in read(streamed.chunk(piece)):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    whole = whole_answer(form(completion(echo=True), prompts), pieces())
    assert [choice["text"] for choice in whole["choices"]] == texts == ["Pab", "Qxy"]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"logprobs": 2}, {}])
def test_long_logprobs_are_encoded_in_turns_to_the_same_json(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and streamed, completions and chats."""

    def pieces() -> list[Piece]:
        found = [logprob(-0.5, (1, -0.5), (3, -1.5)), logprob(float("-inf"), (1, 0.0)), logprob(-1.0)]
        first = Piece(0, "ab", [1, 2, 1], found, [0, 1, 2], prompt_logprobs=[logprob(-2.0, (2, -1.0))])
        return [first, Piece(0, "c", [3], found[:1], [3], finish="length")]

    valid = completion(**fields) if fields else chat(logprobs=True, top_logprobs=2)
    prompts = [Prompted([0, 3], "<s>a", [0, 3])]

    async def streamed() -> list[Any]:
        written, events = form(valid, prompts), []
        for piece in pieces():
            await written.prepare(piece)
            events += list(read(written.chunk(piece)))
        return events

    at_once = whole_answer(form(valid, prompts), pieces()), asyncio.run(streamed())
    monkeypatch.setattr("service.format.TURN_ALTERNATIVES", 4)
    in_turns = whole_answer(form(valid, prompts), pieces()), asyncio.run(streamed())
    assert in_turns == at_once


def test_messages_their_parts_and_tool_calls_are_counted() -> None:
    config = GatewayConfig(max_messages=3)
    message = {"role": "user", "content": "a"}

    def asked(messages: list[Any]) -> ValidRequest:
        return api.parse_chat(json.dumps({"model": "m", "messages": messages}).encode(), config, "m", 600.0)

    assert len(asked([message] * 3).messages) == 3
    refusal = refused(asked, [message] * 4)
    assert (refusal.code, refusal.param, refusal.limit, refusal.given) == ("too_many", "messages", 3, 4)
    part = {"type": "text", "text": "a"}
    refusal = refused(asked, [{"role": "user", "content": [part] * (CONTENT_PARTS + 1)}])
    assert (refusal.param, refusal.limit) == ("messages[].content", CONTENT_PARTS)
    refusal = refused(asked, [{**message, "tool_calls": [{}] * (TOOL_CALLS + 1)}])
    assert (refusal.param, refusal.limit) == ("messages[].tool_calls", TOOL_CALLS)
