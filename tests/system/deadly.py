"""An engine that dies of any prompt that has a certain token: `python -m tests.system.deadly TOKEN KIND options...`.

kill  SIGKILL, as a segfault in a kernel or the kernel's OOM killer would end it
lost  ExecutorLost, as after a fault on a GPU
bug   a Python exception in the step loop
bus   a Python exception in the bus thread, as soon as the prompt is claimed
hang  a step that never returns
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from quire.engine import __main__ as program
from quire.engine.core.plan import StepPlan, StepResult
from quire.engine.executor.base import ExecutorLost, ScriptedExecutor
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.records import SyncReply


class Deadly(ScriptedExecutor):
    """Says the script until it meets the token `deadly`."""

    deadly = 0
    kind = "kill"

    def submit(self, plan: StepPlan) -> None:
        if self.kind == "kill" and self._meets(plan):
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(plan)

    def collect(self) -> StepResult:
        if self._meets(self._plans[0]):
            if self.kind == "lost":
                raise ExecutorLost("the GPU is lost to this process: CUDA error: an illegal memory access")
            if self.kind == "bug":
                raise KeyError("no such row")
            if self.kind == "hang":
                time.sleep(3600)
        return super().collect()

    def _meets(self, plan: StepPlan) -> bool:
        return any(self.deadly in piece.token_ids for piece in plan.slices)


class DeadlyBus(EngineSide):
    async def sync(self, *args: Any, **more: Any) -> SyncReply:
        claimed = await super().sync(*args, **more)
        if any(Deadly.deadly in request.token_ids for request in claimed.generates):
            raise RuntimeError("the bus thread can't read this")
        return claimed


if __name__ == "__main__":
    _, token, Deadly.kind, *words = sys.argv
    Deadly.deadly = int(token)
    program.ScriptedExecutor = Deadly  # type: ignore[attr-defined]
    if Deadly.kind == "bus":
        sys.modules["quire.engine.bus_thread"].EngineSide = DeadlyBus  # type: ignore[attr-defined]
    sys.exit(program.main(words))
