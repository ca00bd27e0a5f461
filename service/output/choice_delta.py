"""A delta of one choice of an answer: new text, tokens, log probabilities, and the finish reason."""

from __future__ import annotations

import msgspec

from quire.engine.wire.messages import Predictions, TokenLogprob
from quire.service.output.content_scores import Score
from quire.service.output.regions import CallDelta, Part, TextDelta


class ChoiceDelta(msgspec.Struct):
    """A delta of one choice.

    `token_ids` are all new tokens.  `text` may lag behind them, while a character, a marker or a possible stop string
    is incomplete.  Once `finish` is set, the text is complete."""

    choice: int  # index of the prompt * n + index of the choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # one entry per token
    offsets: list[int] | None = None  # characters of output before each token; set with logprobs
    prompt_logprobs: list[TokenLogprob] | None = None  # entries from the second prompt token on; first delta only
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; first delta only
    finish: str | None = None  # "stop", "length" or "tool_calls" in the last delta
    stop_reason: str | int | None = None  # the stop string, or the client's own stop token, that ended the choice
    encoded: msgspec.Raw | None = None  # logprobs as JSON if they are long: see Format.prepare
    reasoning: str = ""  # new text of the reasoning
    calls: list[CallDelta] = []
    reasoning_tokens: int = 0  # reasoning tokens of the choice so far
    score: float | None = None  # beam search's score of the choice; set with `finish`
    searched: int = 0  # tokens that beam search computed but did not return; set with `finish`
    shared: float = 0.0  # fraction of KV blocks that the beams shared; set with `finish`
    predictions: Predictions | None = None  # counts of draft tokens from the client's prediction so far
    parts: list[Part] = []  # text, reasoning and calls in the order in which the model wrote them
    content: list[Score] | None = None  # new entries of `logprobs.content` of a chat; set with logprobs

    def ordered(self) -> list[Part]:
        """Return text, reasoning and calls in the model's order, also for an answer without regions."""
        return self.parts or ([TextDelta(self.text)] if self.text else [])
