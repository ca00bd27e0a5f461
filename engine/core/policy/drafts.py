"""Draft control (speculative decoding): chooses how many draft tokens to verify, for the maximum tokens per second.

    D(n)          seconds of a step of n sequences without drafts (StepCostModel.exact_decode_s)
    D(n) + X(p)   seconds of a step of n sequences with drafts in p tokens of new tiles: measured per power of two of n
    survival      probability that a draft token and all draft tokens before it are accepted: rate ** its position

A step without drafts gives n tokens, and each draft token adds its survival.  All draft tokens of a batch are ranked by
survival; the first d are computed, with the d that maximises (n + sum of survivals) / (D(n) + X(p)).  No draft is
computed unless this exceeds n / D(n) by the factor MARGIN.

Linear layers compute tokens in tiles of T, so the cost of drafts is counted in tiles that they add to the step:

    tokens  | n sequences and drafts |  free  ||          tile            ||        tile ...
            |<------ complete tiles --------->|<-- p = T: as long for one draft as for T -->|

Drafts that fit into the last tile of a step count as p = 1.  So drafts either fill a further tile or do not begin one,
and a probe (see below) stays in the last tile if that is not full.

Acceptance rates are learnt per request and per tenant, each by source and match length.  A new request begins with the
rates of its tenant.  An executor that runs ahead has a step in flight when the next step is planned.  Drafts need the
result of the step in flight, so the device is idle until the next plan arrives.  The measured time of a step with
drafts includes this idle time.  `pays` adds the idle time after the last step with drafts, and the probability that
the token in flight equals the drafter's guess.

Predictions err, so a credit account, in seconds, bounds the time that drafts may lose on any text and machine:

    begins with FIRST_CREDIT * D(n), and never exceeds MAX_CREDIT * D(n)
    + PROBES * D(n) for each step in which drafts could have been computed and did not pay
    + time that accepted drafts have saved, - time that drafts have added, both as measured

Other work on the machine delays steps by more than drafts do, often for several steps.  So the time of a step with
drafts is divided by the slowdown (StepCostModel.pace): how many times their average the last decode-only steps took.
If the average is too old, a step without drafts measures it again first.  And X(p) is at least the time of p prompt
tokens, times the fraction of D(n) that n prompt tokens take: further tokens cost little only while a step is bound by
reading weights.

A step computes at most the drafts whose time the account covers even if all of them are refused.  Without computed
drafts no acceptance rate is learnt.  So PROBE_TOKENS drafts are computed (a probe) when the account holds twice their
time and PROBES of the time since the last probe covers their expected loss: probes do not spend what earlier drafts
have saved.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import inf

from quire.engine.core.plan import HEAD, Draft
from quire.engine.core.policy.step_cost import FRESH, OUTLIER, StepCostModel, load_class
from quire.engine.core.sequence import Sequence
from quire.engine.wire.messages import Generate

MARGIN = 1.03  # minimum predicted speedup for which drafts are computed, since predictions err
PROBES = 1 / 200  # fraction of the time of steps without drafts that drafts may lose
FIRST_CREDIT = 0.25  # initial credit, in steps without drafts
MAX_CREDIT = 2.0  # maximum credit, in decode-only steps of the batch size, however much time drafts have saved
GROWTH = 2.0  # a step has at most this multiple of the maximum drafts measured so far: the time of more is unknown
PROBE_TOKENS = 4  # draft tokens of a probe
TENANT_WEIGHT = 4.0  # weight of the tenant's rate in a request's rate, in drafts
UNLIKELY = 0.02  # draft tokens with at most this survival are not considered
KEPT = 0.97  # factor on the weight of earlier drafts for each new draft: exponential decay
TENANTS = 1024  # tenants whose rates are kept, most recent first
MATCHES = (2, 4, 8, 16)  # minimum match length of each class of drafts, in tokens
# Prior of a tenant's acceptance rate by class, and its weight in drafts.  Drafts after a match of two or three tokens
# were right with 0.32 in prose, and with 0.52 to 0.78 in other texts (loadtest/results/draft_traces.json).
FIRST_RATES, FIRST_WEIGHT = (0.45, 0.7, 0.7, 0.7), 2.0
# Steps with drafts after which one step without drafts measures the decode-only time again: first and maximum interval.
FIRST_RECHECK, RECHECK = 8, 32
KNOWN = 4  # steps without drafts that are measured before drafts begin: a single measurement may be wrong by half
SEARCHES = 64  # every SEARCHES steps matches of any length are searched, even if short matches have not saved time


@dataclass(slots=True)
class _Rate:
    """Fraction of accepted draft tokens among those whose predecessors were accepted; recent drafts count more."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int) -> None:
        keep = KEPT**tried
        self.right = self.right * keep + right
        self.tried = self.tried * keep + tried

    def value(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.tried + weight)


@dataclass(slots=True)
class _Extra:
    """Extra seconds that drafts add to steps of similar batch size, keyed by the bit length of p.

    The first measurement may be far too long, and then few drafts would be computed to correct it.  So a lower second
    measurement replaces it.  Measurements below 0 are timing noise; they are averaged in, too, to avoid a bias."""

    seconds: dict[int, float] = field(default_factory=dict)
    padded: dict[int, float] = field(default_factory=dict)  # moving average of p in these steps
    tokens: dict[int, float] = field(default_factory=dict)  # moving average of the number of drafts in these steps
    readings: dict[int, int] = field(default_factory=dict)  # number of measurements

    def record(self, padded: int, tokens: int, extra: float, alone: float) -> None:
        size = padded.bit_length()
        doubtful, known = self.doubtful(padded, OUTLIER * alone), self.seconds.get(size, extra)
        self.readings[size] = self.readings.get(size, 0) + 1
        if doubtful:
            known = min(known, extra)
        weight = max(FRESH, 1 / self.readings[size])
        self.seconds[size] = known + weight * (min(extra, OUTLIER * max(known, alone)) - known)
        for averages, value in ((self.padded, padded), (self.tokens, tokens)):
            average = averages.setdefault(size, float(value))
            averages[size] = average + FRESH * (value - average)

    def doubtful(self, padded: int, limit_s: float) -> bool:
        """Return whether there is only one measurement of about this p, and it is longer than `limit_s` seconds."""
        size = padded.bit_length()
        return self.readings.get(size) == 1 and self.seconds[size] > limit_s

    def cheapest(self) -> float:
        """Return the minimum measured seconds per draft token."""
        return max(0.0, min(seconds / self.tokens[size] for size, seconds in self.seconds.items()))

    def line(self, size: int, token_s: float) -> tuple[float, float, float]:
        """Return a linear estimate (p, seconds, seconds per further token of p) for a bit length of p.

        The estimate starts from the largest measured p of at most this bit length."""
        if not self.seconds:
            return 0.0, 0.0, token_s
        below = max((known for known in self.seconds if known <= size), default=0)
        if not below:  # smaller than every measured p: assume the time of the smallest
            return inf, max(0.0, self.seconds[min(self.seconds)]), 0.0
        above = min((known for known in self.seconds if known > below), default=0)
        extra, count = max(0.0, self.seconds[below]), self.padded[below]
        if above and self.padded[above] > count:
            return count, extra, max(0.0, self.seconds[above] - extra) / (self.padded[above] - count)
        return count, extra, max(extra / max(count, self.tokens[below]), token_s)


UNKNOWN = _Extra()  # no measurements


class DraftController:
    """Chooses the draft tokens that raise tokens per second.  O(drafts found) per step."""

    def __init__(self, step_cost: StepCostModel, tile_tokens: int = 1) -> None:
        """`tile_tokens`: T (ModelInfo.tile_tokens)."""
        self._step_cost, self._tile_tokens = step_cost, tile_tokens
        self._extra: dict[int, _Extra] = {}  # extra seconds of drafts, by bit length of the sequences in a step
        self._tenants: OrderedDict[str, dict[tuple[int, int], _Rate]] = OrderedDict()
        self._requests: dict[str, dict[tuple[int, int], _Rate]] = {}  # acceptance rates by source and class of match
        self._overall = [_Rate() for _ in MATCHES]  # rates of all tenants together, by class of match
        self._in_a_row: dict[tuple[int, int], int] = {}  # consecutive steps with drafts, by load_class
        self._recheck: dict[tuple[int, int], int] = {}  # steps between two steps without drafts, by load_class
        self._searches = 0
        self._credit_s = inf  # credit account in seconds; inf: not opened yet
        self._unprobed = FIRST_CREDIT / PROBES  # steps without drafts since the last probe
        self._idle_s = 0.0  # moving average of the seconds that the device waits for a step with drafts

    # ------------------------------------------------------------------------------------------------------- learning

    def learn(self, seq: Sequence, draft: Draft, computed: int, accepted: int) -> None:
        """Update the rates: `accepted` of the first `computed` tokens of a draft were accepted.

        The first refused token counts as tried; later tokens do not, since they follow a wrong token."""
        tried = accepted + (accepted < computed)
        self._request_rate(seq.request.id, draft).add(accepted, tried)
        self._tenant_rate(seq.request.tenant, draft).add(accepted, tried)
        if draft.source != HEAD:  # it has no match
            self._overall[_class(draft)].add(accepted, tried)

    def record(self, seconds: float, seqs: int, tokens: int, accepted: int, idle_s: float) -> None:
        """Learn from a step without prompts: `seqs` sequences, `tokens` drafts, `accepted` of them accepted.

        `idle_s`: the part of `seconds` for which the device waited for the step."""
        self._step_cost.mixed_steps += 1
        known = self._idle_s or idle_s
        self._idle_s = known + FRESH * (min(idle_s, OUTLIER * known) - known)
        self._step_cost.record_bound(seconds, seqs)
        if alone := self._step_cost.exact_decode_s(seqs):
            extra, padded = self._extra.setdefault(seqs.bit_length(), _Extra()), self._padded(seqs, tokens)
            extra.record(padded, tokens, seconds / self._step_cost.pace - alone, alone)
            # Use the average, not this measurement, because other work on the machine delays single steps.
            if not extra.doubtful(padded, OUTLIER * alone):
                self._book(accepted / seqs * alone - self.extra_s(seqs, tokens), alone)

    def forget(self, request: Generate) -> None:
        """Drop the acceptance rates of a request that has ended."""
        self._requests.pop(request.id, None)

    # ------------------------------------------------------------------------------------------------------- choosing

    def min_match(self, seqs: int) -> int:
        """Return the minimum match length, in tokens, for which drafts may save time in a step of `seqs` sequences.

        Short matches are frequent in any text, so searching them wastes host time if their drafts save none.  Every
        SEARCHES steps all lengths are searched, since rates may have changed."""
        self._searches += 1
        worth = self._worth(seqs)
        if not worth or self._searches % SEARCHES == 0:
            return 2
        for min_match, rate, first in zip(MATCHES, self._overall, FIRST_RATES, strict=True):
            if rate.value(first, FIRST_WEIGHT) >= worth:
                return min_match
        return MATCHES[-1]

    def choose(self, drafts: list[tuple[Sequence, Draft]], seqs: int, max_tokens: int) -> list[int]:
        """Return how many tokens of each draft a step of `seqs` sequences computes, at most `max_tokens` in total."""
        rates = [self._rate(seq, draft) for seq, draft in drafts]
        lengths = [len(draft.tokens) for _, draft in drafts]
        if self._plain_step_due(seqs):
            return [0] * len(drafts)
        counts, gain = self._best(rates, lengths, seqs, max_tokens)
        counts = counts if gain else self._probe(rates, lengths, seqs, max_tokens)
        size = load_class(seqs)
        self._in_a_row[size] = self._in_a_row.get(size, 0) + 1 if any(counts) else 0
        if not any(counts):
            self._recheck.pop(size, None)
        return counts

    def pays(self, drafts: list[tuple[Sequence, Draft]], seqs: int, max_tokens: int) -> bool:
        """Return whether to wait for the result of the step in flight, so that the next step can compute drafts."""
        rates = [self._rate(seq, draft) for seq, draft in drafts]
        lengths = [len(draft.tokens) for _, draft in drafts]
        if self._plain_step_due(seqs):
            return False
        _, gain = self._best(rates, lengths, seqs, max_tokens, waits=True)
        return gain or self._probe_size(rates, lengths, seqs, max_tokens) > 0

    def expected(self, seq: Sequence, draft: Draft) -> float:
        """Return the expected number of accepted tokens if a step computes the complete draft."""
        return _accepted(self._rate(seq, draft), len(draft.tokens))

    def extra_s(self, seqs: int, tokens: int) -> float:
        """Return the estimated seconds that `tokens` drafts add to a step of `seqs` sequences."""
        padded = self._padded(seqs, tokens)
        count, seconds, each = self._line(seqs, padded)
        return max(seconds + max(0.0, padded - count) * each, max(padded, tokens) * self._floor_s(seqs))

    def _padded(self, seqs: int, tokens: int) -> int:
        """Return p: the tokens of the tiles that `tokens` drafts begin; 1 if they all fit into the last tile."""
        tile = self._tile_tokens
        return max(1, (-(-(seqs + tokens) // tile) - -(-seqs // tile)) * tile)

    def _floor_s(self, seqs: int) -> float:
        """Return a lower bound of the seconds per draft token; it grows as steps become compute-bound; 0: unknown."""
        alone, each = self._step_cost.exact_decode_s(seqs), self._step_cost.token_s
        return min(1.0, seqs * each / alone) * min(each, alone / seqs) if alone else 0.0

    def _plain_step_due(self, seqs: int) -> bool:
        """Return whether the next step should have no drafts, to measure the current time of such a step."""
        size = load_class(seqs)
        recheck = self._recheck.get(size, FIRST_RECHECK)
        if self._step_cost.readings(seqs) >= KNOWN and self._in_a_row.get(size, 0) < recheck:
            return False
        self._in_a_row[size], self._recheck[size] = 0, min(RECHECK, 2 * recheck)
        return True

    def _measurable(self, seqs: int) -> int:
        """Return the maximum drafts of a step: GROWTH times the maximum measured with a similar number of sequences.

        Without measurements, one draft per sequence: the extra time of fewer would be below the clock's error."""
        extra = self._extra.get(seqs.bit_length())
        first = max(PROBE_TOKENS, seqs)
        return first if extra is None else max(first, int(GROWTH * max(extra.tokens.values())))

    def _worth(self, seqs: int) -> float:
        """Return the minimum survival of a draft token worth its time, at the lowest measured time per draft; 0:
        unknown."""
        alone, extra = self._step_cost.exact_decode_s(seqs), self._extra.get(seqs.bit_length())
        return 0.0 if not alone or extra is None else max(extra.cheapest(), self._floor_s(seqs)) * seqs / alone

    def _line(self, seqs: int, padded: int) -> tuple[float, float, float]:
        """Return the linear estimate (p, seconds, seconds per further token of p) for about `padded` tokens of p."""
        extra = self._extra.get(seqs.bit_length(), UNKNOWN)
        return extra.line(padded.bit_length(), self._step_cost.token_s)

    def _book(self, seconds: float, alone: float) -> None:
        """Add saved (+) or lost (-) seconds to the credit account.  `alone`: seconds of the step without drafts."""
        self._credit_s = min(self._credit(alone) + seconds, MAX_CREDIT * alone)

    def _credit(self, alone: float) -> float:
        """Return the seconds that drafts may lose.  `alone`: seconds of a step without drafts."""
        if self._credit_s == inf:
            self._credit_s = FIRST_CREDIT * alone
        return min(self._credit_s, MAX_CREDIT * alone)

    def _best(
        self, rates: list[float], lengths: list[int], seqs: int, max_tokens: int, *, waits: bool = False
    ) -> tuple[list[int], bool]:
        """Return the draft tokens per sequence that maximise tokens per second, and whether drafts save time at all.

        `waits`: the token before the drafts is still in flight, so it is a guess, too."""
        counts = [0] * len(rates)
        alone = self._step_cost.exact_decode_s(seqs)
        if not alone or max_tokens <= 0:  # no measurements yet
            return counts, False
        ranked = [(-rate * rate if waits else -rate, at) for at, rate in enumerate(rates)]
        idle, credit, floor = self._idle_s if waits else 0.0, self._credit(alone), self._floor_s(seqs)
        heapify(ranked)
        expected, tokens, size, best, best_tokens = float(seqs), 0, 0, MARGIN * seqs / alone, 0
        order, min_survival = [], max(UNLIKELY, self._worth(seqs) / 2)  # half of the minimum, since measured times err
        while tokens < max_tokens and ranked[0][0] < -min_survival:
            survival, at = -ranked[0][0], ranked[0][1]
            tokens += 1
            padded = self._padded(seqs, tokens)
            if padded.bit_length() != size:
                size = padded.bit_length()
                count, seconds, each = self._line(seqs, padded)
            extra = seconds + (padded - count) * each if padded > count else seconds
            extra = idle + max(extra, max(padded, tokens) * floor)
            if extra > credit:
                break
            order.append(at)
            counts[at] += 1
            expected += survival
            heapreplace(ranked, (-survival * rates[at] if counts[at] < lengths[at] else 0.0, at))
            if (speed := expected / (alone + extra)) > best:
                best, best_tokens = speed, tokens
        for at in order[min(best_tokens, self._measurable(seqs)) :]:
            counts[at] -= 1
        return counts, best_tokens > 0

    def _probe(self, rates: list[float], lengths: list[int], seqs: int, max_tokens: int) -> list[int]:
        """Return the draft tokens per sequence of a probe if the credit account covers it, else zeros."""
        counts = [0] * len(lengths)
        if count := self._probe_size(rates, lengths, seqs, max_tokens):
            counts[lengths.index(max(lengths))] = count
            self._unprobed = 0.0
        return counts

    def _probe_size(self, rates: list[float], lengths: list[int], seqs: int, max_tokens: int) -> int:
        """Add the time for a step without drafts to the credit account.  Returns the tokens of a due probe, or 0."""
        alone = self._step_cost.exact_decode_s(seqs)
        free = -seqs % self._tile_tokens  # tokens that fit into the last tile
        count = min(PROBE_TOKENS, max_tokens, max(lengths), free or PROBE_TOKENS)
        if not alone:
            return 0
        self._book(PROBES * alone, alone)
        self._unprobed += 1
        if count <= 0:
            return 0
        extra = self._extra.get(seqs.bit_length())
        # The only measurement is implausible.
        if extra is not None and extra.doubtful(self._padded(seqs, count), OUTLIER * alone):
            return count
        cost = min(self.extra_s(seqs, count) + self._idle_s, MAX_CREDIT / 2 * alone)
        loss = cost - _accepted(rates[lengths.index(max(lengths))], count) / seqs * alone
        return count if 2 * cost <= self._credit(alone) and loss <= self._unprobed * PROBES * alone else 0

    def _rate(self, seq: Sequence, draft: Draft) -> float:
        """Return the probability that a draft token is accepted if the draft tokens before it are."""
        tenant = self._tenant_rate(seq.request.tenant, draft).value(FIRST_RATES[_class(draft)], FIRST_WEIGHT)
        return min(0.99, self._request_rate(seq.request.id, draft).value(tenant, TENANT_WEIGHT))

    def _request_rate(self, request: str, draft: Draft) -> _Rate:
        return self._requests.setdefault(request, {}).setdefault((draft.source, _class(draft)), _Rate())

    def _tenant_rate(self, tenant: str, draft: Draft) -> _Rate:
        rates = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)
        return rates.setdefault((draft.source, _class(draft)), _Rate())


def _accepted(rate: float, tokens: int) -> float:
    """Return the expected number of accepted tokens of a draft, each accepted with probability `rate` if those before
    it are.  rate < 1."""
    return rate * (1 - rate**tokens) / (1 - rate)


def _class(draft: Draft) -> int:
    """Return the class of a draft by its match length, an index into MATCHES."""
    return max(0, sum(draft.match >= min_match for min_match in MATCHES) - 1)
