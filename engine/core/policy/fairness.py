"""Fairness: a tenant below its share does not wait until tenants above theirs are done.

Between tenants the queue is fair by Virtual Token Counter (engine/wire/redis/KEYS.md): it decides whose turn it is.
In a pool that one tenant has filled, that is a turn to wait.  So a waiting sequence of a tenant
below its share preempts the newest sequences of the tenant that holds most, as many as it needs:

    blocks by weight
    |  loud                        the giver comes down, the taker comes up, and they never change places;
    |  ####  -- newest preempted   so no two tenants take from each other in turn (max-min fairness)
    |  ####   |
    |  ####   v    ....  taker
    |  ####        ####
    +----------------------------> tenants

No block is kept free for requests that might arrive.  A sequence is preempted for fairness at most once, so at worst
every token is computed twice.  It waits ahead of all that never ran, and resumes when another one ends.

A block in several tables counts in each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import takewhile

from quire.engine.core.batch import Batch
from quire.engine.core.isolation import Isolation
from quire.engine.core.open_requests import OpenRequests
from quire.engine.core.policy.adapters import AdapterSlots
from quire.engine.core.policy.admission import AdmissionPolicy
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.swapping import Swapping
from quire.engine.core.waiting_queue import WaitingQueue

LOOK_SLOTS = 32  # what tenants hold is summed up again every 1 + running / LOOK_SLOTS steps
FAVOUR_SLOTS = 64  # after a search without result the next one is 1 + running / FAVOUR_SLOTS steps later
PREEMPTIBLE = (State.PREFILLING, State.DECODING, State.PAUSED)


class Shares:
    """What each tenant holds at one moment.  Building takes O(n log n)."""

    def __init__(self, holders: Iterable[Sequence]) -> None:
        """`holders`: every sequence that holds blocks."""
        self._blocks: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._newest: dict[str, list[Sequence]] = {}  # preemptible sequences, in the order in which they would go
        for seq in holders:
            tenant = seq.request.tenant
            self._blocks[tenant] += len(seq.table)
            self._weights[tenant] = seq.request.weight
            own = self._newest.setdefault(tenant, [])
            if not seq.preempted_for_fairness and seq.state in PREEMPTIBLE:
                own.append(seq)
        for own in self._newest.values():
            own.sort(key=lambda seq: seq.rank, reverse=True)

    def crowd(self) -> list[str]:
        """Tenants that hold their share or more.  A tenant alone holds all of it."""
        held, weights = sum(self._blocks.values()), sum(self._weights.values())
        return [t for t, blocks in self._blocks.items() if blocks * weights >= self._weights[t] * held]

    def for_another(self) -> int:
        """Blocks that would be given up for one more tenant of the mean weight."""
        if not self._weights:
            return 0
        held, weights = sum(self._blocks.values()), sum(self._weights.values())
        weights += weights / len(self._weights)
        return sum(
            min(max(0, blocks - int(self._weights[t] * held / weights)), sum(len(s.table) for s in self._newest[t]))
            for t, blocks in self._blocks.items()
        )

    def yielding_to(self, seq: Sequence, need: int) -> Iterator[Sequence]:
        """Iterate over the sequences to preempt so that `seq`, which takes `need` blocks, can start.

        Each is the least urgent and newest of the tenant that then holds most by weight.  The end comes when that
        tenant would keep less than the tenant of `seq` would have."""
        taker, blocks = seq.request.tenant, Counter(self._blocks)
        level = (blocks[taker] + need) / seq.request.weight
        queues = {tenant: iter(own) for tenant, own in self._newest.items() if tenant != taker}
        while queues:
            giver = max(queues, key=lambda tenant: blocks[tenant] / self._weights[tenant])
            newest = next(queues[giver], None)
            if newest is None:
                del queues[giver]
                continue
            blocks[giver] -= len(newest.table)
            if blocks[giver] / self._weights[giver] < level:
                return
            yield newest


class Fairness:
    """Finds the waiting sequence that starts before all others, and the sequences preempted for it.

    What tenants hold is a few steps old when many sequences run."""

    def __init__(
        self,
        requests: OpenRequests,
        batch: Batch,
        waiting: WaitingQueue,
        admission: AdmissionPolicy,
        isolation: Isolation,
        swapping: Swapping,
        adapters: AdapterSlots,
    ) -> None:
        self.crowd: list[str] = []  # tenants that hold their share or more
        self._requests, self._batch, self._waiting = requests, batch, waiting
        self._admission, self._isolation, self._swapping = admission, isolation, swapping
        self._adapters = adapters
        self._for_another = 0  # blocks that would be given up for one more tenant
        self._look_step = 0  # the step from which holdings are summed up again
        self._retry_step = 0  # the step from which a favoured sequence is looked for again

    @property
    def contend(self) -> bool:
        """More than one tenant has open requests."""
        return len(self._requests.tenants) > 1

    def sum_holdings(self) -> None:
        """Sum up what every tenant holds, unless the last sums are recent enough."""
        batch = self._batch
        if self._look_step <= batch.step:
            shares = Shares(batch.holders())
            self.crowd, self._for_another = shares.crowd(), shares.for_another()
            self._look_step = batch.step + 1 + batch.running // LOOK_SLOTS

    def room(self, block_size: int) -> int:
        """Prompt tokens that could start of tenants under their share, behind their own requests that wait already."""
        theirs = (seq.queued_tokens for seq in self._waiting if seq.request.tenant not in self.crowd)
        return max(0, self._for_another - sum(tokens // block_size + 1 for tokens in theirs)) * block_size

    def favoured(self, named: Container[int]) -> tuple[Sequence, list[Sequence]] | None:
        """Return a sequence that starts before all others, and the sequences to preempt for it, in that order.

        The first waiting sequence of each tenant below its share is tried, in the order of the queue.  So a tenant's
        swapped sequences return before it starts a new one, and before new ones of others below their shares.  `named`:
        ids of sequences that the plan names already, so that they cannot leave in the same one.  None: no sequence is
        favoured now."""
        if not self.contend or not self._waiting or not self._admission.preempts or self._isolation.active:
            return None
        batch = self._batch
        if batch.step < self._retry_step:
            return None
        if self._swapping.sequences:  # only a tenant below its share passes them: this plan's starts count
            self._look_step = 0
        self.sum_holdings()
        tried = set(self.crowd)
        for seq in self._adapters.startable(self._waiting):
            # A sequence that this very plan swaps out freed its blocks for others: it returns in a later plan.
            ready = seq.sampled_in <= batch.committed and not self._swapping.leaves(seq)
            if seq.request.tenant not in tried and ready:
                if (victims := self._victims(seq, named)) is not None:
                    return seq, victims
                self._retry_step = batch.step + batch.running // FAVOUR_SLOTS
            tried.add(seq.request.tenant)
        return None

    def _victims(self, seq: Sequence, named: Container[int]) -> list[Sequence] | None:
        """The fewest sequences whose blocks are enough for `seq`; None: all candidates together are not enough."""
        slots = self._batch.slots
        need = self._admission.blocks_to_start(seq) + seq.sibling_blocks
        need_slots = 1 + len(seq.siblings) - slots.free - slots.cooling
        ordered = Shares(self._batch.holders()).yielding_to(seq, need)
        candidates = list(takewhile(lambda s: id(s) not in named, ordered))

        def enough(count: int) -> bool:
            return count >= need_slots and self._admission.fits_without(seq, need, candidates[:count])

        if not enough(len(candidates)):
            return None
        return candidates[: bisect_left(range(len(candidates)), True, key=enough)]
