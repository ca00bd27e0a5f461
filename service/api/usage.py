"""Counts the tokens of one answer for OpenAI's `usage`."""

from __future__ import annotations

import statistics
from typing import Any

from quire.engine.wire.messages import Predictions
from quire.service.api.valid_request import ValidRequest
from quire.service.output.choice_delta import ChoiceDelta


class UsageCount:
    """Counts tokens of prompts, choices, reasoning, drafts and beam search while an answer is written."""

    def __init__(self, valid: ValidRequest, prompt_tokens: list[int]) -> None:
        """`prompt_tokens`: number of tokens of each prompt."""
        choices = len(prompt_tokens) * valid.n
        self._valid, self._prompt_tokens = valid, sum(prompt_tokens)
        self.tokens = [0] * choices  # output tokens so far, per choice
        self._cached = [0] * len(prompt_tokens)  # prompt tokens found in the prefix cache, per prompt
        self._reasoning = [0] * choices  # tokens of the reasoning, per choice
        self._predictions: list[Predictions] = [(0, 0)] * choices  # drafts from `prediction`: (accepted, rejected)
        self._searched = 0  # tokens computed by beam search that are in no answer
        self._shared = [0.0] * len(prompt_tokens)  # fraction of KV cache that the beams shared, per prompt

    def skip(self, tokens: list[int], cached: list[int], reasoning: list[int], predictions: list[Predictions]) -> None:
        """Continue after the tokens that a resuming client already has.  Each list has one entry per choice."""
        self.tokens, self._reasoning, self._predictions = tokens, reasoning, predictions
        for choice, found in enumerate(cached):
            self._record_cached(choice, found)

    def add(self, delta: ChoiceDelta) -> None:
        """Count the tokens of a delta."""
        self.tokens[delta.choice] += len(delta.token_ids)
        self._searched += delta.searched
        if delta.shared:
            self._shared[delta.choice // self._valid.n] = delta.shared
        if delta.predictions is not None:
            self._predictions[delta.choice] = delta.predictions
        if delta.reasoning_tokens:
            self._reasoning[delta.choice] = delta.reasoning_tokens
        if delta.cached_tokens:
            self._record_cached(delta.choice, delta.cached_tokens)

    def _record_cached(self, choice: int, tokens: int) -> None:
        prompt = choice // self._valid.n
        self._cached[prompt] = max(self._cached[prompt], tokens)

    def fields(self) -> dict[str, Any]:
        """Return OpenAI's `usage`.  A prompt counts once, however many choices it has."""
        prompt, completion = self._prompt_tokens, sum(self.tokens)
        found = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        details: dict[str, float] = {}
        if self._valid.reading is not None:
            details["reasoning_tokens"] = sum(self._reasoning)
        if self._valid.prediction is not None:
            computed = sum(sum(counts) for counts in self._predictions)
            # A stop string may end the answer before the engine's last accepted drafts.
            pairs = zip(self._predictions, self.tokens, strict=True)
            accepted = sum(min(counts[0], tokens) for counts, tokens in pairs)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = computed - accepted
        if self._valid.beams is not None:
            details["searched_tokens"] = self._searched
            details["shared_kv_fraction"] = round(statistics.fmean(self._shared), 4)
        return {**found, "completion_tokens_details": details} if details else found
