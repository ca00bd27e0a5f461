"""Logits -> tokens, for all rows of a step at once; what a row asks for sits in tables on the device.

Order of operations on a row's logits (float32), the one transformers uses where it has the same control:

    raw logits ──────────────────────────────────────────────> log-softmax: the logprobs we report
       └ repetition penalty ─ presence, frequency ─ logit_bias ─ allowed ids, min_tokens (masks) = adjusted
    adjusted ── temperature 0: argmax
             └─ else w = exp((logit - max) / temperature), filters top_k, top_p, min_p, one draw by inverse CDF

Every filter keeps an *upper set* of the weights w (all tokens at least as likely as some floor), so a row's filters
come down to one number, the highest of three floors.  Tokens exactly as likely as the last one kept are kept too.

The draw: u = hash(seed, sibling, output position) in [0, 1), then the first token, in vocabulary order, at which the
running sum of w passes u * total.  Sums run in float64 in an order that depends on the vocabulary size alone, so a
token is a function of (logits, seed, sibling, position): preemption, batch mates and crashes do not change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import Sampler
from engine.executor import ops
from engine.wire.messages import Sampling, TokenLogprob

NEVER = float("-inf")
LANES = 256  # the vocabulary is padded to a multiple of this: sums go lane by lane, then over whole groups
TARGET_ROWS = 64  # prompt positions whose float32 log-softmax exists at one time

# columns of the integer and of the float table
SEED, SIBLING, PROMPT_LEN, TOP_K, MIN_TOKENS = range(5)
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What N rows got, in the order they were given."""

    tokens: Tensor  # [N] i64; 0 where `finite` is false
    finite: Tensor  # [N] bool: false where the row's logits held NaN or infinity, or masks left no token
    logprobs: dict[int, TokenLogprob]  # by row, where asked for


@dataclass(frozen=True, slots=True)
class Wishes:
    """Which filters any row of a group uses; the others cost nothing."""

    top_k: bool
    top_p: bool
    min_p: bool

    @property
    def any(self) -> bool:
        return self.top_k or self.top_p or self.min_p


@dataclass(frozen=True, slots=True)
class Group:
    """Everything about a set of rows that holds as long as the set does.

    Positions `i` below count within the rows given (N of them), positions `j` within `worked` (M of them).
    """

    rows: tuple[int, ...]
    plain: Tensor | None  # [.] i: rows whose token is the argmax of the raw logits; None: all are
    worked: Tensor | None  # [M] i: rows whose logits are adjusted or drawn from; None: all are
    greedy: Tensor  # [.] j: adjusted rows with temperature 0
    drawn: Tensor  # [.] j: rows with temperature > 0
    ints: Tensor  # [M, 5] i64
    floats: Tensor  # [M, 6] f32
    penalised: Tensor  # [P] j
    counts_at: Tensor  # [P]: where the counts of those rows are
    bias: tuple[Tensor, Tensor, Tensor] | None  # [B] j, [B] token, [B] added
    allowed: tuple[Tensor, Tensor] | None  # [A] j, [A, V] bool
    waiting: tuple[Tensor, Tensor] | None  # [W] j, [W] token that must not come before min_tokens
    reported: list[tuple[int, int, int]]  # (i, row, top k) of rows that report logprobs
    wishes: Wishes


class SamplerBank:
    """What each seated row asks for.  `seat` before its first sample, `free` when it leaves; `sample` every step."""

    def __init__(self, *, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._ints = torch.zeros(max_seqs, 5, dtype=torch.int64, device=device)
        self._floats = torch.zeros(max_seqs, 6, dtype=torch.float32, device=device)
        # Token counts of rows with penalties.  Such rows are rare and a vocabulary is large, so the pool grows to the
        # number of them that ever ran together.
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._in_output = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self.reset()

    def reset(self) -> None:
        """Free every row."""
        self._samplers: dict[int, Sampler] = {}
        self._counts: dict[int, int] = {}  # row -> index in the count pool
        self._spare = list(range(len(self._in_prompt)))
        self._group: Group | None = None

    def seat(self, row: int, sampler: Sampler) -> None:
        self.free(row)
        self._samplers[row] = sampler
        s = sampler.sampling
        self._ints[row] = torch.tensor([s.seed, sampler.sibling, sampler.prompt_len, s.top_k, s.min_tokens])
        self._floats[row] = torch.tensor(
            [s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty]
        )
        if has_penalty(s):
            self._count_history(row, sampler)

    def free(self, row: int) -> None:
        """Forget a row; harmless when it never sampled."""
        self._samplers.pop(row, None)
        if (index := self._counts.pop(row, None)) is not None:
            self._spare.append(index)

    def _count_history(self, row: int, sampler: Sampler) -> None:
        if not self._spare:
            have = len(self._in_prompt)
            more = max(4, have)
            self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._vocab)])
            self._in_output = torch.cat([self._in_output, self._in_output.new_zeros(more, self._vocab)])
            self._spare = list(range(have, have + more))
        index = self._counts[row] = self._spare.pop()
        history = torch.tensor(sampler.history, dtype=torch.int64, device=self._device)
        self._in_prompt[index] = False
        self._in_prompt[index, history[: sampler.prompt_len]] = True
        self._in_output[index] = torch.bincount(history[sampler.prompt_len :], minlength=self._vocab)

    def sample(self, logits: Tensor, rows: tuple[int, ...], known: Tensor) -> Sampled:
        """Choose one token for each row.

        logits [N, V] of the model's dtype, not changed; rows N seated rows, the same tuple object while the set does
        not change (what is derived from the set is kept); known [N] i64, tokens before the one chosen now.
        """
        if self._group is None or self._group.rows is not rows:
            self._group = self._make_group(rows)
        group = self._group
        if group.plain is None:
            chosen, tokens = ops.row_max(logits)
        else:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
            chosen = torch.empty(len(rows), dtype=torch.float32, device=self._device)
            if len(group.plain):
                chosen[group.plain], tokens[group.plain] = ops.row_max(logits[group.plain])
            worked = slice(None) if group.worked is None else group.worked
            tokens[worked], chosen[worked] = self._work(group, logits[worked], known[worked])
        finite = chosen.isfinite()  # the largest of values with a NaN among them is NaN, so one value tells of the row
        tokens.masked_fill_(~finite, 0)
        return Sampled(tokens, finite, self._logprobs(group, logits, tokens) if group.reported else {})

    def _make_group(self, rows: tuple[int, ...]) -> Group:
        samplers = [self._samplers[row] for row in rows]
        worked = [i for i, s in enumerate(samplers) if s.sampling.temperature > 0 or is_adjusted(s.sampling)]
        plain = sorted(set(range(len(rows))) - set(worked))
        work = [samplers[i] for i in worked]
        seats = self._index([rows[i] for i in worked])
        pick = [j for j, s in enumerate(work) if has_penalty(s.sampling)]
        bias = [(j, token, add) for j, s in enumerate(work) for token, add in s.sampling.logit_bias]
        waiting = [(j, token) for j, s in enumerate(work) if s.sampling.min_tokens for token in s.stop_ids]
        allowed = [j for j, s in enumerate(work) if s.sampling.allowed_token_ids]
        mask = torch.zeros(len(allowed), self._vocab, dtype=torch.bool, device=self._device)
        for line, j in zip(mask, allowed, strict=True):
            line[self._index(work[j].sampling.allowed_token_ids)] = True
        drawn = [s.sampling for s in work if s.sampling.temperature > 0]
        return Group(
            rows=rows,
            plain=self._index(plain) if worked else None,
            worked=self._index(worked) if plain else None,
            greedy=self._index([j for j, s in enumerate(work) if s.sampling.temperature == 0]),
            drawn=self._index([j for j, s in enumerate(work) if s.sampling.temperature > 0]),
            ints=self._ints[seats],
            floats=self._floats[seats],
            penalised=self._index(pick),
            counts_at=self._index([self._counts[rows[worked[j]]] for j in pick]),
            bias=(
                self._index([j for j, _, _ in bias]),
                self._index([token for _, token, _ in bias]),
                torch.tensor([add for _, _, add in bias], dtype=torch.float32, device=self._device),
            )
            if bias
            else None,
            allowed=(self._index(allowed), mask) if allowed else None,
            waiting=(self._index([j for j, _ in waiting]), self._index([t for _, t in waiting])) if waiting else None,
            reported=[
                (i, rows[i], min(s.sampling.logprobs, self._vocab))
                for i, s in enumerate(samplers)
                if s.sampling.logprobs >= 0
            ],
            wishes=Wishes(
                top_k=any(0 < s.top_k < self._vocab for s in drawn),
                top_p=any(s.top_p < 1 for s in drawn),
                min_p=any(s.min_p > 0 for s in drawn),
            ),
        )

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _work(self, group: Group, logits: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [M] and the logit that tells whether each row was sound, for rows that need more than an argmax."""
        count, vocab = logits.shape
        # Padded to whole lanes, so that every sum below adds in the same order whatever the batch.
        x = torch.full((count, -(-vocab // LANES) * LANES), NEVER, dtype=torch.float32, device=self._device)
        x[:, :vocab] = logits
        position = known - group.ints[:, PROMPT_LEN]
        self._adjust(group, x[:, :vocab], position)
        if not len(group.drawn):
            chosen, tokens = x.max(-1)
        elif not len(group.greedy):
            tokens, chosen = draw(x, position, group.ints, group.floats, group.wishes)
        else:
            tokens, chosen = torch.empty_like(known), torch.empty_like(x[:, 0])
            chosen[group.greedy], tokens[group.greedy] = x[group.greedy].max(-1)
            at = group.drawn
            tokens[at], chosen[at] = draw(x[at], position[at], group.ints[at], group.floats[at], group.wishes)
        if len(group.penalised):
            self._in_output[group.counts_at, tokens[group.penalised].clamp(max=vocab - 1)] += 1
        return tokens, chosen

    def _adjust(self, group: Group, x: Tensor, position: Tensor) -> None:
        """Penalties, bias and masks on x [M, V] f32, in place; position [M] i64 counts outputs."""
        if len(group.penalised):
            at = group.penalised
            floats = group.floats[at]
            output = self._in_output[group.counts_at]
            seen = self._in_prompt[group.counts_at] | (output > 0)
            y, repetition = x[at], floats[:, REPETITION, None]
            y = torch.where(seen, torch.where(y > 0, y / repetition, y * repetition), y)
            y -= floats[:, FREQUENCY, None] * output
            y -= floats[:, PRESENCE, None] * (output > 0)
            x[at] = y
        if group.bias:
            j, token, add = group.bias
            x.index_put_((j, token), add, accumulate=True)
        if group.allowed:
            j, mask = group.allowed
            x[j] = x[j].masked_fill(~mask, NEVER)
        if group.waiting:
            j, token = group.waiting
            early = position[j] < group.ints[j, MIN_TOKENS]
            x[j, token] = x[j, token].masked_fill(early, NEVER)

    def _logprobs(self, group: Group, logits: Tensor, tokens: Tensor) -> dict[int, TokenLogprob]:
        at = self._index([i for i, _, _ in group.reported])
        found = token_logprobs(logits[at], tokens[at], max(top for _, _, top in group.reported))
        return {
            row: TokenLogprob(entry.logprob, entry.top[:top])
            for (_, row, top), entry in zip(group.reported, found, strict=True)
        }


def has_penalty(s: Sampling) -> bool:
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def is_adjusted(s: Sampling) -> bool:
    return has_penalty(s) or bool(s.logit_bias or s.allowed_token_ids) or s.min_tokens > 0


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprob]:
    """Log-probabilities from raw logits [L, V] of tokens [L], and of the `top` likeliest of each row."""
    found = []
    for first in range(0, len(logits), TARGET_ROWS):
        logp = logits[first : first + TARGET_ROWS].float().log_softmax(-1)
        chosen = logp.gather(1, tokens[first : first + TARGET_ROWS, None])[:, 0].tolist()
        values, ids = logp.topk(top, dim=-1)
        found += [
            TokenLogprob(own, list(zip(i, v, strict=True)))
            for own, i, v in zip(chosen, ids.tolist(), values.tolist(), strict=True)
        ]
    return found


def draw(x: Tensor, position: Tensor, ints: Tensor, floats: Tensor, wishes: Wishes) -> tuple[Tensor, Tensor]:
    """One token for each row of adjusted logits x [M, V padded to LANES] f32, which is overwritten.

    Returns tokens [M] i64 and each row's largest logit [M].
    """
    peak = x.amax(-1)
    w = x.sub_(peak[:, None]).div_(floats[:, TEMPERATURE, None]).exp_()
    if wishes.any:
        floor = floats[:, MIN_P]  # the largest weight is 1, so min_p is a floor as it stands
        if wishes.top_k or wishes.top_p:
            floor = torch.maximum(floor, upper_set_floor(w, ints[:, TOP_K], floats[:, TOP_P]))
        w.masked_fill_(w < floor[:, None], 0)
    return inverse_cdf(w, uniform(ints[:, SEED], ints[:, SIBLING], position)), peak


def upper_set_floor(w: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """[M] f32: the smallest weight of w [M, V] that top_k k [M] i64 (0: off), then top_p p [M] (1: off) keep.

    top_p keeps the smallest set of the likeliest tokens that holds a fraction p of what top_k left.
    """
    vocab = w.shape[1]
    ascending = sort(w)
    limited = (k > 0) & (k < vocab)
    kth = ascending.gather(1, (vocab - k.clamp(1, vocab))[:, None])[:, 0].masked_fill(~limited, 0)
    if not bool((p < 1).any()):
        return kth
    below = ascending.masked_fill_(ascending < kth[:, None], 0).cumsum(-1, dtype=torch.float64)
    cut = torch.searchsorted(below, (1 - p.double())[:, None] * below[:, -1:], right=True).clamp(max=vocab - 1)
    nucleus = ascending.gather(1, cut)[:, 0].masked_fill(p >= 1, 0)
    return torch.maximum(kth, nucleus)


def sort(w: Tensor) -> Tensor:
    """Each row of w [M, V] f32 in ascending order, in new memory."""
    if w.device.type == "cpu":  # numpy sorts with vector instructions: 3 ms for 64 rows of 16,000, torch takes 58 ms
        return torch.from_numpy(np.sort(w.numpy(), axis=-1))
    return w.sort(-1).values


def lane_sums(w: Tensor) -> Tensor:
    """[M, V / LANES] f64: sums of consecutive LANES weights of w [M, V], each taken in float32 (six times faster)."""
    return w.view(len(w), -1, LANES).sum(-1).double()


def inverse_cdf(w: Tensor, u: Tensor) -> Tensor:
    """[M] i64: the first token whose running sum of w [M, V] exceeds u [M] f64 times the row's sum.

    In two levels, so that the running sum is taken over V / LANES + LANES numbers instead of V.
    """
    groups = lane_sums(w).cumsum(-1)
    total = groups[:, -1]
    # Never past the end: rounding of u * total must not step over the last token with weight.
    goal = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    group = (groups > goal[:, None]).int().argmax(-1)
    before = torch.where(group > 0, groups.gather(1, (group - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    at = torch.arange(len(w), device=w.device)
    lanes = w.view(len(w), -1, LANES)[at, group].cumsum(-1, dtype=torch.float64)
    rest = torch.minimum(goal - before, torch.nextafter(lanes[:, -1], torch.zeros_like(total)))
    return group * LANES + (lanes > rest[:, None]).int().argmax(-1)


def uniform(seed: Tensor, sibling: Tensor, position: Tensor) -> Tensor:
    """[M] f64 in [0, 1): a hash of three i64 tensors [M], no state, so any position can be drawn at any time.

    Three rounds of the SplitMix64 finaliser (Steele, Lea, Flood, OOPSLA 2014) on wrapping 64-bit integers.
    """
    h = _mix(seed + _GOLDEN)
    h = _mix(h ^ (sibling + _GOLDEN))
    h = _mix(h ^ (position * _GOLDEN))
    return _shift(h, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)
