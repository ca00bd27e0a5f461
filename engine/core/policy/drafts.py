"""Draft control: how many drafts a step computes, for the maximum tokens per second.

    D(n)          seconds of a step of n sequences without drafts (StepCostModel.exact_decode_s)
    D(n) + X(d)   with d drafts in all: X is measured for each power of two of n
    survival      probability that a draft and all before it are accepted: rate ** its place

A step without drafts gives n tokens.  Each draft adds its survival.  All drafts of a batch are ranked by survival, and
the first d are computed that maximise (n + sum of survivals) / (D(n) + X(d)).  None is where that is no better
than n / D(n) by MARGIN.

Rates are learnt per request and per tenant, source and length of match.  A request begins with its tenant's rates.
An executor that runs ahead has a step in flight when the next one is planned.  Drafts need that step's result, so the
device is idle until the next plan arrives.  The measured time of a step with drafts includes this.  `pays` also counts
the second such pause, behind the last step with drafts, and asks whether the token in flight will be the one guessed.

Predictions err, so an account bounds what drafts may lose on any text and machine.  It counts D(n):

    opens with FIRST_CREDIT, and never holds more than MOST_CREDIT
    + PROBES for each step in which drafts could have been computed and did not pay
    + time that accepted drafts have saved, - time that drafts have added, both as measured

A step computes no more drafts than the account can pay for if all are wrong.  If all drafts were refused, nothing would
be learnt any more.  So when the account holds twice the time of few drafts, these are computed (a probe).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import inf

from quire.engine.core.plan import Draft
from quire.engine.core.policy.step_cost import FRESH, OUTLIER, StepCostModel, load_class
from quire.engine.core.sequence import Sequence
from quire.engine.wire.messages import Generate

MARGIN = 1.03  # minimum gain for which drafts are computed: predictions err
PROBES = 1 / 200  # part of the time of steps without drafts that drafts may lose
FIRST_CREDIT = 1.0  # steps without drafts whose time drafts may lose at first
MOST_CREDIT = 2.0  # as many at any time, however much drafts have saved before
GROWTH = 2.0  # a step has at most this multiple of the drafts that were measured, since their time is not known
PROBE_TOKENS = 4  # drafts of a probe
FIRST_RATE, FIRST_WEIGHT = 0.7, 2.0  # assumed rate of a tenant's first drafts; it counts as this many drafts
TENANT_WEIGHT = 4.0  # drafts that the tenant's rate counts for in a request's
UNLIKELY = 0.02  # probability up to which an accepted draft is worth no search
KEPT = 0.97  # weight that earlier drafts keep when one more is judged
TENANTS = 1024  # tenants with rates: those that drafted last
MATCHES = (2, 4, 8, 16)  # minimum match of each class of drafts
# Steps with drafts after which one has none, to measure what such a step takes now: at first, and at most.
FIRST_RECHECK, RECHECK = 8, 32
KNOWN = 4  # steps without drafts that are measured first: one alone may err by half
SEARCHES = 64  # steps after which drafts of any match are looked for once, where short ones have not paid


@dataclass(slots=True)
class _Rate:
    """Share of drafts accepted, among those whose predecessors were; recent ones count more."""

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
    """What drafts add to steps of about as many sequences: seconds by bit length of their number.

    A first reading may be far too long, and little would be drafted to correct it.  So the second may replace it.
    A reading below 0 says that the clock erred.  It counts like the others, or the average would be too long."""

    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)  # moving average of the drafts of the same steps
    readings: dict[int, int] = field(default_factory=dict)

    def record(self, tokens: int, extra: float, alone: float) -> None:
        size = tokens.bit_length()
        doubtful, known = self.doubtful(tokens, OUTLIER * alone), self.seconds.get(size, extra)
        self.readings[size] = self.readings.get(size, 0) + 1
        if doubtful:
            known = min(known, extra)
        weight = max(FRESH, 1 / self.readings[size])
        self.seconds[size] = known + weight * (min(extra, OUTLIER * max(known, alone)) - known)
        count = self.tokens.setdefault(size, float(tokens))
        self.tokens[size] = count + FRESH * (tokens - count)

    def doubtful(self, tokens: int, limit_s: float) -> bool:
        """Return whether so many drafts were measured once only, at more than `limit_s`."""
        size = tokens.bit_length()
        return self.readings.get(size) == 1 and self.seconds[size] > limit_s

    def cheapest(self) -> float:
        """Minimum seconds of a draft over the measured numbers of them."""
        return max(0.0, min(seconds / self.tokens[size] for size, seconds in self.seconds.items()))

    def line(self, size: int, token_s: float) -> tuple[float, float, float]:
        """Return a line (drafts, seconds, seconds of each further draft) for numbers of drafts with a bit length.

        It begins at the nearest measured number, and rises in proportion above it."""
        if not self.seconds:
            return 0.0, 0.0, token_s
        below = max((known for known in self.seconds if known <= size), default=0)
        if not below:  # fewer than were ever measured: as long as those, at most
            return inf, max(0.0, self.seconds[min(self.seconds)]), 0.0
        above = min((known for known in self.seconds if known > below), default=0)
        extra, count = max(0.0, self.seconds[below]), self.tokens[below]
        if above and self.tokens[above] > count:
            return count, extra, max(0.0, self.seconds[above] - extra) / (self.tokens[above] - count)
        return count, extra, max(extra / count, token_s) if count else token_s


UNKNOWN = _Extra()  # nothing is measured


class DraftController:
    """Admits drafts where they pay.  O(drafts found) a step."""

    def __init__(self, step_cost: StepCostModel) -> None:
        self._step_cost = step_cost
        self._extra: dict[int, _Extra] = {}  # extra seconds of drafts, by bit length of the sequences in a step
        self._tenants: OrderedDict[str, dict[tuple[int, int], _Rate]] = OrderedDict()
        self._requests: dict[str, dict[int, _Rate]] = {}  # acceptance rates by source
        self._overall = [_Rate() for _ in MATCHES]  # rates of all tenants together, by class of match
        self._in_a_row: dict[tuple[int, int], int] = {}  # by load_class: steps with drafts since one was left without
        self._recheck: dict[
            tuple[int, int], int
        ] = {}  # the number at which one is left without, where it is not FIRST_RECHECK
        self._searches = 0
        self._credit = FIRST_CREDIT  # the account: steps without drafts whose time drafts may lose
        self._idle_s = 0.0  # moving average of the seconds that the device waits for a step with drafts

    # ------------------------------------------------------------------------------------------------------- learning

    def learn(self, seq: Sequence, draft: Draft, computed: int, accepted: int) -> None:
        """`accepted` of the first `computed` tokens of a draft were right: the next one was judged, too."""
        tried = accepted + (accepted < computed)
        self._request_rate(seq.request.id, draft).add(accepted, tried)
        self._tenant_rate(seq.request.tenant, draft).add(accepted, tried)
        self._overall[_class(draft)].add(accepted, tried)

    def record(self, seconds: float, seqs: int, tokens: int, accepted: int, idle_s: float) -> None:
        """Learn from a step of `seqs` sequences, without prompts, that computed `tokens` drafts; `accepted` were right.

        For `idle_s` of its seconds the device waited for it."""
        self._step_cost.mixed_steps += 1
        known = self._idle_s or idle_s
        self._idle_s = known + FRESH * (min(idle_s, OUTLIER * known) - known)
        if alone := self._step_cost.exact_decode_s(seqs):
            extra = self._extra.setdefault(seqs.bit_length(), _Extra())
            extra.record(tokens, seconds - alone, alone)
            # The average, not the reading: other work on the machine delays single steps.
            if not extra.doubtful(tokens, OUTLIER * alone):
                self._book(accepted / seqs - self.extra_s(seqs, tokens) / alone)

    def forget(self, request: Generate) -> None:
        """A request has ended."""
        self._requests.pop(request.id, None)

    # ------------------------------------------------------------------------------------------------------- choosing

    def least_match(self, seqs: int) -> int:
        """Return the fewest tokens of a match for which drafts may pay in a step of `seqs` sequences.

        Shorter matches are frequent in any text.  If they do not pay, their search would cost the host for nothing.
        Every SEARCHES steps all are searched, since a rate may have changed."""
        self._searches += 1
        worth = self._worth(seqs)
        if not worth or self._searches % SEARCHES == 0:
            return 2
        for least, rate in zip((2, *MATCHES[1:]), self._overall, strict=True):
            if rate.value(FIRST_RATE, FIRST_WEIGHT) >= worth:
                return least
        return MATCHES[-1]

    def choose(self, drafts: list[tuple[Sequence, Draft]], seqs: int, most: int) -> list[int]:
        """Return how many tokens of each draft to compute, in a step of `seqs` sequences and at most `most` drafts."""
        rates = [self._rate(seq, draft) for seq, draft in drafts]
        lengths = [len(draft.tokens) for _, draft in drafts]
        if self._plain_step_due(seqs):
            return [0] * len(drafts)
        counts, gain = self._best(rates, lengths, seqs, most)
        counts = counts if gain else self._probe(lengths, seqs, most)
        size = load_class(seqs)
        self._in_a_row[size] = self._in_a_row.get(size, 0) + 1 if any(counts) else 0
        if not any(counts):
            self._recheck.pop(size, None)
        return counts

    def pays(self, drafts: list[tuple[Sequence, Draft]], seqs: int, most: int) -> bool:
        """Return whether to wait for the step in flight, so that the next one may compute drafts like these."""
        rates = [self._rate(seq, draft) for seq, draft in drafts]
        lengths = [len(draft.tokens) for _, draft in drafts]
        if self._plain_step_due(seqs):
            return False
        _, gain = self._best(rates, lengths, seqs, most, waits=True)
        return gain or self._probe_size(lengths, seqs, most) > 0

    def extra_s(self, seqs: int, tokens: int) -> float:
        """Seconds that `tokens` drafts add to a step of `seqs` sequences, as far as is known."""
        count, seconds, each = self._line(seqs, tokens)
        return seconds + max(0.0, tokens - count) * each

    def _plain_step_due(self, seqs: int) -> bool:
        """Return whether the next step should have no drafts, so that the time of such a step is known and recent."""
        size = load_class(seqs)
        recheck = self._recheck.get(size, FIRST_RECHECK)
        if self._step_cost.readings(seqs) >= KNOWN and self._in_a_row.get(size, 0) < recheck:
            return False
        self._in_a_row[size], self._recheck[size] = 0, min(RECHECK, 2 * recheck)
        return True

    def _measurable(self, seqs: int) -> int:
        """Return the maximum drafts of a step: GROWTH times as many as were measured with about so many sequences.

        At first one for each sequence: fewer would take less time than the clock errs by."""
        extra = self._extra.get(seqs.bit_length())
        first = max(PROBE_TOKENS, seqs)
        return first if extra is None else max(first, int(GROWTH * max(extra.tokens.values())))

    def _worth(self, seqs: int) -> float:
        """Return the survival that pays for one more draft at its cheapest; 0: not known."""
        alone, extra = self._step_cost.exact_decode_s(seqs), self._extra.get(seqs.bit_length())
        return 0.0 if not alone or extra is None else extra.cheapest() * seqs / alone

    def _line(self, seqs: int, tokens: int) -> tuple[float, float, float]:
        """Return the line (drafts, seconds, seconds of each further draft) on which numbers of drafts like this lie."""
        extra = self._extra.get(seqs.bit_length(), UNKNOWN)
        return extra.line(tokens.bit_length(), self._step_cost.token_s)

    def _book(self, steps: float) -> None:
        """Note what drafts have saved or lost, in the time of steps without drafts."""
        self._credit = min(self._credit + steps, MOST_CREDIT)

    def _best(
        self, rates: list[float], lengths: list[int], seqs: int, most: int, *, waits: bool = False
    ) -> tuple[list[int], bool]:
        """Return the counts with the maximum tokens per second, and whether they pay.

        `waits`: the token before the drafts is in flight, a guess like them."""
        counts = [0] * len(rates)
        alone = self._step_cost.exact_decode_s(seqs)
        if not alone or most <= 0:  # nothing is measured yet: compute a few
            return counts, False
        ranked = [(-rate * rate if waits else -rate, at) for at, rate in enumerate(rates)]
        idle, credit = self._idle_s if waits else 0.0, self._credit * alone
        heapify(ranked)
        expected, tokens, best, best_tokens = float(seqs), 0, MARGIN * seqs / alone, 0
        order, least = [], max(UNLIKELY, self._worth(seqs) / 2)  # measured times err: search down to half of what pays
        while tokens < most and ranked[0][0] < -least:
            survival, at = -ranked[0][0], ranked[0][1]
            if not tokens & (tokens + 1):
                count, seconds, each = self._line(seqs, tokens + 1)
            tokens += 1
            extra = idle + (seconds + (tokens - count) * each if tokens > count else seconds)
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

    def _probe(self, lengths: list[int], seqs: int, most: int) -> list[int]:
        """Return the counts of a probe if the account pays for it, else none."""
        counts = [0] * len(lengths)
        if count := self._probe_size(lengths, seqs, most):
            counts[lengths.index(max(lengths))] = count
        return counts

    def _probe_size(self, lengths: list[int], seqs: int, most: int) -> int:
        """Credit a step without drafts.  Returns the drafts of the probe that is due; 0: none is."""
        self._book(PROBES)
        alone, count = self._step_cost.exact_decode_s(seqs), min(PROBE_TOKENS, most, max(lengths))
        if count <= 0:
            return 0
        extra = self._extra.get(seqs.bit_length())
        if extra is not None and extra.doubtful(count, OUTLIER * alone):  # a first reading that is far too long
            return count
        cost = 2 * (self.extra_s(seqs, count) + self._idle_s)
        return count if min(cost, MOST_CREDIT * alone) <= self._credit * alone else 0

    def _rate(self, seq: Sequence, draft: Draft) -> float:
        """Probability that a token of a draft is accepted if those before it are."""
        tenant = self._tenant_rate(seq.request.tenant, draft).value(FIRST_RATE, FIRST_WEIGHT)
        return min(0.99, self._request_rate(seq.request.id, draft).value(tenant, TENANT_WEIGHT))

    def _request_rate(self, request: str, draft: Draft) -> _Rate:
        return self._requests.setdefault(request, {}).setdefault(draft.source, _Rate())

    def _tenant_rate(self, tenant: str, draft: Draft) -> _Rate:
        rates = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)
        return rates.setdefault((draft.source, _class(draft)), _Rate())


def _class(draft: Draft) -> int:
    """Return the class of a draft by its match, an index into MATCHES."""
    return max(0, sum(draft.match >= least for least in MATCHES) - 1)
