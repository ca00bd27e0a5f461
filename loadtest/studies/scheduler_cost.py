"""CPU time of the scheduler for a steady decode step, by the number of decoding sequences.

    python -m quire.loadtest.studies scheduler-cost [--sizes 64,256,1024,4096]

Plan, commit and reading the outputs are measured in CPU time; the scripted executor between them is not.  In real loads
sequences also start and end; their cost does not depend on the others.
"""

from __future__ import annotations

import argparse
import time

from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.scheduler import Scheduler
from quire.engine.executor.base import ModelInfo, ScriptedExecutor
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling
from quire.loadtest import machine

WARM_STEPS, RUNS, STEPS = 20, 10, 16  # the minimum of RUNS means over STEPS steps each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="64,256,1024,4096", help="sequences; default 64,256,1024,4096")


def steady_step_seconds(seqs: int) -> float:
    """Return the CPU seconds of plan, commit and outputs in a steady decode step of so many sequences."""
    pool = BlockPool(seqs * 40, 16)
    info = ModelInfo("scripted", "scripted", 1000, 4096, [0], 0)
    limits = Limits(seqs, max(4096, 2 * seqs), 4096, 4096, 1000, 1.0, frozenset([0]), "scripted")
    core, executor = Scheduler(pool, limits), ScriptedExecutor(info, pool.total)
    for i in range(seqs):
        core.accept(Generate(f"r{i}", "gw", [2] * (5 + i % 16), 600, Sampling(seed=i), FOREVER_MS))
    while core.running < seqs or core.batch.prefilling:
        _step(core, executor)
    for _ in range(WARM_STEPS):
        _step(core, executor)
    return min(sum(_step(core, executor) for _ in range(STEPS)) / STEPS for _ in range(RUNS))


def _step(core: Scheduler, executor: ScriptedExecutor) -> float:
    """Run one step and return the scheduler's CPU seconds."""
    begin = time.process_time()
    plan = core.plan(0)
    spent = time.process_time() - begin
    assert plan is not None
    executor.submit(plan)
    result = executor.collect()
    begin = time.process_time()
    core.commit(result)
    core.outputs()
    return spent + time.process_time() - begin


def main(args: argparse.Namespace, command: str) -> int:
    figures = {}
    for size in map(int, args.sizes.split(",")):
        seconds = steady_step_seconds(size)
        figures[str(size)] = {"step_ms": round(1000 * seconds, 3), "us_per_sequence": round(1e6 * seconds / size, 3)}
        print(f"{size} sequences: {figures[str(size)]}", flush=True)
    path = machine.write("scheduler_cost", command, figures)
    print(f"written to {path.relative_to(machine.ROOT)}")
    return 0
