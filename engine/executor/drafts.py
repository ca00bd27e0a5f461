"""Verifies drafts on the device: samples after each draft, how many drafts are accepted, and each slot's next token.

A slice [t, d1 .. dk] with k drafts has k + 1 rows of logits.  The row after t is the slot's own row, like those of the
slots without drafts.  The k rows after the drafts follow the rows of all slots:

    logits   | a row for each slot that samples | k rows of a slice, after d1 .. dk | of the next slice ...
    samples    s1 of each slot                    s2 .. s(k+1)
    accepted   number of leading i with s(i) = d(i);  next token: s(accepted + 1);  position: of the last accepted one

A row samples with its slot's settings at its own position, so it draws the same token as a separate decode step.  In a
slot with a grammar, each row has the mask of its position: the matcher consumes the drafts before it and is rolled
back.  A draft that its mask forbids differs from every sample, so it needs no check here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.plan import Slice
from quire.engine.executor import ops
from quire.engine.executor.followers import Follower
from quire.engine.executor.sampling import CHOSEN, Logprobs, SamplerBank
from quire.engine.executor.staging import Array, Staging
from quire.engine.wire.messages import TokenLogprob

NO_TOKEN = -1  # padding: a draft that equals no sample


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The slices of one step that have drafts: D slices, at most K drafts each, R drafts in all; N slots sample."""

    slots: list[int]  # [D]
    tokens: list[list[int]]  # [D] drafts of each slice
    rows: Array  # [R] i64: slot of each draft row
    known: Tensor  # [R] i64: number of tokens before the one that the row samples
    behind: Tensor  # [N] i64: draft tokens per sampling slot; `StepTensors.known` includes them
    own: Tensor  # [D] i64: index of each slot among the N slots that sample
    drafts: Tensor  # [D, K] i64; NO_TOKEN: padding
    at: Tensor  # [D, K + 1] i64: the rows (0 .. N + R - 1) of each slot, in order; padded with its first row
    device_slots: Tensor  # [D] i64

    @classmethod
    def stage(cls, slices: Sequence[Slice], order: Sequence[int], samples: int, staging: Staging) -> DraftRows:
        """`order`: the slots that sample, in the order of the step's rows.  `samples`: rows before the draft rows."""
        slices = [piece for piece in slices if piece.drafts]
        place = {slot: at for at, slot in enumerate(order)}
        slots, sizes = [piece.slot for piece in slices], np.array([piece.drafts for piece in slices])
        own = np.array([place[slot] for slot in slots], np.int64)
        starts, firsts = np.array([piece.start for piece in slices]), np.cumsum(sizes) - sizes
        most, total = int(sizes.max()), int(sizes.sum())
        behind = np.zeros(samples, np.int64)
        behind[own] = sizes
        known = np.repeat(starts + 2 - firsts, sizes) + np.arange(total)
        each = np.arange(most)
        exists = each < sizes[:, None]
        drafts = np.full((len(slices), most), NO_TOKEN, np.int64)
        drafts[exists] = np.fromiter(chain.from_iterable(piece.token_ids[1:] for piece in slices), np.int64, total)
        at = np.repeat(own[:, None], most + 1, axis=1)
        at[:, 1:][exists] = np.arange(samples, samples + total)
        arrays = known, behind, own, drafts, at, np.array(slots, np.int64)
        staged = staging.stage_array(np.concatenate([array.ravel() for array in arrays]))
        parts = staged.split([array.size for array in arrays])
        tensors = parts[0], parts[1], parts[2], parts[3].view(drafts.shape), parts[4].view(at.shape), parts[5]
        return cls(slots, [piece.token_ids[1:] for piece in slices], np.repeat(slots, sizes), *tensors)


@dataclass(frozen=True, slots=True)
class Verified:
    """Accepted drafts of a step; on the host, or being copied there until the step is done."""

    slots: list[int]
    tokens: list[list[int]]  # the drafts
    accepted: Tensor  # [D] i64
    logprobs: Logprobs | None  # log-probabilities of all samples of the slots that report some

    def counts(self) -> dict[int, int]:
        """Return how many drafts of each slot were accepted."""
        return dict(zip(self.slots, self.accepted.tolist(), strict=True))

    def take(self, followers: Sequence[Follower]) -> None:
        """Advance the followers of these slots by the accepted drafts, before they take the token after the drafts."""
        rows = {follower.slot: follower.row for follower in followers}
        for slot, drafts, count in zip(self.slots, self.tokens, self.accepted.tolist(), strict=True):
            if (row := rows.get(slot)) is not None:
                for token in drafts[:count]:
                    row.take(token)

    def entries(self) -> dict[int, tuple[list[TokenLogprob], TokenLogprob]]:
        """Return, for each slot that reports log-probabilities, (those of the accepted drafts, that of the token after
        them)."""
        if self.logprobs is None:
            return {}
        by_slot: dict[int, list[TokenLogprob]] = {}
        for report, entry in zip(self.logprobs.asked, self.logprobs.entries(), strict=True):
            by_slot.setdefault(report.slot, []).append(entry)
        counts = self.counts()
        return {slot: (found[: counts[slot]], found[counts[slot]]) for slot, found in by_slot.items()}


def verify(
    rows: DraftRows, samplers: SamplerBank, logits: Tensor, tokens: Tensor, outcomes: Tensor, position: Tensor
) -> Verified:
    """Sample after the drafts and accept the drafts that equal the samples; launches only.

    logits    [N + R or more, V]; the first N rows have been sampled
    tokens, outcomes  [N] results of these N rows; a slot with drafts gets the sample after its accepted drafts instead
    position  [max_seqs] i64: per slot, the position of its last token that is not a draft; accepted drafts advance it
    """
    count, extra = len(tokens), len(rows.rows)
    sampled = torch.empty(extra, dtype=torch.int64, device=tokens.device)
    results = torch.empty(extra, dtype=torch.uint8, device=tokens.device)
    table, masks = samplers.draft_table(rows.rows, dict(zip(rows.slots, rows.tokens, strict=True)))
    numbers = torch.arange(extra, dtype=torch.int64, device=tokens.device)
    ops.sample(logits[count : count + extra], numbers, rows.known, table, samplers.general, sampled, results)
    del masks  # the table has their addresses
    all_tokens, all_outcomes = torch.cat([tokens, sampled]), torch.cat([outcomes, results])
    samples, sound = all_tokens[rows.at], all_outcomes[rows.at] == CHOSEN
    right = (samples[:, :-1] == rows.drafts) & sound[:, :-1]
    accepted = right.cumprod(1).sum(1)
    # If the sample after the accepted drafts failed, report the last accepted draft as the sampled token instead.  The
    # next step then fails as without drafts, and the client gets all tokens before.
    failed = ~sound.gather(1, accepted[:, None])[:, 0] & (accepted > 0)
    accepted -= failed.long()
    at = rows.at.gather(1, accepted[:, None])[:, 0]
    logprobs = samplers.draft_logprobs(logits, rows.slots, rows.tokens, rows.at, all_tokens)
    tokens.index_copy_(0, rows.own, all_tokens[at])
    outcomes.index_copy_(0, rows.own, all_outcomes[at])
    position.index_add_(0, rows.device_slots, accepted)
    return Verified(rows.slots, rows.tokens, accepted.to("cpu", non_blocking=True), logprobs)
