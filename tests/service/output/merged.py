"""An answer read in pieces, with its deltas merged as a client does."""

from __future__ import annotations

from quire.service.output.regions import CallDelta, RegionReader

Read = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, (name, arguments) of each call


def merged(reader: RegionReader, pieces: list[str], *, cut: bool = False) -> Read:
    """Push the pieces, finish, and merge what the reader returns.  Each call's deltas follow one another."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for piece in [*pieces, None]:
        if piece is None:
            reader.finish(cut=cut)
        else:
            reader.push(piece)
        more, thought, deltas = reader.take()
        content, reasoning = content + more, reasoning + thought
        for delta in deltas:
            add(calls, delta)
    return content, reasoning, calls


def add(calls: list[tuple[str, str]], delta: CallDelta) -> None:
    """Add a delta to the calls so far."""
    if delta.name is not None:
        assert delta.index == len(calls), "an index is left out"
        calls.append((delta.name, delta.arguments))
    else:
        assert delta.index == len(calls) - 1
        calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
