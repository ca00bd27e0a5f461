"""Candidates: the top-k next tokens after a slice, from which the scheduler's beam search chooses.

    logits of a step   [slots that sample | slices with candidates | padding], V each
                                            └ log-softmax in float32, top k ─> pinned copies ─> StepResult.candidates

The sampling operator treats these rows as padding, so steps with candidates use the same CUDA graphs of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from torch import Tensor

ROWS = 128  # maximum rows whose float32 log-softmax exists at a time


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates on the host, or being copied there: read them once their step is done."""

    asked: Sequence[tuple[int, int]]  # (slot, number of candidates to report)
    pieces: list[tuple[Tensor, Tensor]]  # token ids i64 and log-probabilities f32, each [up to ROWS slots, candidates]

    def by_slot(self) -> dict[int, tuple[list[int], list[float]]]:
        """Return (token ids, log-probabilities) by slot, most probable first.  Slots with logits that are not finite
        are left out."""
        rows = [row for ids, logprobs in self.pieces for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
        # A log-softmax of logits with NaN or +inf, or of -inf only, is NaN everywhere.
        return {
            slot: (ids[:count], logprobs[:count])
            for (slot, count), (ids, logprobs) in zip(self.asked, rows, strict=True)
            if not isnan(logprobs[0])
        }


def find_candidates(logits: Tensor, first: int, asked: Sequence[tuple[int, int]]) -> Candidates | None:
    """Launch the search for the candidates of rows first, first + 1, ... of logits [N, V]; None if none are requested.

    `asked`: the slot of each row, and its number of candidates, at most V."""
    if not asked:
        return None
    most = max(count for _, count in asked)
    pieces = []
    for at in range(first, first + len(asked), ROWS):
        rows = logits[at : min(at + ROWS, first + len(asked))]
        logprobs, ids = rows.float().log_softmax(-1).topk(most, dim=-1)
        pieces.append((ids.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)))
    return Candidates(asked, pieces)
