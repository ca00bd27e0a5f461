"""Scores of items: the probability of a label token after a query and an item.

    query, items --prompts--> one prompt per item --engine, one position each--> log probabilities of the labels
    log probabilities --score--> the probability of the first label

Query and item are encoded separately, so all prompts share the query's tokens and its KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

Encode = Callable[[str, bool], list[int]]  # a text, and whether the tokenizer adds its special tokens


class Scoring(msgspec.Struct, frozen=True):
    """Parameters of a scoring request, except the items."""

    query: str | list[int]
    labels: list[int]  # distinct token ids; the score is the probability of the first one
    softmax: bool  # normalise over the labels; otherwise over the vocabulary
    item_first: bool  # a prompt is item + query; otherwise query + item

    def prompts(self, items: list[str | list[int]], encode: Encode, *, special: bool) -> Iterator[list[int]]:
        """Yield the token ids of each item's prompt.  `special`: add the tokenizer's special tokens at its start."""
        query = self._ids(self.query, encode, special=special and not self.item_first)
        for item in items:
            ids = self._ids(item, encode, special=special and self.item_first)
            yield [*ids, *query] if self.item_first else [*query, *ids]

    def _ids(self, part: str | list[int], encode: Encode, *, special: bool) -> list[int]:
        return encode(part, special) if isinstance(part, str) else part

    def score(self, logprobs: dict[int, float]) -> float:
        """Return the score of an item.  `logprobs`: label -> its log probability at the position after the prompt."""
        first = logprobs[self.labels[0]]
        if not self.softmax:
            return math.exp(first)
        highest = max(logprobs[label] for label in self.labels)
        if highest == -math.inf:  # every label has probability 0
            return 0.0
        return math.exp(first - highest) / math.fsum(math.exp(logprobs[label] - highest) for label in self.labels)
