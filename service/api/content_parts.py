"""Content parts of a chat message -> text parts, and the reasoning among them.

    text, input_text, output_text, a bare string, refusal, a file of text   a text part
    thinking, reasoning                                                     reasoning of the assistant
    images and others                                                       400; a note in a tool's result

The types beyond OpenAI's own are those of vLLM, Mistral and of items of `/v1/responses`.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from quire.service.api.skipped import Skipped
from quire.service.common.limits import shown
from quire.service.common.refusal import bad_request, unsupported

NOTE = "[{} left out: this model reads text only]"  # replaces an image in a tool's result
TEXTS = ("text", "input_text", "output_text")
SERVED = (*TEXTS, "refusal", "a file of text")
THOUGHTS = ("thinking", "reasoning")


class Part(msgspec.Struct):
    """One content part of a chat message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None  # a text, or a list of text parts
    file: Any = None


def read_parts(
    name: str, role: str, parts: list[Part | str], skipped: Skipped
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the content of the message `name` as text parts, and its reasoning.  Raises Refusal."""
    found: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, part in enumerate(parts):
        if isinstance(part, str):
            found.append({"type": "text", "text": part})
        elif role == "assistant" and part.type in THOUGHTS and (thought := _thought(part)) is not None:
            thoughts.append(thought)
        else:
            found.append({"type": "text", "text": _text(f"{name}.content[{at}]", role, part, skipped)})
    return found, "\n\n".join(thoughts) if thoughts else None


def reasoning_in(*forms: Any) -> str | None:
    """Return the earlier reasoning from the first form that contains any.  A form is a text or a list of blocks."""
    for form in forms:
        if isinstance(form, str) and form:
            return form
        blocks = [one for one in form if isinstance(one, dict)] if isinstance(form, list) else []
        texts = [one.get(key) for one in blocks for key in ("thinking", "text", "summary")]
        if found := [text for text in texts if isinstance(text, str) and text]:
            return "\n\n".join(found)
    return None


def _text(field: str, role: str, part: Part, skipped: Skipped) -> str:
    if part.type in TEXTS and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type == "file" and isinstance(part.file, dict) and (text := text_of_file(part.file)) is not None:
        return text
    if part.type in (*TEXTS, "refusal"):
        key = "refusal" if part.type == "refusal" else "text"
        raise bad_request("invalid_type", f"{field}.{key}: must be a string", f"{field}.{key}", "a string")
    if role in ("tool", "function"):
        skipped.add(f"{field}.{shown(part.type)}")
        return note_for(part.type)
    raise unsupported(f"{field}.type", "this server takes text only", ", ".join(SERVED), str(shown(part.type)))


def _thought(part: Part) -> str | None:
    """Return the reasoning of a part; None if it holds none."""
    given = part.thinking if part.thinking is not None else part.text
    if isinstance(given, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in given):
        return "".join(one["text"] for one in given)
    return given if isinstance(given, str) else None


def note_for(kind: str) -> str:
    """Return the note that replaces a part of a tool's result."""
    return NOTE.format("image" if "image" in kind or "screenshot" in kind else "file")


def text_of_file(file: dict[str, Any]) -> str | None:
    """Return the text of a file that is part of the request; None for other files."""
    data, name = file.get("file_data"), file.get("filename")
    head, _, encoded = data.partition(";base64,") if isinstance(data, str) else ("", "", "")
    if not head.startswith(("data:text/", "data:application/json")):
        return None
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        return None
    return f"{name}:\n{text}" if isinstance(name, str) and name else text
