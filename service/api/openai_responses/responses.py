"""OpenAI's format of responses: POST /v1/responses as a request of the chat path, and its answers.

    ResponsesBody, stored history --chat_of--> ChatBody --api.chat_request--> ValidRequest --a chat's path--> pieces
    pieces --ResponseFormat--> response.created, response.output_item.added ... response.completed, or one response

The chat path checks what both formats share.  A refusal names the field as this format does (`NAMES`).

Events are numbered.  A piece of an answer holds one token here, so the events and their numbers depend on the tokens
alone, and any gateway can send those after a given number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.service.api.api import NO_DEFAULTS, ChatBody, Refusal, Served, ValidRequest, chat_request, decode, decode_all
from quire.service.api.blocks import Block, BlockFormat
from quire.service.api.client_tools import Called, allowed_tools, custom_input, functions_of, names_of, tool_choice
from quire.service.api.format import Prompted, call_id
from quire.service.api.history import Message
from quire.service.api.openai_responses.raw_messages import RawMessages
from quire.service.api.openai_responses.response_items import (
    CALL_PREFIX,
    Item,
    Referring,
    messages_of,
    resolved,
    sealed,
    tools_in,
    with_ids,
)
from quire.service.api.openai_responses.response_logprobs import Entry, ResponseLogprobs
from quire.service.api.skipped import Skipped
from quire.service.api.tools import ToolRules
from quire.service.common.limits import shown
from quire.service.common.pacing import Pacer, Turns
from quire.service.common.refusal import bad_request, check, placing
from quire.service.config import GatewayConfig
from quire.service.output.pieces import Piece

PREFIX = "resp_"
Turn = tuple[bytes, bytes]  # a stored response: its input items and the response, as JSON

# Fields of a chat, as refusals of the chat path name them -> fields of this format.
NAMES = (
    (r"messages\b.*", "input"),
    (r"max_tokens", "max_output_tokens"),
    (r"(tools\[\d*\](?:\.tools\[\d*\])?)\.function", r"\1"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"verbosity", "text.verbosity"),
)
UNSERVED = {
    "prompt": "a stored prompt",
    "conversation": "a stored conversation",
    "moderation": "moderation",
    "context_management": "compaction of the context",
    "max_tool_calls": "a bound on the server's own tool calls",
}
# Values of `include`: the reasoning in a form that a client may send back, log probabilities, and parts of items that
# never occur here.
SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    SEALED,
    LOGPROBS,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_", "custom": "ctc_"}  # prefixes of the ids of output items
ARGUMENTS, CUSTOM = "response.function_call_arguments", "response.custom_tool_call_input"
SUMMARIES = ("auto", "concise", "detailed")


class ChatFields(msgspec.Struct, kw_only=True):
    """Fields that are Quire's own here, and those of a chat by the same name there."""

    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    seed: int | None = None
    priority: int | str | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: Any = None


class ResponsesBody(ChatFields, kw_only=True):
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
    enable_response_messages: bool | None = None  # vLLM's: see raw_messages.py


class _Wanted(msgspec.Struct):
    input: str | list[Referring] = ""
    previous_response_id: str | None = None


class Wanted(NamedTuple):
    """What a request takes from stored responses."""

    previous: str | None  # the response that it continues
    items: list[str]  # ids of output items


def wanted_of(body: bytes, config: GatewayConfig) -> Wanted:
    """Return what a body takes from stored responses.  Raises Refusal."""
    found: _Wanted = decode(body, _Wanted, config)
    items = [] if isinstance(found.input, str) else found.input
    return Wanted(found.previous_response_id, [item.id for item in items if isinstance(item.id, str) and item.refers])


def parse(
    body: bytes,
    config: GatewayConfig,
    served_name: str,
    timeout_s: float,
    served: Served = NO_DEFAULTS,
    earlier: Sequence[Item] = (),
    items: Mapping[str, Item] | None = None,
) -> ValidRequest:
    """Parse the body of POST /v1/responses.  Raises Refusal.

    `earlier`: the items that it continues.  `items`: stored items that it may refer to, by their ids."""
    asked, unknown = decode_all(body, ResponsesBody, "responses", config)
    given = resolved(with_ids(asked.input), items or {})
    stored, skipped = _stored(asked, config), Skipped(config)
    chat, rules, sources = chat_of(asked, given, earlier, config, skipped)
    with placing(sources):
        valid = chat_request(chat, config, served_name, timeout_s, served, (*unknown, *skipped.names()), rules)
    called = names_of([*(asked.tools or ()), *tools_in([*earlier, *given])])
    return msgspec.structs.replace(
        valid,
        shown={"store": stored, **_shown(asked, valid)},
        items=given,
        sources=sources,
        called=called,
        seals=SEALED in (asked.include or ()),
        raw_messages=bool(asked.enable_response_messages),
    )


# ------------------------------------------------------------------------------------------------------------- requests


def _unsupported(param: str, reason: str, allowed: Any = None, given: Any = None) -> Refusal:
    return bad_request("unsupported", f"{param}: {reason}", param, allowed, given)


def _wrong(param: str, wanted: str) -> Refusal:
    return bad_request("invalid_type", f"{param}: must be {wanted}", param, wanted)


def _stored(asked: ResponsesBody, config: GatewayConfig) -> bool:
    """Return whether the response will be stored.  Raises Refusal for what needs a store that there is not."""
    stored = config.responses_ttl_s > 0 and asked.store is not False
    needed = "store" if asked.store else "background" if asked.background else ""
    if needed and not config.responses_ttl_s:
        raise _unsupported(needed, "this server stores no responses (--responses-ttl-s)", False, True)
    if needed and not stored:
        raise bad_request(
            "invalid_value", "background can only be used when `store` is true", "background", False, True
        )
    return stored


def chat_of(
    asked: ResponsesBody, items: Sequence[Item], earlier: Sequence[Item], config: GatewayConfig, skipped: Skipped
) -> tuple[ChatBody, ToolRules, list[str]]:
    """Return the chat that a body asks for, its rules, and the source of each message.

    `items`: its input.  `earlier`: the items before it.  Raises Refusal."""
    _refuse_unserved(asked)
    _check_metadata(asked.metadata or {}, config)
    effort = (asked.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise _wrong("reasoning.effort", "a string")
    if (summary := (asked.reasoning or {}).get("summary")) not in (None, *SUMMARIES):
        allowed, value = ", ".join(SUMMARIES), str(shown(str(summary)))
        message = f"reasoning.summary: must be one of {allowed}, got '{value}'"
        raise bad_request("invalid_value", message, "reasoning.summary", allowed, value)
    if asked.max_output_tokens is not None and asked.max_output_tokens < 1:  # a chat's -1 means what fits
        limit, given = ">= 1", asked.max_output_tokens
        message = f"max_output_tokens: must be {limit}, got {given}"
        raise bad_request("invalid_value", message, "max_output_tokens", limit, given)
    system = [Message("system", asked.instructions)] if asked.instructions else []
    messages, sources = messages_of(items, skipped, earlier)
    if isinstance(asked.input, str):
        sources = ["input" if source == "input[0]" else source for source in sources]
    tools, rules = functions_of([*(asked.tools or ()), *tools_in([*earlier, *items])], skipped, config)
    choice, tools, rules = allowed_tools(asked.tool_choice, tools, rules)
    chat = ChatBody(
        model=asked.model,
        messages=[*system, *messages],
        tools=tools or None,
        tool_choice=tool_choice(choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_response_format(asked.text),
        reasoning_effort=effort,
        verbosity=(asked.text or {}).get("verbosity"),
        max_tokens=msgspec.UNSET if asked.max_output_tokens is None else asked.max_output_tokens,
        logprobs=LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs),
        top_logprobs=asked.top_logprobs,
        temperature=asked.temperature,
        top_p=asked.top_p,
        stream=asked.stream,
        **{name: getattr(asked, name) for name in ChatFields.__struct_fields__},
    )
    return chat, rules, ["instructions"] * len(system) + sources


def _refuse_unserved(asked: ResponsesBody) -> None:
    for name, feature in UNSERVED.items():
        if getattr(asked, name) not in (None, [], {}, ""):
            raise _unsupported(name, f"{feature} is not served")
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


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    given = given or {}
    for name in given:
        if name not in ("format", "verbosity"):
            raise _unsupported(f"text.{shown(name)}", "there is no such setting", "format, verbosity")
    if not isinstance(given.get("verbosity"), str | None):
        raise _wrong("text.verbosity", "a string")
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
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
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
        vocabulary: list[bytes],
    ) -> None:
        super().__init__(valid, request_id=request_id, model=model, prompt=prompt)
        self._created = created
        self._number = 0  # of the next event
        self._reasoning = 0  # output tokens of the reasoning
        self._finish = ""
        self._names = valid.called
        self._summary = bool(valid.shown.get("reasoning", {}).get("summary"))  # reasoning is shown as its summary
        self._seals = valid.seals
        self._logprobs = ResponseLogprobs(valid, vocabulary) if valid.sampling.logprobs >= 0 else None
        self._raw = RawMessages(prompt.token_ids, vocabulary) if valid.raw_messages else None
        self._encoded: list[msgspec.Raw] = []  # items of the output at its end
        self.after = -1  # events up to this number are not written
        self.stored = bool(valid.shown.get("store"))  # false once the response could not be stored

    def _count(self, piece: Piece) -> None:
        super()._count(piece)
        self._reasoning = piece.reasoning_tokens or self._reasoning
        self._finish = piece.finish or self._finish
        if self._logprobs is not None:
            self._logprobs.add(piece)
        if self._raw is not None:
            self._raw.add(piece)

    # -- the response

    def response(self, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response as far as it was written.  `status`: "" as the answer ended."""
        if self._logprobs is not None:
            self._logprobs.end()
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
            "output": self._output() if ended or error else [],
            **self._valid.shown,
            "store": self.stored,
            "usage": self._usage() if ended else None,
            **(self._raw.fields() if self._raw is not None and ended else {}),
        }

    def _output(self) -> list[msgspec.Raw]:
        """Return all items as JSON: those that `prepare_end` has encoded, and the others."""
        found = self._encoded
        return found + [self._encode_item(block) for block in self._blocks.found[len(found) :]]

    def _encode_item(self, block: Block) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(self._item(block)))

    async def prepare_end(self, pacer: Pacer) -> None:
        """Encode the items of the output, of which there may be thousands, while other requests run."""
        if self._logprobs is not None:
            self._logprobs.end()
        turns, found = Turns(pacer), self._encoded
        while len(found) < len(self._blocks.found) and self._blocks.found[len(found)].complete:
            found.append(self._encode_item(self._blocks.found[len(found)]))
            await turns.pause()

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens[0],
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._prompt + self._tokens[0],
        }

    def _called(self, block: Block) -> Called:
        """Return a call's tool as the client names it."""
        return self._names.get(block.name) or Called(block.name)

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and self._called(block).kind == "custom"

    def _item_id(self, block: Block) -> str:
        prefix = PREFIXES["custom" if self._is_custom(block) else block.kind]
        return f"{prefix}{self.request_id.removeprefix(PREFIX)}{block.index:04x}"

    def _item(self, block: Block, *, begun: bool = False) -> Item:
        """Return a block as an item of the output; `begun`: as it is announced, without content."""
        whole = block.followed or self._finish in ("stop", "tool_calls")
        status = "in_progress" if begun else "completed" if whole else "incomplete"
        item: Item = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            return self._call_item(block, item, begun=begun)
        parts = [] if begun else [self._part(block)]
        if block.kind == "reasoning":
            summary, content = (parts, []) if self._summary else ([], parts)
            encrypted = sealed(block.text) if self._seals and not begun else None
            return {"type": "reasoning", **item, "summary": summary, "content": content, "encrypted_content": encrypted}
        return {"type": "message", **item, "role": "assistant", "content": parts}

    def _call_item(self, block: Block, item: Item, *, begun: bool) -> Item:
        name, namespace, kind = self._called(block)
        call = {**item, "call_id": CALL_PREFIX + call_id(self.request_id, 0, block.call), "name": name}
        if namespace is not None:
            call["namespace"] = namespace
        if kind == "custom":
            return {"type": "custom_tool_call", **call, "input": "" if begun else custom_input(block.text)}
        return {"type": "function_call", **call, "arguments": "" if begun else block.text}

    def _part(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        text = "" if begun else block.text
        if block.kind == "reasoning":
            return {"type": "summary_text" if self._summary else "reasoning_text", "text": text}
        scores = [] if begun else self._scores(block)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

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
                events.append(self._grow(block, text, self._scored(block, text)))
            else:
                events += self._open(block) if step == "open" else self._close(block)
        return b"".join(events)

    def _scored(self, block: Block, text: str) -> list[Entry]:
        """Return the log probabilities of what a block grows by."""
        return [] if self._logprobs is None or block.kind != "text" else self._logprobs.grow(block.index, text)

    def _scores(self, block: Block) -> list[Entry]:
        """Return the log probabilities of a block so far."""
        return [] if self._logprobs is None else self._logprobs.of(block.index)

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _grow(self, block: Block, text: str, scores: list[Entry]) -> bytes:
        place = self._place(block)
        if self._is_custom(block):  # its input is known when its JSON is whole
            return b""
        if block.kind == "call":
            return self._event(f"{ARGUMENTS}.delta", **place, delta=text)
        if block.kind == "reasoning" and self._summary:
            return self._event("response.reasoning_summary_text.delta", **place, summary_index=0, delta=text)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        return self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=scores)

    def _open(self, block: Block) -> list[bytes]:
        item = self._item(block, begun=True)
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != "call":
            events.append(self._part_event("added", block, begun=True))
        return events

    def _part_event(self, step: str, block: Block, *, begun: bool = False) -> bytes:
        part = self._part(block, begun=begun)
        if block.kind == "reasoning" and self._summary:
            kind = f"response.reasoning_summary_part.{step}"
            return self._event(kind, **self._place(block), summary_index=0, part=part)
        return self._event(f"response.content_part.{step}", **self._place(block), content_index=0, part=part)

    def _close(self, block: Block) -> list[bytes]:
        place, text = self._place(block), block.text
        if self._is_custom(block):
            given = custom_input(text)
            events = [self._event(f"{CUSTOM}.delta", **place, delta=given)] if given else []
            events.append(self._event(f"{CUSTOM}.done", **place, input=given))
        elif block.kind == "call":
            events = [self._event(f"{ARGUMENTS}.done", **place, name=self._called(block).name, arguments=text)]
        elif block.kind == "reasoning" and self._summary:
            events = [self._event("response.reasoning_summary_text.done", **place, summary_index=0, text=text)]
        elif block.kind == "reasoning":
            events = [self._event("response.reasoning_text.done", **place, content_index=0, text=text)]
        else:
            scores = self._scores(block)
            events = [self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=scores)]
        if block.kind != "call":
            events.append(self._part_event("done", block))
        return [*events, self._event("response.output_item.done", output_index=block.index, item=self._item(block))]

    def usage_chunk(self) -> bytes:
        """Return nothing: the last event has the usage."""
        return b""

    def events_after(self, number: int) -> ValidRequest:
        """Leave out events up to this number; return the request as a streamed one.  Raises Refusal without events."""
        self.after = number
        return msgspec.structs.replace(self._valid, stream=True)

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
            for step, block, text in self._blocks.add(piece):
                if step == "grow":
                    self._scored(block, text)

    def body(self) -> bytes:
        """Return the response as it ended."""
        return msgspec.json.encode(self.response())

    async def whole(self, pieces: list[Piece], pacer: Pacer) -> list[bytes]:
        """Return the body of an answer that is not streamed.  Other requests run in between."""
        turns = Turns(pacer)
        for piece in pieces:
            self.read([piece])
            await turns.pause()
        await self.prepare_end(pacer)
        return [self.body()]


def missing(response_id: str, param: str | None = None) -> Refusal:
    """Return the refusal of a response that is not stored.  `param`: the field that names it."""
    prefix = f"{param}: " if param else ""
    message = f"{prefix}Response with id '{shown(response_id)}' not found."
    return Refusal(404, "response_not_found", message, param=param, given=response_id)
