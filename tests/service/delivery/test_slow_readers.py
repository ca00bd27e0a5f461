"""Slow readers: their cost is bounded, and no other request waits for them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

from quire.service.delivery.mailbox import MAILBOX_BYTES
from quire.service.http.sse import WRITE_BUFFER_BYTES
from quire.service.text.tokenizer import Tokenizer
from tests.service.delivery.test_resume import events, merged, says
from tests.service.fakes import FakeEngine, Served, settled

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]

SLOW, TOKENS = 40, 6000
# An event of what a mailbox held: at most so many tokens, here with their ids, and no token longer than this.
EVENT_BYTES = MAILBOX_BYTES // 4 * 24


def begin(port: int, body: dict[str, object]) -> socket.socket:
    """Ask, with the smallest of buffers, and read nothing yet."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    one.connect(("127.0.0.1", port))
    sent = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    one.sendall(head % len(sent) + sent)
    one.setblocking(False)
    return one


async def test_forty_at_a_byte_each_cost_bounded_memory_and_no_blocks_and_delay_nobody(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer
) -> None:
    served = await serve(late_wait_s=1000.0)
    slow_body = {"model": "tiny", "prompt": "a", "max_tokens": TOKENS, "stream": True, "return_token_ids": True}
    body = {"model": "tiny", "prompt": "b", "max_tokens": 50, "stream": True}
    async with engine(says(byte_level_tokenizer)) as fake:
        fake.load_changes = {"max_model_len": 10_000}
        fake.burst = 5
        await settled(lambda: any(load.max_model_len == 10_000 for load in served.streams.fleet.engines))
        expected = merged(await events(served.session, "/v1/completions", body))["text 0"]
        slow = [begin(int(served.url.rpartition(":")[2]), slow_body) for _ in range(SLOW)]
        try:
            await settled(lambda: len(fake.seen) == 1 + SLOW)
            fast = [asyncio.create_task(events(served.session, "/v1/completions", body)) for _ in range(8)]
            for one in slow:
                assert len(await asyncio.get_running_loop().sock_recv(one, 1)) == 1
            for task in fast:  # they end while no other client reads
                assert merged(await task)["text 0"] == expected
            await settled(lambda: not fake.busy)
            assert len(served.streams) == SLOW  # the engine has nothing left of them, and they still read
            buffers = [transport.get_write_buffer_size() for transport in served.transports()]
            assert max(buffers) <= WRITE_BUFFER_BYTES + EVENT_BYTES
            assert 0 < served.streams.submissions.backlog.held <= SLOW * MAILBOX_BYTES
            held = [
                box
                for submission in served.streams.submissions._submissions.values()
                for box in submission.readers[0][0].mailboxes
            ]
            assert max(len(box._tokens) for box in held) <= MAILBOX_BYTES // 4
            assert max(box.next - box.at for box in held) > MAILBOX_BYTES // 4  # the rest is in the log alone

            last, *others = slow
            for one in others:
                one.close()
            await settled(lambda: len(served.streams) == 1)
            received = bytearray()
            while block := await asyncio.get_running_loop().sock_recv(last, 65536):
                received += block
        finally:
            for one in slow:
                one.close()
        assert b"data: [DONE]" in received
        chunks = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
        ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert ids == says(byte_level_tokenizer)(fake.seen[1], 0)[0][:TOKENS]
        await settled(lambda: len(served.streams) == 0)
        assert served.streams.submissions.backlog.held == 0
