"""Converts blocks of an answer to output items of `/v1/responses`."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.service.api.blocks import Block
from quire.service.api.client_tools import Called, custom_input
from quire.service.api.format import call_id
from quire.service.api.openai_responses.response_items import CALL_PREFIX, Item, sealed
from quire.service.api.openai_responses.response_logprobs import Entry, ResponseLogprobs
from quire.service.api.valid_request import ValidRequest
from quire.service.common.pacing import Pacer, Turns

PREFIX = "resp_"  # prefix of a response's id
PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_", "custom": "ctc_"}  # kind of block -> prefix of item ids


class OutputItems:
    """Converts the blocks of one answer to output items."""

    def __init__(self, valid: ValidRequest, request_id: str, logprobs: ResponseLogprobs | None) -> None:
        """`logprobs`: log probabilities of text blocks; None if the request has none."""
        self._request_id, self._logprobs = request_id, logprobs
        self._names, self._seals = valid.called, valid.seals
        self.summarised = bool(valid.shown.get("reasoning", {}).get("summary"))  # send reasoning in the field `summary`
        self.finish = ""  # finish reason of the answer; "" while it runs
        self._encoded: list[msgspec.Raw] = []  # JSON of the first items, from `encode_complete`

    def encoded(self, blocks: list[Block]) -> list[msgspec.Raw]:
        """Return the JSON of all items, reusing the result of `encode_complete`."""
        found = self._encoded
        return found + [self._encode(block) for block in blocks[len(found) :]]

    async def encode_complete(self, blocks: list[Block], pacer: Pacer) -> None:
        """Encode all complete items, perhaps thousands, while other requests run."""
        turns, found = Turns(pacer), self._encoded
        while len(found) < len(blocks) and blocks[len(found)].complete:
            found.append(self._encode(blocks[len(found)]))
            await turns.pause()

    def _encode(self, block: Block) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(self.item(block)))

    def tool(self, block: Block) -> Called:
        """Return name and kind of a call's tool in the client's format."""
        return self._names.get(block.name) or Called(block.name)

    def is_custom(self, block: Block) -> bool:
        """Return whether a block is a call of a custom tool, whose input is plain text."""
        return block.kind == "call" and self.tool(block).kind == "custom"

    def item_id(self, block: Block) -> str:
        """Return the id of a block's item.  A resumed answer has equal ids: only request and block determine them."""
        prefix = PREFIXES["custom" if self.is_custom(block) else block.kind]
        return f"{prefix}{self._request_id.removeprefix(PREFIX)}{block.index:04x}"

    def item(self, block: Block, *, begun: bool = False) -> Item:
        """Convert a block to an output item.  `begun`: without content, for the event `response.output_item.added`."""
        complete = block.followed or self.finish in ("stop", "tool_calls")
        status = "in_progress" if begun else "completed" if complete else "incomplete"
        item: Item = {"id": self.item_id(block), "status": status}
        if block.kind == "call":
            return self._call_item(block, item, begun=begun)
        parts = [] if begun else [self.part(block)]
        if block.kind == "reasoning":
            summary, content = (parts, []) if self.summarised else ([], parts)
            encrypted = sealed(block.text) if self._seals and not begun else None
            return {"type": "reasoning", **item, "summary": summary, "content": content, "encrypted_content": encrypted}
        return {"type": "message", **item, "role": "assistant", "content": parts}

    def _call_item(self, block: Block, item: Item, *, begun: bool) -> Item:
        name, namespace, kind = self.tool(block)
        call = {**item, "call_id": CALL_PREFIX + call_id(self._request_id, 0, block.call), "name": name}
        if namespace is not None:
            call["namespace"] = namespace
        if kind == "custom":
            return {"type": "custom_tool_call", **call, "input": "" if begun else custom_input(block.text)}
        return {"type": "function_call", **call, "arguments": "" if begun else block.text}

    def part(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        """Return the content part of a block of text or reasoning.  `begun`: with empty text, for the `added` event."""
        text = "" if begun else block.text
        if block.kind == "reasoning":
            return {"type": "summary_text" if self.summarised else "reasoning_text", "text": text}
        scores = [] if begun else self.scores(block)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    def scores(self, block: Block) -> list[Entry]:
        """Return the log probabilities of a block so far."""
        return [] if self._logprobs is None else self._logprobs.of(block.index)

    def place(self, block: Block) -> dict[str, Any]:
        """Return the fields with which events identify a block's item."""
        return {"item_id": self.item_id(block), "output_index": block.index}
