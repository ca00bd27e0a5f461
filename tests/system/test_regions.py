"""A thinking answer with a tool call survives what happens to it: engines killed with -9, a client at another gateway.

The scripted executor says the tokens of the vocabulary one after the other.  So a tokenizer whose tokens are the pieces
of an answer, in this order, makes it say that answer.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.service.api.format import call_id
from tests.checkpoints import VOCAB
from tests.pace import paced_ms, patience
from tests.ports import free_port
from tests.service.fakes import TOOLS_TEMPLATE
from tests.system.processes import QUIRE, Process, ending, wait_until_ready
from tests.system.test_survival import LIMIT_S, Engines

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("warm_processes")]

THOUGHT = [f"step {at}; " for at in range(150)]
ARGUMENTS = ["{", *(f'"key{at}": "value {at}", ' for at in range(150)), '"end": 1}']
PIECES = [
    "<think>\n",
    *THOUGHT,
    "\n</think>",
    "\n\nI look.",
    "<tool_call>",
    '{"name": "weather", ',
    '"arguments": {',
    *ARGUMENTS[1:],
    "}</tool_call>",
]
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Rain?"}],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
    "max_tokens": 600,
    "seed": 0,
    "ignore_eos": True,
    "stop_token_ids": [2 + len(PIECES)],
    "stream": True,
    "stream_options": {"include_usage": True},
}


def speaking(folder: Path) -> Path:
    """Replace the tokenizer of a checkpoint: from id 2 on its tokens are PIECES, then the 256 bytes."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = ["<s>", "</s>", *("".join(part for part, _ in bytes_of.pre_tokenize_str(piece)) for piece in PIECES)]
    pieces += sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(pieces) == len(set(pieces)) <= VOCAB
    backend = Backend(models.BPE({piece: at for at, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer, backend.decoder = bytes_of, decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": TOOLS_TEMPLATE}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


class Fleet(Engines):
    """Two gateways."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        port = free_port()
        self.other_url = f"http://127.0.0.1:{port}"
        self._start("other gateway", "--gateway-id=h", f"--port={port}", command=[*QUIRE, "gateway"])

    async def ready(self, count: int) -> None:
        await super().ready(count)
        await asyncio.to_thread(wait_until_ready, self.other_url, LIMIT_S)


@pytest.fixture
def fleet(
    redis_server: EmbeddedRedis, namespace: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> Iterator[Fleet]:
    model = speaking(Path(shutil.copytree(checkpoint("llama"), tmp_path / "model")))
    processes: list[Process] = []
    with ending(processes):
        yield Fleet(redis_server.url, namespace, tmp_path, model, processes)


class Reader:
    """A client that keeps what it received, and may leave and resume."""

    def __init__(self) -> None:
        self.thought = self.text = self.arguments = self.last = ""
        self.names: list[tuple[str, str]] = []
        self.ends: list[str] = []
        self.usage: dict[str, Any] = {}

    async def read(
        self, client: aiohttp.ClientSession, url: str, enough: Callable[[Reader], bool] | None = None
    ) -> None:
        headers = {"Last-Event-ID": self.last} if self.last else {"X-Resumable": "1"}
        async with client.post(f"{url}/v1/chat/completions", json=BODY, headers=headers) as response:
            assert response.status == 200, await response.text()
            event_id = ""
            async for line in response.content:
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
                    self.last = event_id
                    if enough is not None and enough(self):
                        return

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice["delta"]
            self.thought += delta.get("reasoning_content", "")
            self.text += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    self.names.append((call["id"], call["function"]["name"]))
                self.arguments += call["function"]["arguments"]
            self.ends += [choice["finish_reason"]] if choice["finish_reason"] else []

    def check(self) -> None:
        request_id = self.last.partition(":")[0]
        assert self.thought == "".join(THOUGHT).rstrip()
        assert self.text == "I look."
        assert self.names == [(call_id(request_id, 0, 0), "weather")]
        assert self.arguments == "".join(ARGUMENTS)
        assert self.ends == ["tool_calls"]
        assert self.usage["completion_tokens"] == len(PIECES) + 1
        # All pieces up to "</think>".
        assert self.usage["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT) + 2


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience(LIMIT_S))) as session:
        yield session


async def test_killed_engines_and_another_gateway_change_no_byte(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    engine = fleet.engine("e0", f"--lease-ms={paced_ms(1000)}")
    await fleet.ready(1)
    undisturbed = Reader()
    await undisturbed.read(client, fleet.url)
    undisturbed.check()

    reader = Reader()
    reading = asyncio.create_task(reader.read(client, fleet.url, lambda so_far: "key60" in so_far.arguments))
    for number, part in enumerate(("step 40;", "key20")):  # inside the reasoning, and inside the call
        while part not in reader.thought + reader.arguments:
            assert not reading.done()
            await asyncio.sleep(0.002)
        engine.kill()
        assert not reading.done()
        engine = fleet.engine(f"e{number + 1}", f"--lease-ms={paced_ms(1000)}")
    await reading
    assert '"end"' not in reader.arguments
    await reader.read(client, fleet.other_url)
    reader.check()


async def test_a_client_may_leave_at_any_place(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    fleet.engine("e0")
    await fleet.ready(1)
    reader = Reader()
    urls = [fleet.url, fleet.other_url]
    for at, part in enumerate(("step 3;", "step 90;", "I look", "key2", "key99")):

        def enough(so_far: Reader, part: str = part) -> bool:
            return part in so_far.thought + so_far.text + so_far.arguments

        await reader.read(client, urls[at % 2], enough)
        assert not reader.ends
    await reader.read(client, urls[1])
    reader.check()
