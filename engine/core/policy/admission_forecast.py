"""The forecast of one scheduler: blocks that the running sequences will hold, and whether one more fits.

`forecast.py` knows lengths and tokens.  Here sequences become such questions.  The answers are compared with what
happened later (`forecast_accuracy.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.engine.core.blocks import BlockPool
from quire.engine.core.policy.forecast import Demand, Held, LengthModel
from quire.engine.core.policy.forecast_accuracy import LEVELS, Cohort, ForecastAccuracy, tokens_held
from quire.engine.core.sequence import Sequence, State

# How sure the forecast is: standard deviations of a normal with the same quantile.  It chooses a point on the curve
# in docs/notes/core.md.  With lengths known there are no preemptions at any caution.
CAUTION = 2.5
ASK_SLOTS = 256  # after a refusal the next question is 1 + sequences / ASK_SLOTS steps later: 1 us per sequence
PEAK_SLOTS = 32  # the reported peak is computed again every 1 + sequences / PEAK_SLOTS steps
WATCH_SLOTS = 16  # what a cohort holds is summed up again every 1 + sequences / WATCH_SLOTS steps


class AdmissionForecast:
    """Answers for the sequences that hold blocks (`holders`) and one step.  `late`: steps until a result arrives."""

    def __init__(self, pool: BlockPool, *, worst_case: bool = False) -> None:
        """`worst_case`: count every sequence at its maximum length."""
        self.lengths = LengthModel()  # output lengths by tenant
        self.calibration = ForecastAccuracy()
        self.ask_again = 0  # the forecast refused; it is not asked again before this step
        self.step_tokens = 1 << 62  # prompt tokens that a step may have
        self._pool, self._worst_case = pool, worst_case
        self._demand: Demand | None = None  # demand of the running sequences, while a plan is made
        self._rows = 0  # how many were summed up last
        self._peak, self._peak_step = 0, -1  # peak() and the step it was computed in
        self._cohort: Cohort | None = None
        self._look_again = 0  # the step to look at it again

    def forget_demand(self) -> None:
        """A plan begins its starts: forget the demand summed up for the plan before."""
        self._demand = None

    def fits(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence], step: int, late: int) -> bool:
        """Return whether the peak predicted for all holders and `seq` stays within the pool (mode "reserve": at their
        maximum lengths).  `hits`: its cached blocks.  If so, it counts as a holder until forget_demand()."""
        if self._demand is None:
            if step < self.ask_again:
                return False
            self._demand = self._of(holders, step, late)
        bound = self._with(self._demand, seq, hits, late)
        if bound <= self._pool.total:
            self._peak, self._peak_step = bound, step - 1
            return True
        self.ask_again = step + 1 + self._rows // ASK_SLOTS
        return False

    def would_fit(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence], step: int, late: int) -> bool:
        """The same for other holders than there are; nothing is remembered."""
        return self._with(self._of(holders, step, late), seq, hits, late) <= self._pool.total

    def peak(self, holders: Iterable[Sequence], step: int, late: int) -> int:
        """Blocks that the holders stay within, except for unusual luck (mode "reserve": at worst), if none joins.
        A few steps old when many run."""
        if step - self._peak_step > self._rows // PEAK_SLOTS:
            self._peak, self._peak_step = self._of(holders, step, late).bound(), step
        return self._peak

    def predict_length(self, seq: Sequence) -> None:
        """Predict the output length of a sequence that starts; learn() judges the prediction."""
        if seq.stops:
            lengths, produced = self.lengths.lengths(seq.request.tenant), seq.known - seq.prompt_len
            most = seq.limit - seq.known
            seq.predicted = [produced + lengths.quantile(level, produced, most) for level in LEVELS]

    def learn(self, seq: Sequence, *, ended: bool) -> None:
        """Learn from a finished output; `ended`: by itself.  If only its limit could end it, nothing is learnt."""
        if seq.stops and seq.known > seq.prompt_len:
            produced, cap = seq.known - seq.prompt_len, seq.limit - seq.prompt_len
            if ended or produced >= cap:
                self.calibration.output(seq.predicted, produced, cap)
            self.lengths.record_output(seq.request.tenant, produced, ended)

    def watch(self, holders: Iterable[Sequence], step: int, late: int) -> None:
        """Judge the bounds, one cohort after the other, by what their members hold.  Call it in every step."""
        if step < self._look_again:
            return
        if self._cohort is None:
            common: set[int] = set()
            holders = list(holders)
            members = [(seq, shared) for seq, _, shared in self._parts(holders, step, common)]
            if not members:
                return
            bound = self._of(holders, step, late).bound()
            self._cohort = Cohort(members, len(common), bound, self._pool.block_size)
        if self._cohort.look(step):
            self.calibration.peak(self._cohort.bound, self._cohort.peak)
            self._cohort = None
        self._look_again = step + 1 + self._rows // WATCH_SLOTS

    def _with(self, demand: Demand, seq: Sequence, hits: list[int], late: int) -> int:
        """The bound once `seq`, whose first blocks are cached as `hits`, has joined a demand."""
        late += self._later(demand, seq.known - len(hits) * self._pool.block_size)
        self._expect(demand, seq, seq.known, len(hits) - self._pool.idle_among(hits), late)
        for sibling in seq.siblings:
            shared = -(-(seq.known + 1) // self._pool.block_size) - sibling.fork_blocks
            self._expect(demand, sibling, seq.known, shared, late)
        return demand.bound()

    def _of(self, holders: Iterable[Sequence], step: int, late: int) -> Demand:
        """The demand of the holders from the end of `step` on."""
        demand, common = Demand(self._pool.block_size, CAUTION), set[int]()
        self._rows = 0
        for seq, tokens, shared in self._parts(holders, step, common):
            self._rows += 1
            later = self._later(demand, seq.known - seq.computed) if seq.state is State.PREFILLING else 0
            self._expect(demand, seq, tokens, shared, late + later)
        demand.hold(len(common))
        return demand

    def _later(self, demand: Demand, to_compute: int) -> int:
        """Steps by which a sequence ends later than if its prompt, and those before it, were computed in one step.

        `to_compute`: its prompt tokens that are not computed yet; the demand adds them up."""
        demand.to_compute += to_compute
        return max(0, demand.to_compute - 1) // self.step_tokens

    def _parts(self, holders: Iterable[Sequence], step: int, common: set[int]) -> Iterator[tuple[Sequence, int, int]]:
        """(sequence, tokens it holds, its first blocks that are shared) of each holder, and of the siblings that
        will fork from it.

        Adds to `common` the blocks in several tables.  They count as held whichever sequence ends, since another
        one may continue."""
        size = self._pool.block_size
        # The worst case is a promise, and must not count a block too few.
        prefix = self._pool.certain_prefix if self._worst_case else self._pool.shared_prefix
        for seq in holders:
            tokens = tokens_held(seq, step)
            shared = min(prefix(seq.table), tokens // size)
            if shared and seq.table[shared - 1] not in common:
                common.update(seq.table[:shared])
            yield seq, tokens, shared
            for sibling in seq.siblings:
                yield sibling, tokens, tokens // size

    def _expect(self, demand: Demand, seq: Sequence, tokens: int, shared: int, late: int) -> None:
        """Add a sequence to a demand.  It has `tokens`, and other tables contain its first `shared` blocks."""
        size = self._pool.block_size
        if self._worst_case:
            demand.hold(seq.greatest_blocks(size) - shared)
        elif seq.stops:
            request = seq.request
            produced = max(0, tokens - len(request.token_ids))
            lengths = self.lengths.lengths(request.tenant)
            demand.add(lengths, tokens - shared * size, produced, max(1, seq.limit - tokens))
        else:  # nothing ends it before its limit; the last token is never computed, but has to be reported
            demand.add_known(Held(tokens - shared * size, max(0, seq.limit - 1 - tokens) + late))
