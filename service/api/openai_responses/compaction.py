"""POST /v1/responses/compact: reduces a long conversation to its user messages and a summary written by the model.

    input, instructions --parse--> ValidRequest with a last message that asks for a summary --as a chat--> deltas
    deltas --CompactionFormat--> {"object": "response.compaction", "output": [user messages, a compaction item]}

The item's `encrypted_content` contains the summary, encoded but not encrypted.  In a later input, the item becomes a
user message (`response_items.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.service.api.api import NO_DEFAULTS, Served
from quire.service.api.openai_responses.output_items import PREFIX
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.openai_responses.response_items import Item, listed, sealed
from quire.service.api.openai_responses.responses import missing, parse
from quire.service.api.valid_request import ValidRequest
from quire.service.config import GatewayConfig

OBJECT = "response.compaction"
ITEM_PREFIX = "cmp_"
ASK = (
    "Summarise the conversation so far, so that it can be continued from the summary alone: goals and constraints of "
    "the user, decisions, facts, names and paths, what was done with which result, and what is left to do. Write the "
    "summary only, and call no tools."
)


def parse_compaction(
    body: bytes,
    config: GatewayConfig,
    served_name: str,
    timeout_s: float,
    served: Served = NO_DEFAULTS,
    earlier: Sequence[Item] = (),
    items: Mapping[str, Item] | None = None,
) -> ValidRequest:
    """Parse the body of POST /v1/responses/compact.  Parameters as for `responses.parse`.  Raises Refusal."""
    valid = parse(body, config, served_name, timeout_s, served, earlier, items)
    kept = [listed(item) for item in (*earlier, *valid.items) if item.get("role") == "user"]
    messages = [*valid.messages, {"role": "user", "content": ASK}]
    options = msgspec.structs.replace(valid.options, tools=[], demanded=[], strict="")
    shown = {**valid.shown, "object": OBJECT, "store": False, "background": False}
    return msgspec.structs.replace(
        valid, messages=messages, options=options, constraint=None, stream=False, shown=shown, items=kept
    )


class CompactionFormat(ResponseFormat):
    """Writes the non-streaming answer to POST /v1/responses/compact."""

    def events_after(self, number: int) -> ValidRequest:
        """Raise Refusal, since a compaction is neither streamed nor stored."""
        raise missing(self.request_id)

    def response(self, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the compacted conversation."""
        text = "".join(block.text for block in self._blocks.found if block.kind == "text")
        item = {"type": "compaction", "id": ITEM_PREFIX + self.request_id.removeprefix(PREFIX)}
        return {
            "id": self.request_id,
            "object": OBJECT,
            "created_at": self._created,
            "output": [*self._valid.items, {**item, "encrypted_content": sealed(text.strip())}],
            "usage": self._usage(),
        }
