"""Candidates: the top-k tokens after the last one of a slice, from which the scheduler chooses.

    logits of a step   [slots that sample | slices with candidates | padding], V each
                                            └ log-softmax in float32, top k ─> pinned copies ─> StepResult.candidates

These rows pass through the sampling operator as padding, so graphs of sampling need not know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from torch import Tensor

ROWS = 128  # rows whose log-softmax exists at one time, in float32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates on the host, or on their way there: read them once the step that they belong to is done."""

    asked: Sequence[tuple[int, int]]  # slot, and how many candidates to report
    pieces: list[tuple[Tensor, Tensor]]  # pairs per chunk of ROWS slots: token ids [., most] i64, log-probabilities f32

    def by_slot(self) -> dict[int, tuple[list[int], list[float]]]:
        """(token ids, log-probabilities) of each slot, most probable first.  Slots whose logits are not finite are left
        out."""
        rows = [row for ids, logprobs in self.pieces for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
        # A log-softmax of NaN, of +inf or of nothing but -inf is NaN everywhere.
        return {
            slot: (ids[:count], logprobs[:count])
            for (slot, count), (ids, logprobs) in zip(self.asked, rows, strict=True)
            if not isnan(logprobs[0])
        }


def find_candidates(logits: Tensor, first: int, asked: Sequence[tuple[int, int]]) -> Candidates | None:
    """Launch the search for the candidates of rows first, first + 1, ... of logits [N, V]; None if none are requested.

    `asked`: the slot of each row, and how many candidates it wants, at most V."""
    if not asked:
        return None
    most = max(count for _, count in asked)
    pieces = []
    for at in range(first, first + len(asked), ROWS):
        rows = logits[at : min(at + ROWS, first + len(asked))]
        logprobs, ids = rows.float().log_softmax(-1).topk(most, dim=-1)
        pieces.append((ids.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)))
    return Candidates(asked, pieces)
