"""Event ids: each encodes how much of an answer a client has, so that any gateway can continue from there."""

from __future__ import annotations

import re
from typing import Self

import msgspec

from quire.service.common.refusal import Refusal


class Position(msgspec.Struct, frozen=True):
    """How much of an answer a client has.  In an event id it is written `ID:TOKENS[:ENDED]`.

        cmpl-5f0c:17,,20         17 tokens of choice 0, nothing of choice 1, 20 tokens of choice 2
        cmpl-5f0c:17,0,20:2      also the end of choice 2
        cmpl-5f0c:17,9,20:usage  every choice, and the event with the usage
        cmpl-5f0c:17,9,20:done   the complete answer

    0 tokens mean that a choice has begun: its role, or the echoed prompt, was sent.  The text sent after N tokens is a
    function of these tokens.  So any gateway can continue at exactly the next character."""

    request_id: str
    tokens: tuple[int | None, ...]  # tokens per choice; None: not begun
    ended: frozenset[int] = frozenset()  # choices whose last event was sent
    usage: bool = False  # the event with the usage was sent
    done: bool = False  # [DONE] was sent

    @classmethod
    def start(cls, request_id: str, choices: int) -> Self:
        """Return the position before anything was sent."""
        return cls(request_id, (None,) * choices)

    @classmethod
    def parse(cls, event_id: str) -> Self:
        """Parse an event id.  Raises Refusal(400) if it is malformed."""
        found = _EVENT_ID.fullmatch(event_id)
        if found is None:
            raise _malformed(event_id)
        request_id, counts, ended = found["id"], found["tokens"].split(","), found["ended"] or ""
        tokens = tuple(int(count) if count else None for count in counts)
        if ended in ("usage", "done"):
            return cls(request_id, tokens, frozenset(range(len(tokens))), True, ended == "done")
        choices = frozenset(map(int, filter(None, ended.split(","))))
        if any(choice >= len(tokens) or tokens[choice] is None for choice in choices):
            raise _malformed(event_id)
        return cls(request_id, tokens, choices)


REQUEST_ID = r"(?:cmpl|chatcmpl)-[0-9a-f]{32}"
ANSWER_ID = rf"{REQUEST_ID}|(?:msg|resp)_[0-9a-f]{{32}}"  # also ids of API formats without event ids
_EVENT_ID = re.compile(
    rf"(?P<id>{REQUEST_ID}):(?P<tokens>(?:\d{{1,9}})?(?:,(?:\d{{1,9}})?)*)(?::(?P<ended>usage|done|\d{{1,5}}(?:,\d{{1,5}})*))?",
    re.ASCII,
)


def _malformed(event_id: str) -> Refusal:
    message = "Last-Event-ID: not the id of any event of this server"
    return Refusal(400, "invalid_event_id", message, param="last-event-id", given=event_id[:64])
