"""Fields that have the same name and meaning in completions, chats and responses."""

from __future__ import annotations

from typing import Any

import msgspec


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields for sampling, the end of the answer, and scheduling.  Null means absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
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
    cache_salt: str | None = None
    timeout: float | None = None
    priority: int | str | None = None
