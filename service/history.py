"""Messages of a chat, as clients send them and as chat templates read them.

    Message --plain_messages--> {"role", "content", ...} --for_template, what the model's template reads--> the template

Templates differ in what they read: `template_probe.py` finds it out when the model is loaded.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import msgspec

from service.config import GatewayConfig
from service.limits import ROLE_CHARS
from service.refusal import bad_request, check
from service.template_probe import TEMPLATES_KEPT, Dialect

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # of OpenAI's API; a template may know more
ROLE = rf"[A-Za-z][A-Za-z0-9_-]{{0,{ROLE_CHARS - 1}}}"  # what a role of a template may be


class Part(msgspec.Struct):
    """One content part of a chat message."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One chat message."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def plain_messages(messages: list[Message], config: GatewayConfig) -> list[dict[str, Any]]:
    """Return checked messages without null fields; content is a string or a list of parts.  Raises Refusal."""
    if not messages:
        raise bad_request("empty_prompt", "messages: must not be empty, at least 1 message", "messages", ">= 1", 0)
    check("messages", len(messages), config)
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    check("content parts", parts, config)
    check("tool calls", sum(len(message.tool_calls or ()) for message in messages), config)
    return [_plain(f"messages[{at}]", message) for at, message in enumerate(messages)]


def _plain(name: str, message: Message) -> dict[str, Any]:
    if message.role not in ROLES and not re.fullmatch(ROLE, message.role):
        raise unknown_role(name, message.role)
    entry: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                reason = "this server takes text only: only parts of type 'text' are served"
                raise bad_request("unsupported", f"{name}.content: {reason}", f"{name}.content")
        entry["content"] = [{"type": "text", "text": part.text} for part in message.content]
    for field in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, field)) is not None:
            entry[field] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        entry["reasoning_content"] = reasoning
    return entry


def unknown_role(name: str, role: str) -> Exception:
    """Return the refusal of a role.  It repeats the role, cut short: that is no prompt text."""
    allowed, given = ", ".join(ROLES), role[:ROLE_CHARS]
    message = f"{name}.role: '{given}' is not one of {allowed}, and the model's chat template does not name it"
    return bad_request("invalid_value", message, f"{name}.role", allowed, given)


@lru_cache(maxsize=TEMPLATES_KEPT)
def roles_in(template: str) -> frozenset[str]:
    """Return what a template's source has in quotes and may be a role; once, as `template_probe.names_in`."""
    return frozenset(re.findall(rf"(?=['\"]({ROLE})['\"])", template))


def for_template(messages: list[dict[str, Any]], dialect: Dialect, template: str) -> list[dict[str, Any]]:
    """Return messages in the form that the chat template reads.  Raises Refusal for a role that it does not know."""
    return [_form(f"messages[{at}]", message, dialect, template) for at, message in enumerate(messages)]


def _form(name: str, message: dict[str, Any], dialect: Dialect, template: str) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role not in ROLES and role not in roles_in(template):
        raise unknown_role(name, role)
    found = {**message, "content": content}
    if isinstance(content, list) and not dialect.parts:
        found["content"] = "\n".join(part["text"] for part in content)
    elif isinstance(content, str) and not dialect.text:
        found["content"] = [{"type": "text", "text": content}]
    if "tool_calls" in message:
        found["tool_calls"] = [_call(call, dialect) for call in message["tool_calls"]]
    return found


def _call(call: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return a tool call whose arguments have the form that the template reads.  Text that is no JSON object stays."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and dialect.arguments:
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif isinstance(arguments, dict) and not dialect.arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
