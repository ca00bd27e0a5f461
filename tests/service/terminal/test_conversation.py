"""`quire chat` without its terminal: a broken stream is resumed, a stopped one is not computed, words are wrapped."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from quire.service.delivery import queue_updates
from quire.service.terminal import conversation, server
from quire.service.terminal.chat import View
from quire.service.terminal.conversation import Answer, Ended, Event, Lost, Piece, Waits
from quire.service.terminal.options import ChatConfig
from quire.service.terminal.server import AddressError, ServerError
from quire.service.terminal.wrapping import Wrapper
from quire.service.text.tokenizer import Tokenizer
from tests.service.delivery.test_late import TARGET_S, full
from tests.service.fakes import FakeEngine, Served, settled
from tests.service.test_app import ANSWER, says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
HELLO = [{"role": "user", "content": "a"}]


class Cutter:
    """A proxy that breaks each connection after so many bytes of its answer; -1: never."""

    def __init__(self, port: int, cuts: Sequence[int]) -> None:
        self._port, self._cuts = port, list(cuts)
        self.connections = 0

    async def __aenter__(self) -> Cutter:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._serve(client, answer)))

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        left = self._cuts[self.connections] if self.connections < len(self._cuts) else -1
        self.connections += 1
        behind, up = await asyncio.open_connection("127.0.0.1", self._port)

        async def pass_on() -> None:
            while block := await client.read(65536):
                up.write(block)

        task = asyncio.create_task(pass_on())
        try:
            while left != 0 and (block := await behind.read(65536 if left < 0 else left)):
                answer.write(block)
                left -= len(block) if left > 0 else 0
                await answer.drain()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for writer in (answer, up):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def ask(base: str, found: list[Event] | None = None, **options: object) -> tuple[str, list[Event]]:
    """The text of one answer, and every event."""
    found = [] if found is None else found
    async with server.session("") as client:
        answer = Answer(client, base, ChatConfig(url=base, **options), "tiny")  # type: ignore[arg-type]
        async with contextlib.aclosing(answer.stream(HELLO)) as events:
            async for event in events:
                found.append(event)
    return "".join(event.text for event in found if isinstance(event, Piece)), found


async def test_an_answer_is_whole_wherever_its_connection_breaks(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "PAUSES_S", (0.001,))
    served = await serve()
    async with engine(says(byte_level_tokenizer, eos=True)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        async with Cutter(int(served.url.rpartition(":")[2]), []) as proxy:
            text, undisturbed = await ask(proxy.url)
        assert text == ANSWER
        assert undisturbed[-1] == Ended("stop", len(byte_level_tokenizer._encode(ANSWER, special=False)) + 1)
        # Headers are 700 bytes or so, an event 250: cuts within headers of a resumed answer, ids, data and between.
        for first in (900, 1001, 1113, 1450, 1777, 2222, 3333):
            seen = len(fake.seen)
            async with Cutter(int(served.url.rpartition(":")[2]), [first, 0, 300, first + 111, 1200]) as proxy:
                text, found = await ask(proxy.url)
            assert text == ANSWER, first
            assert found[-1] == undisturbed[-1]
            assert proxy.connections >= 4
            assert len([event for event in found if isinstance(event, Lost)]) == 1
            assert len(fake.seen) == seen + 1  # nothing was computed twice


async def test_what_cannot_be_resumed_ends_with_one_line(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "PAUSES_S", (0.001,))
    monkeypatch.setattr(conversation, "RESUME_S", 0.05)
    served = await serve()
    async with engine(says(byte_level_tokenizer), step_s=0.01) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        port = int(served.url.rpartition(":")[2])
        async with Cutter(port, [0]) as proxy:
            with pytest.raises(ServerError, match=f"cannot reach {proxy.url}"):
                await ask(proxy.url)
        async with Cutter(port, [1500] + [0] * 10_000) as proxy:
            with pytest.raises(ServerError, match=r"could not be resumed for 0\.05 s"):
                await ask(proxy.url)
        fake.holding = True


@contextlib.asynccontextmanager
async def other_server(lines: list[bytes]) -> AsyncIterator[str]:
    """A server that is not Quire: it sends these lines and breaks off."""

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            await response.write(line + b"\n\n")
        return response

    app = web.Application()
    app.router.add_route("POST", "/some/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/some"
    finally:
        await runner.cleanup()


def chunk(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([chunk(content="Hel")], "broke: the stream ended early"),
        ([chunk(content="Hel"), b'data: {"error": {"message": "too\\nbad \\u001b[2J"}}'], "too bad \ufffd[2J"),
        ([b"data: {}"], "none of a chat"),
        ([b"data: [1"], "none of a chat"),
    ],
)
async def test_another_servers_failure_is_one_line(lines: list[bytes], error: str) -> None:
    async with other_server(lines) as base:
        with pytest.raises(ServerError) as raised:
            await ask(base)
        assert error in str(raised.value)
        assert "\n" not in str(raised.value)


async def test_reasoning_and_content_of_one_event_are_both_read() -> None:
    lines = [chunk(role="assistant", content=""), chunk(reasoning_content="Hm", content="Yes"), chunk(reasoning="x")]
    async with other_server([*lines, b"data: [DONE]"]) as base:
        _, found = await ask(base)
    assert found == [Piece("Hm", reasoning=True), Piece("Yes"), Piece("x", reasoning=True), Ended("", None)]


async def test_a_stopped_answer_is_computed_no_longer(
    serve: Serve, engine: EngineMaker, byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running, and waiting in the late lane.  A client that may resume and only left would be waited for."""
    monkeypatch.setattr(queue_updates, "UPDATE_S", 0.02)
    served = await serve(ttft_target_s=TARGET_S, late_wait_s=60.0, resume_s=600.0)
    async with full(served, engine(says(byte_level_tokenizer), step_s=0.01)) as fake:
        config = ChatConfig(url=served.url)
        for waits in (True, False):
            if not waits:
                fake.free_tokens = 1000
            async with server.session("") as client:
                answer = Answer(client, served.url, config, "tiny")
                long = [{"role": "user", "content": "a" * 200}]
                async with contextlib.aclosing(answer.stream(long)) as events:
                    async for event in events:
                        if isinstance(event, Waits) == waits:
                            break
                    if waits:
                        assert isinstance(event, Waits)
                        assert (event.place, event.wait_s is not None) == (0, True)
                        await settled(lambda: served.streams.fleet.late.requests == 1)
                await answer.stop()
            await settled(
                lambda: (
                    served.streams.fleet.queued == 0 and not fake.busy and not served.streams.submissions._submissions
                )
            )
        assert len(fake.seen) == len(fake.aborted) == 1


def shown(events: Sequence[Event], *, live: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=live, width=72, color_system="standard" if live else None)
    view = View(console, live=live)
    for event in events:
        view.show(event)
    view.close(stopped=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_reasoning_dimmed_the_queue_and_a_lost_connection() -> None:
    events: list[Event] = [
        Waits(12, 8.3),
        Piece("Let me ", reasoning=True),
        Piece("think.", reasoning=True),
        Piece("It is \x1b]0;x\x07 Paris. "),
        Lost("reset"),
        Piece("Yes."),
        Ended("length", 9),
    ]
    text = shown(events, live=True)
    assert "waiting in the late lane: 12 requests ahead, about 8 s" in text
    assert "\x1b[2mLet me\x1b[0m" in text or "\x1b[2mLet\x1b[0m" in text
    assert "\x1b]0" not in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")
    assert "Let me think.\n\nIt is \ufffd]0;x\ufffd Paris. [connection lost: reset; resuming]" in plain
    assert "9 tokens" in plain
    assert "ended by length" in plain
    assert shown(events, live=False) == "It is \ufffd]0;x\ufffd Paris. Yes.\n"


def test_only_chosen_sampling_fields_are_sent() -> None:
    client = object()
    plain = Answer(client, "http://x", ChatConfig(url="x"), "m").body(HELLO)  # type: ignore[arg-type]
    assert set(plain) == {"model", "messages", "stream", "stream_options"}
    config = ChatConfig(url="x", temperature=0.0, top_k=0, seed=0, max_tokens=5, min_p=0.0, top_p=0.5)
    chosen = Answer(client, "http://x", config, "m").body(HELLO)  # type: ignore[arg-type]
    assert {name: value for name, value in chosen.items() if name not in plain} == {
        "temperature": 0.0,
        "top_k": 0,
        "seed": 0,
        "max_tokens": 5,
        "min_p": 0.0,
        "top_p": 0.5,
    }


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("https://host/llm/v1/", "https://host/llm"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "http://localhost"),
    ],
)
def test_addresses(given: str, base: str) -> None:
    assert server.base_url(given) == base


@pytest.mark.parametrize("given", ["", "ftp://x", "http://", "host:port", "host:99999", "a b:1", "http://x?y=1", "x#y"])
def test_what_is_no_address_is_refused_by_name(given: str) -> None:
    with pytest.raises(AddressError, match="no address of a server"):
        server.base_url(given)


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    for key in ("a\nb", "ключ", "a b"):
        with pytest.raises(AddressError, match="API key"):
            server.headers(key)


# --------------------------------------------------------------------------------------------------------- wrapping

TEXTS = st.text(st.sampled_from("ab é🙂日本\n\t -"), max_size=80)


def wrapped(parts: Sequence[str], width: int) -> str:
    out: list[str] = []
    wrapper = Wrapper(width, out.append)
    for part in parts:
        wrapper.feed(part)
    wrapper.flush()
    return "".join(out)


@given(TEXTS, st.integers(2, 20), st.lists(st.integers(0, 80), max_size=6))
def test_wrapped_text_is_the_same_however_it_is_cut_and_fits(text: str, width: int, cuts: list[int]) -> None:
    ends = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    parts = [text[begin:end] for begin, end in itertools.pairwise(ends)]
    whole = wrapped([text], width)
    assert wrapped(parts, width) == whole
    assert "".join(whole.split()) == "".join(text.split())  # nothing is lost or added but white space
    assert all(cell_len(line.strip(" ")) <= width for line in whole.split("\n"))
    assert whole.count("\n") >= text.count("\n")
    assert wrapped([text], 0) == text


def test_lines_break_at_words() -> None:
    assert wrapped(["One req", "uest down, one to", "ken up"], 12) == "One request\ndown, one\ntoken up"
    assert wrapped(["a" * 7, " b"], 5) == "aaaaa\naa b"
