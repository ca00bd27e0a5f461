"""Converts input items of /v1/responses to messages of a chat.

    message, reasoning                      text of a message
    function_call, custom_tool_call,        a call of the assistant's message
      local_shell_call, shell_call ...
    ..._output                              a message of role `tool`
    mcp_call, code_interpreter_call,        a call and its result, if the result is in the item
      file_search_call
    compaction, agent_message               a user message with the summary, or with the other agent's text
    web_search_call and others of SKIPPED   ignored, and named in `x-unknown-fields`: they have no text for the model

Any other type gets 400.  An image or file in a tool's result becomes a note, so that the conversation can continue.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.service.api.client_tools import custom_arguments, each_tool, joined
from quire.service.api.content_parts import Part, note_for, text_of_file
from quire.service.api.history import Message
from quire.service.api.skipped import Skipped
from quire.service.chat_templates import written_numbers
from quire.service.common.limits import shown
from quire.service.common.refusal import Refusal, bad_request, unsupported, wrong_type

CALL_PREFIX = "call_"  # prefix of call ids; removed, since some chat templates accept only nine characters
Item = dict[str, Any]  # one item of an input or an output, as JSON

ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
SUMMARY = "Summary of the conversation so far:\n\n"
# Type of a call that a client runs -> (name of the function in the chat, field with its arguments).
CLIENT_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
# Type of a call that OpenAI has run -> (name of the function, fields with its arguments, field with its result).
PROVIDER_CALLS = {
    "mcp_call": ("", ("arguments",), "output"),
    "code_interpreter_call": ("code_interpreter", ("code",), "outputs"),
    "file_search_call": ("file_search", ("queries",), "results"),
}
WITH_OBJECTS = (*CLIENT_CALLS, *PROVIDER_CALLS)  # items whose arguments or results may be objects
OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "computer_call_output",
    "tool_search_output",
)
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
SKIPPED = (
    "web_search_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "additional_tools",
    "configuration_update",
    "compaction_trigger",
    "program",
    "program_output",
    "ghost_snapshot",
)
SERVED = ("message", "agent_message", "function_call", "custom_tool_call", "reasoning", *COMPACTIONS)
ID_PREFIXES = {"function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_", "custom_tool_call": "ctc_"}
REFERENCE = "item_reference"


def kind_of(item: Item) -> str:
    """Return the type of an item.  Without `type` it is a message, or a reference if it has only an id."""
    kind = item.get("type")
    if kind is None and isinstance(item.get("id"), str) and "role" not in item and "content" not in item:
        return REFERENCE
    return str(kind or "message")


def with_ids(given: str | list[Item]) -> list[Item]:
    """Return the input as a list of items, with missing ids added.  Raises Refusal for an id that is no string."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    found = []
    for at, item in enumerate(items):
        kind, item_id = kind_of(item), item.get("id")
        if item_id is None:
            item_id = ID_PREFIXES.get(kind, "msg_") + secrets.token_hex(16)
        elif not isinstance(item_id, str):
            raise wrong_type(f"input[{at}].id", "a string")
        found.append({**item, "id": item_id, "type": kind})
    return found


def listed(item: Item) -> Item:
    """Return an input item in the form of OpenAI's item lists: content as parts, with a status."""
    found = {**item, "type": kind_of(item), "status": item.get("status") or "completed"}
    if found["type"] == "message":
        content = item.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found["content"] = [_listed_part(part, of_model=item.get("role") == "assistant") for part in parts]
    elif found["type"] == "reasoning":
        found["summary"] = item.get("summary") or []
    return found


def _listed_part(part: dict[str, Any], *, of_model: bool) -> dict[str, Any]:
    if part.get("type") not in TEXT_PARTS:
        return part
    return {**part, "type": "output_text", "annotations": []} if of_model else {**part, "type": "input_text"}


class Referring(msgspec.Struct):
    """The fields of an input item that show whether it is a reference to a stored item."""

    type: Any = None
    id: Any = None
    role: Any = None
    content: msgspec.Raw = msgspec.Raw()

    @property
    def refers(self) -> bool:
        """Whether the item is a reference: by its type, or because it has only an id."""
        return self.type == REFERENCE or (self.type is None and self.role is None and not self.content)


def resolved(items: list[Item], stored: Mapping[str, Item]) -> list[Item]:
    """Return items with references replaced by the stored items.  Raises Refusal(404)."""
    return [_stored_item(item, stored) if item["type"] == REFERENCE else item for item in items]


def _stored_item(item: Item, stored: Mapping[str, Item]) -> Item:
    if (found := stored.get(item["id"])) is not None:
        return found
    given = str(shown(str(item["id"])))
    message = (
        f"Item with id '{given}' not found. Items are not persisted when `store` is set to false. "
        "Try again with `store` set to true, or remove this item from your input."
    )
    raise Refusal(404, "item_not_found", message, param="input", given=given)


def tools_in(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the tools that the input's items contain: results of a client's tool search."""
    found: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") in ("tool_search_output", "additional_tools") and isinstance(item.get("tools"), list):
            found += [tool for tool in item["tools"] if isinstance(tool, dict)]
    return found


def earlier_items(history: Sequence[tuple[bytes, bytes]]) -> list[Item]:
    """Return the items of earlier turns.  `history`: for each turn its input items and its response, as JSON."""
    found: list[Item] = []
    for given, answered in history:  # one at a time, since decoding holds the GIL
        found += msgspec.json.decode(given) + msgspec.json.decode(answered)["output"]
    return found


def messages_of(
    items: Sequence[Item], skipped: Skipped, earlier: Sequence[Item] = ()
) -> tuple[list[Message], list[str]]:
    """Return the messages of a chat, and the client's field that each comes from.  `earlier`: items before the input.

    Consecutive reasoning, text and calls of the assistant form one message, whose field is that of the first item."""
    history = _History(skipped)
    fields = ["previous_response_id"] * len(earlier) + [f"input[{at}]" for at in range(len(items))]
    sources: list[str] = []
    for field, item in zip(fields, (*earlier, *items), strict=True):
        history.add(field, item)
        sources += [field] * (len(history.found) - len(sources))
    kept = [
        (one, source)
        for one, source in zip(history.found, sources, strict=True)
        if one.content or one.tool_calls or one.reasoning_content or one.role != "assistant"
    ]
    return [one for one, _ in kept], [source for _, source in kept]


class _History:
    """Converts items to messages one by one."""

    def __init__(self, skipped: Skipped) -> None:
        self.found: list[Message] = []
        self._skipped = skipped
        self._names: dict[str, str] = {}  # id of a call -> name of the function

    def add(self, param: str, item: Item) -> None:
        """Add one item.  Raises Refusal."""
        kind = str(item.get("type") or "message")
        if kind == "message":
            self._message(param, item)
        elif kind == "agent_message":
            self._agent_message(param, item)
        elif kind == "function_call":
            self._call(item, _string(param, item, "call_id"), _name(param, item), _string(param, item, "arguments"))
        elif kind == "custom_tool_call":
            arguments = custom_arguments(_string(param, item, "input"))
            self._call(item, _string(param, item, "call_id"), _name(param, item), arguments)
        elif kind in CLIENT_CALLS:
            name, field = CLIENT_CALLS[kind]
            self._call(item, _call_id(param, item), name, _json(item.get(field)))
        elif kind in OUTPUTS:
            self._result(_call_id(param, item), self._result_text(param, item), item.get("name"))
        elif kind in PROVIDER_CALLS:
            self._provider_call(param, kind, item)
        elif kind == "reasoning":
            turn = self._turn(fresh=self._answered())
            text = self._reasoning(param, item)
            turn.reasoning_content = "\n\n".join(filter(None, (turn.reasoning_content, text)))
        elif kind in COMPACTIONS:
            self._compaction(param, item)
        elif kind in SKIPPED:
            self._skipped.add(f"{param}.{kind}")
        else:
            allowed = ", ".join((*SERVED, *CLIENT_CALLS, *OUTPUTS, *PROVIDER_CALLS))
            raise unsupported(f"{param}.type", "there is no such item here", allowed, str(shown(kind)))

    def _message(self, param: str, item: Item) -> None:
        role = item.get("role")
        if role not in ROLES:
            allowed, given = ", ".join(ROLES), str(shown(str(role)))
            message = f"{param}.role: must be one of {allowed}, got '{given}'"
            raise bad_request("invalid_value", message, f"{param}.role", allowed, given)
        content = texts(f"{param}.content", item.get("content"))
        if role == "assistant":
            self._turn(fresh=self._answered()).content = content
        else:
            self.found.append(Message(str(role), content))

    def _agent_message(self, param: str, item: Item) -> None:
        """Add the text of another agent as a user message."""
        content = texts(f"{param}.content", item.get("content"), self._skipped)
        text = content if isinstance(content, str) else "\n".join(part.text or "" for part in content)
        author = item.get("author")
        self.found.append(Message("user", f"Message from {author}:\n\n{text}" if isinstance(author, str) else text))

    def _answered(self) -> bool:
        """Return whether the last message has text or calls, so that further reasoning or text begins a new turn."""
        return bool(self.found) and bool(self.found[-1].content or self.found[-1].tool_calls)

    def _turn(self, *, fresh: bool = False) -> Message:
        """Return the assistant's message at the end; add a new one if there is none, or if `fresh`."""
        if fresh or not self.found or self.found[-1].role != "assistant":
            self.found.append(Message("assistant", ""))
        return self.found[-1]

    def _call(self, item: Item, call: str, name: str, arguments: str) -> None:
        self._names[call] = name
        turn = self._turn()
        function = {"name": name, "arguments": arguments}
        entry: dict[str, Any] = {"id": call.removeprefix(CALL_PREFIX), "type": "function", "function": function}
        turn.tool_calls = [*(turn.tool_calls or ()), entry]

    def _result(self, call: str, content: str | list[Part], name: Any = None) -> None:
        """Add a tool result.  `name`: name of the function, used if its call is not in the history."""
        name = self._names.get(call, name if isinstance(name, str) else None)
        self.found.append(Message("tool", content, name=name, tool_call_id=call.removeprefix(CALL_PREFIX)))

    def _result_text(self, param: str, item: Item) -> str | list[Part]:
        """Return the text of a tool result, with a note in place of images and files."""
        output = item.get("output")
        if item.get("type") == "tool_search_output":
            return "Tools: " + ", ".join(_tool_names(item.get("tools")))
        if isinstance(output, str):
            return output
        if isinstance(output, list) and all(isinstance(part, dict) and "stdout" in part for part in output):
            return "\n".join(f"{part['stdout']}{part.get('stderr') or ''}" for part in output)
        if output is None and item.get("type") == "apply_patch_call_output":
            return str(item.get("status") or "")
        if isinstance(output, dict):
            output = [output]
        return texts(f"{param}.output", output, self._skipped)

    def _provider_call(self, param: str, kind: str, item: Item) -> None:
        """Add a call that OpenAI has run, with its result; a call without a result is ignored."""
        name, fields, result = PROVIDER_CALLS[kind]
        output = item.get("error") or item.get(result)
        if output is None:
            self._skipped.add(f"{param}.{kind}")
            return
        name = name or _name(param, {"name": item.get("name"), "namespace": item.get("server_label")})
        given = item.get(fields[0])
        arguments = given if kind == "mcp_call" and isinstance(given, str) else _json({fields[0]: given})
        call = str(item.get("id") or f"{kind}{len(self.found)}")
        self._call(item, call, name, arguments)
        self._result(call, output if isinstance(output, str) else _json(output))

    def _reasoning(self, param: str, item: Item) -> str:
        """Return the text of a reasoning item: from `content`, else `summary`, else Quire's own `encrypted_content`."""
        for field in ("content", "summary"):
            if item.get(field):
                parts = item[field]
                if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                    raise wrong_type(f"{param}.{field}", "a list of parts")
                return "\n\n".join(_string(f"{param}.{field}[{at}]", part, "text") for at, part in enumerate(parts))
        if sealed := item.get("encrypted_content"):
            if (text := opened(sealed)) is not None:
                return text
            self._skipped.add(f"{param}.encrypted_content")
        return ""

    def _compaction(self, param: str, item: Item) -> None:
        """Add the summary in a compaction item; an item of another server cannot be read and is ignored."""
        if (text := opened(item.get("encrypted_content"))) is None:
            self._skipped.add(f"{param}.encrypted_content")
        else:
            self.found.append(Message("user", SUMMARY + text))


# ---------------------------------------------------------------------------------------------------------------- parts


def texts(param: str, given: Any, skipped: Skipped | None = None) -> str | list[Part]:
    """Return content in the form of a chat message.  Raises Refusal for parts that are no text.

    `skipped`: given for a tool's result.  Then such a part becomes a note, and its name is added to `skipped`."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong_type(param, "a string or a list of parts")
    parts = []
    for at, part in enumerate(given):
        here = f"{param}[{at}]"
        if not isinstance(part, dict):
            raise wrong_type(here, "an object")
        kind = str(part.get("type"))
        if kind in TEXT_PARTS or kind == "refusal":
            parts.append(Part("text", _string(here, part, "refusal" if kind == "refusal" else "text")))
        elif kind == "input_file" and (text := text_of_file(part)) is not None:
            parts.append(Part("text", text))
        elif skipped is not None:
            skipped.add(f"{here}.{shown(kind)}")
            parts.append(Part("text", note_for(kind)))
        else:
            allowed = ", ".join((*TEXT_PARTS, "refusal"))
            raise unsupported(f"{here}.type", "this server takes text only", allowed, str(shown(kind)))
    return (parts[0].text or "") if len(parts) == 1 else parts if parts else ""


SEALED = "quire1."  # prefix of the values that Quire writes into `encrypted_content`


def sealed(text: str) -> str:
    """Encode text for `encrypted_content`, which clients only send back.  It is not encrypted."""
    return SEALED + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def opened(given: Any) -> str | None:
    """Decode an `encrypted_content` that Quire wrote; None for a value from another server."""
    if not isinstance(given, str) or not given.startswith(SEALED):
        return None
    try:
        return base64.b64decode(given.removeprefix(SEALED), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None


def _json(value: Any) -> str:
    return value if isinstance(value, str) else written_numbers.written(value or {})


def _name(param: str, item: Item) -> str:
    namespace = item.get("namespace")
    return joined(_string(param, item, "name"), namespace if isinstance(namespace, str) else None)


def _call_id(param: str, item: Item) -> str:
    """Return the call id of a call in CLIENT_CALLS or of a result; "" if a result names no call.

    Some calls, and a local shell's output, have the call id in `id`."""
    if item.get("call_id") is not None:
        return _string(param, item, "call_id")
    kind = item.get("type")
    if kind == "tool_search_output" or (kind == "function_call_output" and item.get("name") is not None):
        return ""
    return _string(param, item, "call_id" if kind == "function_call_output" else "id")


def _tool_names(tools: Any) -> list[str]:
    """Return the names by which the model sees the tools that a tool search has found."""
    return [
        joined(tool["name"], namespace)
        for _, namespace, tool in each_tool([tool for tool in tools or () if isinstance(tool, dict)])
        if isinstance(tool.get("name"), str)
    ]


def _string(param: str, item: Item, field: str) -> str:
    if not isinstance(value := item.get(field), str):
        raise wrong_type(f"{param}.{field}", "a string")
    return value
