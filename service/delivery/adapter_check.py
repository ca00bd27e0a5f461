"""Check an adapter before its name is served: an engine loads it and computes one token with it.

The check is an ordinary request, which passes through the queue and the engine's adapter store.  So an adapter that
engines would refuse (shapes of another base model, NaN) is found before a client uses its name.
"""

from __future__ import annotations

from quire.engine.wire.messages import CONSTRAINT, PRIORITIES, Finish, Generate, Sampling
from quire.service.api.adapters import ServedAdapter
from quire.service.common.refusal import Refusal
from quire.service.common.refusal import bad_request as _bad
from quire.service.delivery import admission, resume
from quire.service.delivery.streams import Streams

PREFIX = "lora-"  # prefix of the request id


async def try_out(streams: Streams, gateway: str, adapter: ServedAdapter, timeout_s: float) -> None:
    """Raise Refusal unless an engine computes a token with the adapter.  `gateway`: id of this gateway process."""
    admission.limits(streams.fleet)
    admission.require_adapters(streams.fleet, "lora_path")
    now_ms = streams.redis_ms()
    submission = Generate(
        id=f"{resume.new_id(PREFIX, now_ms)}.0",
        gateway=gateway,
        token_ids=[0],
        max_new_tokens=1,
        sampling=Sampling(temperature=0.0),
        deadline_ms=now_ms + int(timeout_s * 1000),
        priority=PRIORITIES[0],
        queued_ms=now_ms,
        adapter=adapter.id,
        adapter_path=adapter.path,
    )
    finish = Finish("error")
    async with streams.open([submission], admission.Cost(prompt_tokens=1, timeout_s=timeout_s)) as opened:
        async for changed in opened:
            for mailbox in changed:
                if (ended := mailbox.take()[2]) is not None:
                    finish = ended
                    opened.end(mailbox.choice)
    if finish.reason in ("stop", "length"):
        return
    if finish.code == CONSTRAINT:
        raise _bad("invalid_adapter", f"lora_path: {finish.message}", "lora_path")
    if finish.reason == "deadline":
        message = f"no engine has loaded the adapter within {timeout_s:g} s"
        raise Refusal(504, "deadline_exceeded", message)
    if finish.reason == "cancelled":
        raise Refusal(503, "cancelled", "this gateway is shutting down", retry_after_s=1.0)
    raise Refusal(500, "engine_error", finish.message or "the engine failed on this adapter")
