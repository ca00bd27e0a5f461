"""An engine that dies, as by a bug in a kernel, of any prompt that has a certain token: `python -m tests.system.deadly
TOKEN engine-options...`."""

from __future__ import annotations

import os
import signal
import sys

from engine import __main__ as program
from engine.core.plan import StepPlan
from engine.executor.base import ScriptedExecutor


class Deadly(ScriptedExecutor):
    """Says the script until it meets the token `deadly`."""

    deadly = 0

    def submit(self, plan: StepPlan) -> None:
        if any(self.deadly in piece.token_ids for piece in plan.slices):
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(plan)


if __name__ == "__main__":
    _, token, *words = sys.argv
    Deadly.deadly = int(token)
    program.ScriptedExecutor = Deadly  # type: ignore[misc]
    sys.exit(program.main(words))
