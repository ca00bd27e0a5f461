"""Anthropic's API format: converts POST /v1/messages and /v1/messages/count_tokens to chats, and answers back.

    MessagesBody --chat_of--> ChatBody --api.chat_request--> ValidRequest --as for any chat--> deltas
    deltas --MessageFormat--> message_start, content_block_start, content_block_delta ... message_stop, or one message

`message_blocks.py` converts content blocks, `client_tools.py` tools.  `chat_request` checks the fields that this format
shares with chats; `NAMES` translates field names in its refusals to this format's.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from quire.service.api.anthropic.context_edits import edited
from quire.service.api.anthropic.message_blocks import TOOL_PREFIX, ContentBlock, Turn, messages_of, system_of
from quire.service.api.api import Served, chat_request
from quire.service.api.blocks import Block, BlockFormat
from quire.service.api.bodies import ChatBody
from quire.service.api.client_tools import message_tools
from quire.service.api.decoding import decode_all
from quire.service.api.format import Prompted, call_id
from quire.service.api.history import Message
from quire.service.api.skipped import Skipped
from quire.service.api.tools import ToolRules
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import WHOLE, shown
from quire.service.common.pacing import Pacer, Turns
from quire.service.common.refusal import Refusal, bad_request, check, placing, unsupported, wrong_type
from quire.service.common.surrogates import without_escaped_halves
from quire.service.config import GatewayConfig
from quire.service.output.choice_delta import ChoiceDelta

PREFIX = "msg_"
REQUEST_ID_HEADER = "request-id"  # Anthropic's name for x-request-id
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Field of a chat (regex) -> field of this format, for refusals.
NAMES = (
    (r"stop(?=$|\W)", "stop_sequences"),
    (r"tools\[(\d*)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d*)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"continue_final_message", "messages"),
)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNSERVED = {
    "mcp_servers": "tools of other servers",
    "container": "code execution",
}
SPEEDS = ("standard", "fast")  # accepted values of `speed`, without effect
HINTS = ("task_budget",)  # settings of `output_config` without effect


class CountBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # older name of `output_config.format`
    chat_template_kwargs: Any = None
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    container: Any = None
    context_management: dict[str, Any] | None = None
    speed: Any = None


class MessagesBody(CountBody, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Extensions of Quire, as in a chat.
    seed: int | None = None
    priority: int | str | None = None
    timeout: float | None = None
    cache_salt: str | None = None


def parse(body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: Served) -> ValidRequest:
    """Parse the body of POST /v1/messages.  Raises Refusal."""
    asked, unknown = decode_all(body, MessagesBody, "messages", config)
    check("max_tokens", asked.max_tokens, config)
    skipped = Skipped(config)
    turns, bounds = edited(asked.messages, asked.context_management, skipped)
    chat, rules, sources = chat_of(asked, turns, skipped)
    chat.max_tokens, chat.stream, chat.stop = asked.max_tokens, asked.stream, asked.stop_sequences
    chat.temperature, chat.top_p, chat.top_k, chat.seed = asked.temperature, asked.top_p, asked.top_k, asked.seed
    chat.priority, chat.timeout, chat.cache_salt = asked.priority, asked.timeout, asked.cache_salt
    with placing(sources):
        valid = chat_request(chat, config, served_name, timeout_s, served, (*unknown, *skipped.names()), rules)
    return msgspec.structs.replace(_with_thinking(valid, asked), at_most=True, sources=sources, bounds=bounds)


def parse_count(body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: Served) -> ValidRequest:
    """Parse the body of POST /v1/messages/count_tokens.  Raises Refusal."""
    asked, unknown = decode_all(body, CountBody, "messages", config)
    skipped = Skipped(config)
    turns, bounds = edited(asked.messages, asked.context_management, skipped)
    chat, rules, sources = chat_of(asked, turns, skipped)
    with placing(sources):
        valid = chat_request(chat, config, served_name, timeout_s, served, (*unknown, *skipped.names()), rules)
    return msgspec.structs.replace(_with_thinking(valid, asked), sources=sources, bounds=bounds)


def _with_thinking(valid: ValidRequest, asked: CountBody) -> ValidRequest:
    thinking, budget = _thinking(asked.thinking)
    options = msgspec.structs.replace(
        valid.options, thinking=thinking, thinking_budget=budget, thinking_target=budget is not None
    )
    return msgspec.structs.replace(valid, options=options)


# ------------------------------------------------------------------------------------------------------------- requests


def chat_of(asked: CountBody, turns: list[Turn], skipped: Skipped) -> tuple[ChatBody, ToolRules, list[str]]:
    """Convert a body to a chat without sampling fields; return it, the rules of its tools, and `sources`.

    `turns`: the body's messages after `context_management`.  `sources`: the body's field for each message of the chat.
    Raises Refusal."""
    for name, feature in UNSERVED.items():
        if getattr(asked, name) not in (None, [], {}):
            raise unsupported(name, f"{feature} is not served")
    if asked.speed is not None and asked.speed not in SPEEDS:
        raise unsupported(
            "speed", f"must be one of {', '.join(SPEEDS)}", ", ".join(SPEEDS), str(shown(str(asked.speed)))
        )
    if asked.speed == "fast":
        skipped.add("speed")
    messages, sources = messages_of(turns, skipped)
    if len(messages) > 1 and messages[-1] == Message("assistant", messages[-1].content) and not messages[-1].content:
        messages, sources = messages[:-1], sources[:-1]  # an empty last message of the assistant is dropped
    # If the last message is the assistant's, the answer continues it, as at Anthropic.
    continued = bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
    tools, rules = message_tools(asked.tools, skipped, asked.tool_choice)
    choice, parallel = _tool_choice(asked.tool_choice)
    effort, form = _output_config(asked, skipped)
    system = system_of(asked.system, skipped)
    chat = ChatBody(
        model=asked.model,
        messages=[*system, *messages],
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs=asked.chat_template_kwargs,
        reasoning_effort=effort,
        response_format=form,
        continue_final_message=continued or None,
    )
    return chat, rules, ["system"] * len(system) + sources


def _tool_choice(given: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """Return `tool_choice` and `parallel_tool_calls` of the chat."""
    if given is None:
        return None, None
    parallel = False if given.get("disable_parallel_tool_use") else None
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in choices:
        allowed, value = "auto, any, tool, none", str(shown(str(kind)))
        message = f"tool_choice.type: must be one of {allowed}, got '{value}'"
        raise bad_request("invalid_value", message, "tool_choice.type", allowed, value)
    return choices[kind], parallel


def _thinking(given: dict[str, Any] | None) -> tuple[bool | None, int | None]:
    """Return whether reasoning is on (None: the template's default), and its budget in tokens (None: unbounded)."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "adaptive":
        return None, None
    if kind not in ("enabled", "disabled"):
        allowed, value = "enabled, disabled, adaptive", str(shown(str(kind)))
        message = f"thinking.type: must be one of {allowed}, got '{value}'"
        raise bad_request("invalid_value", message, "thinking.type", allowed, value)
    if kind == "disabled":
        return False, None
    budget = given.get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise wrong_type("thinking.budget_tokens", "a whole number >= 0")
    return True, None if budget is None else min(budget, WHOLE)


def _output_config(asked: CountBody, skipped: Skipped) -> tuple[str | None, dict[str, Any] | None]:
    """Return `reasoning_effort` and `response_format` of the chat."""
    given, field = asked.output_config or {}, "output_config.format"
    for name, value in given.items():
        if name in HINTS and value is not None:
            skipped.add(f"output_config.{name}")
        elif name not in ("effort", "format", *HINTS):
            raise unsupported(f"output_config.{shown(name)}", "there is no such setting", "effort, format")
    effort, form = given.get("effort"), given.get("format")
    if not isinstance(effort, str | None):
        raise wrong_type("output_config.effort", "a string")
    if asked.output_format is not None:
        if form is not None:
            raise bad_request("invalid_value", f"output_format: is the older name of {field}", "output_format")
        form, field = asked.output_format, "output_format"
    if form is None:
        return effort, None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise unsupported(f"{field}.type", "only json_schema is served", "json_schema")
    return effort, {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}


# -------------------------------------------------------------------------------------------------------------- answers


def error_body(refusal: Refusal, request_id: str) -> bytes:
    """Return an error in Anthropic's JSON format."""
    message = refusal.message.encode("utf-8", "replace").decode()
    kind = ERRORS.get(refusal.status, "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


class MessageFormat(BlockFormat):
    """Writes one answer in Anthropic's format.  A retry with the same idempotency key gets the complete answer."""

    each_token = False

    def __init__(self, valid: ValidRequest, *, request_id: str, model: str, prompt: Prompted) -> None:
        super().__init__(valid, request_id=request_id, model=model, prompt=prompt)
        self._begun = False

    def _usage(self) -> dict[str, int]:
        # In Anthropic's usage, `input_tokens` does not include cached prompt tokens.
        return {
            "input_tokens": self._prompt - self._cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached,
            "output_tokens": self._tokens[0],
        }

    def _frame(self, content: list[msgspec.Raw], stop: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.request_id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content} | stop | {"usage": self._usage()}

    def _stop(self, delta: ChoiceDelta) -> dict[str, Any]:
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) and delta.finish == "stop" else None
        reason = "stop_sequence" if sequence is not None else STOP_REASONS[delta.finish or "stop"]
        if reason == "max_tokens" and self._tokens[0] < (self._valid.max_tokens or 0):
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _content(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        call = TOOL_PREFIX + call_id(self.request_id, 0, block.call)
        return {"type": "tool_use", "id": call, "name": block.name, "input": read_input(text)}

    # -- a stream

    def _start(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = self._frame([], {"stop_reason": None, "stop_sequence": None})
        return _event({"type": "message_start", "message": message})

    def idle(self) -> bytes:
        """Return a `ping` event as keep-alive, after `message_start` if that was not sent."""
        return self._start() + _event({"type": "ping"})

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        self._cached = max(self._cached, delta.cached_tokens)
        events = [self._start()]
        self._count(delta)
        for step, block, text in self._blocks.add(delta):
            event: dict[str, Any] = {"type": f"content_block_{step}", "index": block.index}
            if step == "open":
                event |= {"type": "content_block_start", "content_block": self._content(block, empty=True)}
            elif step == "grow":
                event |= {"type": "content_block_delta", "delta": _delta(block, text)}
            else:
                event["type"] = "content_block_stop"
            events.append(_event(event))
        if delta.finish is not None:
            events.append(_event({"type": "message_delta", "delta": self._stop(delta), "usage": self._usage()}))
        return b"".join(events)

    def usage_chunk(self) -> bytes:
        """Return nothing, since `message_delta` has the usage."""
        return b""

    def done(self) -> bytes:
        """Return the event that ends the stream."""
        return _event({"type": "message_stop"})

    def failure(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that failed."""
        return b"event: error\ndata: " + error_body(refusal, self.request_id) + b"\n\n"

    # -- the complete answer

    async def whole(self, deltas: list[ChoiceDelta], pacer: Pacer) -> list[bytes]:
        """Return the body of a non-streaming answer.  Other requests run meanwhile."""
        turns, content = Turns(pacer), list[msgspec.Raw]()
        for delta in deltas:
            self._count(delta)
            for step, block, _ in self._blocks.add(delta):
                if step == "close":
                    content.append(msgspec.Raw(msgspec.json.encode(self._content(block))))
            await turns.pause()
        return [msgspec.json.encode(self._frame(content, self._stop(deltas[-1])))]


def read_input(arguments: str) -> msgspec.Raw:
    """Return a call's arguments unchanged if they are a JSON object; {} if not (a model's error, or a cut answer).

    Repeated keys and numbers beyond a float's range stay."""
    text = without_escaped_halves(arguments)
    try:
        found = json.loads(text, parse_int=float)  # as floats: Python refuses to parse an int of over 4,300 digits
    except (ValueError, RecursionError):
        found = None
    return msgspec.Raw(text.encode() if isinstance(found, dict) else b"{}")


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
