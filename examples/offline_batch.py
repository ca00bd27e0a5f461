"""Complete many prompts without a server.

python examples/offline_batch.py [PROMPT ...]      QUIRE_MODEL=./dir or org/name; without it the demo model

Prints one JSON line per prompt, in the order of the prompts. All prompts are submitted at once: the scheduler batches
them and shares the KV blocks of common prefixes.
"""

from __future__ import annotations

import json
import os
import sys

from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling


def main(prompts: list[str]) -> None:
    llm = LLM(os.environ.get("QUIRE_MODEL", "demo"))
    try:
        completions = llm.generate(prompts, Sampling(temperature=0.8, top_p=0.95, seed=1), max_new_tokens=32, n=2)
    finally:
        llm.close()
    for prompt, completion in zip(prompts, completions, strict=True):
        texts = [output.text for output in completion.outputs]
        print(json.dumps({"prompt": prompt, "texts": texts, "cached_tokens": completion.cached_tokens}))


if __name__ == "__main__":
    main(sys.argv[1:] or ["To be", "To be or not"])
