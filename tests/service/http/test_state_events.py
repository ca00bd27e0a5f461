"""Events of the engines' state: a reader that applies them has the state, whatever changed in between."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.wire.messages import PoolState, SequenceBlocks
from quire.engine.wire.records import Fleet, LaneQueue
from quire.service.delivery import resume
from quire.service.http.state_events import FleetState, event, observe, sequence_name
from tests.matrix import examples
from tests.service.fakes import a_load
from tests.service.http.state_reader import StateReader

Tables = dict[tuple[str, int], list[int]]


def request_id(number: int) -> str:
    return f"cmpl-{0:012x}{number:08x}{0:012x}.0"


def packed(table: list[int]) -> bytes:
    runs = array("I")
    for at, block in enumerate(table):
        if at and block == table[at - 1] + 1:
            runs[-1] += 1
        else:
            runs.extend((block, 1))
    return runs.tobytes()


def reading(engines: dict[str, tuple[bytes | None, Tables]], time_ms: int = 1, **figures: Any) -> FleetState:
    pools = {
        name: PoolState(
            name,
            len(cells),
            1,
            cells,
            [SequenceBlocks(request, index, packed(table)) for (request, index), table in tables.items()],
            left_out=3,
        )
        for name, (cells, tables) in engines.items()
        if cells is not None
    }
    loads = [a_load(name, total_blocks=len(cells or b"12345"), **figures) for name, (cells, _) in engines.items()]
    fleet = Fleet(loads, 3, 30, time_ms, on_time=LaneQueue(2), late=LaneQueue(1))
    return observe(fleet, pools, time_ms)


def check(reader: StateReader, engines: dict[str, tuple[bytes | None, Tables]]) -> None:
    assert set(reader.figures) == set(engines)
    for name, (cells, tables) in engines.items():
        assert reader.figures[name]["blocks"] == len(cells or b"12345")
        if cells is None:
            assert name not in reader.cells
            assert reader.seqs[name] == {}
            continue
        values = [(min(value, 3), 0 if value < 2 else value - 1) for value in cells]
        assert reader.cells[name] == values
        named = {sequence_name(*key): table for key, table in tables.items()}
        assert {seq: reader.blocks(name, seq) for seq in reader.seqs[name]} == named


CELLS = st.lists(st.sampled_from([0, 0, 1, 2, 2, 3, 255]), min_size=5, max_size=5).map(bytes)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, tuple[bytes | None, Tables]]]:
    """States of up to two engines: cells change, tables grow, are copied on write, end and begin."""
    history: list[dict[str, tuple[bytes | None, Tables]]] = [{}]
    for _ in range(draw(st.integers(1, 8))):
        engines = dict(history[-1])
        name = draw(st.sampled_from(["e0", "e1"]))
        action = draw(st.sampled_from(["cells", "grow", "replace", "end", "silent", "gone", "resize", "nothing"]))
        cells, tables = engines.get(name, (None, {}))
        tables = {key: list(table) for key, table in tables.items()}
        keys = [(request_id(number), number % 2) for number in range(3)]
        key = draw(st.sampled_from(keys))
        if cells is None or action == "cells":
            cells = draw(CELLS)
        elif action == "grow":
            tables[key] = tables.get(key, []) + draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        elif action == "replace":
            tables[key] = [*tables.get(key, [0])[:-1], draw(st.integers(0, 9))]
        elif action == "end":
            tables.pop(key, None)
        elif action == "resize":
            cells = cells * 2
        engines[name] = (cells, tables) if action != "silent" else (None, {})
        if action == "gone":
            del engines[name]
        history.append(engines)
    return history


@settings(max_examples=examples(300))
@given(histories(), st.integers(1, 3))
def test_a_full_event_and_the_changes_after_it_make_the_state(
    history: list[dict[str, tuple[bytes | None, Tables]]], every: int
) -> None:
    """A slow reader gets only every second or third state."""
    reader, before = StateReader(), None
    for at, engines in enumerate(history[::every]):
        state = reading(engines, at, running=at)
        reader.feed(event(before, state).decode().removesuffix("\n\n"))
        check(reader, engines)
        assert all(figures["running"] == at for figures in reader.figures.values())
        assert reader.lanes == {"on_time": 2, "late": 1}
        before = state


def test_only_what_changed_is_sent() -> None:
    key = (request_id(5), 1)
    one = reading({"e0": (bytes(1000), {key: [4, 5, 9]}), "e1": (bytes(1000), {})})
    other = reading(
        {"e0": (bytes(500) + b"\x02\x02\x01" + bytes(497), {key: [4, 5, 9, 10, 2]}), "e1": (bytes(1000), {})}
    )
    changes = msgspec.json.decode(event(one, other).removeprefix(b"data: "))
    assert changes.pop("t") == 1
    name = sequence_name(*key)
    assert changes == {
        "full": False,
        "engines": [
            {"engine": "e0", "changed": [[500, 2, 2, 1], [502, 1, 1, 0]], "seqs": [[name, 1, [[9, 2], [2, 1]]]]}
        ],
    }
    assert one.equals(reading({"e0": (bytes(1000), {key: [4, 5, 9]}), "e1": (bytes(1000), {})}, 7))
    assert not one.equals(other)


def test_a_map_that_changed_everywhere_is_sent_whole() -> None:
    one, other = bytes([0, 1] * 5000), bytes([1, 0] * 5000)
    data = event(reading({"e0": (one, {})}), reading({"e0": (other, {})}))
    full = event(None, reading({"e0": (other, {})}))
    assert len(data) < len(full)
    assert b'"cells"' in data
    few = bytearray(one)
    few[::100] = bytes([7]) * 100
    assert b'"changed"' in event(reading({"e0": (one, {})}), reading({"e0": (bytes(few), {})}))


def test_a_name_is_no_id_that_an_answer_can_be_read_with() -> None:
    """Of the 20 random digits of an id 12 stay hidden; the first 12 digits are its time."""
    answer = resume.new_id("chatcmpl-", 1_763_800_000_000)
    name = sequence_name(f"{answer}.3", 1)
    assert name == f"{answer[21:29]}.3.1"
    assert len(answer) - 29 == 12
    assert sequence_name("ahead 3", 0) == ".ahead 3.0"
