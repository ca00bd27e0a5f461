"""What is new in one choice of an answer: text, tokens, log probabilities, and how it ended."""

from __future__ import annotations

import msgspec

from quire.engine.wire.messages import Predictions, TokenLogprob
from quire.service.output.content_scores import Score
from quire.service.output.regions import CallDelta, Part, TextDelta


class Piece(msgspec.Struct):
    """What is new in one choice.

    `token_ids` are all its new tokens.  `text` lags behind them while a character, a marker or a possible stop string
    is incomplete; it is complete when `finish` is set."""

    choice: int  # prompt number * n + choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # one for each token
    offsets: list[int] | None = None  # characters of output before each token; set with logprobs
    prompt_logprobs: list[TokenLogprob] | None = None  # logprobs of prompt tokens 1.., in a choice's first delta
    cached_tokens: int = 0  # prompt tokens found in the prefix cache, on a choice's first delta
    finish: str | None = None  # "stop", "length" or "tool_calls"; nothing follows
    stop_reason: str | int | None = None  # the stop string, or the client's own stop token
    encoded: msgspec.Raw | None = None  # its logprobs as JSON, where they are long: see Format.prepare
    reasoning: str = ""  # text of that region
    calls: list[CallDelta] = []
    reasoning_tokens: int = 0  # reasoning tokens of the choice so far
    score: float | None = None  # score that beam search gave the answer, with `finish`
    searched: int = 0  # tokens that the search computed besides those of its answers, with `finish`
    shared: float = 0.0  # fraction of its beams' KV cache that they shared, with `finish`
    predictions: Predictions | None = None  # drafts from the client's prediction so far
    parts: list[Part] = []  # text, reasoning and calls in the order in which the model wrote them
    content: list[Score] | None = None  # the log probabilities of a chat's content; set with logprobs

    def ordered(self) -> list[Part]:
        """Return text, reasoning and calls in order, also for an answer without regions."""
        return self.parts or ([TextDelta(self.text)] if self.text else [])
