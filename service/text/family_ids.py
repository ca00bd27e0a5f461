"""Ids of tool calls in the form in which a model family was trained, such as `functions.weather:0`, counted per chat.

A chat template shows the ids to the model.  Ids in a client's history may come from other servers, in a form that the
model has never seen, so they are replaced.
"""

from __future__ import annotations

from typing import Any

from quire.service.output.regions import ResponseTemplate

Message = dict[str, Any]


def with_family_ids(messages: list[Message], responses: ResponseTemplate | None) -> list[Message]:
    """Return messages with the ids of calls and results replaced, if the model family needs ids of a certain form.

    A result without an id belongs to the first call that has no result yet.  A result with an unknown id keeps it."""
    if responses is None or not responses.call_id("", "0"):
        return messages
    found, due, count = list[Message](), list[tuple[str, str]](), 0  # due: (old id, new id) of calls without a result
    for message in messages:
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            pair = next((one for one in due if given in (None, one[0])), None)
            if pair is not None:
                due.remove(pair)
                message = {**message, "tool_call_id": pair[1]}
        elif message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                new = responses.call_id(call["function"]["name"], str(count))
                count += 1
                due.append((str(call.get("id")), new))
                calls.append({**call, "id": new})
            message = {**message, "tool_calls": calls}
        found.append(message)
    return found
