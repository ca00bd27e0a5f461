"""OpenAI's Responses API: converts POST /v1/responses to a chat.  `response_format.py` writes the answers.

    ResponsesBody, stored history --chat_of--> ChatBody --api.chat_request--> ValidRequest --as for every chat--> deltas

`chat_request` checks the fields that this format shares with chats; `NAMES` translates field names in its refusals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.service.api.api import NO_DEFAULTS, Served, chat_request
from quire.service.api.bodies import ChatBody
from quire.service.api.client_tools import allowed_tools, functions_of, names_of, tool_choice
from quire.service.api.decoding import decode, decode_all
from quire.service.api.history import Message
from quire.service.api.openai_responses.response_items import (
    WITH_OBJECTS,
    Item,
    Referring,
    messages_of,
    resolved,
    tools_in,
    with_ids,
)
from quire.service.api.openai_responses.written_items import as_written
from quire.service.api.sampling_fields import SamplingFields
from quire.service.api.skipped import Skipped
from quire.service.api.tools import ToolRules
from quire.service.api.valid_request import PromptBound, ValidRequest
from quire.service.common.limits import WHOLE, shown
from quire.service.common.refusal import Refusal, bad_request, check, placing, unsupported, wrong_type
from quire.service.config import GatewayConfig

Turn = tuple[bytes, bytes]  # a stored response: its input items and the response, as JSON

# Field of a chat (regex) -> field of this format, for refusals.
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
}
TRUNCATIONS = ("disabled", "auto")  # "auto" truncates nothing: a prompt that does not fit is refused
# Accepted values of `include`: encoded reasoning, log probabilities, and fields of items that Quire never produces.
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
SUMMARIES = ("auto", "concise", "detailed")


class ResponsesBody(SamplingFields, kw_only=True):
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
    top_logprobs: int | None = None
    truncation: str | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: Any = None
    # These fields have no effect, as in a chat.
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    max_tool_calls: int | None = None  # no effect, since this server runs no tools
    context_management: list[dict[str, Any]] | None = None
    # Refused: see UNSERVED.
    prompt: Any = None
    conversation: Any = None
    moderation: Any = None
    chat_template_kwargs: Any = None  # extension of Quire, as in a chat
    enable_response_messages: bool | None = None  # extension of vLLM: see raw_messages.py


class _Wanted(msgspec.Struct):
    input: str | list[Referring] = ""
    previous_response_id: str | None = None


class Wanted(NamedTuple):
    """The stored responses and items to which a request refers."""

    previous: str | None  # `previous_response_id`
    items: list[str]  # ids of stored output items, named by `item_reference` items


def wanted_of(body: bytes, config: GatewayConfig) -> Wanted:
    """Return the stored responses and items to which a body refers.  Raises Refusal."""
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

    `earlier`: items of the responses that the request continues.  `items`: id -> stored item, for its references."""
    asked, unknown = decode_all(body, ResponsesBody, "responses", config)
    given = resolved(with_ids(asked.input), items or {})
    stored, skipped = _stored(asked, config), Skipped(config)
    chat, rules, sources = chat_of(asked, as_written(body, given, WITH_OBJECTS), earlier, config, skipped)
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
        bounds=_compactions(asked.context_management or []),
    )


# ------------------------------------------------------------------------------------------------------------- requests


def _stored(asked: ResponsesBody, config: GatewayConfig) -> bool:
    """Return whether the response will be stored.  Raises Refusal for fields that need storage if it is disabled."""
    stored = config.responses_ttl_s > 0 and asked.store is not False
    needed = "store" if asked.store else "background" if asked.background else ""
    if needed and not config.responses_ttl_s:
        raise unsupported(needed, "this server stores no responses (--responses-ttl-s)", False, True)
    if needed and not stored:
        raise bad_request(
            "invalid_value", "background can only be used when `store` is true", "background", False, True
        )
    return stored


def chat_of(
    asked: ResponsesBody, items: Sequence[Item], earlier: Sequence[Item], config: GatewayConfig, skipped: Skipped
) -> tuple[ChatBody, ToolRules, list[str]]:
    """Convert a body to a chat; return it, the rules of its tools, and the body's field for each message.

    `items`: the body's input.  `earlier`: items before it.  Raises Refusal."""
    _refuse_unserved(asked)
    _check_metadata(asked.metadata or {}, config)
    effort = (asked.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise wrong_type("reasoning.effort", "a string")
    if (summary := (asked.reasoning or {}).get("summary")) not in (None, *SUMMARIES):
        allowed, value = ", ".join(SUMMARIES), str(shown(str(summary)))
        message = f"reasoning.summary: must be one of {allowed}, got '{value}'"
        raise bad_request("invalid_value", message, "reasoning.summary", allowed, value)
    if asked.max_output_tokens is not None and asked.max_output_tokens < 1:  # a chat would accept -1
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
        chat_template_kwargs=asked.chat_template_kwargs,
        stream=asked.stream,
        **{name: getattr(asked, name) for name in SamplingFields.__struct_fields__},
    )
    return chat, rules, ["instructions"] * len(system) + sources


def _refuse_unserved(asked: ResponsesBody) -> None:
    for name, feature in UNSERVED.items():
        if getattr(asked, name) not in (None, [], {}, ""):
            raise unsupported(name, f"{feature} is not served")
    if asked.truncation not in (None, *TRUNCATIONS):
        allowed, given = ", ".join(TRUNCATIONS), str(shown(asked.truncation))
        raise bad_request(
            "invalid_value", f"truncation: must be one of {allowed}, got '{given}'", "truncation", allowed, given
        )
    if (calls := asked.max_tool_calls) is not None and not 1 <= calls <= WHOLE:
        limit = f">= 1 and <= {WHOLE}"
        message = f"max_tool_calls: must be {limit}, got {shown(calls)}"
        raise bad_request("invalid_value", message, "max_tool_calls", limit, shown(calls))
    for at, name in enumerate(asked.include or ()):
        if name not in INCLUDED:
            raise unsupported(f"include[{at}]", "is not served", ", ".join(INCLUDED), str(shown(name)))


def _compactions(given: list[dict[str, Any]]) -> list[PromptBound]:
    """Return the prompt lengths at which `context_management` demands a compaction.  Raises Refusal for other edits."""
    bounds = []
    for at, entry in enumerate(given):
        here, threshold = f"context_management[{at}]", entry.get("compact_threshold")
        if entry.get("type") != "compaction":
            raise unsupported(
                f"{here}.type", "there is no such setting", "compaction", str(shown(str(entry.get("type"))))
            )
        if not isinstance(threshold, int | None) or isinstance(threshold, bool):
            raise wrong_type(f"{here}.compact_threshold", "a whole number")
        if threshold is not None:
            bounds.append(PromptBound(f"{here}.compact_threshold", min(threshold, WHOLE), "compaction of the context"))
    return bounds


def _check_metadata(metadata: dict[str, str], config: GatewayConfig) -> None:
    check("metadata entries", len(metadata), config)
    for name, value in metadata.items():
        check("metadata name", len(name), config)
        check("metadata", len(value), config)


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    given = given or {}
    for name in given:
        if name not in ("format", "verbosity"):
            raise unsupported(f"text.{shown(name)}", "there is no such setting", "format, verbosity")
    if not isinstance(given.get("verbosity"), str | None):
        raise wrong_type("text.verbosity", "a string")
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
        "max_tool_calls": asked.max_tool_calls,
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
        "truncation": asked.truncation or "disabled",
        "user": asked.user,
    }


def missing(response_id: str, param: str | None = None) -> Refusal:
    """Return the 404 for a response that is not stored.  `param`: the request field that has its id."""
    prefix = f"{param}: " if param else ""
    message = f"{prefix}Response with id '{shown(response_id)}' not found."
    return Refusal(404, "response_not_found", message, param=param, given=response_id)
