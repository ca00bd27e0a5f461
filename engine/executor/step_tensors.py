"""The tensors of one step that the layers of a model read, and the buffers of their attention plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.kv_cache import Caches
from quire.engine.executor.window_tables import GroupPlaces


@dataclass(frozen=True, slots=True)
class Targets:
    """Prompt logprobs requested for one slice: the logprob of ids[i], from the logits of the step's token at[i]."""

    slot: int
    at: Tensor  # [.] i64
    ids: Tensor  # [.] i64
    top: int


class AttentionPlans:
    """Buffers of `attention_plan`: one per kind of attention layer, allocated when the first layer of its kind runs."""

    def __init__(self, *, max_seqs: int, max_tokens: int, device: torch.device) -> None:
        self._most = {"max_seqs": max_seqs, "max_tokens": max_tokens}
        self._device = device
        self._buffers: dict[tuple[int, int, int, int], Tensor] = {}

    def buffer(self, heads: int, kv_heads: int, head_size: int, window: int) -> Tensor:
        """Return the buffer [bytes] u8 of this kind of layer; equal arguments give the same buffer."""
        key = heads, kv_heads, head_size, window
        if (found := self._buffers.get(key)) is None:
            size = ops.attention_plan_bytes(
                self._device, **self._most, heads=heads, kv_heads=kv_heads, head_size=head_size
            )
            # Kernels may count finished CTAs in this memory, from 0; they reset the counters for the next launch.
            found = self._buffers[key] = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return found


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, ready to compute: T tokens of S sequences, N slots that sample, and targets of prompt logprobs."""

    input_ids: Tensor  # [1, T] i64
    position_ids: Tensor  # [1, T] i64
    kv_indices: Tensor  # [T] i64: index in the KV cache for each token's key and value; -1: not stored
    tables: Tensor  # [max_seqs, max_blocks] i32: block tables of all slots, indexed by `rows`
    rows: Tensor  # [S] i32: the slot of each sequence, an index into `tables`
    q_start: Tensor  # [S + 1] i32: first token of each sequence; the last entry is T
    lens: Tensor  # [S] i32: length of each sequence with this step's tokens; 0: padding
    decodes: int  # leading sequences with one token each
    caches: Caches
    plans: AttentionPlans
    # [N + R] i64: tokens that need logits: the last token of each of N slots, then R drafts, then padding; None: all T
    logits_at: Tensor | None
    sample_slots: Tensor  # [N] i64; -1: padding
    known: Tensor  # [N] i64: number of tokens before the sampled one, including the slot's drafts
    targets: list[Targets] = field(default_factory=list)
    keeps: Tensor | None = None  # [n, 2] i32 (end, state slot): copy the recurrent state before token `end` to the slot
    planned: set[tuple[int, ...]] = field(default_factory=set)  # kinds of attention layers that have a plan already
    # Tokens with LoRA adapters; None: no token has one.
    adapters: ops.AdapterRows | ops.DeviceAdapters | None = None
    windows: tuple[GroupPlaces, ...] = ()  # kv_indices and tables of each window group

    @property
    def places(self) -> tuple[GroupPlaces, ...]:
        """kv_indices and block tables per KV group, full layers first."""
        return GroupPlaces(self.kv_indices, self.tables), *self.windows

    def attention_plan(self, heads: int, kv_heads: int, head_size: int, window: int) -> Tensor:
        """Return the partition of this step's attention work, computed once for all layers of a kind."""
        kind = heads, kv_heads, head_size, window
        buffer = self.plans.buffer(*kind)
        if kind not in self.planned:
            ops.attention_plan(self.q_start, self.lens, self.decodes, *kind, buffer)
            self.planned.add(kind)
        return buffer
