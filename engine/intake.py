"""Bounded intake: applies commands to the scheduler in parts, so that no turn of the step loop takes long.

    Inbox.drain() ==commands==> Intake ==one part per turn==> Scheduler
                                '-- the rest waits here, in the order of arrival

A burst of long prompts or a reset of a large prefix cache would otherwise pause every stream of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quire.engine.commands import Command, Refused, ResetPrefixCache, Resume, Returned, request_of
from quire.engine.core.scheduler import Scheduler
from quire.engine.wire.messages import Generate

TURN_TOKENS = 2**18  # maximum work of one turn, in tokens of prompts and earlier outputs: about 8 ms
COMMAND_TOKENS = 512  # work of a command besides its tokens, in the same unit: about 16 us
RESET_BLOCKS = 8_192  # maximum blocks that one turn of the loop evicts from the prefix cache: about 7 ms


class Intake:
    """The commands that the step loop has taken from its inbox and not applied yet.  Only the loop's thread uses it."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._waiting: deque[Command] = deque()

    def __len__(self) -> int:
        """Return the number of commands that wait for a later turn."""
        return len(self._waiting)

    def apply(self, commands: Iterable[Command]) -> list[Command]:
        """Apply waiting and new commands until the work of one turn is done.  Returns those applied.

        At least one is applied, however large, except during a reset: commands behind a reset wait until the prefix
        cache is empty, so no request behind it finds a block that was cached before it."""
        self._waiting.extend(commands)
        applied: list[Command] = []
        work = 0
        while self._waiting and work < TURN_TOKENS:
            command = self._waiting[0]
            if not self._apply(command):
                break
            applied.append(self._waiting.popleft())
            work += COMMAND_TOKENS + _tokens(command)
        return applied

    def _apply(self, command: Command) -> bool:
        """Pass one command to the scheduler.  Returns whether it is done; a reset may take further turns."""
        core = self._core
        if isinstance(command, Generate):
            core.accept(command)
        elif isinstance(command, Resume):
            core.accept(command.request, command.outputs)
        elif isinstance(command, Refused):
            core.accept(command.request, command.outputs, fault=command.why)
        elif isinstance(command, ResetPrefixCache):
            return core.reset_prefix_cache(RESET_BLOCKS)
        elif isinstance(command, Returned):
            pass  # the request has not reached the scheduler
        elif command.reassigned:
            core.drop(command.id)
        else:
            core.abort(command.id, command.index)
        return True


def _tokens(command: Command) -> int:
    """Return the number of tokens that the scheduler reads to accept a request; 0 for a command without a request."""
    if (request := request_of(command)) is None:
        return 0
    outputs = command.outputs or () if isinstance(command, Resume | Refused) else ()
    unfinished = [output for output in outputs if output is not None]
    # Each unfinished choice of a resumed request has its own copy of the prompt.
    return len(request.token_ids) * max(1, len(unfinished)) + sum(map(len, unfinished))
