"""Layouts in which a StepPlan's values are copied to the device, and the buffers of decode steps.

`batch.py` fills them on the host and applies them on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.executor.drafts import DraftRows
from quire.engine.executor.shapes import Shape
from quire.engine.executor.staging import Array
from quire.engine.executor.step_tensors import Targets


class Page(NamedTuple):
    """The tensors of a step with slices, T = decodes + tokens and S = decodes + slices; on the host or on the device.

    They are contiguous in one buffer, so that one copy sends them and a CUDA graph finds them at the same addresses.
    The entries of decoding slots stay empty: only the device has their values.
    """

    ids: Any  # [T] i64
    positions: Any  # [T] i64
    kv_indices: Any  # [T] i64; -1: padding
    logits_at: Any  # [logits] i64
    sample_seqs: Any  # [samples] i64: the sequence from which each sampling slot continues
    slots: Any  # [decodes] i32; -1: padding
    rows: Any  # [S] i32
    lens: Any  # [S] i32; 0: padding
    q_start: Any  # [S + 1] i32
    windows: Any  # [groups, T] i64: as `kv_indices`, for each window group

    @classmethod
    def view(cls, memory: Any, shape: Shape, int32: Any, groups: int) -> Page:
        """Return views of `memory`, an array or tensor of `words(shape, groups)` int64.

        int32: numpy's or torch's int32.  groups: number of window groups."""
        views, at = [], 0
        for size, wide in cls._sizes(shape):
            words = size if wide else -(-size // 2)
            part = memory[at : at + words]
            views.append(part if wide else part.view(int32)[:size])
            at += words
        return cls(*[*views, memory[at:].reshape(groups, shape.total)])

    @classmethod
    def words(cls, shape: Shape, groups: int) -> int:
        return sum(size if wide else -(-size // 2) for size, wide in cls._sizes(shape)) + groups * shape.total

    @staticmethod
    def _sizes(shape: Shape) -> list[tuple[int, bool]]:
        total, seqs = shape.decodes + shape.tokens, shape.decodes + shape.slices
        wide = [total, total, total, shape.logits, shape.samples]
        return [(size, True) for size in wide] + [(size, False) for size in (shape.decodes, seqs, seqs, seqs + 1)]


def staged_bytes(tokens: int, groups: int) -> int:
    """Return the bytes to stage a step of so many tokens, and some thousands of table entries.

    groups: number of window groups.  A token of a slice takes at most 56 bytes, and 8 per window group."""
    return (64 + 8 * groups) * tokens + (1 << 18)


def blank(shape: Shape, groups: int) -> tuple[Array, Page]:
    """Return a page of padding only, and the memory it lies in.  groups: number of window groups."""
    memory = np.zeros(Page.words(shape, groups), dtype=np.int64)
    page = Page.view(memory, shape, np.int32, groups)
    page.kv_indices[:] = page.windows[:] = -1
    page.slots[:] = -1
    page.q_start[:] = np.minimum(np.arange(len(page.q_start)), shape.decodes)
    return memory, page


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Slices of one token each, all with candidates, in a step without other slices.  They are computed as rows of a
    decode step, after the decoding slots."""

    at: int  # first row
    inputs: Tensor  # [3, n] i64: slots, tokens, positions
    candidates: tuple[tuple[int, int], ...]  # (slot, number of candidates)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A step with slices."""

    shape: Shape
    page: Page
    joined: tuple[Tensor, Tensor] | None  # slots i64 that begin to decode, and position i64 of their last token
    targets: list[Targets]
    candidates: tuple[tuple[int, int], ...] = ()  # (slot, number of candidates); rows after sampling slots
    drafts: DraftRows | None = None  # drafts; their logits rows follow those of all slots
    keeps: Tensor | None = None  # copies of recurrent state: `StepTensors.keeps`


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan whose values are being copied to the device."""

    slots: Tensor | None  # [max_seqs] i32; None: unchanged
    edits: Tensor | None  # [n, 3] i32: slot, index in its block table, block
    mixed: Mixed | None  # None: no slices, or only `single`
    single: SingleRows | None  # None if `mixed` is not
    # One entry per KV group, full-attention layers first; None: the plan has no such blocks of this group.
    poison: list[Tensor | None]  # [n] i64: blocks to fill with NaN
    copies: list[Tensor | None]  # [n, 2] i64: from block, to block
    window_edits: list[Tensor]  # `edits` of each window group


class DecodeBuffers(NamedTuple):
    """Tensors of a decode step at fixed addresses, with an entry per slot; a step uses the first entries."""

    ids: Tensor  # [max_seqs] i64
    positions: Tensor  # [max_seqs] i64
    kv_indices: Tensor  # [max_seqs] i64
    known: Tensor  # [max_seqs] i64
    rows: Tensor  # [max_seqs] i32
    lens: Tensor  # [max_seqs] i32
    q_start: Tensor  # [max_seqs + 1] i32
    sample_slots: Tensor  # [max_seqs] i64: as `Batch.slots`

    @classmethod
    def allocate(cls, max_seqs: int, device: torch.device) -> DecodeBuffers:
        ids, positions, kv_indices, known = torch.zeros(4, max_seqs, dtype=torch.int64, device=device)
        rows, lens = torch.zeros(2, max_seqs, dtype=torch.int32, device=device)
        q_start = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        sample_slots = torch.full((max_seqs,), -1, dtype=torch.int64, device=device)
        return cls(ids, positions, kv_indices, known, rows, lens, q_start, sample_slots)
