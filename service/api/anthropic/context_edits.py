"""`context_management` of /v1/messages: edits that are applied, that change nothing, or that are refused.

no edits                                     nothing to do
clear_thinking_20251015, keep "all"          changes nothing
clear_thinking_20251015, keep N turns        the thinking of earlier turns is left out
clear_tool_uses_20250919                     changes nothing while the calls are few: see `_clears_no_calls`
any other edit                               400: it would change the prompt in a way that this server does not know
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.service.api.anthropic.message_blocks import Turn
from quire.service.api.skipped import Skipped
from quire.service.common.limits import shown
from quire.service.common.refusal import bad_request

FIELD = "context_management"
CLEAR_THINKING, CLEAR_CALLS = "clear_thinking_20251015", "clear_tool_uses_20250919"
THINKING = ("thinking", "redacted_thinking")
KEPT_TURNS, KEPT_CALLS = 1, 3  # defaults of `keep`: turns with thinking, and tool calls


def edited(turns: list[Turn], management: dict[str, Any] | None, skipped: Skipped) -> list[Turn]:
    """Return messages after the edits of their request.  Raises Refusal for an edit that is not served."""
    if not management:
        return turns
    for name in management:
        if name != "edits":
            raise bad_request(
                "unsupported", f"{FIELD}.{shown(name)}: there is no such setting", f"{FIELD}.{shown(name)}"
            )
    edits = management.get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise bad_request("invalid_type", f"{FIELD}.edits: must be a list of edits", f"{FIELD}.edits", "a list")
    for at, edit in enumerate(edits):
        if edit.get("type") == CLEAR_CALLS and _clears_no_calls(turns, edit):
            skipped.add(FIELD)
            continue
        if edit.get("type") != CLEAR_THINKING:
            kind = str(shown(str(edit.get("type"))))
            message = f"{FIELD}.edits[{at}].type: editing of the context by '{kind}' is not served"
            raise bad_request("unsupported", message, f"{FIELD}.edits[{at}].type", CLEAR_THINKING, kind)
        keep = _turns_to_keep(f"{FIELD}.edits[{at}].keep", edit.get("keep"))
        if keep is None:
            skipped.add(FIELD)
        else:
            turns = _without_thinking(turns, keep)
    return turns


def _clears_no_calls(turns: list[Turn], edit: dict[str, Any]) -> bool:
    """Return whether an edit surely clears no call: it keeps as many as there are, or begins with more."""
    blocks = [block for turn in turns if not isinstance(turn.content, str) for block in turn.content]
    calls = sum(block.type == "tool_use" for block in blocks)
    keep, trigger = edit.get("keep") or {"value": KEPT_CALLS}, edit.get("trigger")
    kept = keep.get("value") if isinstance(keep, dict) else None
    first = trigger.get("value") if isinstance(trigger, dict) and trigger.get("type") == "tool_uses" else None
    return (isinstance(kept, int) and calls <= kept) or (isinstance(first, int) and calls < first)


def _turns_to_keep(param: str, keep: Any) -> int | None:
    """Return how many turns keep their thinking; None: all."""
    if keep is None:
        return KEPT_TURNS
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return None
    value = keep.get("value") if isinstance(keep, dict) and keep.get("type") == "thinking_turns" else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        wanted = "'all', or thinking_turns with a value >= 1"
        raise bad_request("invalid_value", f"{param}: must be {wanted}", param, wanted)
    return value


def _without_thinking(turns: list[Turn], keep: int) -> list[Turn]:
    """Return messages in which only the last `keep` turns that have thinking keep it."""
    found = list(turns)
    for at in reversed(range(len(found))):
        content = found[at].content
        if found[at].role != "assistant" or isinstance(content, str):
            continue
        rest = [block for block in content if block.type not in THINKING]
        if len(rest) == len(content):
            continue
        if keep:
            keep -= 1
        elif rest:
            found[at] = msgspec.structs.replace(found[at], content=rest)
    return found
