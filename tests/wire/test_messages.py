"""Golden bytes of every message.  A failure here means that two releases cannot run at the same time any more."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from quire.engine.wire import token_messages
from quire.engine.wire.layout import (
    LOAD_BLOCK_SIZE,
    LOAD_CROWD,
    LOAD_DRAINING,
    LOAD_HONOURS,
    LOAD_TOTAL_BLOCKS,
    TOKEN_CHANNELS,
)
from quire.engine.wire.messages import (
    ADAPTERS,
    CONSTRAINT,
    Abort,
    Beams,
    Delta,
    EngineLoad,
    Finish,
    Generate,
    HotPrefix,
    PoolState,
    Sampling,
    SequenceBlocks,
    TokenBatch,
    TokenLogprob,
)

SAMPLING = Sampling(
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    seed=2**63 - 1,
    min_tokens=2,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    logit_bias=[(7, -100.0)],
    allowed_token_ids=[1, 2],
    stop_token_ids=[3],
    ignore_eos=True,
    logprobs=5,
    prompt_logprobs=0,
)
GENERATE = Generate("r1", "g1", [1, 300, 70000], 16, SAMPLING, 1_700_000_000_000, "tenant", "00-ab-cd-01", 2)
LOAD = cast(Any, EngineLoad)(
    "e1",
    "m",
    "f" * 4,
    4096,
    32000,
    16,
    100,
    60,
    20,
    3,
    2,
    512,
    1_700_000_000_000,
    1.5,
    0.5,
    *range(5),
    True,
    77,
    0.25,
    1,
    *range(2, 7),
    [(0.5, 4, 2)],
    *range(7, 14),
    ["loud"],
    512,
    [2, 7],
    True,
    64,
    90,
    0.975,
    ["bad_words"],
    ["sql@5f"],
    {"own": (9, 5), "tenant": (300, 0)},
    6,
    4,
)
DELTA = Delta(
    "r1", 4, [5, 6], Finish("stop", 6, ""), 1, [TokenLogprob(-0.5, [(5, -0.5)]), TokenLogprob(-1.0)], 512, None
)
SEQUENCE_BLOCKS = SequenceBlocks("r1", 1, b"\x05\x00\x00\x00\x02\x00\x00\x00")
BATCH = TokenBatch("e1", [DELTA, Delta("r2", 0, [9])])
SHORT = "chatcmpl-019a0c55d7b2" + "5a" * 10  # a client's id

GOLDEN: list[tuple[Any, str]] = [
    (
        SAMPLING,
        "de000fab74656d7065726174757265cb3fe0000000000000a5746f705f70cb3feccccccccccccda5746f705f6b28a56d696e"
        "5f70cb3fb999999999999aa473656564cf7fffffffffffffffaa6d696e5f746f6b656e7302b070726573656e63655f70656e"
        "616c7479cbbfe0000000000000b16672657175656e63795f70656e616c7479cb3fd0000000000000b272657065746974696f"
        "6e5f70656e616c7479cb3ff8000000000000aa6c6f6769745f62696173919207cbc059000000000000b1616c6c6f7765645f"
        "746f6b656e5f696473920102ae73746f705f746f6b656e5f6964739103aa69676e6f72655f656f73c3a86c6f6770726f6273"
        "05af70726f6d70745f6c6f6770726f627300",
    ),
    (
        GENERATE,
        "de000aa474797065a867656e6572617465a26964a27231a767617465776179a26731a9746f6b656e5f6964739301cd012cce0001"
        "1170ae6d61785f6e65775f746f6b656e7310a873616d706c696e67de000fab74656d7065726174757265cb3fe00000000000"
        "00a5746f705f70cb3feccccccccccccda5746f705f6b28a56d696e5f70cb3fb999999999999aa473656564cf7fffffffffff"
        "ffffaa6d696e5f746f6b656e7302b070726573656e63655f70656e616c7479cbbfe0000000000000b16672657175656e6379"
        "5f70656e616c7479cb3fd0000000000000b272657065746974696f6e5f70656e616c7479cb3ff8000000000000aa6c6f6769"
        "745f62696173919207cbc059000000000000b1616c6c6f7765645f746f6b656e5f696473920102ae73746f705f746f6b656e"
        "5f6964739103aa69676e6f72655f656f73c3a86c6f6770726f627305af70726f6d70745f6c6f6770726f627300ab64656164"
        "6c696e655f6d73cf0000018bcfe56800aa63616368655f73616c74a674656e616e74ab7472616365706172656e74ab30302d"
        "61622d63642d3031a16e02",
    ),
    (
        Generate("r1", "g1", [1], 1, Sampling(), 5, queued_ms=1_700_000_000_000),
        "de0008a474797065a867656e6572617465a26964a27231a767617465776179a26731a9746f6b656e5f6964739101ae6d61785f6e"
        "65775f746f6b656e7301a873616d706c696e67de0000ab646561646c696e655f6d7305a97175657565645f6d73cf0000018b"
        "cfe56800",
    ),
    (
        Generate("r1", "g1", [1], 1, Sampling(), 5, priority=-1, tenant="acme", weight=2.0),
        "de000aa474797065a867656e6572617465a26964a27231a767617465776179a26731a9746f6b656e5f6964739101ae6d61785f6e"
        "65775f746f6b656e7301a873616d706c696e67de0000ab646561646c696e655f6d7305a87072696f72697479ffa674656e61"
        "6e74a461636d65a6776569676874cb4000000000000000",
    ),
    (
        Generate("r1", "g1", [1], 1, Sampling(), 5, traceparent="00-ab-cd-01", tracestate="rojo=1"),
        "de0009a474797065a867656e6572617465a26964a27231a767617465776179a26731a9746f6b656e5f6964739101ae6d61785f6e"
        "65775f746f6b656e7301a873616d706c696e67de0000ab646561646c696e655f6d7305ab7472616365706172656e74ab3030"
        "2d61622d63642d3031aa74726163657374617465a6726f6a6f3d31",
    ),
    (
        Generate("r1", "g1", [1], 1, Sampling(), 5, n=2, beams=Beams(4, 2.0, "never")),
        "de0009a474797065a867656e6572617465a26964a27231a767617465776179a26731a9746f6b656e5f6964739101ae6d61785f6e"
        "65775f746f6b656e7301a873616d706c696e67de0000ab646561646c696e655f6d7305a16e02a56265616d7383a577696474"
        "6804ae6c656e6774685f70656e616c7479cb4000000000000000ae6561726c795f73746f7070696e67a56e65766572",
    ),
    (
        Generate("r1", "g1", [1], 1, Sampling(), 5, anchors=[64], retain_s=2.5, adapter="sql@5f", predicted=[7, 8]),
        "de000ba474797065a867656e6572617465a26964a27231a767617465776179a26731a9746f6b656e5f6964739101ae6d6178"
        "5f6e65775f746f6b656e7301a873616d706c696e67de0000ab646561646c696e655f6d7305a7616e63686f72739140a87265"
        "7461696e5f73cb4004000000000000a761646170746572a673716c403566a9707265646963746564920708",
    ),
    (
        Generate("r1", "g1", [1], 1, Sampling(), 5, prefixes=b"\x01" * 8),
        "de0008a474797065a867656e6572617465a26964a27231a767617465776179a26731a9746f6b656e5f6964739101ae6d6178"
        "5f6e65775f746f6b656e7301a873616d706c696e67de0000ab646561646c696e655f6d7305a87072656669786573c4080101"
        "010101010101",
    ),
    (
        Beams(2, early_stopping=True),
        "82a5776964746802ae6561726c795f73746f7070696e67c3",
    ),
    (
        Sampling(grammar='start: "a"'),
        "de0001a76772616d6d6172aa73746172743a20226122",
    ),
    (
        Sampling(bad_words=[[5, 6], [7]], logprobs=0, logprob_token_ids=[8]),
        "de0003a86c6f6770726f627300a96261645f776f726473929205069107b16c6f6770726f625f746f6b656e5f6964739108",
    ),
    (
        Abort("r1"),
        "82a474797065a561626f7274a26964a27231",
    ),
    (
        Abort("r1", index=2),
        "83a474797065a561626f7274a26964a27231a5696e64657802",
    ),
    (
        Finish("length", score=-0.75, searched=12, shared=0.5625),
        "98a66c656e677468ffa0cbbfe80000000000000ccb3fe2000000000000a0c0",
    ),
    (
        Finish("length", predictions=(300, 4)),
        "98a66c656e677468ffa0cb000000000000000000cb0000000000000000a092cd012c04",
    ),
    (
        Finish("error", -1, "out of luck", code=CONSTRAINT),
        "98a56572726f72ffab6f7574206f66206c75636bcb000000000000000000cb0000000000000000aa636f6e73747261696e74c0",
    ),
    (
        HotPrefix(b"\x01\x00\x00\x00\x2c\x01\x00\x00", "tenant"),
        "92c408010000002c010000a674656e616e74",
    ),
    (
        SEQUENCE_BLOCKS,
        "93a2723101c4080500000002000000",
    ),
    (
        PoolState("e1", 4, 1, b"\x00\x01\x02\x04", [SEQUENCE_BLOCKS], 1, 8, 2),
        "88a6656e67696e65a26531a6626c6f636b7304a87065725f63656c6c01a563656c6c73c40400010204a973657175656e6365"
        "739193a2723101c4080500000002000000a86c6566745f6f757401ab686f73745f626c6f636b7308a9686f73745f75736564"
        "02",
    ),
    (
        TokenLogprob(-0.5, [(5, -0.5), (6, -2.0)]),
        "92cbbfe0000000000000929205cbbfe00000000000009206cbc000000000000000",
    ),
    (
        DELTA,
        "99a272310492050698a473746f7006a0cb000000000000000000cb0000000000000000a0c0019292cbbfe0000000000000919205"
        "cbbfe000000000000092cbbff000000000000090cd0200c0c0",
    ),
    (
        LOAD,
        "dc0032a26531a16da466666666cd1000cd7d0010643c140302cd0200cf0000018bcfe56800cb3ff8000000000000cb3fe000"
        "00000000000001020304c34dcb3fd00000000000000102030405069193cb3fe000000000000004020708090a0b0c0d91a46c"
        "6f7564cd0200920207c3405acb3fef33333333333391a96261645f776f72647391a673716c403566"
        "82a36f776e920905a674656e616e7492cd012c00060480",
    ),
    (
        BATCH,
        "82a6656e67696e65a26531a664656c7461739299a272310492050698a473746f7006a0cb000000000000000000cb00000000"
        "00000000a0c0019292cbbfe0000000000000919205cbbfe000000000000092cbbff000000000000090cd0200c0c099a27232"
        "009109c000c000c0c0",
    ),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_bytes_of_every_message(message: msgspec.Struct, golden: str) -> None:
    assert msgspec.msgpack.encode(message).hex() == golden
    assert msgspec.msgpack.decode(bytes.fromhex(golden), type=type(message)) == message


def test_bytes_of_a_token_message() -> None:
    """An id of a client takes 16 bytes, and 18 for its other prompts; what a Delta ends with is left out."""
    more = TokenBatch("e1", [Delta(f"{SHORT}.0", 300, [70_000]), Delta(f"{SHORT}.1", 1, [2], None, 3)])
    [(channel, message)] = token_messages.encode([("g1", BATCH), ("g1", more)])
    assert channel == token_messages.channel_of("g1") == 2
    assert message.hex() == (
        "92a265319292a267319298a272310492050698a473746f7006a0cb000000000000000000cb0000000000000000a0c0019292cb"
        "bfe0000000000000919205cbbfe000000000000092cbbff000000000000090cd0200c093a2723200910992a267319293b001"
        "9a0c55d7b25a5a5a5a5a5a5a5a5a5acd012c91ce0001117095b2019a0c55d7b25a5a5a5a5a5a5a5a5a5a0001019102c003"
    )
    assert token_messages.decode(message, "g1") == TokenBatch("e1", [*BATCH.deltas, *more.deltas])
    assert token_messages.decode(message, "g2") is None


def test_counts_of_drafts_cross_the_wire_and_cost_others_nothing() -> None:
    counted = Delta("r2", 3, [9], predictions=(7, 2))
    [(_, message)] = token_messages.encode([("g1", TokenBatch("e1", [Delta("r1", 1, [5]), counted]))])
    assert token_messages.decode(message, "g1") == TokenBatch("e1", [Delta("r1", 1, [5]), counted])
    _, [[_, (bare, _)]] = msgspec.msgpack.decode(message)
    assert bare[1:] == [1, [5]]


def test_scripts_know_where_the_fields_of_a_load_stand() -> None:
    places = LOAD_BLOCK_SIZE, LOAD_TOTAL_BLOCKS, LOAD_DRAINING, LOAD_CROWD, LOAD_HONOURS
    known = msgspec.structs.replace(LOAD, draining=True, honours=[ADAPTERS])
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(known))
    assert [fields[at - 1] for at in places] == [LOAD.block_size, LOAD.total_blocks, True, LOAD.over_share, ["adapter"]]


def test_a_token_message_of_a_newer_peer_is_read() -> None:
    [(_, message)] = token_messages.encode([("g1", BATCH)])
    engine, [[gateway, deltas]] = msgspec.msgpack.decode(message)
    deltas[0] += [None, "a later field", {"x": 1}]
    newer = msgspec.msgpack.encode([engine, [[gateway, deltas, "later"]], "later still"])
    assert token_messages.decode(newer, "g1") == BATCH


def test_gateways_of_one_channel_share_a_message() -> None:
    names = [f"gateway-{at}" for at in range(16 * TOKEN_CHANNELS)]
    batches = [(name, TokenBatch("e1", [Delta(name, at, [at])])) for at, name in enumerate(names)]
    messages = token_messages.encode(batches)
    assert len(messages) == TOKEN_CHANNELS
    for name, batch in batches:
        found = [token_messages.decode(message, name) for _, message in messages]
        assert [one for one in found if one is not None] == [batch]
        assert found.index(batch) == [channel for channel, _ in messages].index(token_messages.channel_of(name))


def test_a_finish_of_an_engine_that_measures_no_sharing_is_read() -> None:
    """Engines and gateways of one wire version may differ in the fields that messages end with."""
    before = bytes.fromhex("95a66c656e677468ffa0cbbfe80000000000000c")
    assert msgspec.msgpack.decode(before, type=Finish) == Finish("length", score=-0.75, searched=12)
    without_code = bytes.fromhex("96a56572726f72ffab6f7574206f66206c75636bcb000000000000000000cb0000000000000000")
    assert msgspec.msgpack.decode(without_code, type=Finish) == Finish("error", -1, "out of luck")


def test_every_message_has_golden_bytes() -> None:
    import quire.engine.wire.messages as module

    kinds = {value for value in vars(module).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)}
    assert kinds - {msgspec.Struct} == {type(message) for message, _ in GOLDEN}


def test_bytes_of_an_older_peer_decode_with_defaults() -> None:
    """What the first version sent, before any field with a default was thought of."""
    old = {"type": "generate", "id": "r", "gateway": "g", "token_ids": [1], "max_new_tokens": 1, "sampling": {}}
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode({**old, "deadline_ms": 5}), type=Generate)
    assert decoded == Generate("r", "g", [1], 1, Sampling(), 5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(["r", 0, [1]]), type=Delta) == Delta("r", 0, [1])


def test_fields_of_a_newer_peer_are_ignored() -> None:
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(GENERATE)) | {"colour": 3}
    newer["sampling"]["typical_p"] = 0.5
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=Generate) == GENERATE
    longer = [*msgspec.msgpack.decode(msgspec.msgpack.encode(DELTA)), "a later field", {"x": 1}]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=Delta) == DELTA
