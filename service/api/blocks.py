"""The blocks of an answer: runs of text, reasoning and tool calls, in the order in which the model wrote them.

    deltas --Blocks.add--> (open, block, "") (grow, block, "more") ... (close, block, "") --a format--> its events

They become the content blocks of `/v1/messages` and the output items of `/v1/responses`.  They depend on the text that
the model wrote, not on how it was split into deltas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from quire.engine.wire.messages import Predictions
from quire.service.api.format import Prompted
from quire.service.api.position import Position
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Pacer
from quire.service.output.choice_delta import ChoiceDelta
from quire.service.output.regions import CallDelta

Kind = Literal["text", "reasoning", "call"]
Step = Literal["open", "grow", "close"]


class Block:
    """One run of text or reasoning, or one tool call."""

    __slots__ = ("call", "complete", "followed", "index", "kind", "name", "parts")

    def __init__(self, index: int, kind: Kind, call: int = -1, name: str = "") -> None:
        """`index`: number of the block in the answer.  `call`, `name`: number of the tool call, name of the tool."""
        self.index, self.kind, self.call, self.name = index, kind, call, name
        self.parts: list[str] = []
        self.complete = self.followed = False  # whether it is closed, and whether another block follows it

    @property
    def text(self) -> str:
        """The text so far; for a call its arguments, which are JSON unless the model made an error or was cut off."""
        return "".join(self.parts)


class Blocks:
    """Collects the blocks of one answer.  Only the last block may be open."""

    def __init__(self) -> None:
        self.found: list[Block] = []

    def add(self, delta: ChoiceDelta) -> Iterator[tuple[Step, Block, str]]:
        """Yield the steps of a delta: a block opens, grows by a non-empty text, or closes."""
        for part in delta.ordered():
            if isinstance(part, CallDelta):
                kind: Kind = "call"
                text, begins = part.arguments, part.name is not None
            else:
                kind, text = "reasoning" if part.reasoning else "text", part.text
                begins = self._open is None or self._open.kind != kind
            if begins:
                yield from self._close(followed=True)
                self.found.append(Block(len(self.found), kind))
                if isinstance(part, CallDelta):
                    self.found[-1].call, self.found[-1].name = part.index, part.name or ""
                yield "open", self.found[-1], ""
            if text:
                self.found[-1].parts.append(text)
                yield "grow", self.found[-1], text
        if delta.finish is not None:
            yield from self._close()

    @property
    def _open(self) -> Block | None:
        return self.found[-1] if self.found and not self.found[-1].complete else None

    def _close(self, *, followed: bool = False) -> Iterator[tuple[Step, Block, str]]:
        if (block := self._open) is not None:
            block.complete, block.followed = True, followed
            yield "close", block, ""


class BlockFormat:
    """Base class of API formats that write blocks.  Answers have one prompt and one choice.

    Their events have no ids, so a client that resumes gets the answer from its start."""

    ids = False

    def __init__(self, valid: ValidRequest, *, request_id: str, model: str, prompt: Prompted) -> None:
        self._valid, self.request_id, self._model, self._prompt = valid, request_id, model, len(prompt.token_ids)
        self._blocks = Blocks()
        self._cached = 0  # prompt tokens found in the prefix cache
        self._tokens = [0]

    @property
    def tokens(self) -> list[int]:
        """Number of output tokens written so far, as a list with one entry."""
        return self._tokens

    def skip(self, had: Position, cached: list[int], reasoning: list[int], predictions: list[Predictions]) -> None:
        """Keep only the cached-token count: this format repeats the answer from its start, whatever the client has."""
        self._cached = max(cached)

    async def prepare(self, delta: ChoiceDelta, *, with_prompt: bool | None = None) -> None:
        """Do nothing: log probabilities are encoded with their block."""

    async def prepare_end(self, pacer: Pacer) -> None:
        """Do nothing, since the end of a stream does not repeat the answer."""

    def _count(self, delta: ChoiceDelta) -> None:
        self._tokens[0] += len(delta.token_ids)
        self._cached = max(self._cached, delta.cached_tokens)
