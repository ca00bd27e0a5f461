"""Clients whose answers are hostile, and who read them in every way while faults are injected.

The checkpoint writes hardly anything but markers of calls and reasoning, brackets, quotes and long tokens, so every
answer is hostile.  The texts of the undisturbed answer are the oracle.

    stream    continues at the next gateway: resumed by the id of its    slow    the same, but reads slowly
              last event, or repeated where events have no ids
    complete  not streamed; repeated under its Idempotency-Key           leave   disconnects after some events

A stream that has ended is sometimes repeated under its key, and resumed from its middle.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from transformers import PreTrainedModel

from quire.service.output.regions import known
from tests.checkpoints import VOCAB, make_checkpoint
from tests.pace import patience
from tests.service.fakes import TOOLS_TEMPLATE, with_markers
from tests.service.output.hostile_answers import CALL, LONG_TOKENS, PATHS, Answer, Texts, fields_of, read_answer
from tests.system.chaos.readers import PATIENCE_S, PAUSE_S, Broken, Doors, Lost

WAYS = ("stream", "stream", "complete", "slow", "leave")
SLOW_BYTES, SLOW_S = 2048, 0.02  # bytes that a slow client reads at once, seconds between two reads
LEFT_EVENTS = 8  # events after which a client leaves, at most
REPEATED = 0.4  # part of the streams that are repeated and resumed after their end
QUIET = 0.1  # factor of the logits of all other tokens
# Tokens of the vocabulary that the answers consist of.
HOSTILE = [
    *LONG_TOKENS, CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>",
    "<parameter=o>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", '{"name": "f", "arguments": {"o": "',
    "[TOOL_CALLS] [", "]<", "}}", '"}', '\\"', "ab" * 40, "<|channel|>", "<|message|>",
]  # fmt: skip
ENDS = (
    b"data: [DONE]",
    b'"type":"message_stop"',
    *(b'"type":"response.%b"' % end for end in (b"completed", b"incomplete")),
)


@dataclass
class Tally:
    """What came of all hostile answers together."""

    answers: Counter[str] = field(default_factory=Counter)  # complete and equal to the oracle, by way and endpoint
    characters: int = 0
    resumed: int = 0  # times that a stream was resumed
    repeated: int = 0  # ended streams that were repeated and resumed again
    refused: int = 0  # times that a client retried after a 429 or 503
    with_redis: int = 0  # requests lost by a failover and reported to their clients
    failures: list[str] = field(default_factory=list)


class Ask(NamedTuple):
    """One request."""

    path: str
    body: dict[str, Any]

    def __str__(self) -> str:
        left_out = ("tools", "stop", "stop_sequences")
        return f"{self.path} { ({name: value for name, value in self.body.items() if name not in left_out}) }"


class Known(NamedTuple):
    """A request whose undisturbed answer is known."""

    ask: Ask
    texts: Texts


def asks(seed: int, count: int, max_tokens: int) -> list[Ask]:
    """Return `count` random requests for answers of `max_tokens` tokens, the endpoints in turn."""
    dice, made = random.Random(seed), list[Ask]()
    for number, path in zip(range(count), itertools.cycle(PATHS)):
        scores, stops, n = dice.random() < 0.4, dice.random() < 0.5, dice.choice((1, 1, 2, 4))
        body = fields_of(path, tools=dice.random() < 0.8, stops=stops, scores=scores, n=n)
        said = f"{number} " * dice.randint(1, 20)
        # A stored response stays in Redis for days, so it would look like a leak.
        asked: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": said},
            "/v1/responses": {"input": said, "store": False},
        }
        body |= asked.get(path, {"messages": [{"role": "user", "content": said}]})
        body |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": max_tokens, "model": "tiny"}
        if path in ("/v1/completions", "/v1/chat/completions"):
            body |= {"seed": number}
        made.append(Ask(path, body | {"temperature": 1.0 if "seed" in body else 0.0}))
    return made


def write_checkpoint(folder: Path, notation: str, max_len: int) -> Path:
    """Write a tiny checkpoint that calls tools in this notation, and writes hardly anything but HOSTILE tokens."""

    def edit(model: PreTrainedModel) -> None:
        model.get_output_embeddings().weight.data[: VOCAB - len(HOSTILE)] *= QUIET

    made = make_checkpoint(folder / "llama", "llama", edit=edit, max_position_embeddings=max_len)
    described = json.loads((made / "tokenizer_config.json").read_text())
    described |= {
        "chat_template": TOOLS_TEMPLATE.replace("<|im_end|>", "<|end|>"),  # the EOS token that this vocabulary has
        "response_template": known().response_templates[notation],
    }
    (made / "tokenizer_config.json").write_text(json.dumps(described))
    (made / "chat_template.jinja").unlink(missing_ok=True)
    with_markers(made / "tokenizer.json", HOSTILE)
    return made


class Client:
    """One client and its one answer."""

    def __init__(self, known: Known, doors: Doors, name: str, way: str, tally: Tally) -> None:
        self._known, self._doors, self._name, self._way, self._tally = known, doors, name, way, tally
        self._body = known.ask.body | {"stream": way != "complete"}
        self._urls = itertools.cycle(doors.far)
        self._blocks: list[bytes] = []  # complete events so far
        self._last_id = ""
        self._failovers = doors.failovers
        self._dice = random.Random(name)

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Ask, read to the end, however often it takes, and compare."""
        try:
            answer = await self._until_answered(session)
            if self._way == "leave":
                self._tally.answers["leave"] += 1
                return
            self._compare("", answer)
            if self._way == "stream" and self._dice.random() < REPEATED:
                await self._again(session)
        except Lost:
            self._tally.with_redis += 1
        except Broken as error:
            self._fail(str(error))

    def _compare(self, what: str, answer: Answer) -> None:
        if answer.failed or answer.texts != self._known.texts:
            self._fail(f"{what}another text than undisturbed: {answer.failed[:300]}{sizes(answer.texts)}")
            return
        self._tally.answers[f"{self._way} {self._known.ask.path}"] += 1
        self._tally.characters += sum(map(len, answer.texts.values()))

    def _fail(self, what: str) -> None:
        self._tally.failures.append(f"{self._name}, {self._way}, {self._known.ask}: {what}")

    async def _again(self, session: aiohttp.ClientSession) -> None:
        """Repeat the ended stream under its key, and resume it from its middle."""
        ids = [line[4:].decode() for block in self._blocks for line in block.split(b"\n") if line.startswith(b"id: ")]
        self._blocks, self._last_id = [], ""
        self._compare("repeated, ", await self._until_answered(session))
        self._tally.repeated += 1
        if not ids:  # events of this endpoint have none
            return
        self._blocks, self._last_id = [], ids[len(ids) // 2]
        rest = await self._until_answered(session)
        if not all(self._known.texts.get(place, "").endswith(text) for place, text in rest.texts.items()):
            self._fail(f"the resumed text is not the end of the answer: {sizes(rest.texts)}")

    async def _until_answered(self, session: aiohttp.ClientSession) -> Answer:
        """Raises Broken for what no client should see, Lost if a failover lost the request."""
        give_up = time.monotonic() + patience(PATIENCE_S)
        while time.monotonic() < give_up:
            got = len(self._blocks)
            try:
                answer, wait_s = await self._try(session)
            except (aiohttp.ClientError, ConnectionError):
                answer, wait_s = None, PAUSE_S
            if answer is not None:
                return answer
            if len(self._blocks) > got:
                give_up = time.monotonic() + patience(PATIENCE_S)
            await asyncio.sleep(wait_s)
        raise Broken(f"not answered for {PATIENCE_S:g} s")

    async def _try(self, session: aiohttp.ClientSession) -> tuple[Answer | None, float]:
        """One connection, to its end.  Returns the answer, or None and the seconds to wait before the next try."""
        headers = {"Idempotency-Key": self._name, "X-Resumable": "1"}
        if self._way == "leave":
            headers = {}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
            self._tally.resumed += 1
        elif self._blocks:  # events without an id: they come again
            self._blocks.clear()
        url = next(self._urls) + self._known.ask.path
        async with session.post(url, json=self._body, headers=headers) as response:
            if response.status in (429, 503):
                self._tally.refused += 1
                return None, float(response.headers["Retry-After"])
            if response.status == 404 and self._last_id and self._doors.failovers > self._failovers:
                raise Lost
            if response.status == 204 and self._ended():  # the connection broke after the last event had arrived
                return await self._answer(), PAUSE_S
            if response.status != 200:
                raise Broken(f"status {response.status}: {(await response.text())[:500]}")
            if self._way == "complete":
                return read_answer(200, await response.read(), stream=False), 0.0
            return await self._read_events(response), PAUSE_S

    async def _read_events(self, response: aiohttp.ClientResponse) -> Answer | None:
        """Read events until the stream ends; None if it broke off.  The last event of a broken stream may be cut."""
        data, leave_after = b"", self._dice.randint(1, LEFT_EVENTS)
        while got := await response.content.read(SLOW_BYTES if self._way == "slow" else 2**16):
            *events, data = (data + got).split(b"\n\n")
            for event in events:
                self._take(event)
            if self._way == "slow":
                await asyncio.sleep(SLOW_S)
            if self._way == "leave" and len(self._blocks) >= leave_after:
                return Answer(200, {}, [])
        if self._way == "leave" and not self._ended():
            return Answer(200, {}, [])  # a stream that cannot be resumed ends with its gateway
        return await self._answer() if self._ended() else None

    def _ended(self) -> bool:
        return any(end in block for block in self._blocks[-2:] for end in ENDS)

    async def _answer(self) -> Answer:
        return await asyncio.to_thread(read_answer, 200, b"\n\n".join(self._blocks), stream=True)

    def _take(self, event: bytes) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data: {") and b'"error":{' in line and self._way != "leave":
                if b"request_lost" in line and self._doors.failovers > self._failovers:
                    raise Lost
                raise Broken(f"an error event: {line[:500]!r}")
            if line.startswith(b"id: "):
                self._last_id = line[4:].decode()
        self._blocks.append(event)


def sizes(texts: Texts) -> str:
    """Say how many characters each text has."""
    return str({" ".join(map(str, place)): len(text) for place, text in texts.items()})


async def undisturbed(
    session: aiohttp.ClientSession, doors: Doors, work: Sequence[Ask]
) -> tuple[list[Known], list[str]]:
    """Send each request, streamed and not.  Returns the answers, and what is wrong with them."""
    answers, wrong = list[Known](), list[str]()
    for ask in work:
        found = list[Answer]()
        for stream in (True, False):
            async with session.post(doors.near[0] + ask.path, json=ask.body | {"stream": stream}) as response:
                found.append(read_answer(response.status, await response.read(), stream))
        one, other = found
        if one.status != 200 or other.status != 200 or one.texts != other.texts:
            wrong.append(f"{ask}: {one.failed[:300]} {other.failed[:300]} {sizes(one.texts)} {sizes(other.texts)}")
        else:
            answers.append(Known(ask, one.texts))
    return answers, wrong


class Crowd:
    """So many hostile clients, each asking again when it was answered."""

    def __init__(self, session: aiohttp.ClientSession, doors: Doors, answers: Sequence[Known]) -> None:
        self._session, self._doors, self._answers = session, doors, answers
        self.tally = Tally()
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._ending = False

    def start(self, clients: int, seed: int) -> None:
        """Start the clients."""
        dice = random.Random(seed)
        self._tasks = [asyncio.create_task(self._client(dice)) for _ in range(clients)]

    async def finish(self) -> None:
        """Let all clients read their current answers to the end."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _client(self, dice: random.Random) -> None:
        while not self._ending:
            known, way, name = dice.choice(self._answers), dice.choice(WAYS), f"hostile-{next(self._numbers)}"
            await Client(known, self._doors, name, way, self.tally).run(self._session)


def figures(tally: Tally) -> dict[str, Any]:
    """Return a tally for JSON."""
    shown = {name: getattr(tally, name) for name in ("characters", "resumed", "repeated", "refused", "with_redis")}
    return {
        "answers": sum(tally.answers.values()),
        "by_way": dict(sorted(tally.answers.items())),
        **shown,
        "failed": len(tally.failures),
        "failures": tally.failures[:20],
    }


def table(found: dict[str, Any]) -> str:
    """Figures, for people."""
    counts = ", ".join(f"{count} {way}" for way, count in found["by_way"].items())
    return "\n".join(
        [
            f"hostile answers     {found['answers']:>9}   {found['characters']} characters: {counts}",
            f"resumed             {found['resumed']:>9}   repeated {found['repeated']}, refused {found['refused']}",
            f"failed              {found['failed']:>9}",
            *map(json.dumps, found["failures"]),
        ]
    )
