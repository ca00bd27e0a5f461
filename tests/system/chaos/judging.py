"""Is an answer to a hostile request one that docs/api.md promises?  `judge` names what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from tests.system.chaos.fuzz import DOCUMENTED, STREAM_ENDS
from tests.system.chaos.mutations import Request

FINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error")
# Fields that a refusal may name although the body lacks them: they are required, or stand for a default.
REQUIRED = {"prompt", "messages", "input", "tokens", "query", "items", "label_token_ids", "max_tokens", "model"}
# "body" is the complete body; the others are headers.
BESIDE = {"body", "last-event-id", "idempotency-key", "x-request-timeout", "x-max-queue-wait", "content-type"}


class Answer(NamedTuple):
    """One HTTP response; `complete`: its body ended as its headers promise."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


def read(data: bytes) -> Answer | None:
    """Read a response; None: these bytes are none."""
    head, parted, body = data.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", head)
    if found is None or not parted:
        return None
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    headers = {name.lower(): value.strip() for name, _, value in lines}
    if headers.get("transfer-encoding") == "chunked":
        return Answer(int(found[1]), headers, *_unchunked(body))
    length = headers.get("content-length")
    return Answer(int(found[1]), headers, body, length is None or int(length) == len(body))


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    """Return the body without its chunked coding, and whether it ended."""
    parts: list[bytes] = []
    at = 0
    while found := re.compile(rb"([0-9a-fA-F]+)\r\n").match(body, at):
        size = int(found[1], 16)
        at = found.end() + size + 2
        if not size:
            return b"".join(parts), body[found.end() :] == b"\r\n"
        parts.append(body[found.end() : at - 2])
    return b"".join(parts), False


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def loads(data: bytes | str) -> Any:
    """Read JSON as its standard has it: UTF-8, no NaN, no half surrogate.  Raises ValueError."""
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    value = json.loads(text, parse_constant=_no_constant)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def judge(request: Request, data: bytes) -> tuple[str, str]:
    """The status of an answer ('closed' without one), and what is wrong with it, or ''."""
    answer = read(data)
    if answer is None:
        return "closed", "no answer" if request.answered else ""
    if not request.answered:
        return str(answer.status), "" if answer.status < 500 or answer.status in (503, 504) else _error(request, answer)
    if not answer.complete:
        return str(answer.status), "the body did not end"
    try:
        wrong = _success(request, answer) if answer.status < 400 else _error(request, answer)
    except ValueError as error:  # UnicodeError is one
        wrong = f"no JSON: {error}: {answer.body[:300]!r}"
    return str(answer.status), wrong


def _success(request: Request, answer: Answer) -> str:
    if answer.status == 204:
        return "a 204 has a body" if answer.body else ""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _stream(request, answer)
    if answer.status != 200:
        return f"status {answer.status}"
    if answer.headers.get("content-type", "").startswith("application/json"):
        found = loads(answer.body)
        return "an error with status 200" if isinstance(found, dict) and found.get("error") else ""
    return "" if answer.body in (b"", b"pong") else f"neither JSON nor events: {answer.headers}"


def _stream(request: Request, answer: Answer) -> str:
    """What is wrong with a stream of events."""
    if not answer.body:
        return ""  # an event stream that was resumed after its end
    if not answer.body.endswith(b"\n\n"):
        return f"the last event did not end: {answer.body[-200:]!r}"
    last = ""
    for line in answer.body.decode("utf-8").split("\n"):
        name, _, value = line.partition(":")
        if name not in ("", "data", "event", "id", "retry"):
            return f"no line of an event stream: {line[:200]!r}"
        if name == "data":
            last = value.strip()
            found = loads(last) if last != "[DONE]" else {}
            error = found.get("error") if isinstance(found, dict) else None
            code = error.get("code", "") if isinstance(error, dict) else ""
            if code and code not in STREAM_ENDS:
                return f"a stream ended in {last[:300]}"
    if last == "[DONE]":
        return ""
    event = loads(last) if last else {}
    ended = event.get("type") in ("message_stop", *FINAL) or bool(event.get("error"))
    return "" if ended else f"the stream has no end: {last[:300]}"


def _error(request: Request, answer: Answer) -> str:
    """What is wrong with a refusal."""
    body = loads(answer.body)
    if request.path.startswith("/v1/messages"):
        return _anthropic_error(answer, body)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
        return f"status {answer.status}, no error of OpenAI's form: {answer.body[:300]!r}"
    message, param, code = error["message"], error["param"], error["code"]
    if not all(isinstance(one, str) and one for one in (message, code, error["type"])):
        return f"an error without message, type or code: {error}"
    if answer.status >= 500 and (str(answer.status), code) not in DOCUMENTED:
        return f"status {answer.status}, code {code}: {message}"
    if len(message) > 4000:
        return f"a message of {len(message)} characters: {message[:200]}"
    return _field(request, param, message) if answer.status == 400 else ""


def _anthropic_error(answer: Answer, body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or body.get("type") != "error" or not isinstance(body.get("request_id"), str):
        return f"status {answer.status}, no error of Anthropic's form: {answer.body[:300]!r}"
    if not all(isinstance(error.get(name), str) and error[name] for name in ("type", "message")):
        return f"an error without message or type: {error}"
    return f"status {answer.status}: {error['message']}" if answer.status in (500, 502) else ""


def _field(request: Request, param: str | None, message: str) -> str:
    """What is wrong with the field that a refusal names: the client must find it in what it sent."""
    if param is None:
        return ""
    root = re.split(r"[.\[]", param)[0]
    try:
        sent = json.loads(request.body)
    except (ValueError, RecursionError):
        return ""
    names = {re.sub("[\ud800-\udfff]", "\ufffd", name)[:64] for name in sent} if isinstance(sent, dict) else set()
    query = re.findall(r"[?&]([^=&]+)", request.path)
    if root not in {*names, *REQUIRED, *BESIDE, *query} and param not in names:
        return f"the refusal names {param!r}, which the client did not send: {message[:200]}"
    return "" if root.lower() in message.lower() else f"the message does not name {param!r}: {message[:200]}"
