"""Messages of a chat: checks them, and changes them to the form that the model's chat template needs.

    Message --plain_messages--> {"role", "content", ...} --for_template, with the Dialect--> messages for the template

Chat templates accept different messages; `template_probe.py` finds out which when the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from quire.service.api.client_tools import custom_arguments
from quire.service.api.content_parts import Part, read_parts, reasoning_in
from quire.service.api.sent_calls import read_call, read_function
from quire.service.api.skipped import Skipped
from quire.service.chat_templates import written_numbers
from quire.service.chat_templates.fit_history import Entry, fit, joined
from quire.service.chat_templates.template_probe import TEMPLATES_KEPT, Dialect
from quire.service.common.limits import ROLE_CHARS
from quire.service.common.refusal import Refusal, bad_request, check
from quire.service.common.surrogates import without_surrogates
from quire.service.config import GatewayConfig

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's roles; templates may have others
ROLE = rf"[A-Za-z][A-Za-z0-9_-]{{0,{ROLE_CHARS - 1}}}"  # regex of the names that other roles may have


class Message(msgspec.Struct):
    """One chat message."""

    role: str
    content: str | Sequence[Part | str] | None = None
    name: str | None = None
    tool_calls: list[dict[str, msgspec.Raw]] | None = None  # raw JSON: `sent_calls.py` keeps numbers as written
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: Any = None  # Ollama's name of the reasoning
    thinking_blocks: Any = None  # LiteLLM's form of the reasoning
    reasoning_details: Any = None  # OpenRouter's form of the reasoning
    refusal: str | None = None
    function_call: dict[str, msgspec.Raw] | None = None


def plain_messages(messages: list[Message], config: GatewayConfig, skipped: Skipped) -> list[dict[str, Any]]:
    """Return checked messages without null fields; content is a string or a list of parts.  Raises Refusal."""
    if not messages:
        raise bad_request("empty_prompt", "messages: must not be empty, at least 1 message", "messages", ">= 1", 0)
    check("messages", len(messages), config)
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    check("content parts", parts, config)
    check("tool calls", sum(len(message.tool_calls or ()) for message in messages), config)
    plain = [_plain(f"messages[{at}]", message, skipped) for at, message in enumerate(messages)]
    return _without_function_calls(plain)


def _plain(name: str, message: Message, skipped: Skipped) -> dict[str, Any]:
    if message.role not in ROLES and not re.fullmatch(ROLE, message.role):
        raise unknown_role(name, message.role)
    content: Any = message.content or ""
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is None and message.role == "assistant":
        reasoning = reasoning_in(message.thinking, message.thinking_blocks, message.reasoning_details)
    if isinstance(message.content, list):
        content, thoughts = read_parts(name, message.role, [*message.content], skipped)
        reasoning = reasoning or thoughts or reasoning
    entry: dict[str, Any] = {"role": message.role, "content": joined(content, message.refusal) or ""}
    for field in ("name", "tool_calls", "tool_call_id"):
        if value := getattr(message, field):
            entry[field] = value
    if reasoning is not None:
        entry["reasoning_content"] = reasoning
    if "tool_calls" in entry:
        calls = [read_call(f"{name}.tool_calls[{at}]", call) for at, call in enumerate(entry["tool_calls"])]
        entry["tool_calls"] = [_of_custom(call) for call in calls]
    for at, call in enumerate(entry.get("tool_calls", ())):
        _check_call(f"{name}.tool_calls[{at}]", call)
    if message.function_call is not None:
        entry["function_call"] = read_function(f"{name}.function_call", message.function_call)
        _check_call(name, entry, "function_call")
    return entry


def _of_custom(call: dict[str, Any]) -> dict[str, Any]:
    """Turn the call of a custom tool into a function call with one string argument, as `/v1/responses` does."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    arguments = custom_arguments(str(custom.get("input") or ""))
    rest = {key: value for key, value in call.items() if key not in ("type", "custom")}
    return {**rest, "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def _check_call(name: str, call: dict[str, Any], field: str = "function") -> None:
    """Raise Refusal for a call that names no function."""
    function = call.get(field)
    if not isinstance(function, dict):
        raise bad_request("invalid_type", f"{name}.{field}: must be an object", f"{name}.{field}", "an object")
    if not isinstance(function.get("name"), str):
        raise bad_request("invalid_type", f"{name}.{field}.name: must be a string", f"{name}.{field}.name", "a string")


def _without_function_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert OpenAI's deprecated function calls and their results to tool calls and tool results."""
    found, due = [], ""
    for at, message in enumerate(messages):
        if (function := message.pop("function_call", None)) is not None:
            due = f"call{at:05d}"
            call = {"id": due, "type": "function", "function": function}
            message = {**message, "tool_calls": [*message.get("tool_calls", ()), call]}
        elif message["role"] == "function":
            message = {**message, "role": "tool", "tool_call_id": message.get("tool_call_id") or due or f"call{at:05d}"}
            due = ""
        found.append(message)
    return found


def unknown_role(name: str, role: str) -> Exception:
    """Return the refusal of an unknown role.  The error repeats the role, shortened: a role is no prompt text."""
    allowed, given = ", ".join(ROLES), role[:ROLE_CHARS]
    message = f"{name}.role: '{given}' is not one of {allowed}, and the model's chat template does not name it"
    return bad_request("invalid_value", message, f"{name}.role", allowed, given)


@lru_cache(maxsize=TEMPLATES_KEPT)
def roles_in(template: str) -> frozenset[str]:
    """Return the quoted words in a template's source that may be roles.  Cached like `template_probe.names_in`."""
    return frozenset(re.findall(rf"(?=['\"]({ROLE})['\"])", template))


def for_template(messages: list[dict[str, Any]], dialect: Dialect, template: str) -> list[Entry]:
    """Change messages so that the chat template renders them; return each with the index of the client's message.

    Raises Refusal for content that the template would leave out."""
    return fit([_form(f"messages[{at}]", message, dialect, template) for at, message in enumerate(messages)], dialect)


def _form(name: str, message: dict[str, Any], dialect: Dialect, template: str) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role not in ROLES and not dialect.any_role and role not in roles_in(template):
        raise unknown_role(name, role)
    if role == "tool" and not dialect.results:
        raise _left_out(f"{name}.role", "results of tools")
    if role == "developer" and not dialect.developer:
        role = "system"
    found = {**message, "role": role, "content": content}
    if isinstance(content, list) and not (dialect.parts and dialect.text_roles.isdisjoint((role, "user"))):
        found["content"] = "\n".join(part["text"] for part in content)
    elif isinstance(content, str) and not dialect.text:
        found["content"] = [{"type": "text", "text": content}]
    if "tool_calls" in message:
        if not dialect.calls:
            raise _left_out(f"{name}.tool_calls", "tool calls")
        found["tool_calls"] = [_call(call, dialect) for call in message["tool_calls"]]
    return found


def _left_out(field: str, what: str) -> Exception:
    return bad_request("unsupported", f"{field}: the model's chat template shows the model no {what}", field)


def _call(call: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return a tool call with its arguments as an object or as a string of JSON, as the template needs them."""
    function = call["function"]
    arguments = function.get("arguments")
    if dialect.arguments:
        arguments = _object(arguments, dialect)
    elif not isinstance(arguments, str):
        arguments = written_numbers.written({} if arguments is None else arguments)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _object(given: Any, dialect: Dialect) -> Any:
    """Return the arguments of a call as an object.

    Arguments that are no object are returned unchanged if the template accepts them, else as {"arguments": ...}."""
    if isinstance(given, str):
        try:
            parsed = without_surrogates(written_numbers.read(given or "{}"))
        except (ValueError, RecursionError):
            parsed = given
        if isinstance(parsed, dict):
            return parsed
        given = given if dialect.any_arguments else parsed
    if given is None or isinstance(given, dict):
        return given or {}
    return given if dialect.any_arguments else {"arguments": given}


# -------------------------------------------------------------------------------------------------------------- errors


def refused(error: Exception, count: int, render: Callable[[int], Any]) -> Refusal:
    """Return the refusal of `count` messages for which a template has raised `error`.  It names the message at fault.

    The message at fault is found by bisection: it is the last one of the shortest beginning of the conversation that
    raises the same error.  `render` changes and renders the first N messages."""
    reason = _reason(error)
    passed, failed = 0, count
    while failed - passed > 1:
        middle = (passed + failed) // 2
        try:
            render(middle)
        except Exception as other:  # a template may raise any error
            passed, failed = (passed, middle) if _reason(other) == reason else (middle, failed)
        else:
            passed = middle
    name = f"messages[{failed - 1}]"
    message = f"{name}: the model's chat template refuses it: {reason}"
    return Refusal(400, "chat_template_error", message, param=name)


def _reason(error: Exception) -> str:
    """Return the message of a template's own `raise_exception`, or else the error's type.

    Messages of other errors are not repeated, since they may quote prompt text."""
    return str(error) if type(error).__name__ == "TemplateError" else type(error).__name__
