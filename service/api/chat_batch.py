"""POST /v1/chat/completions/batch, as in vLLM: several chats with the same options in one request.

    body --each chat of `messages`--> api.chat_request --> one ValidRequest with one prompt per chat

The answer has one choice per chat, in the same order.
"""

from __future__ import annotations

import msgspec

from quire.service.api import api, decoding
from quire.service.api.bodies import ChatBody
from quire.service.api.decoding import decode
from quire.service.api.echo import last_answer
from quire.service.api.history import Message, plain_messages
from quire.service.api.skipped import Skipped
from quire.service.api.valid_request import ValidRequest
from quire.service.common.limits import shown
from quire.service.common.refusal import Refusal, bad_request, check, renamed, renaming
from quire.service.config import GatewayConfig

UNSERVED = {"stream": False, "tools": [], "use_beam_search": False, "n": 1}  # field -> the only value allowed


class BatchBody(ChatBody, kw_only=True):
    """Body of POST /v1/chat/completions/batch."""

    messages: list[list[Message]]  # type: ignore[assignment]  # one list of messages per chat


def parse(
    body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: api.Served = api.NO_DEFAULTS
) -> ValidRequest:
    """Parse the body of POST /v1/chat/completions/batch.  Raises Refusal."""
    asked, unknown = decoding.decode_all(body, BatchBody, "chat", config)
    for name, allowed in UNSERVED.items():
        if (value := getattr(asked, name)) not in (None, allowed):
            given = len(value) if isinstance(value, list) else shown(value)
            raise bad_request(
                "unsupported", f"{name}: a batch of chats is served without it", name, str(allowed), given
            )
    if not asked.messages:
        raise bad_request("empty_prompt", "messages: must not be empty, at least 1 chat", "messages", ">= 1", 0)
    with renaming((("prompt|n", "messages"),)):
        check("prompt", len(asked.messages), config)
        check("choices", len(asked.messages), config)
    fields = msgspec.structs.asdict(asked)
    valid = None
    conversations = []
    skipped: tuple[str, ...] = ()
    for at, messages in enumerate(asked.messages):
        try:
            if valid is None:
                chat = ChatBody(**{**fields, "messages": messages})
                valid = api.chat_request(chat, config, served_name, timeout_s, served, unknown)
            else:
                lost = Skipped(config)
                conversations.append(plain_messages(messages, config, lost))
                skipped += tuple(f"messages[{at}]{name.removeprefix('messages')}" for name in lost.names())
        except Refusal as refusal:
            raise of_chat(refusal, at) from None
    assert valid is not None
    repeated = [last_answer(messages) for messages in (valid.messages, *conversations)] if asked.echo else []
    return msgspec.structs.replace(
        valid, conversations=conversations, repeated=repeated, unknown=valid.unknown + skipped
    )


def of_chat(refusal: Refusal, at: int) -> Refusal:
    """Return a refusal of one chat's messages with the chat's index in its field name."""
    return renamed(refusal, (("messages", f"messages[{at}]"),))


def parse_invocation(
    body: bytes, config: GatewayConfig, served_name: str, timeout_s: float, served: api.Served = api.NO_DEFAULTS
) -> ValidRequest:
    """Parse the body of POST /invocations: a chat if it has `messages`, else a completion.  Raises Refusal."""
    names = decode(body, dict[str, msgspec.Raw], config)
    if "messages" in names or "prompt" not in names:
        return api.parse_chat(body, config, served_name, timeout_s, served)
    return api.parse_completion(body, config, served_name, timeout_s, served)
