"""`context_management` of /v1/messages: which edits are applied, have no effect, or are refused.

clear_thinking_20251015, keep "all"          no effect
clear_thinking_20251015, keep N turns        thinking of earlier turns is left out
clear_tool_uses_20250919, few calls          no effect: see `_clears_no_calls`
clear_tool_uses_20250919, compact_20260112   no effect while the prompt is below their trigger, else 400
any other edit                               400, since its effect on the prompt is not known
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.service.api.anthropic.message_blocks import Turn
from quire.service.api.skipped import Skipped
from quire.service.api.valid_request import PromptBound
from quire.service.common.limits import WHOLE, shown
from quire.service.common.refusal import bad_request

FIELD = "context_management"
CLEAR_THINKING, CLEAR_CALLS = "clear_thinking_20251015", "clear_tool_uses_20250919"
TRIGGERS = {CLEAR_CALLS: 100_000, "compact_20260112": 150_000}  # default trigger of an edit, in input tokens
THINKING = ("thinking", "redacted_thinking")
KEPT_TURNS, KEPT_CALLS = 1, 3  # defaults of `keep`: turns with thinking, and tool calls


def edited(
    turns: list[Turn], management: dict[str, Any] | None, skipped: Skipped
) -> tuple[list[Turn], list[PromptBound]]:
    """Apply edits.  Returns the edited messages, and for each edit not applied the prompt length that would trigger it.

    Raises Refusal for an unsupported edit."""
    bounds: list[PromptBound] = []
    for name in management or ():
        if name != "edits":
            raise bad_request(
                "unsupported", f"{FIELD}.{shown(name)}: there is no such setting", f"{FIELD}.{shown(name)}"
            )
    edits = (management or {}).get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise bad_request("invalid_type", f"{FIELD}.edits: must be a list of edits", f"{FIELD}.edits", "a list")
    for at, edit in enumerate(edits):
        kind, here = edit.get("type"), f"{FIELD}.edits[{at}]"
        if kind == CLEAR_THINKING:
            keep = _turns_to_keep(f"{here}.keep", edit.get("keep"))
            if keep is not None:
                turns = _without_thinking(turns, keep)
                continue
        elif not (kind == CLEAR_CALLS and _clears_no_calls(turns, edit)):
            bounds.append(_bound(here, edit))
        skipped.add(FIELD)
    return turns, bounds


def _bound(here: str, edit: dict[str, Any]) -> PromptBound:
    """Return the prompt length at which an edit triggers.  Raises Refusal for an unsupported edit or trigger."""
    given = edit.get("type")
    kind = str(shown(str(given)))
    trigger = edit.get("trigger") or {"type": "input_tokens", "value": TRIGGERS.get(kind)}
    tokens = trigger.get("value") if isinstance(trigger, dict) and trigger.get("type") == "input_tokens" else None
    if not isinstance(given, str) or kind not in TRIGGERS or not isinstance(tokens, int) or isinstance(tokens, bool):
        message = f"{here}.type: editing of the context by '{kind}' is not served"
        raise bad_request("unsupported", message, f"{here}.type", CLEAR_THINKING, kind)
    return PromptBound(f"{here}.trigger", min(tokens, WHOLE), f"editing of the context by '{kind}'")


def _clears_no_calls(turns: list[Turn], edit: dict[str, Any]) -> bool:
    """Return whether an edit certainly clears no call: it keeps all calls, or its trigger needs more than there are."""
    blocks = [block for turn in turns if not isinstance(turn.content, str) for block in turn.content]
    calls = sum(block.type == "tool_use" for block in blocks)
    keep, trigger = edit.get("keep") or {"value": KEPT_CALLS}, edit.get("trigger")
    kept = keep.get("value") if isinstance(keep, dict) else None
    first = trigger.get("value") if isinstance(trigger, dict) and trigger.get("type") == "tool_uses" else None
    return (isinstance(kept, int) and calls <= kept) or (isinstance(first, int) and calls < first)


def _turns_to_keep(param: str, keep: Any) -> int | None:
    """Return the number of turns that keep their thinking; None: all."""
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
    """Return the messages without thinking, except in the last `keep` turns that have thinking."""
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
