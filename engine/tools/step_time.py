"""The time of a step in simulations."""

from __future__ import annotations

import msgspec


class StepTime(msgspec.Struct, frozen=True):
    """Model of a step's time, in seconds."""

    fixed: float = 0.010  # seconds per step
    row: float = 0.0002  # seconds per decoding sequence
    prompt_token: float = 0.00005  # seconds per prompt token

    def __call__(self, rows: int, prompt_tokens: int) -> float:
        return self.fixed + self.row * rows + self.prompt_token * prompt_tokens
