"""Keys that vLLM writes with value null in every answer; Quire writes them, too, for clients that expect them.

Events of a stream get only a few of these keys, since each key is sent with every token.
"""

from __future__ import annotations

MESSAGE = ("annotations", "audio", "function_call", "reasoning")
CHAT_CHOICE = ("token_ids",)
COMPLETION_CHOICE = ("token_ids", "prompt_logprobs", "prompt_token_ids")
CHAT_CHUNK = ("token_ids",)
COMPLETION_CHUNK = ("stop_reason", "prompt_token_ids", "token_ids")
ANSWER = ("service_tier", "kv_transfer_params")
CHAT_ANSWER = (*ANSWER, "prompt_logprobs", "prompt_token_ids")


def nulls(keys: tuple[str, ...], present: tuple[str, ...] = ()) -> bytes:
    """Return `,"KEY":null` for each key that is not in `present`."""
    return b"".join(b',"%s":null' % key.encode() for key in keys if key not in present)
