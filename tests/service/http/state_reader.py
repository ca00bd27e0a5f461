"""A reader of GET /engine/state as docs/api.md describes it: applies each event to what it knows."""

from __future__ import annotations

import json
from typing import Any

Cell = tuple[int, int]  # kind, references


class StateReader:
    """What a client knows after the events so far."""

    def __init__(self) -> None:
        self.lanes: dict[str, int] = {}
        self.figures: dict[str, dict[str, int]] = {}  # engine -> its plain numbers
        self.cells: dict[str, list[Cell]] = {}  # engine -> its map, if it has one
        self.seqs: dict[str, dict[str, list[list[int]]]] = {}  # engine -> name -> runs of blocks
        self.events = self.comments = 0

    def feed(self, block: str) -> bool:
        """Apply what stands between two blank lines.  Returns whether it was an event."""
        if not block.startswith("data: "):
            assert block.startswith(":"), block
            self.comments += 1
            return False
        event = json.loads(block.removeprefix("data: "))
        self.events += 1
        if event["full"]:
            self.figures, self.cells, self.seqs = {}, {}, {}
        self.lanes = event.get("lanes", self.lanes)
        for entry in event["engines"]:
            self._apply(entry.pop("engine"), entry, full=event["full"])
        return True

    def _apply(self, engine: str, entry: dict[str, Any], *, full: bool) -> None:
        if (cells := entry.pop("cells", None)) is not None:
            self.cells[engine] = [(kind, refs) for length, kind, refs in cells for _ in range(length)]
        for first, length, kind, refs in entry.pop("changed", []):
            self.cells[engine][first : first + length] = [(kind, refs)] * length
        known = self.seqs.setdefault(engine, {})
        for name, *change in entry.pop("seqs", []):
            keep, runs = (0, *change) if full else change
            assert keep <= len(known.get(name, []))
            known[name] = known.get(name, [])[:keep] + runs
        for name in entry.pop("gone", []):
            del known[name]
        self.figures.setdefault(engine, {}).update(entry)

    def blocks(self, engine: str, name: str) -> list[int]:
        """The block table of one sequence."""
        return [block for first, count in self.seqs[engine][name] for block in range(first, first + count)]
