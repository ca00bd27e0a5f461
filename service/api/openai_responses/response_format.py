"""Answers in the format of OpenAI's Responses API.

    deltas --ResponseFormat--> response.created, response.output_item.added ... response.completed, or one response

Events have sequence numbers.  Each delta has one token (`each_token`), so events and numbers depend only on the tokens,
and any gateway can send the events after a given number.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.service.api.blocks import Block, BlockFormat
from quire.service.api.client_tools import custom_input
from quire.service.api.format import Prompted
from quire.service.api.openai_responses.output_items import OutputItems
from quire.service.api.openai_responses.raw_messages import RawMessages
from quire.service.api.openai_responses.response_logprobs import Entry, ResponseLogprobs
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Pacer, Turns
from quire.service.common.refusal import Refusal
from quire.service.output.choice_delta import ChoiceDelta

ARGUMENTS, CUSTOM = "response.function_call_arguments", "response.custom_tool_call_input"


class ResponseFormat(BlockFormat):
    """Writes one answer in the format of OpenAI's Responses API."""

    each_token = True

    def __init__(
        self,
        valid: ValidRequest,
        *,
        request_id: str,
        model: str,
        created: int,
        prompt: Prompted,
        vocabulary: list[bytes],
    ) -> None:
        super().__init__(valid, request_id=request_id, model=model, prompt=prompt)
        self._created = created
        self._number = 0  # number of the next event
        self._reasoning = 0  # output tokens of the reasoning
        self._logprobs = ResponseLogprobs(valid, vocabulary) if valid.sampling.logprobs >= 0 else None
        self._items = OutputItems(valid, request_id, self._logprobs)
        self._raw = RawMessages(prompt.token_ids, vocabulary) if valid.raw_messages else None
        self.after = -1  # number of the client's last event; events up to it are not written
        self.stored = bool(valid.shown.get("store"))  # value of `store`; False if storing the response failed

    def _count(self, delta: ChoiceDelta) -> None:
        super()._count(delta)
        self._reasoning = delta.reasoning_tokens or self._reasoning
        self._items.finish = delta.finish or self._items.finish
        if self._logprobs is not None:
            self._logprobs.add(delta)
        if self._raw is not None:
            self._raw.add(delta)

    # -- the response

    def response(self, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response object with its content so far.  `status`: "" for the final status."""
        if self._logprobs is not None:
            self._logprobs.end()
        cut = self._items.finish == "length"
        ended = not status
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if ended and cut else None,
            "model": self._model,
            "output": self._items.encoded(self._blocks.found) if ended or error else [],
            **self._valid.shown,
            "store": self.stored,
            "usage": self._usage() if ended else None,
            **(self._raw.fields() if self._raw is not None and ended else {}),
        }

    async def prepare_end(self, pacer: Pacer) -> None:
        """Encode the output items while other requests run."""
        if self._logprobs is not None:
            self._logprobs.end()
        await self._items.encode_complete(self._blocks.found, pacer)

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens[0],
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._prompt + self._tokens[0],
        }

    # -- a stream

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        if number <= self.after:
            return b""
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _start(self) -> bytes:
        if self._number:
            return b""
        first = "queued" if self._valid.shown.get("background") else "in_progress"
        created = self._event("response.created", response=self.response(first))
        return created + self._event("response.in_progress", response=self.response("in_progress"))

    def idle(self) -> bytes:
        """Return the first events if they were not sent, else b"" (a comment or blank lines are the keep-alive)."""
        return self._start()

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        events = [self._start()]
        self._count(delta)
        for step, block, text in self._blocks.add(delta):
            if step == "grow":
                events.append(self._grow(block, text, self._scored(block, text)))
            else:
                events += self._open(block) if step == "open" else self._close(block)
        return b"".join(events)

    def _scored(self, block: Block, text: str) -> list[Entry]:
        """Return the log probabilities of new text of a block."""
        return [] if self._logprobs is None or block.kind != "text" else self._logprobs.grow(block.index, text)

    def _grow(self, block: Block, text: str, scores: list[Entry]) -> bytes:
        place = self._items.place(block)
        if self._items.is_custom(block):  # the input is sent once its JSON is complete
            return b""
        if block.kind == "call":
            return self._event(f"{ARGUMENTS}.delta", **place, delta=text)
        if block.kind == "reasoning" and self._items.summarised:
            return self._event("response.reasoning_summary_text.delta", **place, summary_index=0, delta=text)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        return self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=scores)

    def _open(self, block: Block) -> list[bytes]:
        item = self._items.item(block, begun=True)
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != "call":
            events.append(self._part_event("added", block, begun=True))
        return events

    def _part_event(self, step: str, block: Block, *, begun: bool = False) -> bytes:
        part = self._items.part(block, begun=begun)
        if block.kind == "reasoning" and self._items.summarised:
            kind = f"response.reasoning_summary_part.{step}"
            return self._event(kind, **self._items.place(block), summary_index=0, part=part)
        return self._event(f"response.content_part.{step}", **self._items.place(block), content_index=0, part=part)

    def _close(self, block: Block) -> list[bytes]:
        place, text = self._items.place(block), block.text
        if self._items.is_custom(block):
            given = custom_input(text)
            events = [self._event(f"{CUSTOM}.delta", **place, delta=given)] if given else []
            events.append(self._event(f"{CUSTOM}.done", **place, input=given))
        elif block.kind == "call":
            events = [self._event(f"{ARGUMENTS}.done", **place, name=self._items.tool(block).name, arguments=text)]
        elif block.kind == "reasoning" and self._items.summarised:
            events = [self._event("response.reasoning_summary_text.done", **place, summary_index=0, text=text)]
        elif block.kind == "reasoning":
            events = [self._event("response.reasoning_text.done", **place, content_index=0, text=text)]
        else:
            scores = self._items.scores(block)
            events = [self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=scores)]
        if block.kind != "call":
            events.append(self._part_event("done", block))
        return [
            *events,
            self._event("response.output_item.done", output_index=block.index, item=self._items.item(block)),
        ]

    def usage_chunk(self) -> bytes:
        """Return nothing, since the last event has the usage."""
        return b""

    def events_after(self, number: int) -> ValidRequest:
        """Suppress events up to this number.  Returns the request with `stream` set.  Subclasses may raise Refusal."""
        self.after = number
        return msgspec.structs.replace(self._valid, stream=True)

    def done(self) -> bytes:
        """Return the event that ends the stream."""
        response = self.response()
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that failed."""
        return self._event("response.failed", response=self.failed(refusal))

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        """Return the response object of an answer that failed."""
        return self.response("failed", {"code": "server_error", "message": f"{refusal.code}: {refusal.message}"})

    # -- the complete answer

    def read(self, deltas: list[ChoiceDelta]) -> None:
        """Add deltas without writing events."""
        for delta in deltas:
            self._count(delta)
            for step, block, text in self._blocks.add(delta):
                if step == "grow":
                    self._scored(block, text)

    def body(self) -> bytes:
        """Return the JSON of the final response."""
        return msgspec.json.encode(self.response())

    async def whole(self, deltas: list[ChoiceDelta], pacer: Pacer) -> list[bytes]:
        """Return the body of a non-streaming answer.  Other requests run meanwhile."""
        turns = Turns(pacer)
        for delta in deltas:
            self.read([delta])
            await turns.pause()
        await self.prepare_end(pacer)
        return [self.body()]
