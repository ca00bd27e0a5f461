"""The admission forecast: the predicted peak KV usage of the running sequences, and whether one more sequence fits.

This module converts sequences into lengths and tokens for `forecast.py`, which computes the bound.
`forecast_accuracy.py` compares the predictions with the actual usage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.engine.core.blocks import BlockPool
from quire.engine.core.policy.forecast import Demand, Held, LengthModel
from quire.engine.core.policy.forecast_accuracy import LEVELS, Cohort, ForecastAccuracy, tokens_held
from quire.engine.core.sequence import Sequence, State

# The quantile of the bound, as standard deviations of a normal distribution.  A higher value preempts less and admits
# fewer sequences: the curve is in docs/notes/core.md.  If all lengths are known, no value causes preemptions.
CAUTION = 2.5
ASK_SLOTS = 256  # a refusal holds for 1 + sequences / ASK_SLOTS steps, since a forecast takes 1 us per sequence
PEAK_SLOTS = 32  # the reported peak is computed again every 1 + sequences / PEAK_SLOTS steps
WATCH_SLOTS = 16  # the blocks of a cohort are summed up again every 1 + sequences / WATCH_SLOTS steps


class AdmissionForecast:
    """Predicts the peak KV usage.  `holders`: the sequences that hold blocks.  `in_flight`: steps in flight."""

    def __init__(self, pool: BlockPool, *, worst_case: bool = False) -> None:
        """`worst_case`: count every sequence at its maximum length."""
        self.lengths = LengthModel()  # output lengths by tenant
        self.calibration = ForecastAccuracy()
        self.ask_again = 0  # after a refusal: the first step in which the forecast is computed again
        self.step_tokens = 1 << 62  # maximum prompt tokens of a step
        self._pool, self._worst_case = pool, worst_case
        self._demand: Demand | None = None  # KV-block demand of the running sequences, while a plan is made
        self._rows = 0  # number of sequences in the last demand
        self._peak, self._peak_step = 0, -1  # the last peak(), and the step in which it was computed
        self._cohort: Cohort | None = None
        self._look_again = 0  # the step in which the blocks of `_cohort` are summed up next

    def forget_demand(self) -> None:
        """Forget the sum of the sequences' KV-block demand that the previous plan computed."""
        self._demand = None

    def fits(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence], step: int, in_flight: int) -> bool:
        """Return whether the predicted peak of all holders and `seq` fits the pool.  `hits`: cached blocks of `seq`.

        If it fits, `seq` counts as a holder until forget_demand()."""
        if self._demand is None:
            if step < self.ask_again:
                return False
            self._demand = self._of(holders, step, in_flight)
        bound = self._with(self._demand, seq, hits, in_flight)
        if bound <= self._pool.total:
            self._peak, self._peak_step = bound, step - 1
            return True
        self.ask_again = step + 1 + self._rows // ASK_SLOTS
        return False

    def would_fit(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence], step: int, in_flight: int) -> bool:
        """Return whether the peak of the sequences `holders` and of `seq` would fit the pool; stores nothing."""
        return self._with(self._of(holders, step, in_flight), seq, hits, in_flight) <= self._pool.total

    def peak(self, holders: Iterable[Sequence], step: int, in_flight: int) -> int:
        """Return the predicted peak KV usage of the holders if no other sequence starts, in blocks.

        The value is a few steps old when many sequences run."""
        if step - self._peak_step > self._rows // PEAK_SLOTS:
            self._peak, self._peak_step = self._of(holders, step, in_flight).bound(), step
        return self._peak

    def predict_length(self, seq: Sequence) -> None:
        """Predict the output length of a sequence that starts; learn() checks the prediction later."""
        if seq.stops:
            lengths, produced = self.lengths.lengths(seq.request.tenant), seq.known - seq.prompt_len
            most = seq.limit - seq.known
            seq.predicted = [produced + lengths.quantile(level, produced, most) for level in LEVELS]

    def learn(self, seq: Sequence, *, ended: bool) -> None:
        """Learn from a finished output.  `ended`: a stop token ended it.

        Outputs without stop tokens are skipped, because only their limit can end them."""
        if seq.stops and seq.known > seq.prompt_len:
            produced, cap = seq.known - seq.prompt_len, seq.limit - seq.prompt_len
            if ended or produced >= cap:
                self.calibration.output(seq.predicted, produced, cap)
            self.lengths.record_output(seq.request.tenant, produced, ended)

    def watch(self, holders: Iterable[Sequence], step: int, in_flight: int) -> None:
        """Compare the bound of the current cohort with the blocks that its members hold.  Call it in every step."""
        if step < self._look_again:
            return
        if self._cohort is None:
            common: set[int] = set()
            holders = list(holders)
            members = [(seq, shared) for seq, _, shared in self._parts(holders, step, common)]
            if not members:
                return
            bound = self._of(holders, step, in_flight).bound()
            self._cohort = Cohort(members, len(common), bound, self._pool.block_size)
        if self._cohort.look(step):
            self.calibration.peak(self._cohort.bound, self._cohort.peak)
            self._cohort = None
        self._look_again = step + 1 + self._rows // WATCH_SLOTS

    def _with(self, demand: Demand, seq: Sequence, hits: list[int], in_flight: int) -> int:
        """Add `seq` and its siblings to a KV-block demand, and return the new bound.  `hits`: cached blocks of
        `seq`."""
        in_flight += self._later(demand, seq.known - len(hits) * self._pool.block_size)
        self._expect(demand, seq, seq.known, len(hits) - self._pool.idle_among(hits), in_flight)
        for sibling in seq.siblings:
            shared = -(-(seq.known + 1) // self._pool.block_size) - sibling.fork_blocks
            self._expect(demand, sibling, seq.known, shared, in_flight)
        return demand.bound()

    def _of(self, holders: Iterable[Sequence], step: int, in_flight: int) -> Demand:
        """Sum up the KV-block demand of the holders from the end of `step` on."""
        demand, common = Demand(self._pool.block_size, CAUTION), set[int]()
        self._rows = 0
        for seq, tokens, shared in self._parts(holders, step, common):
            self._rows += 1
            later = self._later(demand, seq.known - seq.computed) if seq.state is State.PREFILLING else 0
            self._expect(demand, seq, tokens, shared, in_flight + later)
        demand.hold(len(common))
        return demand

    def _later(self, demand: Demand, to_compute: int) -> int:
        """Return the delay of a sequence's end, in steps, because its own and earlier prefills take several steps.

        `to_compute`: its prompt tokens that are not computed yet; the demand adds them up."""
        demand.to_compute += to_compute
        return max(0, demand.to_compute - 1) // self.step_tokens

    def _parts(self, holders: Iterable[Sequence], step: int, common: set[int]) -> Iterator[tuple[Sequence, int, int]]:
        """Iterate over (sequence, tokens it holds, number of shared blocks at its start), future siblings included.

        Adds the blocks that several tables share to `common`.  Shared blocks count as held even if one of the
        sequences ends, since another sequence may continue."""
        size = self._pool.block_size
        # The worst case must be exact: it must not miss a block.
        prefix = self._pool.certain_prefix if self._worst_case else self._pool.shared_prefix
        for seq in holders:
            tokens = tokens_held(seq, step)
            shared = min(prefix(seq.table), tokens // size)
            if shared and seq.table[shared - 1] not in common:
                common.update(seq.table[:shared])
            yield seq, tokens, shared
            for sibling in seq.siblings:
                yield sibling, tokens, tokens // size

    def _expect(self, demand: Demand, seq: Sequence, tokens: int, shared: int, in_flight: int) -> None:
        """Add a sequence with `tokens` tokens to a demand.  `shared`: number of its first blocks in other tables."""
        size = self._pool.block_size
        if self._worst_case:
            demand.hold(seq.max_blocks(size) - shared)
        elif seq.stops:
            request = seq.request
            produced = max(0, tokens - len(request.token_ids))
            lengths = self.lengths.lengths(request.tenant)
            demand.add(lengths, tokens - shared * size, produced, max(1, seq.limit - tokens))
        else:  # only its limit can end it; its last token is sampled, but its KV is never computed
            demand.add_known(Held(tokens - shared * size, max(0, seq.limit - 1 - tokens) + in_flight))
