"""Structs for the bodies of completions, chats, /tokenize and /detokenize, which decoding.py decodes."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.service.api.beams import BeamFields
from quire.service.api.history import Message
from quire.service.api.prediction import Prediction


class StreamOptions(msgspec.Struct):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_ids: bool | None = None


INNER = {"stream_options": frozenset(StreamOptions.__struct_fields__)}


class CommonBody(BeamFields, kw_only=True):
    """Fields that completions and chats share.  Null means absent, except for `max_tokens`.

    `fields.py` lists fields that are not implemented."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET  # null means as many as fit; absent means the default
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    # Structured output: at most one of the next five fields and `structured_outputs` may be set (see `grammar.py`).
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


class CompletionBody(CommonBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(CommonBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Tools and options of the chat template: see tools.py.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    documents: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    prediction: Prediction | None = None


class TokenizeBody(msgspec.Struct):
    """Body of POST /tokenize: a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    # The next fields are allowed only with messages, as in a chat.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    documents: Any = None
    continue_final_message: bool | None = None
    thinking_token_budget: int | None = None


class DetokenizeBody(msgspec.Struct):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None
