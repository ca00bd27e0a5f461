"""`enable_response_messages` of /v1/responses: adds token ids and raw text of prompt and answer to the response.

    prompt, deltas --RawMessages--> input_messages, output_messages: {"type": "raw_message_tokens", "message", "tokens"}

The fields are the same as in vLLM.  The text includes markers and special tokens.
"""

from __future__ import annotations

from typing import Any

from quire.service.output.choice_delta import ChoiceDelta


class RawMessages:
    """The raw messages of one response."""

    def __init__(self, prompt: list[int], vocabulary: list[bytes]) -> None:
        self._prompt, self._answer, self._vocabulary = prompt, list[int](), vocabulary

    def add(self, delta: ChoiceDelta) -> None:
        """Add the tokens of a delta."""
        self._answer += delta.token_ids

    def fields(self) -> dict[str, Any]:
        """Return the fields to add to the response."""
        return {"input_messages": [self._message(self._prompt)], "output_messages": [self._message(self._answer)]}

    def _message(self, tokens: list[int]) -> dict[str, Any]:
        known = (self._vocabulary[token] for token in tokens if token < len(self._vocabulary))
        text = b"".join(known).decode("utf-8", "replace")
        return {"type": "raw_message_tokens", "message": text, "tokens": tokens}
