"""The events of GET /engine/state: the engines' state as a whole, or what has changed of it.

    Fleet, PoolStates --observe()--> FleetState --event(None, state)---> {"full": true, ...}
                                                --event(before, state)-> {"full": false, ...}: only what changed

docs/api.md describes the fields.  Nothing here waits or knows of clients.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Any

import msgspec

from quire.engine.wire.messages import EngineLoad, PoolState
from quire.engine.wire.records import Fleet

# Digits of an answer's id that name its sequences: the first of its 20 random ones.  If there are no keys, a client
# could read the answer with the complete id.
RANDOM_DIGITS, SHOWN_DIGITS = 20, 8
FEW = 256  # patches up to which the complete map is not considered instead
# (kind, references) of each value of a cell: free, cached, owned by one table, shared by several.
KINDS = [(0, 0), (1, 0), (2, 1), *((3, refs) for refs in range(2, 255))]
RUN_BYTES = 8  # bytes per run of blocks in SequenceBlocks.runs

Json = dict[str, Any]


class EngineState(msgspec.Struct, frozen=True):
    """One engine, as one reading shows it."""

    figures: dict[str, int]
    cells: bytes | None  # see PoolState; None: it publishes none
    sequences: dict[str, bytes]  # name -> runs of blocks, see SequenceBlocks


class FleetState(msgspec.Struct, frozen=True, eq=False):
    """All engines and the shared queue, as one reading shows them.  Each reading is a value of its own."""

    time_ms: int  # unix time on Redis' clock
    lanes: dict[str, int]  # requests that wait in each
    engines: dict[str, EngineState]

    def equals(self, other: FleetState) -> bool:
        """Whether nothing but the time differs."""
        return self.lanes == other.lanes and self.engines == other.engines

    @property
    def shape(self) -> list[tuple[str, int, int]]:
        """What only a full event can change: the engines and the sizes of their maps."""
        return [
            (name, engine.figures["blocks"], -1 if engine.cells is None else len(engine.cells))
            for name, engine in self.engines.items()
        ]


def observe(fleet: Fleet, pools: Mapping[str, PoolState], time_ms: int) -> FleetState:
    """Put one reading together.  `pools`: without the engines that publish no state."""
    engines = {load.engine: _engine(load, pools.get(load.engine)) for load in fleet.engines}
    lanes = {"on_time": fleet.on_time.requests, "late": fleet.late.requests}
    return FleetState(time_ms, lanes, dict(sorted(engines.items())))


def _engine(load: EngineLoad, pool: PoolState | None) -> EngineState:
    figures = {
        "blocks": load.total_blocks,
        "block_size": load.block_size,
        "per_cell": 1,
        "running": load.running,
        "waiting": load.waiting,
        "paused": load.paused,
        "swapped": load.swapped,
        "preemptions": load.preemptions,
        "tokens": load.generated_tokens,
        "free_blocks": load.free_blocks,
        "cached_blocks": load.cached_blocks,
        "peak_blocks": load.predicted_peak_blocks,
        "host_blocks": 0,
        "host_used": 0,
        "left_out": 0,
    }
    if pool is None:
        return EngineState(figures, None, {})
    for name in ("blocks", "per_cell", "host_blocks", "host_used", "left_out"):
        figures[name] = getattr(pool, name)
    return EngineState(figures, pool.cells, {sequence_name(one.id, one.index): one.runs for one in pool.sequences})


def sequence_name(request_id: str, index: int) -> str:
    """Return what a sequence is called: digits of its answer's id, the number of its prompt, that of its choice."""
    answer, _, prompt = request_id.rpartition(".")
    return f"{answer[-RANDOM_DIGITS:][:SHOWN_DIGITS]}.{prompt}.{index}"


def event(before: FleetState | None, state: FleetState) -> bytes:
    """Return one event of the stream: all of `state`, or what has changed since `before`."""
    if before is None or before.shape != state.shape:
        body = _full(state)
    else:
        body = _changes(before, state)
    return b"data: %s\n\n" % msgspec.json.encode(body)


def _full(state: FleetState) -> Json:
    engines: list[Json] = []
    for name, engine in state.engines.items():
        entry: Json = {"engine": name, **engine.figures}
        if engine.cells is not None:
            entry["cells"] = _runs(engine.cells)
            entry["seqs"] = [[seq, _pairs(runs)] for seq, runs in engine.sequences.items()]
        engines.append(entry)
    return {"full": True, "t": state.time_ms, "lanes": state.lanes, "engines": engines}


def _changes(before: FleetState, state: FleetState) -> Json:
    found: Json = {"full": False, "t": state.time_ms}
    if before.lanes != state.lanes:
        found["lanes"] = state.lanes
    found["engines"] = [
        {"engine": name, **_engine_changes(before.engines[name], engine)}
        for name, engine in state.engines.items()
        if before.engines[name] != engine
    ]
    return found


def _engine_changes(before: EngineState, engine: EngineState) -> Json:
    found: Json = {name: value for name, value in engine.figures.items() if before.figures[name] != value}
    if engine.cells is not None and before.cells is not None and engine.cells != before.cells:
        found |= _cell_changes(before.cells, engine.cells)
    if seqs := list(_sequence_changes(before.sequences, engine.sequences)):
        found["seqs"] = seqs
    if gone := [name for name in before.sequences if name not in engine.sequences]:
        found["gone"] = gone
    return found


def _cell_changes(before: bytes, cells: bytes) -> Json:
    """Return patches of a map of the same size, or the complete map where that is shorter."""
    patches: list[list[int]] = []
    end = last = -1
    for at in compress(range(len(cells)), _xor(int.from_bytes(before), cells)):
        value = cells[at]
        if at == end and value == last:
            patches[-1][1] += 1
        else:
            patches.append([at, 1, *KINDS[value]])
        end, last = at + 1, value
    # A run has three numbers, a patch four.
    if len(patches) > FEW and 3 * len(whole := _runs(cells)) < 4 * len(patches):
        return {"cells": whole}
    return {"changed": patches}


def _sequence_changes(before: Mapping[str, bytes], sequences: Mapping[str, bytes]) -> Iterator[list[Any]]:
    """Yield [name, runs to keep, further runs] of each sequence that differs.  Tables grow at their end."""
    for name, runs in sequences.items():
        known = before.get(name, b"")
        if known == runs:
            continue
        keep = next((kept for kept in (known, known[:-RUN_BYTES]) if runs.startswith(kept)), b"")
        yield [name, len(keep) // RUN_BYTES, _pairs(runs[len(keep) :])]


def _runs(cells: bytes) -> list[tuple[int, int, int]]:
    """Return (length, kind, references) of each run of equal cells.  16,384 cells take a few milliseconds at most."""
    starts = list(compress(range(1, len(cells)), _xor(int.from_bytes(cells) >> 8, cells)[1:]))
    runs = zip([0, *starts], [*starts, len(cells)], strict=True)
    return [(end - start, *KINDS[cells[start]]) for start, end in runs]


def _xor(number: int, cells: bytes) -> bytes:
    """Return a byte for each cell: 0 where it equals that byte of `number`.  As one long number, for speed."""
    return (number ^ int.from_bytes(cells)).to_bytes(len(cells))


def _pairs(runs: bytes) -> list[tuple[int, int]]:
    numbers = array("I", runs)
    return list(zip(numbers[::2], numbers[1::2], strict=True))
