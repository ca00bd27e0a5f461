"""Bounded intake: applies orders to the scheduler in parts, so that no turn of the step loop takes long.

    Inbox.drain() ==orders==> Intake ==one part per turn==> Scheduler
                                '-- the rest waits here, in the order of arrival

A burst of long prompts or a reset of a large prefix cache would otherwise pause every stream of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quire.engine.core.scheduler import Scheduler
from quire.engine.orders import Order, Refused, ResetPrefixCache, Resume, Returned, request_of
from quire.engine.wire.messages import Generate

TURN_TOKENS = 2**18  # work of one turn, in tokens of prompts and earlier outputs: about 8 ms
ORDER_TOKENS = 512  # work of an order besides its tokens, in the same unit: about 16 us
RESET_BLOCKS = 8_192  # maximum blocks that one turn of the loop evicts from the prefix cache: about 7 ms


class Intake:
    """The orders that the step loop has taken from its inbox and not applied yet.  Only the loop's thread uses it."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._waiting: deque[Order] = deque()

    def __len__(self) -> int:
        """Return the number of orders that wait for a later turn."""
        return len(self._waiting)

    def apply(self, orders: Iterable[Order]) -> list[Order]:
        """Apply waiting and new orders until the work of one turn is done.  Returns those applied.

        At least one is applied, however large, except during a reset: orders behind a reset wait until the prefix
        cache is empty, so no request behind it finds a block that was cached before it."""
        self._waiting.extend(orders)
        applied: list[Order] = []
        work = 0
        while self._waiting and work < TURN_TOKENS:
            order = self._waiting[0]
            if not self._apply(order):
                break
            applied.append(self._waiting.popleft())
            work += ORDER_TOKENS + _tokens(order)
        return applied

    def _apply(self, order: Order) -> bool:
        """Pass one order to the scheduler.  Returns whether it is done; a reset may take further turns."""
        core = self._core
        if isinstance(order, Generate):
            core.accept(order)
        elif isinstance(order, Resume):
            core.accept(order.request, order.outputs)
        elif isinstance(order, Refused):
            core.accept(order.request, order.outputs, fault=order.why)
        elif isinstance(order, ResetPrefixCache):
            return core.reset_prefix_cache(RESET_BLOCKS)
        elif isinstance(order, Returned):
            pass  # the request has not reached the scheduler
        elif order.reassigned:
            core.drop(order.id)
        else:
            core.abort(order.id, order.index)
        return True


def _tokens(order: Order) -> int:
    """Return the number of tokens that the scheduler reads to accept a request; 0 for an order without a request."""
    if (request := request_of(order)) is None:
        return 0
    outputs = order.outputs or () if isinstance(order, Resume | Refused) else ()
    unfinished = [output for output in outputs if output is not None]
    # Each unfinished choice of a resumed request has its own copy of the prompt.
    return len(request.token_ids) * max(1, len(unfinished)) + sum(map(len, unfinished))
