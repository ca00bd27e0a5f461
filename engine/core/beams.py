"""Beam search, as transformers defines it: which sequences live on, and which answers are the best so far.

    rows: the likeliest next tokens of every running beam, with log-probabilities
      |  + score of the beam
      v
    the best `kept` of all rows, best first      kept = max(2, 1 + end tokens) * width
      |                    |
      | do not end         | end, and among the first `width`
      v                    v
    the best `width`:    answers: score / length ** length_penalty,
    the next beams       the best `width` of old and new

`kept` is large enough that `width` candidates are left when every beam ends with every EOS token.

Scores are sums in float32, rounded after each token, because transformers adds tensors of float32.  Python's floats
are float64.  A sum of two float32 that is rounded to float64 first, then to float32, is the float32 sum.

This module knows numbers only.  `beam_groups.py` gives the beams their slots and blocks.

Source: transformers 5, `GenerationMixin._beam_search` in generation/utils.py, with do_sample=False.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_float
from heapq import merge
from itertools import islice
from typing import NamedTuple

from quire.engine.wire.messages import Beams

NEVER = -1e9  # the score of what cannot be chosen
Row = tuple[Sequence[int], Sequence[float]]  # token ids and log-probabilities in float32, most probable first


class Path(NamedTuple):
    """The tokens of a beam, the last one first.  Beams with a common beginning share it."""

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

    score: float  # sum of its log-probabilities
    path: Path | None  # None: no token yet


class Answer(NamedTuple):
    """A beam that has ended."""

    score: float  # sum of its log-probabilities / length ** length_penalty; the EOS token counts
    path: Path
    stopped: bool  # its last token is an EOS token; else it reached the maximum length


class Child(NamedTuple):
    """A beam of the next step: beam `parent` of this step, by its place in `running`, and one token more."""

    parent: int
    token: int


class BeamSearch:
    """One search.  `advance` it with the rows of the running beams until `done`; then `answers` has the best first."""

    def __init__(
        self, beams: Beams, stops: frozenset[int], most_tokens: int, *, min_tokens: int = 0, vocab_size: int = 0
    ) -> None:
        """`stops`: tokens that end a sequence, not before it has `min_tokens`.  `most_tokens`: its maximum length.
        `vocab_size` bounds `row_size`; 0: it is not known."""
        self.width = beams.width
        self.length = 0  # tokens of every running beam
        self.done = False
        self.running = [Beam(0.0, None)] + [Beam(NEVER, None)] * (beams.width - 1)  # best first
        self.answers: list[Answer] = []  # best first, `width` at most
        self._stops, self._most_tokens, self._min_tokens = stops, most_tokens, min_tokens
        self._length_penalty = beams.length_penalty
        # One beam is greedy search, which transformers ends at the first EOS token.
        self._early_stopping = beams.early_stopping if beams.width > 1 else True
        self._kept = max(2, 1 + len(stops)) * beams.width
        # Before `min_tokens` the EOS tokens of a row are passed over.
        wanted = self._kept + (len(stops) if min_tokens else 0)
        self.row_size = min(wanted, vocab_size) if vocab_size else wanted  # candidates that each row must have

    @property
    def started(self) -> bool:
        """Whether the beams have tokens, so that each has a row of its own."""
        return self.length > 0

    def advance(self, rows: Sequence[Row]) -> list[Child]:
        """Take the rows of the running beams, in their order; before the first token there is one row for all.

        Returns the beams of the next step, best first, `width` of them; none when the search is done."""
        before = self.running
        if not self.started:
            rows = [rows[0]] * self.width
        length = self.length + 1
        best = list(islice(self._candidates(rows), self._kept))
        ends = [length >= self._most_tokens or token in self._stops for _, _, token, _ in best]
        divisor = self._divisor(length)
        for (score, parent, token, logprob), end in zip(best[: self.width], ends, strict=False):
            if end:
                path = Path(token, logprob, before[parent].path)
                self.answers.append(Answer(_float32(score / divisor), path, token in self._stops))
        self.answers.sort(key=lambda answer: -answer.score)  # stable: of equal ones the older stays
        del self.answers[self.width :]
        # Those that end are last.  They are chosen only where the vocabulary is too small to leave others.
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
        last = 0 if length == 1 else self.width - 1  # before the first token all beams are the same one
        return [Child(min(parent, last), token) for _, parent, token, _ in chosen]

    def _candidates(self, rows: Sequence[Row]) -> Iterator[tuple[float, int, int, float]]:
        """Iterate over (score, beam, token, log-probability) of all rows, best first.

        Of equal ones that of the earlier beam comes first, then what is earlier in its row.  Reads no more of a row
        than is taken from it, and one."""
        withheld = self._stops if self.length < self._min_tokens else frozenset()

        def of_beam(number: int, row: Row) -> Iterator[tuple[float, int, int, int, float]]:
            score = self.running[number].score
            for at, (token, logprob) in enumerate(zip(*row, strict=True)):
                if token not in withheld:
                    yield -_float32(score + logprob), number, at, token, logprob

        ordered = merge(*(of_beam(number, row) for number, row in enumerate(rows)))
        return ((-negated, number, token, logprob) for negated, number, _, token, logprob in ordered)

    def _may_improve(self) -> bool:
        """Return whether a running beam may still become a better answer than the worst one, by transformers' rule."""
        if len(self.answers) < self.width:
            return True
        if self._early_stopping is True:
            return False
        longest = self._early_stopping == "never" and self._length_penalty > 0
        divisor = self._divisor(self._most_tokens if longest else self.length)
        return _float32(self.running[0].score / divisor) > self.answers[-1].score

    def _divisor(self, length: int) -> float:
        return _float32(length**self._length_penalty)


def _float32(value: float) -> float:
    """Round to float32; what is too large becomes infinite."""
    return c_float(value).value
