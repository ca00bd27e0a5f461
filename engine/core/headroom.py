"""Headroom: the engine's free KV capacity, which bounds its claims from the shared queue; gateways read it, too.

KV cache    | running: predicted peak | waiting here |  startable: prompt tokens, requests  |
                                                      `-- claimable: prompt tokens of the next steps
fairness    yielding: prompt tokens that could start if sequences of tenants at their share were preempted
"""

from __future__ import annotations

from quire.engine.core.batch import Batch
from quire.engine.core.blocks import BlockPool
from quire.engine.core.isolation import Isolation
from quire.engine.core.layer_groups import LayerGroups
from quire.engine.core.limits import Limits
from quire.engine.core.open_requests import OpenRequests
from quire.engine.core.policy.admission import AdmissionPolicy
from quire.engine.core.policy.claims import Claims
from quire.engine.core.policy.fairness import Fairness
from quire.engine.core.policy.prompt_budget import prompt_budget
from quire.engine.core.policy.step_cost import StepCostModel
from quire.engine.core.swapping import Swapping
from quire.engine.core.waiting_queue import WaitingQueue


class Headroom:
    """Computes the free capacity from the scheduler's parts; changes nothing."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        step_cost: StepCostModel,
        *,
        batch: Batch,
        waiting: WaitingQueue,
        requests: OpenRequests,
        layers: LayerGroups,
        admission: AdmissionPolicy,
        claims: Claims,
        isolation: Isolation,
        fairness: Fairness,
        swapping: Swapping,
    ) -> None:
        self._pool, self._limits, self._step_cost = pool, limits, step_cost
        self._batch, self._waiting, self._requests, self._layers = batch, waiting, requests, layers
        self._admission, self._claims, self._isolation = admission, claims, isolation
        self._fairness, self._swapping = fairness, swapping

    def startable(self) -> tuple[int, int]:
        """Return (prompt tokens, requests) that the engine could start soon: the bound for claims from the queue."""
        slots = min(self._batch.slots.free, self._layers.reservations.sequences_left()) - len(self._waiting)
        if not self._requests:
            return self._pool.total * self._pool.block_size, slots
        if self._swapping.sequences or self._isolation.active:  # swapped sequences and suspects go before new requests
            return 0, 0
        return max(0, self._admission.free_blocks(self._waiting)) * self._pool.block_size, max(0, slots)

    def claimable(self) -> int:
        """Return the prompt tokens to claim now from the shared queue: as many as the next steps compute.

        The request whose prompt exceeds this number is still claimed.  0: claim no request now."""
        return self._claims.at_once(self.prompt_budget())

    def claimable_by_preemption(self) -> int:
        """Return the prompt tokens to claim now for tenants below their share, for which other tenants are preempted.

        Only waiting sequences of such tenants reduce the number, because all other waiting sequences start later."""
        return self._claims.at_once(self.prompt_budget(), self._fairness.waiting_tokens())

    def yielding(self) -> tuple[list[str], int, dict[str, int]]:
        """Return (tenants that hold their share or more, prompt tokens that a tenant without sequences here could start
        now, the same for each other tenant that has sequences here).

        To start these prompt tokens, sequences of the listed tenants would be preempted for fairness.  The values are a
        few steps old when many sequences run."""
        if not self._requests or not self._admission.preempts or self._isolation.active:
            return [], 0, {}
        self._fairness.sum_holdings()
        tokens, own = self._fairness.startable(self._pool.block_size)  # shared blocks count once per table
        return self._fairness.over_share, min(tokens, self._pool.total * self._pool.block_size), own

    def predicted_peak(self) -> int:
        """Return the predicted peak KV usage of the running sequences if no other starts, in blocks.

        In the baseline mode "reserve", every sequence counts with its maximum length.  The value is a few steps old
        when many sequences run."""
        return self._admission.predicted_peak() if self._requests else 0

    def prompt_budget(self) -> int:
        """Return the maximum prompt tokens of the next step.

        Requests that were left in the shared queue, because earlier prompts are computed first, count as waiting."""
        waiting = len(self._waiting)
        if self._claims.queued:
            waiting += self._claims.fitting(self.startable()[0])
        return prompt_budget(self._limits, self._step_cost, self._batch, waiting, self._requests.behind)
