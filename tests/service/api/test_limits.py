"""Every input has a limit, every number beyond it is a 400, and what a request may take stays bounded."""

from __future__ import annotations

import asyncio
import json
import math
import tracemalloc
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.wire.messages import Delta, Finish, Generate, TokenLogprob
from quire.service.api import api, fitting
from quire.service.api.bodies import ChatBody, CompletionBody
from quire.service.api.envelope import Envelope, generates
from quire.service.api.fitting import EngineLimits
from quire.service.api.format import Format, Prompted
from quire.service.api.tenants import Tenant
from quire.service.common import limits
from quire.service.common.limits import LIMITS, shown
from quire.service.common.pacing import Pacer
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery.resume import Record
from quire.service.output.choice_delta import ChoiceDelta

CONFIG = GatewayConfig(max_logprob_entries=1000)
ENGINES = EngineLimits(max_model_len=4096, vocab_size=50, block_size=16, total_blocks=1000, eos_ids=frozenset([2]))
ABSURD = ["9" * 400, "-" + "9" * 400, "9" * 5000, str(2**70), str(2**64), str(-(2**63) - 1), "1e999", "-1e999", "1e308"]


def walk(body: bytes, *, chat: bool = False) -> list[Generate]:
    """What a gateway does with a body until it is queued.  Raises Refusal, and nothing else may be raised."""
    parse = api.parse_chat if chat else api.parse_completion
    valid = parse(body, CONFIG, "m", 600.0)
    encoded = [p if isinstance(p, list) else [1, 2, 3] for p in valid.prompts] or [[1, 2, 3]]
    if valid.truncate_prompt_tokens is not None:
        encoded = [ids[-valid.truncate_prompt_tokens :] for ids in encoded]
    rooms = fitting.bound_logprobs(valid, encoded, fitting.fit(valid, encoded, ENGINES), CONFIG)
    deadline_ms = 1_700_000_000_000 + int(valid.timeout_s * 1000)
    orders = generates(valid, encoded, rooms, Envelope("r", "g", deadline_ms))
    for order in orders:
        msgspec.msgpack.encode(order)
        assert 0 <= order.sampling.seed < 2**63
        assert order.max_new_tokens < 2**31
    Record("o", "t", valid, [Prompted(ids) for ids in encoded], "m", 1, None, deadline_ms).encode()
    return orders


def outcome(body: bytes, *, chat: bool) -> list[Generate] | Refusal:
    try:
        return walk(body, chat=chat)
    except Refusal as refusal:
        return refusal


def numeric(body: type[Any]) -> list[str]:
    """Its fields that take a number, alone or in a list or as values."""
    return [name for name, kind in get_type_hints(body).items() if "int" in str(kind) or "float" in str(kind)]


def raw(name: str, digits: str, *, chat: bool = False) -> list[bytes]:
    """Bodies with a number of these digits wherever the field takes one."""
    rest = '"messages": [{"role": "user", "content": "x"}]' if chat else '"prompt": "x"'
    forms = [digits, f"[{digits}]", f"[[{digits}]]", f'{{"1": {digits}}}', f'{{"{digits}": 1}}', f'"{digits}"']
    return [f'{{"model": "m", {rest}, "{name}": {form}}}'.encode() for form in forms]


@pytest.mark.parametrize("digits", ABSURD, ids=range(len(ABSURD)))
@pytest.mark.parametrize("chat", [False, True])
def test_an_absurd_number_is_refused_in_every_field(digits: str, chat: bool) -> None:
    taken = []
    for name in numeric(ChatBody if chat else CompletionBody):
        for body in raw(name, digits, chat=chat):
            found = outcome(body, chat=chat)
            if not isinstance(found, Refusal):
                taken.append(name)
                continue
            error = msgspec.json.decode(found.body())["error"]
            assert found.status == 400
            assert len(error["message"]) < 400
            if error["code"] == "invalid_value":
                assert error["limit"] is not None, (name, error)
    assert set(taken) <= {"user", "prompt", "cache_salt", "stop", "suffix"}  # texts of digits


FIELDS = sorted({*numeric(CompletionBody), *numeric(ChatBody)})
NUMBERS = st.integers() | st.floats(allow_nan=False) | st.integers(min_value=10**300, max_value=10**330)


@given(
    st.dictionaries(
        st.sampled_from(FIELDS),
        NUMBERS | st.lists(NUMBERS, max_size=2) | st.dictionaries(st.text(max_size=12), NUMBERS),
    ),
    st.booleans(),
)
def test_any_number_in_any_field_is_queued_or_refused(fields: dict[str, Any], chat: bool) -> None:
    start = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    found = outcome(json.dumps({**start, **fields, "model": "m"}).encode(), chat=chat)
    if isinstance(found, Refusal):
        assert found.status == 400
        msgspec.json.decode(found.body())
        return
    for order in found:
        sampling = order.sampling
        assert all(math.isfinite(bias) for _, bias in sampling.logit_bias)
        assert 0.01 <= sampling.repetition_penalty <= 100


@pytest.mark.parametrize(
    "header", ["nan", "inf", "-inf", "1e999", "9" * 4000, "1_0", "\u0663", "", " 1", "0x1", "1e-999"]
)
def test_a_timeout_header_is_a_plain_number(header: str) -> None:
    with pytest.raises(Refusal) as caught:
        api.header_timeout(header, CONFIG)
    assert (caught.value.status, caught.value.limit) == (400, "> 0 and <= 3600")
    assert len(str(caught.value.given)) <= limits.LONGEST_GIVEN


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("2.5", 2.5), ("1e2", 100.0), (".5", 0.5), ("+7.", 7.0)])
def test_a_timeout_header_in_every_notation_of_a_number(header: str, seconds: float) -> None:
    assert api.header_timeout(header, CONFIG) == seconds


@given(st.integers() | st.floats() | st.text() | st.integers(min_value=10**400))
def test_any_refused_value_is_shown_short_and_as_json(value: float | str) -> None:
    seen = shown(value)
    assert len(msgspec.json.encode(seen)) <= 6 * limits.LONGEST_GIVEN + 2
    json.loads(msgspec.json.encode(seen))


# ------------------------------------------------------------------------------------------------------------ salts


def test_a_salt_travels_as_a_digest_within_its_tenant() -> None:
    asked = ["", "a", "b", "a b", "s" * 256]
    namespaces = [
        Tenant(name).salt(salt) for name in ("", "acme", "acme.b", "tenant", Tenant("acme").salt("")) for salt in asked
    ]
    assert len(set(namespaces)) == len(namespaces)
    assert max(map(len, (Tenant("n" * 64).salt(salt) for salt in asked))) <= 110
    assert not any("sss" in namespace for namespace in namespaces)
    assert Tenant().salt("") == ""  # neither tenant nor salt: the shared namespace
    assert Tenant("acme").salt("a") == Tenant("acme").salt("a")


# -------------------------------------------------------------------------------------------------- log probabilities


def bounded(prompts: list[int], rooms: list[int], *, chat: bool = False, **fields: Any) -> list[int]:
    """bound_logprobs for prompts of these lengths."""
    start = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": ["x"] * len(prompts)}
    parse = api.parse_chat if chat else api.parse_completion
    valid = parse(json.dumps({"model": "m", **start, **fields}).encode(), CONFIG, "m", 600.0)
    return fitting.bound_logprobs(valid, [[1] * length for length in prompts], rooms, CONFIG)


@pytest.mark.parametrize(
    ("prompts", "rooms", "fields", "entries"),
    [
        ([10], [100], {"logprobs": 9}, 1000),
        ([10], [101], {"logprobs": 9}, 1010),
        ([10], [50], {"logprobs": 9, "n": 2}, 1000),
        ([10, 10], [50, 51], {"logprobs": 9}, 1010),
        ([99], [1], {"logprobs": 9, "echo": True}, 1000),
        ([99], [2], {"logprobs": 9, "echo": True}, 1010),
        ([49, 1], [1, 1], {"logprobs": 9, "echo": True, "n": 2}, 1040),
        ([10_000], [1000], {"logprobs": 0}, 1000),  # without echo a prompt has none
        ([10_000], [10_000], {"echo": True}, 0),
    ],
)
def test_the_log_probabilities_of_an_answer_are_bounded(
    prompts: list[int], rooms: list[int], fields: dict[str, Any], entries: int
) -> None:
    if entries <= 1000:
        assert bounded(prompts, rooms, **fields) == rooms
        return
    with pytest.raises(Refusal) as caught:
        bounded(prompts, rooms, **fields)
    refusal = caught.value
    assert (refusal.status, refusal.code, refusal.param) == (400, "too_many_logprobs", "logprobs")
    assert (refusal.limit, refusal.given) == (1000, entries)


def test_a_chat_without_max_tokens_ends_where_its_log_probabilities_do() -> None:
    asked: dict[str, Any] = {"chat": True, "logprobs": True, "top_logprobs": 9}
    assert bounded([10], [4000], **asked) == [100]
    assert bounded([10], [40], **asked) == [40]
    assert bounded([10], [4000], **asked, n=4) == [25]
    assert bounded([10], [4000], chat=True) == [4000]
    with pytest.raises(Refusal) as caught:
        bounded([10], [4000], **asked, min_tokens=101)
    assert (caught.value.limit, caught.value.given) == (1000, 1010)


# --------------------------------------------------------------------------------------------------------- the table


def test_every_number_of_a_request_is_in_the_table() -> None:
    known = {name for limit in LIMITS.values() for name in limit.field.split(", ")}
    assert set(FIELDS) - {"prompt_logprobs", "best_of"} <= known  # refused by name; equal to n


def test_every_row_names_an_option_or_a_bound() -> None:
    for key, limit in LIMITS.items():
        assert limit.counts, key
        assert limit.option or limit.high is not None or limit.set_by, key
        assert not limit.option or isinstance(getattr(CONFIG, limit.option), int | float), key
    assert len(limits.rows(CONFIG)) == len(LIMITS)


@pytest.mark.parametrize(("alternatives", "count"), [(1, 16), (20, 16), (20, 1), (0, 1)])
def test_an_entry_takes_little_memory_everywhere(alternatives: int, count: int) -> None:
    """What the gateway holds at once: the engine's deltas, decoded, and the complete answer, encoded."""
    entries = 2**14
    config = GatewayConfig(max_logprob_entries=entries)
    length = entries // (alternatives + 1) // count - 1
    body = {"model": "m", "prompt": ["x"] * count, "max_tokens": 1, "echo": True, "logprobs": alternatives}
    valid = api.parse_completion(json.dumps(body).encode(), config, "m", 600.0)
    encoded = [list(range(1000, 1000 + length))] * count
    assert fitting.bound_logprobs(valid, encoded, [1] * count, config) == [1] * count
    with pytest.raises(Refusal):
        fitting.bound_logprobs(valid, [[1] * (length + 2)] * count, [1] * count, config)

    scored = [TokenLogprob(-1.25 - at, [(at + i, -0.5 - at) for i in range(alternatives)]) for at in range(length - 1)]
    sent = msgspec.msgpack.encode(Delta("r", 0, [1], Finish("length"), 0, scored[:1], 0, scored))
    form = Format(
        valid,
        request_id="r",
        model="m",
        created=1,
        fingerprint=None,
        prompts=[Prompted(ids, "x" * len(ids), list(range(len(ids)))) for ids in encoded],
        vocabulary=[b"token %d" % at for at in range(20_000)],
    )
    tracemalloc.start()
    try:
        pieces = []
        for choice in range(count):
            delta = msgspec.msgpack.decode(sent, type=Delta)
            pieces.append(ChoiceDelta(choice, "y", [1], delta.logprobs, [0], delta.prompt_logprobs, finish="length"))
        answer = b"".join(asyncio.run(form.whole(pieces, Pacer())))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    each = [round(size / entries) for size in (peak, len(answer), len(sent) * count)]
    print(
        f"{count} x {length} x {alternatives + 1}: bytes an entry: gateway {each[0]}, answer {each[1]}, Redis {each[2]}"
    )
    assert peak < 700 * entries
    assert len(answer) < 100 * entries
    assert len(sent) * count < 24 * entries
    assert GatewayConfig().max_logprob_entries * 700 < 200 * 2**20
