"""Beam search, as transformers defines it: chooses the beams of the next step, and keeps the best answers so far.

    rows: the top-k next tokens of every running beam, with log-probabilities
      |  + score of the beam
      v
    the best `kept` candidates of all rows       kept = max(2, 1 + EOS tokens) * width
      |                    |
      | no EOS token       | EOS token, and among the first `width`
      v                    v
    the best `width`:    answers: score / length ** length_penalty,
    the next beams       the best `width` of old and new answers

`kept` is large enough that `width` candidates remain even if every beam ends with every EOS token.

Scores are float32 sums, rounded after each token, because transformers adds float32 tensors.  Python computes in
float64: adding two float32 values in float64 and rounding the sum to float32 gives the exact float32 sum.

This module only computes scores.  `beam_groups.py` gives the beams their slots and blocks.

Source: transformers 5, `GenerationMixin._beam_search` in generation/utils.py, with do_sample=False.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_float
from heapq import merge
from itertools import islice
from typing import NamedTuple

from quire.engine.wire.messages import Beams

NEVER = -1e9  # score of a beam that cannot be chosen
Row = tuple[Sequence[int], Sequence[float]]  # token ids and log-probabilities in float32, most probable first


class Path(NamedTuple):
    """The tokens of a beam as a linked list, the last token first.  Beams with a common prefix share its links."""

    token: int
    logprob: float
    before: Path | None

    def unroll(self) -> tuple[list[int], list[float]]:
        """Return (tokens, log-probabilities), the first token first."""
        links: list[Path] = []
        at: Path | None = self
        while at is not None:
            links.append(at)
            at = at.before
        links.reverse()
        return [link.token for link in links], [link.logprob for link in links]


class Beam(NamedTuple):
    """A sequence that has not ended."""

    score: float  # sum of the log-probabilities of its tokens
    path: Path | None  # None: no token yet


class Answer(NamedTuple):
    """A beam that has ended."""

    score: float  # sum of the log-probabilities / length ** length_penalty; the EOS token counts
    path: Path
    stopped: bool  # True: its last token is an EOS token; False: it reached the maximum length


class Child(NamedTuple):
    """A beam of the next step: beam `parent` of this step, an index into `running`, and the token appended to it."""

    parent: int
    token: int


class BeamSearch:
    """One beam search.  Call `advance` with the candidates of the running beams until `done`; then read `answers`."""

    def __init__(
        self, beams: Beams, stops: frozenset[int], max_tokens: int, *, min_tokens: int = 0, vocab_size: int = 0
    ) -> None:
        """`stops`: tokens that end a beam once it has `min_tokens`.  `max_tokens`: maximum output length of a beam.
        `vocab_size`: upper bound of `row_size`; 0: unknown."""
        self.width = beams.width
        self.length = 0  # tokens of every running beam
        self.done = False
        self.running = [Beam(0.0, None)] + [Beam(NEVER, None)] * (beams.width - 1)  # best first
        self.answers: list[Answer] = []  # best first, `width` at most
        self._stops, self._max_tokens, self._min_tokens = stops, max_tokens, min_tokens
        self._length_penalty = beams.length_penalty
        # One beam is greedy search, which transformers ends at the first EOS token.
        self._early_stopping = beams.early_stopping if beams.width > 1 else True
        self._kept = max(2, 1 + len(stops)) * beams.width
        # Before `min_tokens` the search skips EOS tokens among the candidates.
        wanted = self._kept + (len(stops) if min_tokens else 0)
        self.row_size = min(wanted, vocab_size) if vocab_size else wanted  # candidates needed per beam

    @property
    def started(self) -> bool:
        """Whether the beams have output tokens, so that each beam has its own candidates."""
        return self.length > 0

    def advance(self, rows: Sequence[Row]) -> list[Child]:
        """Choose the beams of the next step.  `rows`: candidates per running beam, in order; one entry at first.

        Returns the `width` next beams, best first; an empty list when the search is done."""
        before = self.running
        if not self.started:
            rows = [rows[0]] * self.width
        length = self.length + 1
        best = list(islice(self._candidates(rows), self._kept))
        ends = [length >= self._max_tokens or token in self._stops for _, _, token, _ in best]
        divisor = self._divisor(length)
        for (score, parent, token, logprob), end in zip(best[: self.width], ends, strict=False):
            if end:
                path = Path(token, logprob, before[parent].path)
                self.answers.append(Answer(_float32(score / divisor), path, token in self._stops))
        self.answers.sort(key=lambda answer: -answer.score)  # stable: of answers with equal scores the older stays
        del self.answers[self.width :]
        # Candidates that end come last: they are chosen only if the vocabulary is too small for `width` others.
        order = sorted(range(len(best)), key=lambda i: -_float32(best[i][0] + NEVER) if ends[i] else -best[i][0])
        chosen = [best[i] for i in order[: self.width]]
        self.running = [
            Beam(_float32(score + NEVER) if ends[i] else score, Path(token, logprob, before[parent].path))
            for i, (score, parent, token, logprob) in zip(order, chosen, strict=False)
        ]
        self.length = length
        self.done = all(ends) or not self._may_improve()
        if self.done:
            return []
        last = 0 if length == 1 else self.width - 1  # before the first token all beams are the same beam
        return [Child(min(parent, last), token) for _, parent, token, _ in chosen]

    def _candidates(self, rows: Sequence[Row]) -> Iterator[tuple[float, int, int, float]]:
        """Iterate over (score, beam, token, log-probability) of all candidates, best first.

        Equal scores are ordered by beam, then by position among the beam's candidates.  Lazy: reads one entry per beam
        ahead."""
        withheld = self._stops if self.length < self._min_tokens else frozenset()

        def of_beam(number: int, row: Row) -> Iterator[tuple[float, int, int, int, float]]:
            score = self.running[number].score
            for at, (token, logprob) in enumerate(zip(*row, strict=True)):
                if token not in withheld:
                    yield -_float32(score + logprob), number, at, token, logprob

        ordered = merge(*(of_beam(number, row) for number, row in enumerate(rows)))
        return ((-negated, number, token, logprob) for negated, number, _, token, logprob in ordered)

    def _may_improve(self) -> bool:
        """Return whether a running beam may still score higher than the worst answer, by transformers' rule."""
        if len(self.answers) < self.width:
            return True
        if self._early_stopping is True:
            return False
        longest = self._early_stopping == "never" and self._length_penalty > 0
        divisor = self._divisor(self._max_tokens if longest else self.length)
        return _float32(self.running[0].score / divisor) > self.answers[-1].score

    def _divisor(self, length: int) -> float:
        return _float32(length**self._length_penalty)


def _float32(value: float) -> float:
    """Round to float32; values beyond its range become infinite."""
    return c_float(value).value
