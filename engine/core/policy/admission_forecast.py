"""What those who hold blocks will come to hold: may one more start, and what the world outside is told to expect.

`forecast.py` knows lengths and tokens; here sequences become such questions, and what came of them is counted, so that
anybody can see whether the answers are to be believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.core.blocks import BlockPool
from engine.core.policy.forecast import Demand, Held, LengthModel
from engine.core.policy.forecast_accuracy import LEVELS, Cohort, ForecastAccuracy, tokens_held
from engine.core.sequence import Sequence

# How sure the forecast is: standard deviations of a normal with the same quantile.  It chooses a point on the curve
# that engine/core/README.md shows; with lengths known there are no preemptions at any caution.
CAUTION = 2.5
ASK_ROWS = 256  # a forecast that refused is asked again after 1 + rows / ASK_ROWS steps: looking at a row takes 1 us
PEAK_ROWS = 32  # the peak for the world outside is computed again each 1 + rows / PEAK_ROWS steps
WATCH_ROWS = 16  # what a cohort holds is summed up again each 1 + rows / WATCH_ROWS steps


class AdmissionForecast:
    """The forecast of one scheduler, which passes the sequences that hold blocks (`holders`), the step the question is
    about and how many steps late results come in (`late`)."""

    def __init__(self, pool: BlockPool, *, worst_case: bool = False) -> None:
        """`worst_case`: count every sequence at its greatest length."""
        self.lengths = LengthModel()  # of outputs, by tenant
        self.calibration = ForecastAccuracy()
        self.ask_again = 0  # before this step the forecast, having said no, is not asked again
        self._pool, self._worst_case = pool, worst_case
        self._demand: Demand | None = None  # of the holders, while a plan is made
        self._rows = 0  # how many were summed up last
        self._peak, self._peak_step = 0, -1  # peak() and the step it was computed in
        self._cohort: Cohort | None = None
        self._look_again = 0  # the step to look at it again

    def begin(self) -> None:
        """A plan comes to its starts: who holds what has changed."""
        self._demand = None

    def fits(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence], step: int, late: int) -> bool:
        """Whether the peak predicted for all holders and `seq`, whose first blocks are cached as `hits`, stays within
        the pool (mode "reserve": at their greatest lengths).  After a yes it counts as a holder until begin()."""
        if self._demand is None:
            if step < self.ask_again:
                return False
            self._demand = self._of(holders, step, late)
        bound = self._with(self._demand, seq, hits, late)
        if bound <= self._pool.total:
            self._peak, self._peak_step = bound, step - 1
            return True
        self.ask_again = step + 1 + self._rows // ASK_ROWS
        return False

    def would_fit(self, seq: Sequence, hits: list[int], holders: Iterable[Sequence], step: int, late: int) -> bool:
        """The same, asked of other holders than there are: nothing is remembered."""
        return self._with(self._of(holders, step, late), seq, hits, late) <= self._pool.total

    def peak(self, holders: Iterable[Sequence], step: int, late: int) -> int:
        """Blocks that the holders will stay within, but for unusual luck (mode "reserve": at worst), if nothing joins.
        A few steps old when they are many."""
        if step - self._peak_step > self._rows // PEAK_ROWS:
            self._peak, self._peak_step = self._of(holders, step, late).bound(), step
        return self._peak

    def predict_length(self, seq: Sequence) -> None:
        """It starts: note how long its output will be, to be judged by learn()."""
        if seq.stops:
            lengths, produced = self.lengths.lengths(seq.request.tenant), seq.known - seq.prompt_len
            most = seq.limit - seq.known
            seq.predicted = [produced + lengths.quantile(level, produced, most) for level in LEVELS]

    def learn(self, seq: Sequence, *, ended: bool) -> None:
        """An output is over; `ended`: by itself.  One that nothing could end but its limit tells nothing."""
        if seq.stops and seq.known > seq.prompt_len:
            produced, cap = seq.known - seq.prompt_len, seq.limit - seq.prompt_len
            if ended or produced >= cap:
                self.calibration.output(seq.predicted, produced, cap)
            self.lengths.observe(seq.request.tenant, produced, ended)

    def watch(self, holders: Iterable[Sequence], step: int, late: int) -> None:
        """Judge the bounds: of one cohort after the other, what they come to hold.  To be called in every step."""
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
        self._look_again = step + 1 + self._rows // WATCH_ROWS

    def _with(self, demand: Demand, seq: Sequence, hits: list[int], late: int) -> int:
        """The bound once `seq`, whose first blocks are cached as `hits`, has joined a demand."""
        self._expect(demand, seq, seq.known, len(hits) - self._pool.idle_among(hits), late)
        for sibling in seq.siblings:
            self._expect(demand, sibling, seq.known, seq.known // self._pool.block_size, late)
        return demand.bound()

    def _of(self, holders: Iterable[Sequence], step: int, late: int) -> Demand:
        """What the holders will hold from the end of `step` on."""
        demand, common = Demand(self._pool.block_size, CAUTION), set[int]()
        self._rows = 0
        for seq, tokens, shared in self._parts(holders, step, common):
            self._rows += 1
            self._expect(demand, seq, tokens, shared, late)
        demand.hold(len(common))
        return demand

    def _parts(self, holders: Iterable[Sequence], step: int, common: set[int]) -> Iterator[tuple[Sequence, int, int]]:
        """(sequence, tokens it holds, its first blocks that are not its own) of each holder, and of the siblings that
        will fork from it.  Adds to `common` the blocks in several tables: taken as held whoever ends, since some other
        may go on."""
        size = self._pool.block_size
        for seq in holders:
            tokens = tokens_held(seq, step)
            shared = min(self._pool.shared_prefix(seq.table), tokens // size)
            if shared and seq.table[shared - 1] not in common:
                common.update(seq.table[:shared])
            yield seq, tokens, shared
            for sibling in seq.siblings:
                yield sibling, tokens, tokens // size

    def _expect(self, demand: Demand, seq: Sequence, tokens: int, shared: int, late: int) -> None:
        """Add a sequence to a demand.  It has `tokens`, and others hold its first `shared` blocks."""
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
