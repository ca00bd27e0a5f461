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
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import takewhile
from math import inf

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
# Maximum running sequences that the searches of one plan examine, 2 to 5 us each.  Without this limit, a search for 200
# waiting tenants among 800 running sequences of 800 tenants took 1.4 s.
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

    def for_another(self, first: int = 0) -> int:
        """Return how many blocks preemptions for fairness could free for one more tenant of the mean weight.

        `first`: blocks that waiting sequences of tenants below their share take first."""
        if not self._weights:
            return 0
        return self._startable(0, sum(self._weights.values()) / len(self._weights), first)

    def for_each(self, waiting: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
        """Return how many more blocks preemptions for fairness could free for each tenant below its share that holds
        blocks, or has sequences in `waiting`.

        `waiting`: blocks that sequences of tenants below their share wait for, by tenant; they count as held.
        `weights`: the weights of these tenants."""
        first, above = sum(waiting.values()), set(self.over_share())
        return {
            tenant: self._startable(
                self._blocks[tenant] + waiting.get(tenant, 0), self._weights.get(tenant) or weights[tenant], first
            )
            for tenant in {**self._blocks, **waiting}
            if tenant not in above
        }

    def _startable(self, held: int, weight: float, first: int) -> int:
        """Return the maximum blocks for which `yielding_to` finds enough sequences, less the `first` blocks.

        `held`, `weight`: present blocks and weight of the tenant that takes them.  Each further preemption frees
        blocks, and lowers the level up to which the tenant may hold blocks."""
        freed, levels = self._yields
        allowed = [int(level * weight) - held for level in levels]
        at = bisect_left(range(len(freed)), True, key=lambda i: freed[i] - first >= allowed[i])
        found = [freed[i] - first for i in (at - 1,) if i >= 0] + [allowed[i] for i in (at,) if i < len(freed)]
        return max([0, *found])

    @cached_property
    def _yields(self) -> tuple[list[int], list[float]]:
        """The preemptions for a tenant that holds nothing, in order: blocks freed so far, and the fewest blocks by
        weight that a preempted tenant keeps."""
        freed, levels = [0], [inf]
        for seq, left in self._in_order(set()):
            freed.append(freed[-1] + len(seq.table))
            levels.append(min(levels[-1], left))
        return freed[1:], levels[1:]

    def yielding_to(self, seq: Sequence, need: int) -> Iterator[Sequence]:
        """Iterate over the sequences to preempt so that `seq`, which takes `need` blocks, can start.

        Each is the last sequence by `order` of the tenant that then holds most by weight.  Stops when that tenant would
        keep less, by weight, than the tenant of `seq` gets."""
        taker = seq.request.tenant
        level = (self._blocks[taker] + need) / seq.request.weight
        return (newest for newest, _ in takewhile(lambda each: each[1] >= level, self._in_order({taker})))

    def _in_order(self, spared: Container[str]) -> Iterator[tuple[Sequence, float]]:
        """Iterate over (sequence, blocks by weight that its tenant keeps without it), in the order of preemption.

        `spared`: tenants that are not preempted."""
        blocks = Counter(self._blocks)
        queues = {tenant: iter(own) for tenant, own in self._newest.items() if tenant not in spared}
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
            left = blocks[giver] / self._weights[giver]
            heapreplace(most, (-left, at, giver))
            yield newest, left


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
        self._shares = Shares(())  # the tenants' holdings a few steps ago
        # Holdings, blocks that tenants below their share wait for, and what `startable` returned for them.
        self._startable: tuple[Shares, Counter[str], tuple[int, dict[str, int]]] = self._shares, Counter(), (0, {})
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
            self._shares = Shares(batch.holders())
            self.over_share = self._shares.over_share()
            self._look_step = batch.step + 1 + batch.running // LOOK_SLOTS

    def startable(self, block_size: int) -> tuple[int, dict[str, int]]:
        """Return the prompt tokens that one more tenant could start by preemption, after the waiting sequences of
        tenants below their share; and the same for each of these tenants that has sequences here."""
        waiting, weights = Counter[str](), {}
        for seq in self._waiting_below_share():
            waiting[seq.request.tenant] += seq.queued_tokens // block_size + 1 + seq.sibling_blocks
            weights[seq.request.tenant] = seq.request.weight
        if self._startable[:2] != (self._shares, waiting):
            for_another = self._shares.for_another(sum(waiting.values())) * block_size
            each = self._shares.for_each(waiting, weights) if self.contend else {}
            own = {tenant: blocks * block_size for tenant, blocks in each.items()}
            self._startable = self._shares, waiting, (for_another, own)
        return self._startable[2]

    def waiting_tokens(self) -> int:
        """Return the tokens of the waiting sequences of tenants below their share: they start before all others."""
        return sum(seq.queued_tokens for seq in self._waiting_below_share())

    def _waiting_below_share(self) -> Iterator[Sequence]:
        return (seq for seq in self._waiting if seq.request.tenant not in self.over_share)

    def favoured(self, named: Container[int]) -> tuple[Sequence, list[Sequence]] | None:
        """Return (sequence that starts before all others, sequences to preempt for it, in order); None: none does.

        Tries the first waiting sequence of each tenant below its share, in queue order.  So a tenant's swapped
        sequences resume before its new sequences start.  A search of many tenants continues in later plans, so that no
        plan takes long (MAX_VISITS).  `named`: ids of sequences that the plan names already, which it cannot
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
                    self._look_step = 0  # the next report must count the blocks of `seq` as its tenant's
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
