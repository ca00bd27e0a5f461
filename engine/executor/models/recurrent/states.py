"""Recurrent state of a sequence in layers without attention; its size does not depend on the sequence's length.

    conv[layer]        [places, taps - 1, channels]       dtype of the model    the newest inputs of a convolution
    recurrent[layer]   [places, heads, keys, values]      float32               the state of a linear recurrence
                          |
                          └ place: the live states of the slots, then the checkpoints, then states to roll back to

A step updates the live states in place.  A checkpoint is a copy of one place to another in all layers.  On a GPU copies
are launches in the order of steps, so a plan may copy the state that the step in flight will leave.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.core.plan import StepPlan
from quire.engine.executor import ops
from quire.engine.executor.errors import NotEnoughMemory
from quire.engine.executor.kv_cache import GIB, Caches, LayerState
from quire.engine.executor.models.recurrent.rollback import Rollback

log = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True)
class StateShape:
    """State of one layer, per sequence."""

    layer: int
    conv: tuple[int, int]  # taps - 1, channels
    recurrent: tuple[int, int, int] | None = None  # heads, keys, values; None: the layer is a convolution only

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one place.  dtype: of the model."""
        recurrent = math.prod(self.recurrent) * 4 if self.recurrent else 0
        return math.prod(self.conv) * dtype.itemsize + recurrent


def state_bytes(shapes: Iterable[StateShape], dtype: torch.dtype) -> int:
    """Return the bytes of one sequence's state, in all layers; 0: no layer has a state."""
    return sum(shape.bytes(dtype) for shape in shapes)


class States:
    """The state tensors of all layers."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        slots: int,
        checkpoints: int,
        dtype: torch.dtype,
        device: torch.device,
        rollbacks: int = 0,
    ) -> None:
        """Allocate zero states: per layer a live state of each slot, then the checkpoints, then states to roll back to.

        Raises NotEnoughMemory."""
        self.layers: dict[int, LayerState] = {}
        self._slots, self._checkpoints, self._each = slots, checkpoints, state_bytes(shapes, dtype)
        self._places = places = slots + checkpoints + rollbacks
        self.rollback = Rollback(slots, checkpoints, rollbacks)
        try:
            for shape in shapes:
                recurrent = None
                if shape.recurrent:
                    recurrent = torch.zeros(places, *shape.recurrent, dtype=torch.float32, device=device)
                conv = torch.zeros(places, *shape.conv, dtype=dtype, device=device)
                self.layers[shape.layer] = LayerState(conv, recurrent)
        except RuntimeError as error:  # raised by torch on a CPU and on a GPU
            raise NotEnoughMemory(
                f"no memory for {places} recurrent states of {self.bytes / GIB:.2f} GiB: lower state_memory_gib"
            ) from error
        self._device = device
        self._groups = groups_of(self.layers.values())

    @property
    def bytes(self) -> int:
        """Bytes of all states."""
        return self._places * self._each

    def facts(self) -> dict[str, int]:
        """Return the fields of `ModelInfo` about states."""
        return {"state_bytes": self._each, "checkpoints": self._checkpoints}

    def report(self, kv_bytes: int) -> None:
        """Log how memory is divided between these states and a KV cache, in one line."""
        log.info(
            "memory for sequences: %.1f MiB of KV cache, %d live states and %d checkpoints of %.2f MiB each (%.1f MiB)",
            *(kv_bytes / MIB, self._slots, self._checkpoints, self._each / MIB, self.bytes / MIB),
        )
        if self.rollback.places:
            log.info("%d more states are set aside to roll back refused drafts", self.rollback.places)

    def begin_step(self, plan: StepPlan) -> None:
        """Before a step computes: save its plan's checkpoints of decoding slots, and set the first state of started
        slots."""
        self.copy([(slot, self._slots + checkpoint) for slot, checkpoint in plan.keep])
        self.copy([(self._slots + start.state, start.slot) for start in plan.starts if start.state >= 0])
        self.clear([start.slot for start in plan.starts if start.state < 0])

    def end_step(self, plan: StepPlan) -> None:
        """After a step has computed: copy the parent's state to each fork of its plan."""
        self.copy([(fork.parent, fork.slot) for fork in plan.forks])

    def settle(self, accepted: Mapping[int, int]) -> None:
        """After a step has sampled: restore the states before refused drafts.  accepted: drafts accepted, by slot."""
        self.copy(self.rollback.copies(accepted))

    def clear(self, places: list[int]) -> None:
        """Zero these places: the state of a sequence without tokens."""
        if places:
            there = self._sent(places)
            for tensors in self._groups:
                ops.block_fill(tensors, there, 0.0)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy states (from place, to place).  No place may be written twice, or both read and written."""
        if pairs:
            there = self._sent(pairs)
            for tensors in self._groups:
                ops.block_copy(tensors, there)

    def _sent(self, values: Sequence[int | tuple[int, int]]) -> Tensor:
        """Return places, or pairs of places, on the device, without waiting for it."""
        here = torch.tensor(values, dtype=torch.int64)
        return here if self._device.type == "cpu" else here.pin_memory().to(self._device, non_blocking=True)

    def attached(self, caches: Caches) -> Caches:
        """Return the caches of all layers with their states."""
        return [cache._replace(state=self.layers.get(layer)) for layer, cache in enumerate(caches)]


def groups_of(states: Iterable[LayerState]) -> list[list[Tensor]]:
    """Return the tensors of all layers by shape, with the four dimensions of a KV cache: one launch moves a group."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for state in states:
        for tensor in (state.conv[:, None], state.recurrent):
            if tensor is not None:
                groups.setdefault(tensor.shape, []).append(tensor)
    return list(groups.values())
