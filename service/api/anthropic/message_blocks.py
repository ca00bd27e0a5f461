"""Converts content blocks of /v1/messages to messages of a chat.

    text, document (text), search_result        text of a message
    tool_use, mcp_tool_use                       a call of the assistant's message
    tool_result, mcp_tool_result                 a message of role `tool`; an image or file in it becomes a note
    thinking                                     reasoning of the assistant's message
    blocks of SKIPPED                            ignored, and named in `x-unknown-fields`, since they have no text

Any other block gets 400, for example a user's image: the model would answer without having seen it.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from quire.service.api.content_parts import Part, note_for
from quire.service.api.history import Message
from quire.service.api.openai_responses.response_items import SUMMARY
from quire.service.api.skipped import Skipped
from quire.service.common.limits import shown
from quire.service.common.refusal import bad_request, unsupported, wrong_type

TOOL_PREFIX = "toolu_"  # prefix of call ids; removed, since some chat templates accept only nine characters
BILLING = "x-anthropic-billing-header:"  # start of the first line in the system prompt of Anthropic's coding agent
# Blocks of the assistant that are ignored: encrypted thinking, calls of Anthropic's own tools, their results.
SKIPPED = (
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "container_upload",
    "fallback",
)
NAMED = ("image", "document", "container_upload", "browser_state", "tool_reference")  # blocks that a note replaces
OF_USER = "text, document, search_result, tool_result"
OF_ASSISTANT = "text, thinking, tool_use, mcp_tool_use, mcp_tool_result"


class ContentBlock(msgspec.Struct):
    """One content block of a message, of a tool's result or of `system`."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    tool_name: str | None = None  # name in a tool_reference
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # tool_use input; raw: keeps numbers as written
    tool_use_id: str | None = None
    content: Any = None  # content of a tool_result, compaction or search_result: a string or blocks
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    source: Any = None  # source of a document, image or search_result
    title: str | None = None
    context: str | None = None
    cache_control: Any = None
    citations: Any = None


class Turn(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[ContentBlock]


def system_of(given: str | list[ContentBlock] | None, skipped: Skipped) -> list[Message]:
    """Return [the system message], without Anthropic's billing line at its start; [] if it is empty.

    The line differs between requests of the same agent, so it would prevent prefix-cache hits."""
    blocks = [ContentBlock("text", text=given)] if isinstance(given, str) else list(given or ())
    if blocks and blocks[0].type == "text" and (text := blocks[0].text or "").startswith(BILLING):
        skipped.add("system.x-anthropic-billing-header")
        rest = text.partition("\n")[2]
        blocks[:1] = [ContentBlock("text", text=rest)] if rest.strip() else []
    if not blocks or (isinstance(given, str) and not blocks[0].text):
        return []
    return [
        Message("system", _content([_text_part(f"system[{at}]", block, skipped) for at, block in enumerate(blocks)]))
    ]


def messages_of(turns: list[Turn], skipped: Skipped) -> tuple[list[Message], list[str]]:
    """Return the messages of a chat, and for each message the client's field that it comes from.

    One turn may become several messages.  Raises Refusal."""
    found: list[Message] = []
    sources: list[str] = []
    names: dict[str, str] = {}  # id of a call -> name of the tool
    for at, turn in enumerate(turns):
        param = f"messages[{at}]"
        if turn.role not in ("user", "assistant", "system"):
            allowed, given = "user, assistant, system", str(shown(turn.role))
            message = f"{param}.role: must be one of {allowed}, got '{given}'"
            raise bad_request("invalid_value", message, f"{param}.role", allowed, given)
        blocks = [ContentBlock("text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        if turn.role == "assistant":
            found += _answer(f"{param}.content", blocks, names, skipped)
        else:
            found += _question(f"{param}.content", turn.role, blocks, names, skipped)
        sources += [param] * (len(found) - len(sources))
    return found, sources


def _question(
    param: str, role: str, blocks: list[ContentBlock], names: dict[str, str], skipped: Skipped
) -> list[Message]:
    """Return the messages of a user's turn: tool results and text."""
    found: list[Message] = []
    texts: list[Part] = []

    def flush() -> None:
        if texts:
            found.append(Message(role, _content(texts.copy())))
            texts.clear()

    for at, block in enumerate(blocks):
        here = f"{param}[{at}]"
        if block.type == "tool_result":
            flush()
            found.append(_result(here, block, names, skipped))
        elif block.type in SKIPPED:
            skipped.add(f"{here}.{block.type}")
        else:
            texts.append(_text_part(here, block, skipped))
    flush()
    return found


def _answer(param: str, blocks: list[ContentBlock], names: dict[str, str], skipped: Skipped) -> list[Message]:
    """Return the messages of an assistant's turn: thinking, text and tool calls.

    The result of an MCP tool splits the turn."""
    found: list[Message] = []
    texts: list[Part] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []

    def flush() -> None:
        reasoning = "\n\n".join(thoughts) or None
        found.append(
            Message("assistant", _content(texts.copy()), tool_calls=calls.copy() or None, reasoning_content=reasoning)
        )
        for one in (texts, thoughts, calls):
            one.clear()

    for at, block in enumerate(blocks):
        here = f"{param}[{at}]"
        if block.type == "text":
            texts.append(Part("text", _text(here, block)))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "compaction" and isinstance(block.content, str):
            texts.append(Part("text", SUMMARY + block.content))
        elif block.type in ("tool_use", "mcp_tool_use"):
            calls.append(_call(here, block, names))
        elif block.type == "mcp_tool_result":
            flush()
            found.append(_result(here, block, names, skipped))
        elif block.type in SKIPPED:
            skipped.add(f"{here}.{block.type}")
        else:
            raise unsupported(f"{here}.type", f"only {OF_ASSISTANT} are served", OF_ASSISTANT, str(shown(block.type)))
    if texts or thoughts or calls or not blocks:
        flush()
    return found


def _call(here: str, block: ContentBlock, names: dict[str, str]) -> dict[str, Any]:
    given = bytes(block.input) or b"{}"
    if block.id is None or block.name is None or not given.startswith((b"{", b"null")):
        raise wrong_type(here, "a tool_use with id, name and an object as input")
    names[block.id] = block.name
    try:
        arguments = given.decode() if given.startswith(b"{") else "{}"
    except UnicodeDecodeError:
        raise wrong_type(f"{here}.input", "valid UTF-8") from None
    function = {"name": block.name, "arguments": arguments}
    return {"id": _bare(block.id), "type": "function", "function": function}


def _result(here: str, block: ContentBlock, names: dict[str, str], skipped: Skipped) -> Message:
    """Return the message of a tool result.  Raises Refusal."""
    if block.tool_use_id is None:
        raise wrong_type(f"{here}.tool_use_id", "a string")
    name = names.get(block.tool_use_id)
    content = _inner(f"{here}.content", block.content, skipped, notes=True)
    return Message("tool", content, name=name, tool_call_id=_bare(block.tool_use_id))


def _inner(param: str, given: Any, skipped: Skipped, *, notes: bool = False) -> str | list[Part]:
    """Return the text of content within a block.  `notes`: whether images and files become a note.  Raises Refusal."""
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, list):  # `input` of inner blocks is ignored
        given = [{**one, "input": msgspec.Raw()} if isinstance(one, dict) else one for one in given]
    try:
        blocks = msgspec.convert(given, list[ContentBlock])
    except msgspec.ValidationError:
        raise wrong_type(param, "a string or a list of blocks") from None
    return _content([_text_part(f"{param}[{at}]", block, skipped, notes=notes) for at, block in enumerate(blocks)])


def _content(parts: list[Part]) -> str | list[Part]:
    return (parts[0].text or "") if len(parts) == 1 else parts if parts else ""


def _text_part(here: str, block: ContentBlock, skipped: Skipped, *, notes: bool = False) -> Part:
    """Convert a block of text, or a text document, to a content part.  Raises Refusal."""
    if block.type in ("document", "search_result") and (text := _document(here, block, skipped)) is not None:
        return Part("text", text)
    if notes and block.type in NAMED:
        if block.type != "tool_reference":
            skipped.add(f"{here}.{block.type}")
            return Part("text", note_for(block.type))
        return Part("text", f"[tool {block.tool_name or block.name or ''}]".replace(" ]", "]"))
    if block.type != "text":
        raise unsupported(f"{here}.type", "this server takes text only", OF_USER, str(shown(block.type)))
    return Part("text", _text(here, block))


def _text(here: str, block: ContentBlock) -> str:
    if block.text is None:
        raise wrong_type(f"{here}.text", "a string")
    return block.text


def _document(here: str, block: ContentBlock, skipped: Skipped) -> str | None:
    """Return title and text of a document or search result; None if it is no text."""
    source = block.source
    if block.type == "search_result":
        body = _inner(f"{here}.content", block.content, skipped)
        head = [block.title, source if isinstance(source, str) else None]
    else:
        if not isinstance(source, dict):
            raise wrong_type(f"{here}.source", "an object")
        kind, media, data = source.get("type"), str(source.get("media_type")), source.get("data")
        if kind == "content":
            body = _inner(f"{here}.source.content", source.get("content"), skipped)
        elif kind == "text" and isinstance(data, str):
            body = data
        elif kind == "base64" and media.startswith("text/") and (text := _decoded(data)) is not None:
            body = text
        else:
            return None
        head = [block.title, block.context]
    text = body if isinstance(body, str) else "\n".join(part.text or "" for part in body)
    return "\n".join([*filter(None, head), text])


def _decoded(data: Any) -> str | None:
    try:
        return base64.b64decode(data, validate=True).decode()
    except (ValueError, TypeError):
        return None


def _bare(tool_id: str) -> str:
    return tool_id.removeprefix(TOOL_PREFIX)
