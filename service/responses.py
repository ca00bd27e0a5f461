"""OpenAI's format of responses: POST /v1/responses as a request of the chat path, and its answers.

    ResponsesBody, stored history --chat_of--> ChatBody --api.chat_request--> ValidRequest --a chat's path--> pieces
    pieces --ResponseFormat--> response.created, response.output_item.added ... response.completed, or one response

The chat path checks what both formats share.  A refusal names the field as this format does (`NAMES`).

Events are numbered.  A piece of an answer holds one token here, so the events and their numbers depend on the tokens
alone, and any gateway can send those after a given number.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from service.api import NO_DEFAULTS, ChatBody, Refusal, Served, ValidRequest, chat_request, decode, decode_all
from service.blocks import Block, BlockFormat
from service.config import GatewayConfig
from service.format import Piece, Prompted, call_id
from service.history import Message, Part
from service.limits import shown
from service.messages import function_tool
from service.refusal import bad_request, check

PREFIX = "resp_"
CALL_PREFIX = "call_"  # of the ids of tool calls; chat templates get the rest, which some bound to nine characters
Item = dict[str, Any]  # of an input or an output, as JSON
Turn = tuple[bytes, bytes]  # a stored response: its input items and the response, as JSON

# Fields of a chat, as refusals of the chat path name them -> fields of this format.
NAMES = (
    (r"messages\b.*", "input"),
    (r"max_tokens", "max_output_tokens"),
    (r"tools\[(\d*)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
)
UNSERVED = {
    "prompt": "a stored prompt",
    "conversation": "a stored conversation",
    "moderation": "moderation",
    "context_management": "compaction of the context",
    "max_tool_calls": "a bound on the server's own tool calls",
}
# Values of `include`: parts of items that never occur here, and the reasoning, which is there in the open.
INCLUDED = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "system", "developer", "assistant")
PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}  # of the ids of output items
ARGUMENTS = "response.function_call_arguments"


class ResponsesBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: Any = None
    # Harmless, as in a chat.
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    # Refused: see UNSERVED.
    prompt: Any = None
    conversation: Any = None
    moderation: Any = None
    context_management: Any = None
    max_tool_calls: int | None = None
    # Quire's own, as in a chat.
    top_k: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    priority: int | str | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: Any = None


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


def previous_of(body: bytes, config: GatewayConfig) -> str | None:
    """Return the response that a body continues.  Raises Refusal."""
    found: _Previous = decode(body, _Previous, config)
    return found.previous_response_id


def parse(
    body: bytes,
    config: GatewayConfig,
    served_name: str,
    timeout_s: float,
    served: Served = NO_DEFAULTS,
    history: Sequence[Turn] = (),
) -> ValidRequest:
    """Parse the body of POST /v1/responses.  `history`: what it continues, oldest first.  Raises Refusal."""
    asked, unknown = decode_all(body, ResponsesBody, "responses", config)
    items = _given(asked.input)
    stored = _stored(asked, config)
    earlier: list[Item] = []
    for given, answered in history:  # one after the other: decoding holds the interpreter
        earlier += msgspec.json.decode(given) + msgspec.json.decode(answered)["output"]
    chat = chat_of(asked, [*earlier, *items], config)
    valid = chat_request(chat, config, served_name, timeout_s, served, unknown)
    return msgspec.structs.replace(valid, shown={"store": stored, **_shown(asked, valid)}, items=items)


# ------------------------------------------------------------------------------------------------------------- requests


def _unsupported(param: str, reason: str, allowed: Any = None, given: Any = None) -> Refusal:
    return bad_request("unsupported", f"{param}: {reason}", param, allowed, given)


def _wrong(param: str, wanted: str) -> Refusal:
    return bad_request("invalid_type", f"{param}: must be {wanted}", param, wanted)


def _given(given: str | list[Item]) -> list[Item]:
    """Return the input as items with ids."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    found = []
    for item in items:
        kind = item.get("type") or "message"
        prefix = {"function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}.get(str(kind), "msg_")
        found.append({"id": prefix + secrets.token_hex(16), **item, "type": kind})
    return found


def _stored(asked: ResponsesBody, config: GatewayConfig) -> bool:
    """Return whether the response will be stored.  Raises Refusal for what needs a store that there is not."""
    stored = config.responses_ttl_s > 0 and asked.store is not False
    needed = "store" if asked.store else "background" if asked.background else ""
    if needed and not config.responses_ttl_s:
        raise _unsupported(needed, "this server stores no responses (--responses-ttl-s)", False, True)
    if needed and not stored:
        raise bad_request("invalid_value", "background: only with store", "background", False, True)
    return stored


def chat_of(asked: ResponsesBody, items: list[Item], config: GatewayConfig) -> ChatBody:
    """Return the chat that a body asks for.  `items`: its input and what precedes it.  Raises Refusal."""
    _refuse_unserved(asked)
    _check_metadata(asked.metadata or {}, config)
    effort = (asked.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise _wrong("reasoning.effort", "a string")
    if asked.max_output_tokens is not None and asked.max_output_tokens < 1:  # a chat's -1 means what fits
        limit, given = ">= 1", asked.max_output_tokens
        message = f"max_output_tokens: must be {limit}, got {given}"
        raise bad_request("invalid_value", message, "max_output_tokens", limit, given)
    system = [Message("system", asked.instructions)] if asked.instructions else []
    return ChatBody(
        model=asked.model,
        messages=[*system, *messages_of(items)],
        tools=[_tool(f"tools[{at}]", tool) for at, tool in enumerate(asked.tools or ())] or None,
        tool_choice=_tool_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_response_format(asked.text),
        reasoning_effort=effort,
        max_tokens=msgspec.UNSET if asked.max_output_tokens is None else asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop,
        seed=asked.seed,
        stream=asked.stream,
        priority=asked.priority,
        timeout=asked.timeout,
        cache_salt=asked.cache_salt,
        chat_template_kwargs=asked.chat_template_kwargs,
    )


def _refuse_unserved(asked: ResponsesBody) -> None:
    for name, feature in UNSERVED.items():
        if getattr(asked, name) not in (None, [], {}, ""):
            raise _unsupported(name, f"{feature} is not served")
    if asked.top_logprobs:
        raise _unsupported("top_logprobs", "log probabilities are served by chats", 0, shown(asked.top_logprobs))
    if asked.truncation not in (None, "disabled"):
        raise _unsupported("truncation", "items are not dropped", "disabled", str(shown(asked.truncation)))
    for at, name in enumerate(asked.include or ()):
        if name not in INCLUDED:
            raise _unsupported(f"include[{at}]", "is not served", ", ".join(INCLUDED), str(shown(name)))


def _check_metadata(metadata: dict[str, str], config: GatewayConfig) -> None:
    check("metadata entries", len(metadata), config)
    for name, value in metadata.items():
        check("metadata name", len(name), config)
        check("metadata", len(value), config)


def messages_of(items: list[Item]) -> list[Message]:
    """Return the messages of a chat.  Reasoning, text and calls of the assistant in a row are one message."""
    found: list[Message] = []
    names: dict[str, str] = {}  # of the functions that were called, by the call's id
    for at, item in enumerate(items):
        param, kind = f"input[{at}]", item.get("type") or "message"
        if kind == "message" and item.get("role") in ROLES:
            content = _texts(f"{param}.content", item.get("content"))
            if item["role"] == "assistant":
                turn = _turn(found, fresh=bool(found) and bool(found[-1].content or found[-1].tool_calls))
                turn.content = content
            else:
                found.append(Message(item["role"], content))
        elif kind == "message":
            allowed, given = ", ".join(ROLES), str(shown(str(item.get("role"))))
            message = f"{param}.role: must be one of {allowed}, got '{given}'"
            raise bad_request("invalid_value", message, f"{param}.role", allowed, given)
        elif kind == "function_call":
            call, name = _string(param, item, "call_id"), _string(param, item, "name")
            names[call] = name
            turn = _turn(found)
            function = {"name": name, "arguments": _string(param, item, "arguments")}
            entry = {"id": call.removeprefix(CALL_PREFIX), "type": "function", "function": function}
            turn.tool_calls = [*(turn.tool_calls or ()), entry]
        elif kind == "function_call_output":
            call = _string(param, item, "call_id")
            output = _texts(f"{param}.output", item.get("output"))
            found.append(Message("tool", output, name=names.get(call), tool_call_id=call.removeprefix(CALL_PREFIX)))
        elif kind == "reasoning":
            turn = _turn(found, fresh=bool(found) and bool(found[-1].content or found[-1].tool_calls))
            turn.reasoning_content = "\n\n".join(filter(None, (turn.reasoning_content, _reasoning(param, item))))
        else:
            allowed = "message, function_call, function_call_output, reasoning"
            raise _unsupported(f"{param}.type", f"only {allowed} are served", allowed, str(shown(str(kind))))
    return [one for one in found if one.content or one.tool_calls or one.reasoning_content or one.role != "assistant"]


def _turn(found: list[Message], *, fresh: bool = False) -> Message:
    """Return the assistant's message at the end of `found`, which it adds if there is none or a `fresh` one is due."""
    if fresh or not found or found[-1].role != "assistant":
        found.append(Message("assistant", ""))
    return found[-1]


def _string(param: str, item: Item, field: str) -> str:
    if not isinstance(value := item.get(field), str):
        raise _wrong(f"{param}.{field}", "a string")
    return value


def _texts(param: str, given: Any) -> str | list[Part]:
    """Return content that must be text, as a chat message has it."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _wrong(param, "a string or a list of parts")
    parts = []
    for at, part in enumerate(given):
        here = f"{param}[{at}]"
        if not isinstance(part, dict):
            raise _wrong(here, "an object")
        kind = part.get("type")
        if kind not in (*TEXT_PARTS, "refusal"):
            allowed = ", ".join(TEXT_PARTS)
            raise _unsupported(f"{here}.type", "this server takes text only", allowed, str(shown(str(kind))))
        parts.append(Part("text", _string(here, part, "refusal" if kind == "refusal" else "text")))
    return (parts[0].text or "") if len(parts) == 1 else parts if parts else ""


def _reasoning(param: str, item: Item) -> str:
    """Return the text of a reasoning item: the reasoning itself, or else its summary."""
    for field in ("content", "summary"):
        if item.get(field):
            parts = item[field]
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                raise _wrong(f"{param}.{field}", "a list of parts")
            return "\n\n".join(_string(f"{param}.{field}[{at}]", part, "text") for at, part in enumerate(parts))
    if item.get("encrypted_content"):
        raise _unsupported(f"{param}.encrypted_content", "no reasoning is encrypted here")
    return ""


def _tool(param: str, tool: dict[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise _unsupported(f"{param}.type", "only functions are served", "function", str(shown(str(kind))))
    return function_tool(tool, tool.get("parameters"))


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if (kind := given.get("type")) != "function":
        raise _unsupported("tool_choice.type", "only functions are served", "function", str(shown(str(kind))))
    return {"type": "function", "function": {"name": given.get("name")}}


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    given = given or {}
    for name in given:
        if name not in ("format", "verbosity"):
            raise _unsupported(f"text.{shown(name)}", "there is no such setting", "format, verbosity")
    if given.get("verbosity") not in (None, "medium"):
        raise _unsupported("text.verbosity", "a choice of verbosity is not served", "medium")
    form = given.get("format")
    if form is None or not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _shown(asked: ResponsesBody, valid: ValidRequest) -> dict[str, Any]:
    """Return the fields of the request that its response repeats."""
    reasoning, text = asked.reasoning or {}, asked.text or {}
    return {
        "background": bool(asked.background),
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "temperature": valid.sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": 0,
        "top_p": valid.sampling.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }


# -------------------------------------------------------------------------------------------------------------- answers


class ResponseFormat(BlockFormat):
    """Writes one answer in the shape of OpenAI's responses.  Its events have numbers; `after` is the client's last."""

    each_token = True

    def __init__(
        self,
        valid: ValidRequest,
        *,
        request_id: str,
        model: str,
        created: int,
        prompt: Prompted,
    ) -> None:
        super().__init__(valid, request_id=request_id, model=model, prompt=prompt)
        self._created = created
        self._number = 0  # of the next event
        self._reasoning = 0  # output tokens of the reasoning
        self._finish = ""
        self.after = -1  # events up to this number are not written
        self.stored = bool(valid.shown.get("store"))  # false once the response could not be stored

    def _count(self, piece: Piece) -> None:
        super()._count(piece)
        self._reasoning = piece.reasoning_tokens or self._reasoning
        self._finish = piece.finish or self._finish

    # -- the response

    def response(self, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response as far as it was written.  `status`: "" as the answer ended."""
        cut = self._finish == "length"
        ended = not status
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if ended and cut else None,
            "model": self._model,
            "output": [self._item(block) for block in self._blocks.found] if ended or error else [],
            **self._valid.shown,
            "store": self.stored,
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._tokens[0],
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._prompt + self._tokens[0],
        }

    def _item_id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}{self.request_id.removeprefix(PREFIX)}{block.index:04x}"

    def _item(self, block: Block, *, begun: bool = False) -> Item:
        """Return a block as an item of the output; `begun`: as it is announced, without content."""
        whole = block.followed or self._finish in ("stop", "tool_calls")
        status = "in_progress" if begun else "completed" if whole else "incomplete"
        item: Item = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = CALL_PREFIX + call_id(self.request_id, 0, block.call)
            arguments = "" if begun else block.text
            return {"type": "function_call", **item, "call_id": call, "name": block.name, "arguments": arguments}
        parts = [] if begun else [self._part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": parts, "encrypted_content": None}
        return {"type": "message", **item, "role": "assistant", "content": parts}

    def _part(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        text = "" if begun else block.text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    # -- a stream

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        if number <= self.after:
            return b""
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _start(self) -> bytes:
        if self._number:
            return b""
        first = "queued" if self._valid.shown.get("background") else "in_progress"
        created = self._event("response.created", response=self.response(first))
        return created + self._event("response.in_progress", response=self.response("in_progress"))

    def idle(self) -> bytes:
        """Return the events for a silent stream: its first ones, if they were not sent."""
        return self._start()

    def chunk(self, piece: Piece) -> bytes:
        """Return the events of a piece."""
        events = [self._start()]
        self._count(piece)
        for step, block, text in self._blocks.add(piece):
            if step == "grow":
                events.append(self._grow(block, text))
            else:
                events += self._open(block) if step == "open" else self._close(block)
        return b"".join(events)

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _grow(self, block: Block, text: str) -> bytes:
        place = self._place(block)
        if block.kind == "call":
            return self._event(f"{ARGUMENTS}.delta", **place, delta=text)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        return self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=[])

    def _open(self, block: Block) -> list[bytes]:
        item = self._item(block, begun=True)
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != "call":
            part = self._part(block, begun=True)
            events.append(self._event("response.content_part.added", **self._place(block), content_index=0, part=part))
        return events

    def _close(self, block: Block) -> list[bytes]:
        place, text = self._place(block), block.text
        if block.kind == "call":
            events = [self._event(f"{ARGUMENTS}.done", **place, name=block.name, arguments=text)]
        elif block.kind == "reasoning":
            events = [self._event("response.reasoning_text.done", **place, content_index=0, text=text)]
        else:
            events = [self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])]
        if block.kind != "call":
            part = self._part(block)
            events.append(self._event("response.content_part.done", **place, content_index=0, part=part))
        return [*events, self._event("response.output_item.done", output_index=block.index, item=self._item(block))]

    def usage_chunk(self) -> bytes:
        """Return nothing: the last event has the usage."""
        return b""

    def done(self) -> bytes:
        """Return the event that ends the stream."""
        response = self.response()
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that failed."""
        return self._event("response.failed", response=self.failed(refusal))

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        """Return the response of an answer that failed."""
        return self.response("failed", {"code": "server_error", "message": f"{refusal.code}: {refusal.message}"})

    # -- the whole answer

    def read(self, pieces: list[Piece]) -> None:
        """Add pieces without writing events."""
        for piece in pieces:
            self._count(piece)
            for _ in self._blocks.add(piece):
                pass

    def body(self) -> bytes:
        """Return the response as it ended."""
        return msgspec.json.encode(self.response())

    async def whole(self, pieces: list[Piece]) -> list[bytes]:
        """Return the body of an answer that is not streamed."""
        self.read(pieces)
        return [self.body()]
