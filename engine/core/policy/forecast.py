"""Forecast: predicted output lengths, and the peak KV usage that follows from them.

`LengthModel` learns the distribution of output lengths.  `peak_curve` is exact for sequences with known lengths.
`Demand` (of KV blocks) adds the sequences of unknown length, and computes a bound that the peak rarely exceeds.
Admission compares this bound with the pool.

    blocks                     ____  bound: all sequences grow, and unusually few end
    pool |- - - - - - - - -__/- - -\\_ - - - -
         |            __--/  .  .    \\__           The bound is the maximum, over horizons, of a high quantile of the
         |  now ___--/.              .  \\_         blocks held by the sequences that have not ended by then
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

STEPS = 8  # buckets per octave (doubling) of lengths: edges 1, 2, ... 16, 18, 20, ... 32, 36, ...
OCTAVES = 17
BUCKETS = STEPS * (OCTAVES + 1)
LONGEST = STEPS << OCTAVES  # tokens; longer outputs count as this long
MEMORY = 512.0  # observations after which the weight of an old observation has decayed to 1/e
PRIOR = 1.0  # weight of the prior in each bucket, in observations
PRIOR_HAZARD = 1 - 0.5 ** (1 / STEPS)  # prior: half of the outputs end before their length doubles (a heavy tail)
PRIOR_FROM = 16  # tokens: in the prior no output ends before this length
TENANT_ENOUGH = 64.0  # weighted observations from which a tenant's own table is used
TENANTS = 1024  # maximum tenants with tables; the least recently updated table is dropped
REFRESH = 1 / 64  # a table's curve is recomputed when this fraction of its weight is new
NEGLIGIBLE = 1e-4  # survival probabilities below this count as 0
SKEWEST = 4.0  # maximum skewness for which the Wilson-Hilferty transformation is used
RESCALE = 1e9  # observation weights are divided by this when the unit weight exceeds it

# Horizons, in decode steps from now, at which the bound is evaluated.
HORIZONS = (0, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, *(1 << i for i in range(10, 21)))


def bucket_of(length: int) -> int:
    """Return the index of the bucket that contains a length of `length` tokens (>= 0)."""
    if length < STEPS:
        return length
    octave = length.bit_length() - STEPS.bit_length()
    return STEPS * octave + (length >> octave)


def edge(bucket: int) -> int:
    """Return the shortest length of a bucket, tokens."""
    octave = max(0, bucket // STEPS - 1)
    return (bucket - STEPS * octave) << octave


_EDGES = [edge(bucket) for bucket in range(BUCKETS + 1)]
_BUCKETS = [bucket_of(length) for length in range(4096)]  # lookup table of bucket_of for common lengths


class Lengths:
    """A life table of output lengths: per bucket, how many outputs ended, and how many were cut off (censored).

    add() takes O(1); the first query after many additions takes O(BUCKETS)."""

    def __init__(self, parent: Lengths | None = None) -> None:
        self._parent = parent  # model whose hazards serve as the prior
        self._ended = [0.0] * BUCKETS
        self._lost = [0.0] * BUCKETS
        self._unit = 1.0  # weight of the next observation; it grows, which ages all earlier observations at once
        self._sum = 0.0  # sum of the weights of all observations
        self._news = 0  # observations since the survival curve was computed
        self._hazards: list[float] = []  # see hazards()
        self._alive: list[float] = []  # survival curve: P(length >= edge of bucket); empty: must be computed
        self._rows: dict[int, list[tuple[float, float, float]]] = {}  # cached results by bucket

    @property
    def weight(self) -> float:
        """Weighted number of observations, at most about MEMORY; old observations count less."""
        return self._sum / self._unit

    def add(self, length: int, ended: bool) -> None:
        """Add an output of `length` tokens; `ended` False: it was cut off, so its full length is unknown."""
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
        """Return P(output has at least `length` tokens), interpolated geometrically between bucket edges."""
        if not self._alive:
            self._build()
        if length >= LONGEST - 1:
            return self._alive[-1]
        bucket = bucket_of(int(length))
        low, high = _EDGES[bucket], _EDGES[bucket + 1]
        at, past = self._alive[bucket], self._alive[bucket + 1]
        return float(at * (past / at) ** ((length - low) / (high - low)))

    def lives(self, produced: int, more: float) -> float:
        """Return P(output gets at least `more` further tokens | it has `produced` tokens and has not ended)."""
        return 1.0 if more <= 1 else self.alive(produced + more) / self.alive(produced + 1)

    def quantile(self, q: float, produced: int, cap: int) -> int:
        """Return the `q`-quantile (0..1) of the number of further tokens, at least 1 and at most `cap`."""
        low, high = 1, max(1, cap)
        while low < high:  # the smallest r with P(remaining > r) <= 1 - q
            middle = (low + high) // 2
            if self.lives(produced, middle + 1) <= 1 - q:
                high = middle
            else:
                low = middle + 1
        return low

    def row(self, bucket: int) -> list[tuple[float, float, float]]:
        """Return the moments of survival at each of HORIZONS, for a sequence whose output length is in this bucket.

        The moments are mean, variance and third central moment of a variable that is 1 if the sequence still runs at
        the horizon, else 0.  The list stops where survival is negligible."""
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
        """Return, per bucket, the probability that an output which reached the bucket ends in it."""
        if not self._alive:
            self._build()
        return self._hazards

    def _build(self) -> None:
        prior = self._parent.hazards() if self._parent is not None else None
        hazards, reached = [0.0] * BUCKETS, 0.0
        for k in range(BUCKETS - 1, -1, -1):
            ended, lost = self._ended[k] / self._unit, self._lost[k] / self._unit
            guess = prior[k] if prior is not None else PRIOR_HAZARD if _EDGES[k] >= PRIOR_FROM else 0.0
            # Actuarial convention: an output that was cut off inside a bucket was at risk for half of the bucket.
            hazards[k] = (ended + PRIOR * guess) / (reached + ended + lost / 2 + PRIOR)
            reached += ended + lost
        alive = [1.0]
        for hazard in hazards:
            alive.append(max(alive[-1] * (1 - hazard), 1e-12))
        self._hazards, self._alive, self._rows = hazards, alive, {}


class LengthModel:
    """Distributions of output lengths: one for the model, and one per tenant with enough finished requests."""

    def __init__(self) -> None:
        self._model = Lengths()
        self._tenants: OrderedDict[str, Lengths] = OrderedDict()  # least recently updated first

    def lengths(self, tenant: str) -> Lengths:
        """Return the life table to use for a tenant ("": no tenant)."""
        own = self._tenants.get(tenant)
        return own if own is not None and own.weight >= TENANT_ENOUGH else self._model

    def record_output(self, tenant: str, produced: int, ended: bool) -> None:
        """Record an output of `produced` tokens (>= 1).

        `ended`: a stop token ended it; otherwise it reached its maximum length or was cancelled."""
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
    """A sequence whose final length is known."""

    tokens: int  # tokens whose keys and values it holds now
    remaining: int  # steps that it still runs, one token each; it frees its blocks after the last step


def peak_curve(sequences: Iterable[Held], block_size: int) -> list[tuple[int, int]]:
    """Return (step, blocks held) for every step that is the last one of some sequence, latest step first.

    Between two such steps usage only grows, so these are the local maxima.  O(n log n)."""
    order = sorted(sequences, key=lambda held: -held.remaining)
    counts = [0] * block_size  # live sequences by (tokens - 1) % block_size, which decides when they take a block
    base = 0  # current blocks of the sequences that still run at the considered step
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
    """The future KV usage of a set of sequences, which are added one by one.

    Sequences of unknown length are grouped by (length table, output length so far).  Each group keeps the sums of the
    blocks held, of their squares and of their cubes.  Sequences end independently, so the first three central moments
    of the blocks held at a horizon add up.  The bound is a high quantile of a gamma distribution with these moments.
    For few sequences it is near the worst case.  An output is counted up to the first horizon past its maximum length.

    add() takes O(1).  bound() takes O(horizons) per new group, and O(n log n) in the sequences of known length."""

    def __init__(self, block_size: int, caution: float) -> None:
        """`caution`: the quantile, in standard deviations of a normal distribution."""
        self.to_compute = 0  # prompt tokens that the sequences still have to compute
        self._size = block_size
        self._grown = [horizon / block_size for horizon in HORIZONS]  # per horizon: blocks a sequence takes by then
        self._caution = caution
        self._constant = 0  # blocks that stay held at all horizons
        self._groups: dict[Lengths, dict[int, list[float]]] = {}
        self._known: list[Held] = []
        self._all = [0.0] * len(HORIZONS)  # blocks held per horizon if no sequence ends before its maximum length
        self._mean = [0.0] * len(HORIZONS)  # mean of the blocks held, per horizon
        self._variance = [0.0] * len(HORIZONS)
        self._third = [0.0] * len(HORIZONS)  # third central moment of the blocks held, per horizon

    def add(self, lengths: Lengths, tokens: int, produced: int, remaining: int) -> None:
        """Add a sequence of unknown length: `tokens` held, `produced` of them output, at most `remaining` to follow."""
        age = _BUCKETS[produced] if produced < 4096 else bucket_of(min(produced, LONGEST - 1))
        key = age * 32 + bisect_left(HORIZONS, remaining)
        groups = self._groups.get(lengths)
        if groups is None:
            groups = self._groups[lengths] = {}
        sums = groups.get(key)
        if sums is None:
            sums = groups[key] = [0.0, 0.0, 0.0, 0.0]
        held = tokens / self._size + 0.5  # blocks: on average half of the last block is not filled
        sums[0] += 1
        sums[1] += held
        sums[2] += held * held
        sums[3] += held * held * held

    def hold(self, blocks: int) -> None:
        """Add blocks that stay held even if single sequences end."""
        self._constant += blocks

    def add_known(self, held: Held) -> None:
        """Add a sequence whose final length is known."""
        self._known.append(held)

    def bound(self) -> int:
        """Predicted peak KV usage of the running sequences if no other starts, in blocks: a high quantile."""
        self._fold()
        curve = [self._constant + self._quantile(h) for h in range(len(HORIZONS))]
        if not self._known:
            return math.ceil(max(curve))
        worst, begin = 0.0, 0
        for step, blocks in reversed(peak_curve(self._known, self._size)):
            # Until `step` sequences of known length grow; add the maximum of the other sequences on the way.
            end = bisect_left(HORIZONS, step)
            worst = max(worst, blocks + max(curve[begin : end + 1]))
            begin = max(0, end - 1)
        return math.ceil(max(worst, *curve[begin:]))

    def _fold(self) -> None:
        """Add the moments of all groups to the sums per horizon."""
        everything, mean, variance, third = self._all, self._mean, self._variance, self._third
        for lengths, groups in self._groups.items():
            for key, (count, held, square, cube) in groups.items():
                row = lengths.row(key // 32)[: key % 32 + 1]  # up to the first horizon beyond the maximum length
                for h, (grown, (lives, spread, skew)) in enumerate(zip(self._grown, row, strict=False)):
                    total = held + count * grown  # sum over the group of (held + grown); squares and cubes below
                    mixed = square + grown * held
                    total2 = mixed + grown * total
                    everything[h] += total
                    mean[h] += lives * total
                    variance[h] += spread * total2
                    third[h] += skew * (cube + grown * (square + mixed + total2))
        self._groups = {}

    def _quantile(self, h: int) -> float:
        """Return the quantile of the blocks held at a horizon: Pearson type III by the Wilson-Hilferty formula."""
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
