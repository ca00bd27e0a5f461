"""Scores of items: how probable a label token is after a query and each item.

    query, items --prompts--> a prompt for each item --the engine, one position each--> log probabilities of the labels
    log probabilities --score--> the probability of the first label

Query and item are encoded apart, so a query's tokens are the same for all items and its KV cache is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

Encode = Callable[[str, bool], list[int]]  # a text, and whether the tokenizer adds its special tokens


class Scoring(msgspec.Struct, frozen=True):
    """What a request scores."""

    query: str | list[int]
    labels: list[int]  # token ids, each once; the first one is scored
    softmax: bool  # probabilities among the labels; else among the vocabulary
    item_first: bool  # a prompt is item and query; else query and item

    def prompts(self, items: list[str | list[int]], encode: Encode, *, special: bool) -> Iterator[list[int]]:
        """Yield the token ids of each item's prompt.  `special`: a text at its beginning gets special tokens."""
        query = self._ids(self.query, encode, special=special and not self.item_first)
        for item in items:
            ids = self._ids(item, encode, special=special and self.item_first)
            yield [*ids, *query] if self.item_first else [*query, *ids]

    def _ids(self, part: str | list[int], encode: Encode, *, special: bool) -> list[int]:
        return encode(part, special) if isinstance(part, str) else part

    def score(self, logprobs: dict[int, float]) -> float:
        """Return the score of an item.  `logprobs`: of each label at the position after the prompt."""
        first = logprobs[self.labels[0]]
        if not self.softmax:
            return math.exp(first)
        highest = max(logprobs[label] for label in self.labels)
        if highest == -math.inf:  # no label can follow
            return 0.0
        return math.exp(first - highest) / math.fsum(math.exp(logprobs[label] - highest) for label in self.labels)
