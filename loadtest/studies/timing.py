"""Steps of a loaded model: run until prompts are computed, timed one by one, and summed up."""

from __future__ import annotations

import time

from quire.engine.llm import LLM


def prefill(llm: LLM) -> None:
    """Run steps until all submitted prompts are computed."""
    core = llm.engine.core
    llm.step()  # accepts the requests
    while core.waiting or core.batch.prefilling:
        llm.step()


def timed(llm: LLM) -> float:
    """Run one step, and return its seconds."""
    begin = time.perf_counter()
    llm.step()
    return time.perf_counter() - begin


def percentiles(seconds: list[float], name: str) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"{name}_p{p}_ms": ordered[len(ordered) * p // 100] * 1e3 for p in (50, 99)}
