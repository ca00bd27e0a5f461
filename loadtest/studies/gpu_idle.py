"""Measures how long the GPU is idle between decode steps, from a profile.

    python -m quire.loadtest.studies gpu-idle MODEL [--batches 1,32,256] [--trace FILE]

and any option of an engine.  Prints one line of JSON per batch size.  The profiler slows down the host but hardly the
device, so measured gaps are upper bounds.  FILE: also write the last batch's profile, for a trace viewer.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.llm import LLM, Completion
from quire.engine.wire.messages import Sampling

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
PROMPT, WARM, STEPS = 128, 40, 60  # prompt tokens, warm-up steps of the complete batch, profiled steps
JOINING = 200  # maximum output tokens of the first sequence when the last sequence joins
MAX_KERNELS = 12  # maximum kernels in the result


class Idle(msgspec.Struct):
    """Result for one batch size: medians, ms per step."""

    batch: int
    step_ms: float
    between_steps_ms: float  # idle time from a step's copy to the host until the next step's first kernel
    between_steps: float  # `between_steps_ms` as a fraction of the step
    idle: float  # fraction of the time in which the device is idle, gaps within a step included
    launches: int  # kernels and copies per step
    kernels: dict[str, float]  # kernel -> ms by which it delays the step's end (launches overlap), longest first


class Did(NamedTuple):
    """One kernel or copy on the device."""

    start: int  # ns
    end: int
    name: str


def measure(llm: LLM, batch: int, trace: str | None) -> Idle:
    """Profile decode steps of `batch` sequences: all run before the profile begins, and none ends within it."""
    joined: list[Completion] = []
    for seed in range(batch):
        ids = random.Random(seed).choices(range(llm.executor.info.vocab_size), k=PROMPT)
        joined.append(llm.submit(ids, GREEDY, max_new_tokens=JOINING + WARM + STEPS))
    while not all(each.outputs[0].token_ids for each in joined):
        llm.step()
    for _ in range(WARM):
        llm.step()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(STEPS):
            llm.step()
        torch.cuda.synchronize()
    while not llm.engine.core.idle:
        llm.step()
    if trace:
        found.export_chrome_trace(trace)
    return evaluate(batch, all_of(found))


def all_of(found: Any) -> list[Did]:
    """Return all kernels and copies of a profile, by start time."""
    events = [event for event in found.profiler.kineto_results.events() if event.device_type().name == "CUDA"]
    return sorted(
        Did(event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.duration_ns() > 0
    )


def evaluate(batch: int, did: list[Did]) -> Idle:
    """Compute the result from the first step's copy to the host until the last step's copy."""
    homes = [i for i, each in enumerate(did) if "DtoH" in each.name]
    did, steps = did[homes[0] : homes[-1] + 1], len(homes) - 1
    idle, gaps, lengths = 0, [], []
    until = last_home = did[0].end
    time_of: Counter[str] = Counter()
    for before, each in pairwise(did):
        time_of[each.name[:60]] += max(0, each.end - max(until, each.start))
        idle += max(0, each.start - until)
        if "DtoH" in before.name:
            gaps.append(max(0, each.start - until))
        if "DtoH" in each.name:
            lengths.append(each.end - last_home)
            last_home = each.end
        until = max(until, each.end)
    step, gap = statistics.median(lengths), statistics.median(gaps)
    return Idle(
        batch=batch,
        step_ms=step / 1e6,
        between_steps_ms=gap / 1e6,
        between_steps=gap / step,
        idle=idle / (until - did[0].end),
        launches=round((len(did) - 1) / steps),
        kernels={name: round(ns / steps / 1e6, 4) for name, ns in time_of.most_common(MAX_KERNELS)},
    )


def main(argv: list[str]) -> int:
    """Run the tool.  Returns 2, with one line on stderr, if the model cannot be loaded."""
    name = "python -m quire.loadtest.studies gpu-idle"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--trace", type=Path)
    own, rest = parser.parse_known_args(argv)
    config = settings.load(EngineConfig, rest, os.environ, prog=name, positional="model")
    config = msgspec.structs.replace(config, itl_stretch=0.0, step_target_s=0.0)  # let all sequences join at once
    try:
        llm = LLM.over(config, loading.load(config))
    except OperatorError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    for batch in own.batches:
        print(msgspec.json.encode(measure(llm, batch, str(own.trace) if own.trace else None)).decode(), flush=True)
    llm.close()
    return 0
