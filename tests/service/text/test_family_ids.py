"""Ids of calls in the history of families that write them in a form of their own."""

from __future__ import annotations

from typing import Any

from quire.service.text.family_ids import with_family_ids
from tests.service.text.call_notations import notation, renderer

KIMI = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}{{ c.id }};{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)


def calls(*named: tuple[str | None, str]) -> dict[str, Any]:
    made = [{"id": one, "type": "function", "function": {"name": name, "arguments": "{}"}} for one, name in named]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(call: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": "1", **({"tool_call_id": call} if call is not None else {})}


def test_ids_of_calls_are_counted_over_the_conversation_and_results_follow_them() -> None:
    history = [
        {"role": "user", "content": "a"},
        calls(("call_x", "weather"), ("call_y", "time")),
        result("call_y"),
        result("call_x"),
        calls(("call_x", "weather"), (None, "time")),  # an id that is there again
        result("call_x"),
        result(None),
        result("call_unknown"),
    ]
    before = repr(history)
    shown = renderer(KIMI)(with_family_ids(history, notation("kimi-k2")[1]))
    assert shown == (
        "<user><assistant>functions.weather:0;functions.time:1;<tool>functions.time:1<tool>functions.weather:0"
        "<assistant>functions.weather:2;functions.time:3;<tool>functions.weather:2<tool>functions.time:3"
        "<tool>call_unknown"
    )
    assert repr(history) == before
    assert with_family_ids(history, notation("hermes")[1]) is history
    assert with_family_ids(history, None) is history
