"""LoRA adapters that are loaded and unloaded under traffic: no text is wrong, and nothing stays behind.

    python -m tests.system.chaos adapter-cycles [--cycles 1000]

One server in this process, with slots for two adapters and memory for two of rank 64.  Five adapters of several ranks
stand in `--lora-dir`.  A cycle loads one of them as `now` (POST /v1/load_lora_adapter), asks it, and unloads it.
Meanwhile four clients ask the base model and an adapter of `--lora-dir` without end.  Each answer is compared with that
of the merged weights in transformers.  At the end objects, descriptors, threads and keys in Redis are counted again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from tests.checkpoints import make_checkpoint
from tests.executor.test_lora import base_of, reference
from tests.lora import merged, write_adapter
from tests.system.processes import until
from tests.system.stack import Stack

PROMPTS = [[20 + at, 30, 40 + 3 * at, 50] * (1 + at) for at in range(3)]
NEW = 8  # tokens per answer
CLIENTS = ("base", "0", "base", "0")  # what each asks
WARM_CYCLES = 6  # after them caches of libraries are full
RANKS = (8, 16, 4, 64, 8)


class Counts(msgspec.Struct):
    """What a leak would let grow."""

    objects: int
    descriptors: int
    threads: int
    keys: int
    excess: int  # bytes of adapters in the engine's memory beyond --lora-memory-gib


class Cycles:
    """The server, its clients, and what they should hear."""

    def __init__(self, redis_url: str, namespace: str, checkpoint: Path, folder: Path) -> None:
        base, self.expected = base_of(checkpoint), dict[str, list[list[int]]]()
        sizes = set[int]()
        for number, rank in enumerate(RANKS):
            own = write_adapter(folder / str(number), base, rank=rank, seed=number)
            sizes.add((own / "adapter_model.safetensors").stat().st_size)
            self.expected[str(number)] = [reference(merged(checkpoint, own), prompt, NEW) for prompt in PROMPTS]
        self.expected["base"] = [reference(base, prompt, NEW) for prompt in PROMPTS]
        self._redis_url, self._namespace = redis_url, namespace
        self.stack = Stack(
            redis_url,
            namespace,
            checkpoint,
            gateway_options={"lora_dir": str(folder)},
            lora_slots=2,
            lora_memory_gib=2.5 * max(sizes) / 2**30,
        )
        self._max_bytes = 2.5 * max(sizes)
        self.answers = self.wrong = 0

    async def ask(self, client: aiohttp.ClientSession, model: str, which: str, at: int) -> None:
        """Ask one prompt, and compare with the answer of `which`."""
        body = {"model": model, "prompt": PROMPTS[at % len(PROMPTS)], "max_tokens": NEW, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with client.post(f"{self.stack.url}/v1/completions", json=body) as response:
            answer = await response.json()
        self.answers += 1
        wanted = self.expected[which][at % len(PROMPTS)]
        if response.status != 200 or answer["choices"][0]["token_ids"] != wanted:
            self.wrong += 1
            print(f"{model} ({which}): {response.status} {json.dumps(answer)[:300]}, expected {wanted}")

    async def _post(self, client: aiohttp.ClientSession, path: str, **body: Any) -> None:
        async with client.post(f"{self.stack.url}/v1/{path}", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{path}: {response.status} {await response.text()}")

    async def cycle(self, client: aiohttp.ClientSession, number: int) -> None:
        which = str(number % len(RANKS))
        await self._post(client, "load_lora_adapter", lora_name="now", lora_path=which)
        await asyncio.gather(*(self.ask(client, "now", which, at) for at in range(2)))
        await self._post(client, "unload_lora_adapter", lora_name="now")

    async def run(self, cycles: int) -> tuple[Counts, Counts]:
        """Return the counts after WARM_CYCLES and after as many more as `cycles`."""
        ended = asyncio.Event()

        async def ask_on(client: aiohttp.ClientSession, which: str) -> None:
            at = 0
            while not ended.is_set():
                await self.ask(client, "tiny" if which == "base" else which, which, at := at + 1)

        async with aiohttp.ClientSession() as client:
            counted: list[Counts] = []
            for first, last in ((0, WARM_CYCLES), (WARM_CYCLES, WARM_CYCLES + cycles)):
                ended.clear()
                async with asyncio.TaskGroup() as group:
                    for which in CLIENTS:
                        group.create_task(ask_on(client, which))
                    for number in range(first, last):
                        await self.cycle(client, number)
                    ended.set()
                counted.append(await self.count())
        return counted[0], counted[1]

    async def count(self) -> Counts:
        """Count once the engine is idle."""
        core = self.stack.core
        await until(lambda: not core.running and not len(core.waiting))
        gc.collect()
        with redis.Redis.from_url(self._redis_url) as client:
            names = list(client.scan_iter(match=f"{{{self._namespace}}}:*", count=1000))
        # Logs and tombstones of requests stay for a while on purpose.
        lasting = [name for name in names if not name.partition(b":")[2].startswith((b"log:", b"req:"))]
        store = self.stack.engines[0].executor.adapter_store
        assert store is not None
        counts = store.counts
        return Counts(
            len(gc.get_objects()),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(lasting),
            max(0, counts.held_bytes + counts.kept_bytes - math.floor(self._max_bytes)),
        )


async def adapter_cycles(redis_url: str, checkpoint: Path, folder: Path, cycles: int) -> tuple[Counts, Counts, Cycles]:
    """Run so many cycles; return what was counted before and after them."""
    world = Cycles(redis_url, f"cycles-{uuid.uuid4().hex}", checkpoint, folder)
    try:
        before, after = await world.run(cycles)
    finally:
        await asyncio.to_thread(world.stack.stop)
    return before, after, world


def grown(before: Counts, after: Counts, cycles: int) -> list[str]:
    """Name what has grown: objects by more than one in ten cycles and a few hundred, anything else at all."""
    allowed = {"objects": 500 + cycles // 10, "descriptors": 4, "threads": 4, "keys": 4, "excess": 0}
    return [name for name, more in allowed.items() if getattr(after, name) > getattr(before, name) + more]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos adapter-cycles", add_help=False)
    parser.add_argument("--cycles", type=int, default=1000)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as root, EmbeddedRedis() as server:
        checkpoint = make_checkpoint(Path(root) / "model", "llama")
        work = adapter_cycles(server.url, checkpoint, Path(root) / "adapters", given.cycles)
        before, after, world = asyncio.run(work)
    leaks = grown(before, after, given.cycles)
    figures = {"cycles": given.cycles, "answers": world.answers, "wrong": world.wrong, "leaks": leaks}
    counted = {"before": msgspec.to_builtins(before), "after": msgspec.to_builtins(after)}
    print(json.dumps(figures | counted, indent=2))
    return 1 if world.wrong or leaks else 0
