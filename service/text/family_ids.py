"""Ids of calls in the history of a chat, as a family writes them: `functions.weather:0`, counted over the chat.

A chat template shows such ids to the model, and foreign ones, as of other servers, are unlike all that it has learned.
"""

from __future__ import annotations

from typing import Any

from quire.service.output.regions import ResponseTemplate

Message = dict[str, Any]


def with_family_ids(messages: list[Message], responses: ResponseTemplate | None) -> list[Message]:
    """Return messages with the family's ids of calls and results; as they are if the family takes any ids.

    A result without an id belongs to the first call that has none yet; one of an unknown call keeps its id."""
    if responses is None or not responses.call_id("", "0"):
        return messages
    found, due, count = list[Message](), list[tuple[str, str]](), 0  # due: ids of calls without a result, old and new
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
