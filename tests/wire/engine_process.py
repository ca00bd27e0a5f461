"""One EngineSide in a process of its own: `python -m tests.wire.engine_process URL NAMESPACE NAME`.

Each line on stdin is one sync: {"gains": prompts of which its cache now has 1,024 tokens, "token_us"}.  The answer
is a line on stdout: {"ids", "held": tokens held of each, "retry_ms", "clock_s": how far its clock is ahead}."""

from __future__ import annotations

import asyncio
import json
import sys

from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.prefixes import PrefixReport, prefix_digests, split
from tests.wire.sides import PLENTY, ids, load
from tests.wire.test_locality import prompt


async def main(url: str, namespace: str, name: str) -> None:
    engine = EngineSide(url, name, namespace=namespace)
    await engine.open()
    while line := await asyncio.to_thread(sys.stdin.readline):
        words = json.loads(line)
        digests = [digest for one in words["gains"] for digest in split(prefix_digests(prompt(one, 1024), ""))]
        report = PrefixReport(digests, [], words["token_us"], 10_000.0)
        got = await engine.sync([], [], load(name), *PLENTY, report)
        held = [got.claim(one).held_tokens for one in ids(got)]
        answer = {"ids": ids(got), "held": held, "retry_ms": got.retry_ms, "clock_s": engine.clock.skew_s}
        print(json.dumps(answer), flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
