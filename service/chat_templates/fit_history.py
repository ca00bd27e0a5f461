"""Changes order and roles of a chat's messages so that the chat template renders all of their text.

    [system, system, user, assistant + calls, tool, system, user] --fit, for a Dialect--> messages for the template

A template may silently drop a message for which it was not written, raise an error, or write a header that the model
has never seen.  `Dialect` lists which shapes of a conversation a template renders.  Other shapes are changed:

    several system messages at the start -> one, joined by an empty line
    a later system message         -> a user message, after pending tool results
    template without system role   -> system text moves to the start of the first user message
    only a system message          -> a user message, if the template needs one
    content beside calls           -> a separate message before the calls
    parallel calls                 -> one message per call, each followed by its result
    a tool result without a call   -> a user message
    call ids of another form       -> nine letters or digits, equal for equal ids
    no user message                -> an empty one after the system message, if the template needs one
    two messages of one role in a row -> joined by an empty line, or separated by an empty message of the other role
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from quire.service.chat_templates.template_probe import Dialect

Message = dict[str, Any]
Entry = tuple[Message, int]  # a message, and the index of the client's message from which it comes
SEPARATOR = "\n\n"
NINE = re.compile(r"[A-Za-z0-9]{9}")


def fit(messages: list[Message], dialect: Dialect) -> list[Entry]:
    """Return messages in a shape that the template renders, each with the index of the client's message."""
    entries = [(message, at) for at, message in enumerate(messages)]
    if any("tool_calls" in message or message["role"] == "tool" for message in messages):
        if dialect.nine_letter_ids:
            entries = list(_with_ids(entries))
        if not (dialect.parallel_calls and dialect.content_with_calls):
            entries = list(_split_calls(entries, dialect))
        if not dialect.orphan_results:
            entries = list(_without_orphans(entries))
    if any(message["role"] == "system" for message, _ in entries):
        entries = _fit_system(entries, dialect)
    if not dialect.userless and all(message["role"] != "user" for message, _ in entries):
        head = _head(entries)
        entries[head:head] = [({"role": "user", "content": ""}, entries[-1][1])]
    if not dialect.users_in_row or not dialect.assistants_in_row or not dialect.assistant_first:
        entries = _alternating(entries, dialect)
    return entries


def joined(first: Any, second: Any) -> Any:
    """Join two contents with an empty line between; each is a string or a list of content parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{SEPARATOR}{second}"
    return [*_parts(first), {"type": "text", "text": SEPARATOR}, *_parts(second)]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_content(message: Message, content: Any) -> Message:
    return {**message, "content": content}


# -------------------------------------------------------------------------------------------------------------- system


def _fit_system(entries: list[Entry], dialect: Dialect) -> list[Entry]:
    head = _head(entries)
    first, rest = entries[:head], entries[head:]
    if len(first) > 1 and not dialect.several_systems:
        content: Any = ""
        for message, _ in first:
            content = joined(content, message["content"])
        first = [(_with_content(first[0][0], content), first[0][1])]
    if not dialect.later_system:
        rest = list(_as_turns(rest))
    shown = dialect.system and (dialect.system_beside_results or not _ends_in_results(rest))
    if first and not (shown and (rest or dialect.system_alone)):
        return _before_a_turn(first, rest, last=dialect.system)
    return [*first, *rest]


def _head(entries: list[Entry]) -> int:
    """Return the number of system messages at the beginning."""
    return next((at for at, (message, _) in enumerate(entries) if message["role"] != "system"), len(entries))


def _ends_in_results(entries: list[Entry]) -> bool:
    return bool(entries) and entries[-1][0]["role"] != "user"


def _as_turns(entries: list[Entry]) -> Iterator[Entry]:
    """Yield the entries with system messages turned into user messages, never between calls and their results."""
    waiting: list[Entry] = []
    pending = False  # True while results of calls may follow
    for message, at in entries:
        if message["role"] == "system":
            entry = ({**message, "role": "user"}, at)
            if pending:
                waiting.append(entry)
            else:
                yield entry
            continue
        if message["role"] != "tool":
            yield from waiting
            waiting.clear()
            pending = bool(message.get("tool_calls"))
        yield message, at
    yield from waiting


def _before_a_turn(head: list[Entry], rest: list[Entry], *, last: bool) -> list[Entry]:
    """Move the text of the system messages `head` to the start of the first user message; with `last`, of the last."""
    content: Any = ""
    for message, _ in head:
        content = joined(content, message["content"])
    turns = [at for at, (message, _) in enumerate(rest) if message["role"] == "user"]
    if not turns:
        return [({"role": "user", "content": content}, head[0][1]), *rest]
    at = turns[-1] if last else turns[0]
    message, origin = rest[at]
    return [*rest[:at], (_with_content(message, joined(content, message["content"])), origin), *rest[at + 1 :]]


# --------------------------------------------------------------------------------------------------------------- calls


def _with_ids(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries with nine-character ids of calls and results; equal ids stay equal."""
    due: list[str] = []  # ids of calls without a result so far
    for message, at in entries:
        if message["role"] == "tool":
            call = message.get("tool_call_id") or (due[0] if due else f"result {at}")
            if call in due:
                due.remove(call)
            yield {**message, "tool_call_id": _nine_letters(call)}, at
        elif "tool_calls" in message:
            calls = message["tool_calls"]
            ids = [str(call.get("id") or f"call {at} {position}") for position, call in enumerate(calls)]
            due += ids
            named = [{**call, "id": _nine_letters(given)} for call, given in zip(calls, ids, strict=True)]
            yield {**message, "tool_calls": named}, at
        else:
            yield message, at


def _nine_letters(given: str) -> str:
    if NINE.fullmatch(given):
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def _split_calls(entries: list[Entry], dialect: Dialect) -> Iterator[Entry]:
    """Yield the entries with messages split so that the template renders all calls and their content."""
    at = 0
    while at < len(entries):
        message, origin = entries[at]
        at += 1
        if not message.get("tool_calls"):
            yield message, origin
            continue
        if message.get("content") and not dialect.content_with_calls:
            yield {"role": "assistant", "content": message["content"]}, origin
            message = _with_content(message, "")
        if dialect.parallel_calls or len(message["tool_calls"]) == 1:
            yield message, origin
            continue
        results: list[Entry] = []
        while at < len(entries) and entries[at][0]["role"] == "tool":
            results.append(entries[at])
            at += 1
        for position, call in enumerate(message["tool_calls"]):
            alone = {"role": "assistant", "content": ""} if position else message
            yield {**alone, "tool_calls": [call]}, origin
            mine = [one for one, (result, _) in enumerate(results) if _answers(result, call)]
            mine = mine or [one for one, (result, _) in enumerate(results) if not result.get("tool_call_id")][:1]
            yield from (results[one] for one in mine)
            results = [result for one, result in enumerate(results) if one not in mine]
        yield from results


def _answers(result: Message, call: dict[str, Any]) -> bool:
    return result.get("tool_call_id") is not None and result["tool_call_id"] == call.get("id")


def _without_orphans(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries with tool results that follow no call turned into user messages."""
    called = False
    for message, at in entries:
        if message["role"] == "tool" and not called:
            yield {"role": "user", "content": message["content"]}, at
            continue
        called = called if message["role"] == "tool" else bool(message.get("tool_calls"))
        yield message, at


# --------------------------------------------------------------------------------------------------------- alternation


def _alternating(entries: list[Entry], dialect: Dialect) -> list[Entry]:
    """Return the entries with user and assistant messages in alternation.

    Calls and results do not count as messages."""
    made: list[Entry] = []
    before: int | None = None  # index in `made` of the last user or assistant message
    for message, at in entries:
        role = message["role"]
        if role not in ("user", "assistant") or message.get("tool_calls"):
            made.append((message, at))
            continue
        if before is None:
            if role == "assistant" and not dialect.assistant_first:
                made.append(({"role": "user", "content": ""}, at))
        elif made[before][0]["role"] == role and not (
            dialect.users_in_row if role == "user" else dialect.assistants_in_row
        ):
            earlier, origin = made[before]
            if before == len(made) - 1:
                made[before] = _merged(earlier, message), origin
                continue
            if role == "user":
                made.append(({"role": "assistant", "content": ""}, at))
            else:  # only calls and results stand between two assistant messages: merge the texts
                message = _merged(earlier, message)
                del made[before]
        before = len(made)
        made.append((message, at))
    return made


def _merged(first: Message, second: Message) -> Message:
    merged = {**first, **second}
    for field in ("content", "reasoning_content"):
        if field in merged:
            merged[field] = joined(first.get(field), second.get(field)) or ""
    return merged
