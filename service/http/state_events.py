"""The events of GET /engine/state: the complete state of the engines, or the changes since an earlier state.

    Fleet, PoolStates --observe()--> FleetState --event(None, state)---> {"full": true, ...}
                                                --event(before, state)-> {"full": false, ...}: changes only

docs/api.md describes the fields.  The functions here are pure: no I/O, no waiting.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Any

import msgspec

from quire.engine.wire.messages import EngineLoad, PoolState
from quire.engine.wire.records import Fleet

# An answer's id has 20 random digits.  Names of sequences show only the first 8: on a gateway without API keys, the
# complete id would let any watcher read the answer.
RANDOM_DIGITS, SHOWN_DIGITS = 20, 8
FEW = 256  # maximum number of patches that an event contains without comparing their size with the map's
# Cell value -> (kind, references): free, cached, in one block table, shared by several block tables.
KINDS = [(0, 0), (1, 0), (2, 1), *((3, refs) for refs in range(2, 255))]
RUN_BYTES = 8  # bytes per run of blocks in SequenceBlocks.runs

Json = dict[str, Any]


class EngineState(msgspec.Struct, frozen=True):
    """State of one engine in one snapshot."""

    figures: dict[str, int]  # load and sizes, by field name of the event
    cells: bytes | None  # map of the block pool (see PoolState); None: the engine publishes no map
    sequences: dict[str, bytes]  # name of a sequence -> runs of its blocks, see SequenceBlocks


class FleetState(msgspec.Struct, frozen=True, eq=False):
    """State of all engines and of the shared queue in one snapshot.  Compared and hashed by identity."""

    time_ms: int  # unix time on Redis' clock
    lanes: dict[str, int]  # lane -> number of waiting requests
    engines: dict[str, EngineState]

    def equals(self, other: FleetState) -> bool:
        """Return whether this state equals another one, except for the time."""
        return self.lanes == other.lanes and self.engines == other.engines

    @property
    def shape(self) -> list[tuple[str, int, int]]:
        """The engines and the sizes of their maps.  If the shape changes, a full event is necessary."""
        return [
            (name, engine.figures["blocks"], -1 if engine.cells is None else len(engine.cells))
            for name, engine in self.engines.items()
        ]


def observe(fleet: Fleet, pools: Mapping[str, PoolState], time_ms: int) -> FleetState:
    """Combine load and pools of one snapshot.  `pools` lacks engines that publish no pool state."""
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
        "jumped": load.jumped_tokens,
        "drafted": sum(computed for computed, _ in load.drafts.values()),
        "accepted": sum(accepted for _, accepted in load.drafts.values()),
        "refused": load.refused_drafts,
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
    """Return the name of a sequence: random digits of its answer's id, index of its prompt, index of its choice."""
    answer, _, prompt = request_id.rpartition(".")
    return f"{answer[-RANDOM_DIGITS:][:SHOWN_DIGITS]}.{prompt}.{index}"


def event(before: FleetState | None, state: FleetState) -> bytes:
    """Return one SSE event: the changes from `before` to `state`, or all of `state` if changes are not enough."""
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
    """Return the patches between two maps of equal size, or the complete map if that is shorter."""
    patches: list[list[int]] = []
    end = last = -1
    for at in compress(range(len(cells)), _xor(int.from_bytes(before), cells)):
        value = cells[at]
        if at == end and value == last:
            patches[-1][1] += 1
        else:
            patches.append([at, 1, *KINDS[value]])
        end, last = at + 1, value
    # In JSON a run takes three numbers, a patch four.
    if len(patches) > FEW and 3 * len(whole := _runs(cells)) < 4 * len(patches):
        return {"cells": whole}
    return {"changed": patches}


def _sequence_changes(before: Mapping[str, bytes], sequences: Mapping[str, bytes]) -> Iterator[list[Any]]:
    """Yield [name, number of runs to keep, new runs] for each changed sequence.  Block tables grow at their end."""
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
    """Return the bytewise XOR of `number` and `cells`: 0 for equal bytes.

    One operation on big integers does this fast."""
    return (number ^ int.from_bytes(cells)).to_bytes(len(cells))


def _pairs(runs: bytes) -> list[tuple[int, int]]:
    numbers = array("I", runs)
    return list(zip(numbers[::2], numbers[1::2], strict=True))
