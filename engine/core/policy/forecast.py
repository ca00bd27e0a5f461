"""Forecast: how long outputs get, and the peak of the KV cache that follows from it.

`LengthModel` learns how long outputs are.  `peak_curve` is exact where the ends are known.  `Demand` adds the rest: it
puts a bound on the peak that a given set of sequences passes only rarely.  Admission compares it with the pool.

    blocks                     ____  bound: all sequences grow, and unusually few end
    pool |- - - - - - - - -__/- - -\\_ - - - -
         |            __--/  .  .    \\__           The bound is the largest, over horizons, of a high quantile of
         |  now ___--/.              .  \\_         what those that still live then hold
         +----------------------------------> steps

Sources: sorting by remaining length, the peak lies at a completion: Gong et al., "Past-Future Scheduler for LLM Serving
under SLA Guarantees", ASPLOS 2025.  Life table: Kaplan and Meier 1958, in its actuarial form.  Quantile of a skewed
sum: Pearson type III, transformed as in Wilson and Hilferty 1931.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

STEPS = 8  # buckets an octave of lengths has: edges 1, 2, ... 16, 18, 20, ... 32, 36, ...
OCTAVES = 17
BUCKETS = STEPS * (OCTAVES + 1)
LONGEST = STEPS << OCTAVES  # tokens; longer outputs count as this long
MEMORY = 512.0  # observations after which an old one weighs 1/e
PRIOR = 1.0  # sequences that every bucket has seen before any history
PRIOR_HAZARD = 1 - 0.5 ** (1 / STEPS)  # half of the outputs end before their length doubles: a heavy tail, to be safe
PRIOR_FROM = 16  # tokens: shorter outputs count as rare until some were seen
TENANT_ENOUGH = 64.0  # observations (weighted) from which a tenant's own table is used
TENANTS = 1024  # tables kept; beyond it the one not updated for longest is forgotten
REFRESH = 1 / 64  # fraction of a table's weight that must be new before its curve is computed again
NEGLIGIBLE = 1e-4  # probability to live on that counts as none
SKEWEST = 4.0  # beyond it the transformation fails
RESCALE = 1e9  # weights are divided by it when they pass it

# Horizons, in decode steps from now, at which the bound is evaluated.
HORIZONS = (0, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, *(1 << i for i in range(10, 21)))


def bucket_of(length: int) -> int:
    """Index of the bucket that holds `length` tokens (>= 0)."""
    if length < STEPS:
        return length
    octave = length.bit_length() - STEPS.bit_length()
    return STEPS * octave + (length >> octave)


def edge(bucket: int) -> int:
    """Its shortest length, tokens."""
    octave = max(0, bucket // STEPS - 1)
    return (bucket - STEPS * octave) << octave


_EDGES = [edge(bucket) for bucket in range(BUCKETS + 1)]
_BUCKETS = [bucket_of(length) for length in range(4096)]  # the common ones, looked up


class Lengths:
    """A life table of output lengths: how many ended, and how many were last seen alive, in each bucket.

    add() takes O(1); the first question after enough of them takes O(BUCKETS)."""

    def __init__(self, parent: Lengths | None = None) -> None:
        self._parent = parent  # model whose hazards serve as the prior
        self._ended = [0.0] * BUCKETS
        self._lost = [0.0] * BUCKETS
        self._unit = 1.0  # weight of the next observation; growing it ages all others at once
        self._sum = 0.0
        self._news = 0  # observations since the curve was computed
        self._hazards: list[float] = []
        self._alive: list[float] = []  # the curve: P(length >= edge of bucket); empty: to be computed
        self._rows: dict[int, list[tuple[float, float, float]]] = {}

    @property
    def weight(self) -> float:
        """Observations it rests on, old ones counting less; at most MEMORY."""
        return self._sum / self._unit

    def add(self, length: int, ended: bool) -> None:
        """One output of `length` tokens; `ended` False: it would have gone on."""
        self._unit *= 1 + 1 / MEMORY
        if self._unit > RESCALE:
            self._ended = [value / RESCALE for value in self._ended]
            self._lost = [value / RESCALE for value in self._lost]
            self._sum /= RESCALE
            self._unit /= RESCALE
        (self._ended if ended else self._lost)[bucket_of(min(length, LONGEST - 1))] += self._unit
        self._sum += self._unit
        self._news += 1
        if self._news >= self.weight * REFRESH:
            self._news, self._alive = 0, []

    def alive(self, length: float) -> float:
        """P(output has at least `length` tokens); between edges it falls geometrically."""
        if not self._alive:
            self._build()
        if length >= LONGEST - 1:
            return self._alive[-1]
        bucket = bucket_of(int(length))
        low, high = _EDGES[bucket], _EDGES[bucket + 1]
        at, past = self._alive[bucket], self._alive[bucket + 1]
        return float(at * (past / at) ** ((length - low) / (high - low)))

    def lives(self, produced: int, more: float) -> float:
        """P(it produces at least `more` tokens more | it has produced `produced` and did not end with them)."""
        return 1.0 if more <= 1 else self.alive(produced + more) / self.alive(produced + 1)

    def quantile(self, q: float, produced: int, cap: int) -> int:
        """Most tokens still to come with probability `q` (0..1), at least 1, at most `cap`."""
        low, high = 1, max(1, cap)
        while low < high:  # the smallest r with P(remaining > r) <= 1 - q
            middle = (low + high) // 2
            if self.lives(produced, middle + 1) <= 1 - q:
                high = middle
            else:
                low = middle + 1
        return low

    def row(self, bucket: int) -> list[tuple[float, float, float]]:
        """Return moments of survival at each of HORIZONS, as far as any sequence lives.

        They are the mean, the variance and the third central moment of 1 if a sequence lives and 0 if not.  The
        sequences are those whose output so far ends in this bucket."""
        if not self._alive:
            self._build()
        row = self._rows.get(bucket)
        if row is None:
            row = self._rows[bucket] = []
            middle = (_EDGES[bucket] + _EDGES[bucket + 1] - 1) // 2
            for horizon in HORIZONS:
                lives = self.lives(middle, horizon + 1)
                if lives < NEGLIGIBLE:
                    break
                row.append((lives, lives * (1 - lives), lives * (1 - lives) * (1 - 2 * lives)))
        return row

    def hazards(self) -> list[float]:
        """By bucket: the probability that an output which reached the bucket ends in it."""
        if not self._alive:
            self._build()
        return self._hazards

    def _build(self) -> None:
        prior = self._parent.hazards() if self._parent is not None else None
        hazards, reached = [0.0] * BUCKETS, 0.0
        for k in range(BUCKETS - 1, -1, -1):
            ended, lost = self._ended[k] / self._unit, self._lost[k] / self._unit
            guess = prior[k] if prior is not None else PRIOR_HAZARD if _EDGES[k] >= PRIOR_FROM else 0.0
            # A sequence that left inside a bucket without an end was at risk for half of it.
            hazards[k] = (ended + PRIOR * guess) / (reached + ended + lost / 2 + PRIOR)
            reached += ended + lost
        alive = [1.0]
        for hazard in hazards:
            alive.append(max(alive[-1] * (1 - hazard), 1e-12))
        self._hazards, self._alive, self._rows = hazards, alive, {}


class LengthModel:
    """Distribution of output lengths: one for the model, and one per tenant with enough finished requests."""

    def __init__(self) -> None:
        self._model = Lengths()
        self._tenants: OrderedDict[str, Lengths] = OrderedDict()  # least recently updated first

    def lengths(self, tenant: str) -> Lengths:
        """The table to use for a tenant ("": none in particular)."""
        own = self._tenants.get(tenant)
        return own if own is not None and own.weight >= TENANT_ENOUGH else self._model

    def record_output(self, tenant: str, produced: int, ended: bool) -> None:
        """An output is over after `produced` tokens (>= 1).

        `ended`: by itself.  Otherwise it ran into its cap, or was cancelled, and would have gone on."""
        self._model.add(produced, ended)
        if tenant:
            own = self._tenants.get(tenant)
            if own is None:
                own = self._tenants[tenant] = Lengths(self._model)
                if len(self._tenants) > TENANTS:
                    self._tenants.popitem(last=False)
            own.add(produced, ended)
            self._tenants.move_to_end(tenant)


class Held(NamedTuple):
    """One sequence whose end is known."""

    tokens: int  # tokens whose keys and values it holds now
    remaining: int  # steps it still runs, a token each; with the last one it gives everything back


def peak_curve(sequences: Iterable[Held], block_size: int) -> list[tuple[int, int]]:
    """(step, blocks held in it) for every step in which a sequence runs for the last time, latest first.

    Between two of them the sum only grows, so these are the local maxima.  O(n log n)."""
    order = sorted(sequences, key=lambda held: -held.remaining)
    counts = [0] * block_size  # living sequences by (tokens - 1) % block_size: when they take their next block
    base = 0  # blocks now of those that live at the step under consideration
    curve: list[tuple[int, int]] = []
    for living, held in enumerate(order, 1):
        blocks, place = divmod(held.tokens - 1, block_size)
        counts[place] += 1
        base += blocks + 1
        step = held.remaining
        if living == len(order) or order[living].remaining != step:
            whole, part = divmod(step, block_size)
            crossed = sum(counts[block_size - part :]) if part else 0
            curve.append((step, base + whole * living + crossed))
    return curve


class Demand:
    """What a set of sequences will hold, built up one by one.

    Those of unknown length are gathered by (length table, age) into sums: of what they hold, its square and its cube.
    Ends are independent, so the first three moments of the blocks held at a horizon add up.  A high quantile of a gamma
    distribution with these moments gives the bound.  With few sequences that is near the worst case.  A cap on the
    output counts from the next horizon on.

    add() takes O(1).  bound() takes O(horizons) for each new age, and O(n log n) in sequences of known length."""

    def __init__(self, block_size: int, caution: float) -> None:
        """`caution`: the quantile, in standard deviations of a normal."""
        self.to_compute = 0  # prompt tokens that its sequences have still to compute
        self._size = block_size
        self._grown = [horizon / block_size for horizon in HORIZONS]  # blocks by which each sequence has grown
        self._caution = caution
        self._constant = 0
        self._groups: dict[Lengths, dict[int, list[float]]] = {}
        self._known: list[Held] = []
        self._all = [0.0] * len(HORIZONS)  # blocks held if no sequence ends before its cap
        self._mean = [0.0] * len(HORIZONS)  # mean of the blocks held, per horizon
        self._variance = [0.0] * len(HORIZONS)
        self._third = [0.0] * len(HORIZONS)  # central moment

    def add(self, lengths: Lengths, tokens: int, produced: int, remaining: int) -> None:
        """A sequence of unknown length: of its `tokens`, `produced` are output; at most `remaining` will follow."""
        age = _BUCKETS[produced] if produced < 4096 else bucket_of(min(produced, LONGEST - 1))
        key = age * 32 + bisect_left(HORIZONS, remaining)
        groups = self._groups.get(lengths)
        if groups is None:
            groups = self._groups[lengths] = {}
        sums = groups.get(key)
        if sums is None:
            sums = groups[key] = [0.0, 0.0, 0.0, 0.0]
        held = tokens / self._size + 0.5  # on average half a block is not yet filled
        sums[0] += 1
        sums[1] += held
        sums[2] += held * held
        sums[3] += held * held * held

    def hold(self, blocks: int) -> None:
        """Add blocks that stay held whichever sequence ends."""
        self._constant += blocks

    def add_known(self, held: Held) -> None:
        """Add a sequence whose end is known."""
        self._known.append(held)

    def bound(self) -> int:
        """Predicted peak KV usage of the running sequences if no other starts, in blocks: a high quantile."""
        self._fold()
        curve = [self._constant + self._quantile(h) for h in range(len(HORIZONS))]
        if not self._known:
            return math.ceil(max(curve))
        worst, begin = 0.0, 0
        for step, blocks in reversed(peak_curve(self._known, self._size)):
            # Until `step` the known ones grow; the others are at their worst somewhere on the way.
            end = bisect_left(HORIZONS, step)
            worst = max(worst, blocks + max(curve[begin : end + 1]))
            begin = max(0, end - 1)
        return math.ceil(max(worst, *curve[begin:]))

    def _fold(self) -> None:
        """Move the groups into the sums by horizon."""
        everything, mean, variance, third = self._all, self._mean, self._variance, self._third
        for lengths, groups in self._groups.items():
            for key, (count, held, square, cube) in groups.items():
                row = lengths.row(key // 32)[: key % 32 + 1]  # up to the first horizon past the cap
                for h, (grown, (lives, spread, skew)) in enumerate(zip(self._grown, row, strict=False)):
                    total = held + count * grown  # and its square and cube, for each (held + grown) of the group
                    mixed = square + grown * held
                    total2 = mixed + grown * total
                    everything[h] += total
                    mean[h] += lives * total
                    variance[h] += spread * total2
                    third[h] += skew * (cube + grown * (square + mixed + total2))
        self._groups = {}

    def _quantile(self, h: int) -> float:
        """Blocks held at a horizon, except for unusual luck: Pearson type III by the formula of Wilson and Hilferty."""
        mean, variance = self._mean[h], self._variance[h]
        if variance <= 0:
            return mean
        deviation = math.sqrt(variance)
        skew = min(SKEWEST, self._third[h] / (variance * deviation))
        if abs(skew) < 1e-3:
            factor = self._caution
        else:
            factor = 2 / skew * (max(0.0, 1 + skew * self._caution / 6 - skew * skew / 36) ** 3 - 1)
        return min(self._all[h], mean + deviation * factor)
