"""Fairness: preempts sequences of tenants above their share of the KV cache, so that tenants below theirs can start.

The shared queue is fair between tenants by Virtual Token Counter (engine/wire/redis/KEYS.md): it decides whose request
is claimed next.  But if one tenant has filled the pool, a claimed request of another tenant must wait for blocks.  So
for a waiting sequence of a tenant below its share, the newest sequences of the tenant that holds most are preempted:

    blocks by weight
    |  loud                        the loud tenant still holds at least as much as the quiet one afterwards,
    |  ####  -- newest preempted   so two tenants never preempt each other in turn (max-min fairness)
    |  ####   |
    |  ####   v    ....  quiet
    |  ####        ####
    +----------------------------> tenants

No block is kept free for requests that might arrive.  A sequence is preempted for fairness at most once, so at worst
every token is computed twice.  It waits ahead of sequences that never ran, and resumes when another sequence ends.

A block in several tables counts once per table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import takewhile

from quire.engine.core.batch import Batch
from quire.engine.core.isolation import Isolation
from quire.engine.core.open_requests import OpenRequests
from quire.engine.core.policy.adapters import AdapterSlots
from quire.engine.core.policy.admission import AdmissionPolicy
from quire.engine.core.sequence import Sequence, State
from quire.engine.core.swapping import Swapping
from quire.engine.core.waiting_queue import WaitingQueue

LOOK_SLOTS = 32  # the blocks of each tenant are summed up again every 1 + running / LOOK_SLOTS steps
FAVOUR_SLOTS = 64  # after a search without result, the next search follows 1 + running / FAVOUR_SLOTS steps later
# Running sequences after which the searches of one plan try no further waiting sequence; each takes 2 to 5 us.  Without
# this limit a search for 200 waiting tenants among 800 running sequences of 800 tenants took 1.4 s.
MAX_VISITS = 2_048
ENGINE = "(engine)"  # tenant of the engine's own requests, which have no share: nothing is preempted for them
PREEMPTIBLE = (State.PREFILLING, State.DECODING, State.PAUSED)


class Shares:
    """A snapshot of the blocks that each tenant holds.  Building takes O(n log n)."""

    def __init__(self, holders: Iterable[Sequence]) -> None:
        """`holders`: every sequence that holds blocks."""
        self._blocks: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._newest: dict[str, list[Sequence]] = {}  # preemptible sequences per tenant, in preemption order
        for seq in holders:
            if (tenant := seq.request.tenant) == ENGINE:
                continue
            self._blocks[tenant] += len(seq.table)
            self._weights[tenant] = seq.request.weight
            own = self._newest.setdefault(tenant, [])
            if not seq.preempted_for_fairness and seq.state in PREEMPTIBLE:
                own.append(seq)
        for own in self._newest.values():
            own.sort(key=lambda seq: seq.order, reverse=True)

    def over_share(self) -> list[str]:
        """Return the tenants that hold their share or more.  The only tenant always does."""
        held, weights = sum(self._blocks.values()), sum(self._weights.values())
        return [t for t, blocks in self._blocks.items() if blocks * weights >= self._weights[t] * held]

    def for_another(self) -> int:
        """Return how many blocks preemptions for fairness could free for one more tenant of the mean weight."""
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

        Each is the last sequence by `order` of the tenant that then holds most by weight.  Stops when that tenant would
        keep less, by weight, than the tenant of `seq` gets."""
        taker, blocks = seq.request.tenant, Counter(self._blocks)
        level = (blocks[taker] + need) / seq.request.weight
        queues = {tenant: iter(own) for tenant, own in self._newest.items() if tenant != taker}
        # (negative blocks by weight, order of arrival, tenant) of each queue: a heap
        most = [(-blocks[tenant] / self._weights[tenant], at, tenant) for at, tenant in enumerate(queues)]
        heapify(most)
        while most:
            _, at, giver = most[0]
            newest = next(queues[giver], None)
            if newest is None:
                heappop(most)
                continue
            blocks[giver] -= len(newest.table)
            if (left := blocks[giver] / self._weights[giver]) < level:
                return
            heapreplace(most, (-left, at, giver))
            yield newest


class Fairness:
    """Finds the waiting sequence that starts before all others, and the sequences to preempt for it.

    The tenants' holdings are a few steps old when many sequences run."""

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
        self.over_share: list[str] = []  # tenants that hold their share or more
        self._requests, self._batch, self._waiting = requests, batch, waiting
        self._admission, self._isolation, self._swapping = admission, isolation, swapping
        self._adapters = adapters
        self._for_another = 0  # blocks that preemptions for fairness could free for one more tenant
        self._look_step = 0  # the first step in which holdings are summed up again
        self._retry_step = 0  # the first step that searches for a favoured sequence again
        self._visits, self._visits_step = 0, -1  # running sequences that the searches of a plan have visited; its step
        # Tenants that a search tried without success before its limit: the next search skips them.
        self._failed = set[str]()

    @property
    def contend(self) -> bool:
        """Whether more than one tenant has open requests."""
        return len(self._requests.tenants) > 1

    def sum_holdings(self) -> None:
        """Sum up the blocks of every tenant, unless the last sums are recent enough."""
        batch = self._batch
        if self._look_step <= batch.step:
            shares = Shares(batch.holders())
            self.over_share, self._for_another = shares.over_share(), shares.for_another()
            self._look_step = batch.step + 1 + batch.running // LOOK_SLOTS

    def room(self, block_size: int) -> int:
        """Return the prompt tokens that tenants below their share could start after their waiting requests."""
        theirs = self._waiting_below_share()
        return max(0, self._for_another - sum(tokens // block_size + 1 for tokens in theirs)) * block_size

    def waiting_tokens(self) -> int:
        """Return the tokens of the waiting sequences of tenants below their share: they start before all others."""
        return sum(self._waiting_below_share())

    def _waiting_below_share(self) -> Iterator[int]:
        return (seq.queued_tokens for seq in self._waiting if seq.request.tenant not in self.over_share)

    def favoured(self, named: Container[int]) -> tuple[Sequence, list[Sequence]] | None:
        """Return (sequence that starts before all others, sequences to preempt for it, in order); None: none does.

        Tries the first waiting sequence of each tenant below its share, in queue order.  So swapped sequences of these
        tenants resume before new sequences of them start.  A search of many tenants continues in later plans, so that
        no plan takes long (MAX_VISITS).  `named`: ids of sequences that the plan names already, which it cannot
        preempt."""
        if not self.contend or not self._waiting or not self._admission.preempts or self._isolation.active:
            return None
        batch = self._batch
        if batch.step < self._retry_step or next(iter(self._waiting)).request.tenant == ENGINE:
            return None
        if self._swapping.sequences:  # a new sequence overtakes swapped ones only below its share: use current sums
            self._look_step = 0
        self.sum_holdings()
        if self._visits_step != batch.step:
            self._visits, self._visits_step = 0, batch.step
        if self._visits >= MAX_VISITS:
            return None
        shares: Shares | None = None
        failed: set[str] = set()
        tried = {ENGINE, *self.over_share, *self._failed}
        for seq in self._adapters.startable(self._waiting):
            # A sequence that this plan swaps out has just freed its blocks for others: it resumes in a later plan.
            ready = seq.sampled_in <= batch.committed and not self._swapping.leaves(seq)
            tenant = seq.request.tenant
            if tenant not in tried and ready:
                if self._visits >= MAX_VISITS:
                    self._failed |= failed
                    return None
                shares = shares or Shares(batch.holders())
                if (victims := self._victims(seq, shares, named)) is not None:
                    return seq, victims
                failed.add(tenant)
                self._retry_step = batch.step + batch.running // FAVOUR_SLOTS
            tried.add(tenant)
        self._failed.clear()
        return None

    def _victims(self, seq: Sequence, shares: Shares, named: Container[int]) -> list[Sequence] | None:
        """Return the fewest sequences to preempt so that `seq` can start; None: preempting all candidates is not
        enough.

        `shares`: the blocks that each tenant holds now."""
        slots = self._batch.slots
        need = self._admission.blocks_to_start(seq) + seq.sibling_blocks
        need_slots = 1 + len(seq.siblings) - slots.free - slots.cooling
        candidates = list(takewhile(lambda s: id(s) not in named, shares.yielding_to(seq, need)))

        def enough(count: int) -> bool:
            self._visits += self._batch.running
            return count >= need_slots and self._admission.fits_without(seq, need, candidates[:count])

        if enough(0):
            return []
        if not candidates or not enough(len(candidates)):
            return None
        return candidates[: bisect_left(range(len(candidates)), True, key=enough)]
