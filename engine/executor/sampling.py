"""Batched sampling: logits -> tokens for all rows of a step.  A table on the device holds each slot's settings.

Order of operations on a row's logits (float32).  Controls that transformers has, too, are applied in its order:

    raw logits ──────────────────────────────────────────────> log-softmax: the reported logprobs
       └ grammar, bad_words ─ repetition penalty ─ presence, frequency ─ logit_bias ─ allowed ids, min_tokens = adjusted
    adjusted ── temperature 0: argmax
             └─ else w = exp((logit - max) / temperature), filters top_k, top_p, min_p, one draw by inverse CDF

Every filter keeps the tokens whose weight w reaches a threshold, ties included.  So the filters of a row reduce to one
value, the maximum of three thresholds.

The draw takes u = hash(seed, sibling, output position) in [0, 1).  The token is the first, in vocabulary order, at
which the running sum of w passes u * total.  Sums are of integers (csrc/sampling_rules.h), so a token is a function of
(logits, seed, sibling, position).  It does not depend on preemption, other requests, crashes or the kind of device.

One operator, `ops.sample`, does all of this.  It reads:

    table [max_seqs, 9] i64      a RECORD per slot, on the device
      slot 3: seed ... marks ──> line [V] i32   in the prompt? a stop id? allowed? how often in the output
                       bias ───> line [V] f32   logit_bias, only if a request has one
                       mask ───> row [V / 32]   one bit per token: allowed by grammar and bad_words (masks.py)

Records hold addresses of lines, not tensors: lines are allocated and freed while captured CUDA graphs keep reading
the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.core.plan import Sampler
from quire.engine.executor import ops
from quire.engine.executor.constraints import Constraints
from quire.engine.executor.followers import Follower
from quire.engine.executor.masks import Masks
from quire.engine.wire.messages import Sampling, TokenLogprob

# Prompt positions per chunk of logits and their log-softmax, which are float32: together they take 0.3 GB for a
# vocabulary of 256k.  On a GPU, reading the LM head again for every chunk takes a few per cent of a scoring step.
TARGET_ROWS = 128

# sampling::Settings of csrc/sampling_rules.h
RECORD = np.dtype(
    [
        ("seed", "<i8"),
        ("marks", "<u8"),
        ("bias", "<u8"),
        ("mask", "<u8"),
        ("sibling", "<i4"),
        ("prompt_len", "<i4"),
        ("top_k", "<i4"),
        ("min_tokens", "<i4"),
        ("scale", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
    ]
)
COLDEST = 1e30  # maximum 1 / temperature: finite, so that 0 * scale is 0

# Outcomes of a row, as in csrc/sampling_rules.h.
CHOSEN, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2

# Flags in a token's mark; the mark's lower bits count how often the token is in the output.
IN_PROMPT, STOP, FORBIDDEN = 1 << 31, 1 << 30, 1 << 29


class Lines:
    """Pool of vectors with one value per token of the vocabulary, for the few slots that need one.

    Allocated in chunks that double in size, so a line never moves, and the pool has the size of peak use.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._vocab = vocab_size
        self._dtype = dtype
        self._device = device
        self._have = 0
        self._spare: list[Tensor] = []

    def take_line(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Allocate a line [V] with these values, copied without waiting for the device."""
        if not self._spare:
            more = max(4, self._have)
            width = -(-self._vocab // 8) * 8  # every line starts at a multiple of 16 bytes
            chunk = torch.empty(more, width, dtype=self._dtype, device=self._device)
            self._spare = list(chunk[:, : self._vocab])
            self._have += more
        line = self._spare.pop()
        send(torch.from_numpy(values), line)
        return line

    def return_line(self, line: Tensor) -> None:
        self._spare.append(line)


def send(values: Tensor, to: Tensor) -> None:
    """Copy from the host asynchronously, in stream order; `values` may be changed immediately."""
    if to.is_cuda:
        values = values.pin_memory()  # torch keeps the pinned copy until the device has read it
    to.copy_(values, non_blocking=True)


class SamplerBank:
    """The sampling state of each slot.  Call `assign` before a slot's first sample, `free` when its sequence ends.

    Per step: `assign` and `free`, then `flush`, `fill_masks`, `run`, then `followers.advance`.  `run` only launches,
    with sizes that the host knows, so CUDA graphs may record it, one per N and value of `general`.  A recorded graph
    also serves slots that are filled later.  If `self.general` is false, `run` gives the same tokens with `general`
    true and false.
    """

    def __init__(
        self,
        *,
        max_seqs: int,
        vocab_size: int,
        device: torch.device,
        following: tuple[Constraints, Masks] | None = None,
    ) -> None:
        """`following`: constraints and masks of the slots; None if no request has a grammar or bad_words."""
        self._vocab = vocab_size
        self._device = device
        self._following = following
        self._records = np.zeros(max_seqs, RECORD)
        self._words = torch.from_numpy(self._records.view(np.int64).reshape(max_seqs, -1))
        self._table = self._words.to(device)  # on a CPU the same memory, so `flush` has nothing to copy
        self._marks = Lines(vocab_size, torch.int32, device)
        self._biases = Lines(vocab_size, torch.float32, device)
        self._held: dict[int, list[tuple[Lines, Tensor]]] = {}
        self.reset()

    def reset(self) -> None:
        """Free every slot."""
        for slot in list(self._held):
            self._give_back(slot)
        if self._following is not None:
            self._following[0].reset()
        self._general: set[int] = set()
        self._reports: dict[int, Report] = {}
        self._changed: set[int] = set()

    @property
    def general(self) -> bool:
        """Whether any slot needs more than the argmax of its raw logits.  Constant time."""
        return bool(self._general)

    @property
    def reporting(self) -> bool:
        """Whether any slot reports logprobs.  Constant time."""
        return bool(self._reports)

    def assign(self, slot: int, sampler: Sampler) -> None:
        """Give a slot the settings of the sequence that starts in it.  Takes effect with the next `flush`."""
        self._forget(slot)
        s = sampler.sampling
        record = self._records[slot]
        record["seed"], record["sibling"], record["prompt_len"] = s.seed, sampler.sibling, sampler.prompt_len
        record["top_k"] = s.top_k if s.top_k < self._vocab else 0
        record["min_tokens"] = s.min_tokens
        record["scale"] = min(math.log2(math.e) / s.temperature, COLDEST) if s.temperature > 0 else 0
        record["top_p"], record["min_p"] = s.top_p, s.min_p
        record["repetition"] = s.repetition_penalty
        record["presence"], record["frequency"] = s.presence_penalty, s.frequency_penalty
        record["marks"] = record["bias"] = record["mask"] = 0
        if masked := Constraints.wanted(s):
            if self._following is None:
                raise RuntimeError("a request with a grammar or bad_words reached an executor without masks")
            constraints, masks = self._following
            constraints.assign(slot, sampler)  # a request that jumps over forced tokens keeps its matcher
            record["mask"] = masks.address(slot)
        elif self._following is not None:
            self._following[0].free(slot)
        lines = []
        # A grammar masks the stop tokens itself.
        if has_penalty(s) or s.allowed_token_ids or (s.min_tokens and sampler.stop_ids and not s.grammar):
            lines.append((self._marks, self._marks.take_line(self._mark(sampler))))
            record["marks"] = lines[-1][1].data_ptr()
        if s.logit_bias:
            bias = np.zeros(self._vocab, np.float32)
            for token, added in s.logit_bias:
                bias[token] += added
            lines.append((self._biases, self._biases.take_line(bias)))
            record["bias"] = lines[-1][1].data_ptr()
        if lines:
            self._held[slot] = lines
        if s.temperature > 0 or lines or masked:
            self._general.add(slot)
        if s.logprobs >= 0:
            named = tuple(s.logprob_token_ids)
            self._reports[slot] = Report(slot, 0 if named else min(s.logprobs, self._vocab), named)
        self._changed.add(slot)

    def free(self, slot: int) -> None:
        """Clear the settings of a slot; harmless when it never sampled."""
        self._forget(slot)
        if self._following is not None:
            self._following[0].free(slot)

    def _forget(self, slot: int) -> None:
        self._give_back(slot)
        self._general.discard(slot)
        self._reports.pop(slot, None)

    def _give_back(self, slot: int) -> None:
        for lines, line in self._held.pop(slot, ()):
            lines.return_line(line)

    def _mark(self, sampler: Sampler) -> npt.NDArray[np.int32]:
        s = sampler.sampling
        marks = np.zeros(self._vocab, np.uint32)
        if has_penalty(s):
            history = np.asarray(sampler.history, np.int64)
            marks += np.bincount(history[sampler.prompt_len :], minlength=self._vocab).astype(np.uint32)
            marks[history[: sampler.prompt_len]] |= np.uint32(IN_PROMPT)
        if s.allowed_token_ids:
            forbidden = np.ones(self._vocab, bool)
            forbidden[s.allowed_token_ids] = False
            marks[forbidden] |= np.uint32(FORBIDDEN)
        if s.min_tokens and not s.grammar:
            marks[sampler.stop_ids] |= np.uint32(STOP)
        return marks.view(np.int32)

    def flush(self) -> None:
        """Copy the changes of `assign` to the device: one copy and one scatter, if any; never waits."""
        if self._changed and self._table.is_cuda:
            slots = torch.tensor(sorted(self._changed), dtype=torch.int64)
            staged = torch.empty(len(slots), 1 + self._words.shape[1], dtype=torch.int64, device=self._device)
            send(torch.cat([slots[:, None], self._words[slots]], 1), staged)
            self._table.index_copy_(0, staged[:, 0], staged[:, 1:])
        self._changed.clear()

    @property
    def following(self) -> bool:
        """Whether any slot's mask depends on earlier tokens.  Constant time."""
        return self._following is not None and self._following[0].active

    def begin_masks(self) -> None:
        """Start computing the token masks on worker threads, overlapped with the forward pass.

        All earlier steps must have been collected."""
        if self._following is not None and self._following[0].active:
            self._following[0].begin_fill()

    def fill_masks(self) -> None:
        """Write the token masks of all slots.  All earlier steps must have been collected."""
        if self._following is not None and self._following[0].active:
            constraints, masks = self._following
            masks.send(constraints.fill())

    def followers(self, slots: Sequence[int]) -> list[Follower]:
        """Return the slots of a step, with their rows, whose next masks depend on the tokens of the step."""
        return [] if self._following is None else self._following[0].followers(slots)

    def run(self, logits: Tensor, slots: Tensor, known: Tensor, tokens: Tensor, outcome: Tensor, general: bool) -> None:
        """Sample one token per row; only launches.

        logits   [N, V] in float32 or the model's dtype; not changed
        slots    [N] i64, the row's slot; -1: padding, with token 0 and outcome CHOSEN
        known    [N] i64, number of tokens before the sampled one
        tokens   [N] i64, out
        outcome  [N] u8, out
        general  must be true if `self.general` is; may be true for any rows
        """
        if logits.shape[1] != self._vocab:
            raise ValueError(f"logits of {logits.shape[1]} tokens, the vocabulary has {self._vocab}")
        ops.sample(logits, slots, known, self._table, general, tokens, outcome)

    def draft_table(
        self, rows: npt.NDArray[np.int64], drafts: Mapping[int, Sequence[int]]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the settings of rows that sample after drafts, and the masks that these point to; on the device.

        Call `fill_masks` before.

        rows    [R] the slot of each row, in the order of `drafts`
        drafts  tokens by slot: in a slot with a grammar, each row gets the mask after one more draft"""
        records = self._records[rows]
        held = None
        if self.following and self._following is not None:
            constraints, _ = self._following
            masks = constraints.draft_masks(drafts)
            if masks is not None:
                held = self._sent(torch.from_numpy(masks))
                masked = records["mask"] != 0
                records["mask"][masked] = held.data_ptr() + np.flatnonzero(masked) * (4 * masks.shape[1])
        return self._sent(torch.from_numpy(records.view(np.int64).reshape(len(rows), -1))), held

    def _sent(self, values: Tensor) -> Tensor:
        """Copy to the device without waiting for the work queued there; on a CPU return the same memory."""
        if self._device.type == "cpu":
            return values
        there = torch.empty_like(values, device=self._device)
        send(values, there)
        return there

    def draft_logprobs(
        self, logits: Tensor, slots: Sequence[int], drafts: Sequence[Sequence[int]], at: Tensor, tokens: Tensor
    ) -> Logprobs | None:
        """Return log-probabilities of every sample of the slots that report them; None if no slot does.

        logits [N + R, V], tokens [N + R]: of all rows; at [D, K + 1]: row indices; a slot with k drafts has k + 1"""
        asked = [(i, slot) for i, slot in enumerate(slots) if slot in self._reports]
        if not asked:
            return None
        rows = torch.cat([at[i, : len(drafts[i]) + 1] for i, _ in asked])
        reports = [self._reports[slot] for i, slot in asked for _ in range(len(drafts[i]) + 1)]
        return logprobs_of(logits, tokens[rows], reports, rows)

    def logprobs(self, logits: Tensor, slots: tuple[int, ...], tokens: Tensor) -> Logprobs | None:
        """Return logprobs of the sampled tokens [N], for the slots that report them; None if no slot does."""
        if not self.reporting:
            return None
        asked = [(i, self._reports[slot]) for i, slot in enumerate(slots) if slot in self._reports]
        if not asked:
            return None
        at = torch.empty(len(asked), dtype=torch.int64, device=self._device)
        send(torch.tensor([i for i, _ in asked], dtype=torch.int64), at)
        return logprobs_of(logits, tokens[at], [report for _, report in asked], at)


def has_penalty(s: Sampling) -> bool:
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


class Report(NamedTuple):
    """The log-probabilities that a position reports besides its own token's."""

    slot: int
    top: int  # number of most probable tokens
    named: tuple[int, ...] = ()  # token ids to report, in this order, if `top` is 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of L tokens and of alternatives at their positions.

    The tensors are on the host, or being copied there: readable once the step is done.
    """

    asked: Sequence[Report]  # [L]
    chosen: list[Tensor]  # per chunk of L: log-probabilities f32 of the tokens themselves
    top: list[tuple[Tensor, Tensor]]  # per chunk: ids i64 and log-probabilities f32 of the top-k tokens, [chunk, k]
    named: list[Tensor]  # per chunk: log-probabilities f32 of the tokens that are named in `asked`, concatenated

    def entries(self) -> list[TokenLogprob]:
        """Return one entry per token."""
        own = [logprob for piece in self.chosen for logprob in piece.tolist()]
        tops = [
            list(zip(ids, values, strict=True))
            for piece_ids, piece_values in self.top
            for ids, values in zip(piece_ids.tolist(), piece_values.tolist(), strict=True)
        ]
        named = iter([logprob for piece in self.named for logprob in piece.tolist()])
        return [
            TokenLogprob(p, [(token, next(named)) for token in one.named] or top[: one.top])
            for p, top, one in zip(own, tops, self.asked, strict=True)
        ]

    def by_slot(self) -> dict[int, TokenLogprob]:
        return {one.slot: entry for one, entry in zip(self.asked, self.entries(), strict=True)}


def logprobs_of(logits: Tensor, tokens: Tensor, asked: Sequence[Report], rows: Tensor | None = None) -> Logprobs:
    """Return logprobs of tokens [L] from raw logits [., V]: row i (or rows[i]) of the logits belongs to token i."""
    return logprobs_from(lambda part: logits[part] if rows is None else logits[rows[part]], tokens, asked)


def logprobs_from(logits_of: Callable[[slice], Tensor], tokens: Tensor, asked: Sequence[Report]) -> Logprobs:
    """Return logprobs of tokens [L], in chunks of TARGET_ROWS; `logits_of` returns a chunk's raw logits [., V]."""
    found = Logprobs(asked, [], [], [])
    most = max(report.top for report in asked)
    for first in range(0, len(asked), TARGET_ROWS):
        part = slice(first, first + TARGET_ROWS)
        logp = logits_of(part).float().log_softmax(-1)
        found.chosen.append(logp.gather(1, tokens[part, None])[:, 0].to("cpu", non_blocking=True))
        values, ids = logp.topk(most, dim=-1)
        found.top.append((ids.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)))
        if places := [(row, token) for row, report in enumerate(asked[part]) for token in report.named]:
            at = torch.empty(len(places), 2, dtype=torch.int64, device=logp.device)
            send(torch.tensor(places, dtype=torch.int64), at)
            found.named.append(logp[at[:, 0], at[:, 1]].to("cpu", non_blocking=True))
    return found
