"""CUDA graphs of steps that have rows with LoRA adapters; `step_graphs.py` has the graphs of steps without adapters.

A batch size with adapters is captured when it runs for the second time, so a server without adapter requests has no
such graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.engine.executor.batch import Batch
from quire.engine.executor.graphs import Graphs, SecondUse, Where
from quire.engine.executor.shapes import Shape
from quire.engine.executor.staged_plan import Mixed
from quire.engine.executor.step_launches import StepLaunches

log = logging.getLogger(__name__)


class AdapterGraphs:
    """Graphs of the model for decode steps and for small steps with slices, in which some rows have adapters."""

    def __init__(self, launches: StepLaunches, batch: Batch, logits: Tensor, where: Where) -> None:
        """`logits` (output buffer) and `where` are also used by the graphs of steps without adapters."""
        self._batch, self._device = batch, logits.device
        self._idle: dict[Shape, Mixed] = {}
        self._uses = SecondUse()
        self._failed = False

        def decode(size: int) -> None:
            step = batch.decode_step(size)
            batch.gather(step)
            launches.logits(launches.forward(step), None, logits[:size])

        def mixed(shape: Shape) -> None:
            step = batch.mixed_step(self._idle[shape])
            launches.logits(launches.forward(step), step.logits_at, logits[: shape.logits])

        self._decode, self._mixed = Graphs(decode, where), Graphs(mixed, where)

    def decode(self, number: int, size: int) -> bool:
        """Replay the model's graph of decode step `number` with `size` rows.  Returns False if there is none yet."""
        if size not in self._decode and not self._recorded(
            number, size, partial(self._decode.capture, size, run=False)
        ):
            return False
        self._decode.replay(size)
        return True

    def mixed(self, number: int, mixed: Mixed) -> bool:
        """Replay the model's graph of step `number`, which has slices.  Returns False if there is none."""
        shape = mixed.shape
        if shape not in self._mixed:
            if shape not in self._batch.shapes:
                return False
            self._idle[shape] = mixed  # pages of one shape always lie at the same addresses
            if not self._recorded(number, shape, partial(self._mixed.capture, shape, run=False)):
                return False
        self._mixed.replay(shape)
        return True

    def _recorded(self, number: int, key: object, capture: Callable[[], None]) -> bool:
        """Capture a graph if its launches run for the second time.  Returns False if the step must be launched
        eagerly."""
        if self._failed or not self._uses.due(number, key):
            return False
        try:
            capture()
        except RuntimeError as error:
            log.warning("steps with LoRA adapters run without CUDA graphs: %s", str(error).splitlines()[0])
            self._failed = True
            torch.cuda.synchronize(self._device)
            return False
        return True
