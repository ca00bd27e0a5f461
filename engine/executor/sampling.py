"""Logits -> tokens, for all rows of a step at once.  A table on the device holds each slot's settings.

Order of operations on a row's logits (float32), the one transformers uses where it has the same control:

    raw logits ──────────────────────────────────────────────> log-softmax: the logprobs we report
       └ grammar ─ repetition penalty ─ presence, frequency ─ logit_bias ─ allowed ids, min_tokens (masks) = adjusted
    adjusted ── temperature 0: argmax
             └─ else w = exp((logit - max) / temperature), filters top_k, top_p, min_p, one draw by inverse CDF

Every filter keeps an *upper set* of the weights w: all tokens at least as likely as some floor.  So the filters of a
row come down to one number, the highest of three floors.  Tokens exactly as likely as the last one kept are kept too.

The draw takes u = hash(seed, sibling, output position) in [0, 1).  The token is the first, in vocabulary order, at
which the running sum of w passes u * total.  Sums are of integers (csrc/sampling_rules.h), so a token is a function of
(logits, seed, sibling, position).  Preemption, other requests, crashes and the kind of device do not change it.

All of that is one operator, `ops.sample`.  Here is what it reads:

    table [max_seqs, 9] i64      a RECORD for each slot, on the device
      slot 3: seed ... marks ──> line [V] i32   in the prompt? a stop id? allowed? how often in the output
                       bias ───> line [V] f32   logit_bias, only where asked for
                       mask ───> row [V / 32]   a bit for each token that the grammar allows: masks.py

Records hold addresses of lines, not tensors: lines are taken and given back while recorded CUDA graphs keep reading
the one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.plan import Sampler
from engine.executor import ops
from engine.executor.grammars import Follower, Grammars
from engine.executor.masks import Masks
from engine.wire.messages import Sampling, TokenLogprob

# Prompt positions whose logits exist at one time, in the model's dtype and as a float32 log-softmax.  128 rows of 256k
# tokens take 0.3 GB.  Reading the head again for every 128 rows takes a GPU a few per cent of a scoring step.
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
COLDEST = 1e30  # scales stay finite, so that 0 * scale is 0

# What became of a row: as in csrc/sampling_rules.h.
CHOSEN, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2

# bits of a mark; the lower ones count the token in the output
IN_PROMPT, STOP, FORBIDDEN = 1 << 31, 1 << 30, 1 << 29


class Lines:
    """Vectors of one number per token of the vocabulary, for the rare rows that need one.

    Taken from chunks that double, so there are as many as ever were in use together, and none ever moves.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._vocab = vocab_size
        self._dtype = dtype
        self._device = device
        self._have = 0
        self._spare: list[Tensor] = []

    def take_line(self, values: npt.NDArray[np.generic]) -> Tensor:
        """A line [V] with these values, copied without waiting for the device."""
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
    """Copy from the host, in stream order; the host does not wait, and `values` may change at once."""
    if to.is_cuda:
        values = values.pin_memory()  # torch keeps the pinned copy until the device has read it
    to.copy_(values, non_blocking=True)


class SamplerBank:
    """The sampling state of each slot.  Call `assign` before a slot's first sample, `free` when its sequence ends.

    A step: `assign` and `free`, then `flush`, `fill_masks`, `run`, then `Grammars.advance`.  `run` only launches,
    with sizes the host knows, so a CUDA graph may record it.  There is one for `general` false and one for true, for
    each N.  A recorded graph also serves slots that are filled later. `general` chooses between the two; where it is
    false, both give the same tokens.
    """

    def __init__(
        self, *, max_seqs: int, vocab_size: int, device: torch.device, following: tuple[Grammars, Masks] | None = None
    ) -> None:
        """`following`: the grammars, and the masks that they write; None where no slot can follow one."""
        self._vocab = vocab_size
        self._device = device
        self._grammars: Grammars | None
        self._masks: Masks | None
        self._grammars, self._masks = following or (None, None)
        self._records = np.zeros(max_seqs, RECORD)
        self._words = torch.from_numpy(self._records.view(np.int64).reshape(max_seqs, -1))
        # On a CPU this is the same memory, and there is nothing to flush.
        self._table = self._words.to(device)
        self._marks = Lines(vocab_size, torch.int32, device)
        self._biases = Lines(vocab_size, torch.float32, device)
        self._held: dict[int, list[tuple[Lines, Tensor]]] = {}
        self.reset()

    def reset(self) -> None:
        """Free every slot."""
        for slot in list(self._held):
            self._give_back(slot)
        if self._grammars is not None:
            self._grammars.reset()
        self._general: set[int] = set()
        self._top_logprobs: dict[int, int] = {}
        self._changed: set[int] = set()

    @property
    def general(self) -> bool:
        """Whether any slot needs more than the likeliest token of its raw logits.  Constant time."""
        return bool(self._general)

    @property
    def reporting(self) -> bool:
        """Whether any slot reports logprobs.  Constant time."""
        return bool(self._top_logprobs)

    def assign(self, slot: int, sampler: Sampler) -> None:
        """Give a slot the settings of the sequence that starts in it.  Takes effect with the next `flush`."""
        self.free(slot)
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
        if s.grammar:  # it holds back the stop tokens, too
            if self._grammars is None or self._masks is None:
                raise RuntimeError("a request with a grammar reached an executor that cannot follow one")
            self._grammars.assign(slot, sampler)
            record["mask"] = self._masks.address(slot)
        lines = []
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
        if s.temperature > 0 or lines or s.grammar:
            self._general.add(slot)
        if s.logprobs >= 0:
            self._top_logprobs[slot] = min(s.logprobs, self._vocab)
        self._changed.add(slot)

    def free(self, slot: int) -> None:
        """Forget the settings of a slot; harmless when it never sampled."""
        self._give_back(slot)
        self._general.discard(slot)
        self._top_logprobs.pop(slot, None)
        if self._grammars is not None:
            self._grammars.free(slot)

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
        """Copy what `assign` changed to the device: one copy and one scatter, if anything changed; never waits."""
        if self._changed and self._table.is_cuda:
            slots = torch.tensor(sorted(self._changed), dtype=torch.int64)
            staged = torch.empty(len(slots), 1 + self._words.shape[1], dtype=torch.int64, device=self._device)
            send(torch.cat([slots[:, None], self._words[slots]], 1), staged)
            self._table.index_copy_(0, staged[:, 0], staged[:, 1:])
        self._changed.clear()

    @property
    def following(self) -> bool:
        """Whether any slot follows a grammar.  Constant time."""
        return self._grammars is not None and self._grammars.active

    def begin_masks(self) -> None:
        """Begin to find out what each slot may sample now, while the model runs.  Needs all tokens before it."""
        if self._grammars is not None and self._grammars.active:
            self._grammars.begin_fill()

    def fill_masks(self) -> None:
        """Let the grammars say what each slot may sample now.  Needs all tokens before it."""
        if self._grammars is not None and self._masks is not None and self._grammars.active:
            self._grammars.fill()
            self._masks.send(self._grammars.slots)

    def followers(self, slots: Sequence[int]) -> list[Follower]:
        """Return those of a step's slots that follow a grammar."""
        return [] if self._grammars is None else self._grammars.followers(slots)

    def run(self, logits: Tensor, slots: Tensor, known: Tensor, tokens: Tensor, outcome: Tensor, general: bool) -> None:
        """Choose one token for each row; only launches.

        logits   [N, V] of the model's dtype, not changed
        slots    [N] i64, the slot that each row samples for; -1: padding, whose token is 0 and whose outcome is CHOSEN
        known    [N] i64, tokens before the one chosen now
        tokens   [N] i64, written
        outcome  [N] u8, written
        general  may be true for any rows, and must be true if `self.general` is
        """
        if logits.shape[1] != self._vocab:
            raise ValueError(f"logits of {logits.shape[1]} tokens, the vocabulary has {self._vocab}")
        ops.sample(logits, slots, known, self._table, general, tokens, outcome)

    def logprobs(self, logits: Tensor, slots: tuple[int, ...], tokens: Tensor) -> Logprobs | None:
        """Logprobs of the sampled tokens [N], for the slots that report them; None where none does."""
        if not self.reporting:
            return None
        asked = [(i, slot, self._top_logprobs[slot]) for i, slot in enumerate(slots) if slot in self._top_logprobs]
        if not asked:
            return None
        at = torch.empty(len(asked), dtype=torch.int64, device=self._device)
        send(torch.tensor([i for i, _, _ in asked], dtype=torch.int64), at)
        return logprobs_of(logits, tokens[at], [(slot, top) for _, slot, top in asked], at)


def has_penalty(s: Sampling) -> bool:
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of L tokens and of the likeliest in their places.

    On the host, or on their way there: read them once the step that they belong to is done.
    """

    asked: list[tuple[int, int]]  # [L]: slot, and how many of the likeliest tokens to report
    chosen: list[Tensor]  # all of them, in pieces: [.] f32
    likeliest: list[tuple[Tensor, Tensor]]  # in the same pieces: token ids [., most] i64, log-probabilities f32

    def entries(self) -> list[TokenLogprob]:
        """One for each of the L tokens."""
        own = [logprob for piece in self.chosen for logprob in piece.tolist()]
        tops = [
            list(zip(ids, values, strict=True))
            for piece_ids, piece_values in self.likeliest
            for ids, values in zip(piece_ids.tolist(), piece_values.tolist(), strict=True)
        ]
        return [TokenLogprob(p, top[:count]) for p, top, (_, count) in zip(own, tops, self.asked, strict=True)]

    def by_slot(self) -> dict[int, TokenLogprob]:
        return {slot: entry for (slot, _), entry in zip(self.asked, self.entries(), strict=True)}


def logprobs_of(logits: Tensor, tokens: Tensor, asked: list[tuple[int, int]], rows: Tensor | None = None) -> Logprobs:
    """From raw logits [., V], of tokens [L]: row i of the logits belongs to token i, or row rows[i] where given."""
    return logprobs_from(lambda part: logits[part] if rows is None else logits[rows[part]], tokens, asked)


def logprobs_from(logits_of: Callable[[slice], Tensor], tokens: Tensor, asked: list[tuple[int, int]]) -> Logprobs:
    """Of tokens [L], from the raw logits [., V] that `logits_of` has for a part of them, TARGET_ROWS at most."""
    chosen, likeliest = [], []
    most = max(count for _, count in asked)
    for first in range(0, len(asked), TARGET_ROWS):
        part = slice(first, first + TARGET_ROWS)
        logp = logits_of(part).float().log_softmax(-1)
        chosen.append(logp.gather(1, tokens[part, None])[:, 0].to("cpu", non_blocking=True))
        values, ids = logp.topk(most, dim=-1)
        likeliest.append((ids.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)))
    return Logprobs(asked, chosen, likeliest)
