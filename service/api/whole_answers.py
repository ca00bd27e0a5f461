"""Non-streaming answers: joins all deltas of a choice, in slices of time between which other requests run.

deltas --gathered, one slice per turn of the loop--> WholeChoice --delta()--> one delta with the complete choice
"""

from __future__ import annotations

from quire.engine.wire.messages import TokenLogprob
from quire.service.common.pacing import Turns
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.content_scores import Score
from quire.service.output.regions import CallDelta


class WholeChoice:
    """Joins all deltas of one choice."""

    __slots__ = (
        "_arguments",
        "_content",
        "_logprobs",
        "_names",
        "_offsets",
        "_prompt",
        "_reasoning",
        "_text",
        "_tokens",
        "choice",
        "last",
    )

    def __init__(self, choice: int, *, scored: bool) -> None:
        """`scored`: the choice has log probabilities."""
        self.choice = choice
        self.last = ChoiceDelta(choice, "", [])
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[int] = []
        self._names: list[str] = []  # names of calls, in order
        self._arguments: list[list[str]] = []
        self._logprobs: list[TokenLogprob] | None = [] if scored else None
        self._offsets: list[int] = []
        self._content: list[Score] = []
        self._prompt: list[TokenLogprob] | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta."""
        if self._prompt is None:
            self._prompt = delta.prompt_logprobs
        self.last = delta
        self._tokens += delta.token_ids
        if delta.text:
            self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.name is not None:
                self._names.append(call.name)
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)
        if self._logprobs is not None:
            self._logprobs += delta.logprobs or ()
            self._offsets += delta.offsets or ()
            self._content += delta.content or ()

    @property
    def logprobs(self) -> list[float]:
        """The log probabilities of the choice's tokens."""
        return [one.logprob for one in self._logprobs or ()]

    def delta(self) -> ChoiceDelta:
        """Return one delta with the complete choice, which contains each tool call once, with all its arguments."""
        whole = ChoiceDelta(self.choice, "".join(self._text), self._tokens, reasoning="".join(self._reasoning))
        whole.calls = [
            CallDelta(at, name, "".join(parts))
            for at, (name, parts) in enumerate(zip(self._names, self._arguments, strict=True))
        ]
        whole.prompt_logprobs = self._prompt
        if self._logprobs is not None:
            whole.logprobs, whole.offsets, whole.content = self._logprobs, self._offsets, self._content
        return whole


async def gathered(deltas: list[ChoiceDelta], choices: int, turns: Turns, *, scored: bool) -> list[WholeChoice]:
    """Join the deltas of each choice, pausing for other requests.  `deltas`: all deltas, in order of arrival."""
    found = [WholeChoice(choice, scored=scored) for choice in range(choices)]
    for delta in deltas:
        found[delta.choice].add(delta)
        await turns.pause()
    return found
