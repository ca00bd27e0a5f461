"""Who makes room for whom: a tenant that holds less than its share need not wait until one that holds more is done.

Between tenants the queue is fair by Virtual Token Counter (engine/wire/keys.py): it says whose turn it is.  In a
pool that a loud tenant has filled, that is the turn to wait, for outputs end when they end.  So where a sequence of a
tenant below its share waits, the newest sequences of the tenant that holds most yield to it, as many as it needs:

    blocks by weight
    |  loud                        the giver comes down, the taker comes up, and they never change places;
    |  ####  ----- newest yields   so no two tenants take from each other in turn (max-min fairness)
    |  ####   |
    |  ####   v    ....  taker
    |  ####        ####
    +----------------------------> tenants

Nothing is kept back for who might come, so no block stays empty.  A sequence yields at most once in its life, so at
worst every token is computed twice; it stands before all that never ran, and goes on when somebody ends.

A block in several tables counts in each: who reads it has the use of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.core.sequence import Sequence, State

LOOK_ROWS = 32  # what tenants hold is summed up again each 1 + rows / LOOK_ROWS steps
YIELDING = (State.PREFILLING, State.DECODING, State.PAUSED)  # states in which a sequence may yield


class Shares:
    """What each tenant holds at one moment.  Building costs O(n log n)."""

    def __init__(self, holders: Iterable[Sequence]) -> None:
        """`holders`: every sequence that holds blocks."""
        self._blocks: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._newest: dict[str, list[Sequence]] = {}  # those that may yield, in the order in which they would
        for seq in holders:
            tenant = seq.request.tenant
            self._blocks[tenant] += len(seq.table)
            self._weights[tenant] = seq.request.weight
            own = self._newest.setdefault(tenant, [])
            if not seq.yielded and seq.state in YIELDING:
                own.append(seq)
        for own in self._newest.values():
            own.sort(key=lambda seq: seq.rank, reverse=True)

    def crowd(self) -> list[str]:
        """Tenants that hold their share or more.  Who is alone has all of it."""
        held, weights = sum(self._blocks.values()), sum(self._weights.values())
        return [t for t, blocks in self._blocks.items() if blocks * weights >= self._weights[t] * held]

    def for_another(self) -> int:
        """Blocks that would be yielded to one more tenant, of the others' mean weight."""
        if not self._weights:
            return 0
        held, weights = sum(self._blocks.values()), sum(self._weights.values())
        weights += weights / len(self._weights)
        return sum(
            min(max(0, blocks - int(self._weights[t] * held / weights)), sum(len(s.table) for s in self._newest[t]))
            for t, blocks in self._blocks.items()
        )

    def yielding_to(self, seq: Sequence, need: int) -> Iterator[Sequence]:
        """Who may have to yield so that `seq`, which takes `need` blocks, can start: of the tenant that then holds
        most by weight, the least urgent and newest, and so on, as long as that tenant keeps no less than `seq`'s would
        have."""
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


class Tenants:
    """Which tenants are here, and how they stand: a few steps old when they have many sequences."""

    def __init__(self) -> None:
        self.crowd: list[str] = []  # who holds its share or more
        self._here: Counter[str] = Counter()  # their requests
        self._for_another = 0
        self._look_again = 0

    def came(self, tenant: str) -> None:
        """With one more request."""
        self._here[tenant] += 1

    def left(self, tenant: str) -> None:
        """One of its requests is over."""
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]

    @property
    def contend(self) -> bool:
        """There is more than one."""
        return len(self._here) > 1

    def look(self, holders: Iterable[Sequence], rows: int, step: int) -> None:
        """Sum up what they hold, if it is time to; `rows`: how many sequences run."""
        if self._look_again <= step:
            shares = Shares(holders)
            self.crowd, self._for_another = shares.crowd(), shares.for_another()
            self._look_again = step + 1 + rows // LOOK_ROWS

    def room(self, waiting: Iterable[Sequence], block_size: int) -> int:
        """Prompt tokens that could start of tenants outside the crowd, beside those of `waiting` that are theirs."""
        theirs = (seq.queued_tokens for seq in waiting if seq.request.tenant not in self.crowd)
        return max(0, self._for_another - sum(tokens // block_size + 1 for tokens in theirs)) * block_size
