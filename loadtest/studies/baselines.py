"""Admission and allocation of other servers, as baselines.  Importing this module registers them.

    watermark   5 % of the pool stays free after a start
    reserve     all running sequences, and the new one, fit at their maximum length
    none        the prompt fits
    static      no block tables: a sequence takes one contiguous run for its maximum length when it starts, shares no
                block and is never preempted

`baseline_server.py` starts servers with these modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from quire.engine.config import EngineConfig
from quire.engine.core.blocks import BlockPool
from quire.engine.core.limits import Limits
from quire.engine.core.policy import admission, allocation
from quire.engine.core.policy.admission import PeakBound, Unlimited
from quire.engine.core.policy.admission_forecast import AdmissionForecast
from quire.engine.core.sequence import Sequence
from quire.engine.core.waiting_queue import WaitingQueue

WATERMARK = 0.05  # fraction of the pool that stays free after a start in mode "watermark"
Mode = Literal["forecast", "threshold", "watermark", "reserve", "none", "static"]
MODES: tuple[Mode, ...] = get_args(Mode)


class BaselineConfig(EngineConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of an engine with the baselines among its admission modes."""

    admission: Mode = "forecast"  # type: ignore[assignment]  # wider than in the base class
    """When a waiting sequence may join the batch; the study `baselines` describes each mode."""


class Watermark(Unlimited):
    """Keeps WATERMARK of the pool free."""

    def _blocks_kept_free(self) -> int:
        return -int(-WATERMARK * self._pool.total // 1)


class Reserve(PeakBound):
    """Starts a sequence only if all running ones fit at their maximum length."""

    def judge_predictions(self, step: int) -> None:
        """Do nothing: the maximum length is no prediction."""

    def _forecast(self, pool: BlockPool) -> AdmissionForecast:
        return AdmissionForecast(pool, worst_case=True)


class CompleteRuns(Unlimited):
    """Admission for `Static`: every block is allocated at the start, so no sequence grows or is preempted."""

    preempts = False

    def may_start(self, seq: Sequence) -> bool:
        return self._pool.has_run(seq.max_blocks(self._pool.block_size))

    def free_blocks(self, waiting: WaitingQueue) -> int:
        return 0 if waiting else self._pool.available

    def predicted_peak(self) -> int:
        return self._pool.total - self._pool.available

    def judge_predictions(self, step: int) -> None:
        """Do nothing: the blocks of a sequence never change."""


class Static:
    """Allocation without block tables: one contiguous run of blocks per sequence, never shared."""

    shares_prompt = False

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self._pool = pool

    def cached_prefix(self, seq: Sequence) -> list[int]:
        return []

    def start_table(self, seq: Sequence, hits: list[int]) -> list[int]:
        return self._pool.allocate_run(seq.max_blocks(self._pool.block_size))

    def seal(self, seq: Sequence, end: int) -> int | None:
        return None

    def may_hold(self, seq: Sequence, gone: Iterable[Sequence] = ()) -> bool:
        return True

    def table_blocks(self, seq: Sequence, computed: int) -> int:
        return seq.max_blocks(self._pool.block_size)


for name, policy in (("watermark", Watermark), ("reserve", Reserve), ("none", Unlimited), ("static", CompleteRuns)):
    admission.register(name, policy)
allocation.register("static", Static)
