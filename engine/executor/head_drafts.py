"""Guesses of a checkpoint's MTP head (models/mtp.py): one draft token per sampling slot and step.

After a step has sampled, the head takes each of its tokens together with the token that follows:

    step        t    d1   d2   d3        samples s1 s2 s3 s4; s1 = d1, s2 = d2, s3 is not d3
    following   d1   d2   s3   -
    guess                 the token after s3

The head's KV is one more layer of the paged cache, with the same block tables.  So prefix hits and copies carry it.
Entries after the last accepted draft are overwritten by the next step, as those of other layers.  While the plans say
that guesses do not pay, the head does not run and its entries are zeros.  A sequence with such entries is not guessed
for.

Some entries only come close, which changes guesses but never the text: an entry whose following token the step does not
know (the last one of a prompt chunk) gets the token itself, and in a shared prefix the last entry of a block is that of
the sequence which computed it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.core.plan import StepPlan
from quire.engine.executor import ops
from quire.engine.executor.models.mtp import MtpHead
from quire.engine.executor.step_tensors import StepTensors


class Guesses(NamedTuple):
    """Guesses of a step."""

    tokens: dict[int, tuple[int, float]]  # by slot: token, and its estimated probability
    seconds: float  # time of the head


class HeadDrafts:
    """Runs a head after each step, on a CPU."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head
        self._runs = True  # StepPlan.guess of the step in flight
        self._complete: set[int] = set()  # slots whose entries have all been computed since they started

    def begin(self, plan: StepPlan) -> None:
        """Take in a plan before its step."""
        self._runs = plan.guess
        self._complete.update(start.slot for start in plan.starts)
        for fork in plan.forks:
            (self._complete.add if fork.parent in self._complete else self._complete.discard)(fork.slot)

    def run(
        self, step: StepTensors, hidden: Tensor, slots: Sequence[int], tokens: Tensor, accepted: Mapping[int, int]
    ) -> Guesses:
        """Write the head's KV of a step and guess the token after each sample.

        hidden: [T, hidden];  slots: N that sample;  tokens: [N] i64, their samples;  accepted: drafts accepted, by
        slot."""
        began, rows = time.perf_counter(), step.rows.tolist()
        if not self._runs:
            self._complete.difference_update(rows)
            cache = step.caches[self._head.layer]
            zeros = torch.zeros(len(hidden), *cache.k.shape[1::2], dtype=hidden.dtype)
            ops.kv_write(zeros, zeros, cache.k, cache.v, step.kv_indices, cache.scales)
            return Guesses({}, 0.0)
        following = step.input_ids[0].roll(-1)
        firsts, sampled = step.q_start.tolist(), dict(zip(slots, tokens.tolist(), strict=True))
        ends: dict[int, int] = {}  # by slot: index of its last proved token in the step
        for slot, first, end in zip(rows, firsts[:-1], firsts[1:], strict=True):
            if slot in sampled:
                last = first + accepted.get(slot, end - first - 1)
                following[last] = sampled[slot]
                if slot in self._complete:
                    ends[slot] = last
            elif end > first:
                following[end - 1] = step.input_ids[0, end - 1]
        out, found = self._head(following, hidden, step), dict[int, tuple[int, float]]()
        if ends:
            guessed, probabilities = self._head.guess(out[torch.tensor(list(ends.values()))])
            pairs = zip(guessed.tolist(), probabilities.nan_to_num(0.0).tolist(), strict=True)
            found = dict(zip(ends, pairs, strict=True))
        return Guesses(found, time.perf_counter() - began)
