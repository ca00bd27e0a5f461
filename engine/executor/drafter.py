"""Finds drafts in a sequence's own text, its owner's recent answers and the client's prediction.

csrc/cpu/drafter.h finds the matches, in one call per step for all slots.  It runs on the host and needs no model, so it
does not depend on ranks and devices.
"""

from __future__ import annotations

import struct

import torch

from quire.engine.core.plan import Draft
from quire.engine.executor import ops

# Limits of the tokens that are searched.  Each takes 19 to 30 bytes: at most 120 MiB for 256 slots with OWN_TOKENS
# tokens, and 2 MiB per owner.
OWN_TOKENS = 16_384  # maximum tokens of a sequence's prompt and answer, the last ones
RECENT_TOKENS = 65_536  # maximum tokens of an owner's answers, the last ones
OWNERS = 64  # maximum owners whose answers are searched, those with the latest requests


class SuffixDrafter:
    """Implements `quire.engine.core.drafts.Drafter`.  Not thread-safe: the loop owns it.  Kernels must be loaded."""

    def __init__(self, slots: int) -> None:
        self._drafter = ops.drafter_open(slots, OWN_TOKENS, RECENT_TOKENS, OWNERS)
        # Lists reach the native call through these tensors: torch takes three times as long to convert a list.
        self._last: list[int] = []  # the slots that are in the tensor `_slots`
        self._slots, self._tokens = torch.empty(slots, dtype=torch.int64), torch.empty(slots, dtype=torch.int64)
        self._bytes = [one.numpy().data.cast("B") for one in (self._slots, self._tokens)]

    def begin(self, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]) -> None:
        ops.drafter_begin(self._drafter, slot, owner, tokens, prompt_len, predicted)

    def extend(self, slot: int, tokens: list[int]) -> None:
        ops.drafter_extend(self._drafter, slot, tokens)

    def find(self, slots: list[int], tokens: list[int], min_match: int) -> list[Draft]:
        count = len(slots)
        if slots != self._last:
            struct.pack_into(f"{count}q", self._bytes[0], 0, *slots)
            self._last = list(slots)
        struct.pack_into(f"{count}q", self._bytes[1], 0, *tokens)
        flat = ops.drafter_find(self._drafter, self._slots, self._tokens, count, min_match)
        found, at = [], 0
        while at < len(flat):
            slot, match, source, count = flat[at : at + 4]
            found.append(Draft(slot, flat[at + 4 : at + 4 + count], match, source))
            at += 4 + count
        return found

    def end(self, slot: int, *, keep: bool) -> None:
        ops.drafter_end(self._drafter, slot, keep)

    def close(self) -> None:
        ops.drafter_close(self._drafter)
