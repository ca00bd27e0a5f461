"""The drafter of csrc/cpu/drafter.h, which follows the tokens of sequences and finds drafts for them."""

from __future__ import annotations

import torch


def drafter_open(slots: int, own: int, recent: int, owners: int) -> int:
    """Return a new drafter (csrc/cpu/drafter.h); `drafter_close` ends it.

    own, recent  tokens that it keeps of a slot and of an owner's answers; owners: most of these"""
    drafter: int = torch.ops.quire.drafter_open.default(slots, own, recent, owners)
    return drafter


def drafter_close(drafter: int) -> None:
    torch.ops.quire.drafter_close.default(drafter)


def drafter_begin(
    drafter: int, slot: int, owner: str, tokens: list[int], prompt_len: int, predicted: list[int]
) -> None:
    """Follow a sequence in a slot from now on."""
    torch.ops.quire.drafter_begin.default(drafter, slot, owner, tokens, prompt_len, predicted)


def drafter_extend(drafter: int, slot: int, tokens: list[int]) -> None:
    """Append those of a slot's tokens that the drafter has not."""
    length = torch.ops.quire.drafter_length.default(drafter, slot)
    torch.ops.quire.drafter_extend.default(drafter, slot, tokens[length:])


def drafter_find(drafter: int, slots: torch.Tensor, tokens: torch.Tensor, count: int, least: int) -> list[int]:
    """Append a token to each slot.  Returns slot, match, source, count and drafts, for each slot that has some.

    slots, tokens  i64 on the host, of which the first `count` are read"""
    flat: list[int] = torch.ops.quire.drafter_find.default(drafter, slots, tokens, count, least)
    return flat


def drafter_end(drafter: int, slot: int, keep: bool) -> None:
    """Forget a slot; `keep`: its answer is one of its owner's recent ones from now on."""
    torch.ops.quire.drafter_end.default(drafter, slot, keep)
