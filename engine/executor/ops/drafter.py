"""The drafter of csrc/cpu/drafter.h, which records the tokens of sequences and finds drafts for them."""

from __future__ import annotations

import torch


def drafter_open(slots: int, own: int, recent: int, owners: int) -> int:
    """Return the handle of a new drafter (csrc/cpu/drafter.h); `drafter_close` ends it.

    own, recent  maximum tokens kept per slot, and per owner of answers;  owners: maximum number of owners"""
    drafter: int = torch.ops.quire.drafter_open.default(slots, own, recent, owners)
    return drafter


def drafter_close(drafter: int) -> None:
    torch.ops.quire.drafter_close.default(drafter)


def drafter_begin(
    drafter: int, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]
) -> None:
    """Record a sequence in a slot from now on."""
    torch.ops.quire.drafter_begin.default(drafter, slot, owner, tokens, prompt_len, predicted)


def drafter_extend(drafter: int, slot: int, tokens: list[int]) -> None:
    """Append the tokens of a slot that the drafter does not have yet."""
    length = torch.ops.quire.drafter_length.default(drafter, slot)
    torch.ops.quire.drafter_extend.default(drafter, slot, tokens[length:])


def drafter_find(drafter: int, slots: torch.Tensor, tokens: torch.Tensor, count: int, min_match: int) -> list[int]:
    """Append a token to each slot.  Returns slot, match, source, count and drafts, for each slot that has drafts.

    slots, tokens  i64 on the host, of which the first `count` are read"""
    flat: list[int] = torch.ops.quire.drafter_find.default(drafter, slots, tokens, count, min_match)
    return flat


def drafter_end(drafter: int, slot: int, keep: bool) -> None:
    """Clear a slot.  keep: later drafts of the same tenant may be taken from the slot's answer."""
    torch.ops.quire.drafter_end.default(drafter, slot, keep)
