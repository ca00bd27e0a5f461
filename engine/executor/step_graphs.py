"""CUDA graphs of a worker's steps: which step sizes have a graph, and when graphs are captured.

    start           capture: all, for at most `graph_seconds`
    after takeover  postpone ─┬─ a step runs the second time ─> recorded while requests are served
                              └─ no request runs ─> catch_up captures one
                              all done ─> only sizes with all their graphs are used from then on

A step is padded to a size that has a graph, or will have one.  The order of summation in a GEMM depends on its number
of rows, so a step gives the same tokens before and after its graph is captured.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.engine.executor.batch import Batch
from quire.engine.executor.drafts import DraftRows, Verified
from quire.engine.executor.graphs import Graphs, SecondUse, Where, capture_all, memory_first, next_size, urgent
from quire.engine.executor.lora.adapter_graphs import AdapterGraphs
from quire.engine.executor.shapes import Shape, Shapes
from quire.engine.executor.staged_plan import Mixed
from quire.engine.executor.step_launches import StepLaunches

log = logging.getLogger(__name__)


class StepGraphs:
    """Graphs of decode steps, of small steps with slices, and of sampling; no graphs if `sizes` is empty."""

    def __init__(
        self,
        launches: StepLaunches,
        batch: Batch,
        logits: Tensor,
        *,
        sizes: list[int],
        shapes: list[Shape],
        seconds: float,
        agree: Callable[[int], int] = int,
    ) -> None:
        """`logits` [rows, V] f32: output buffer of the graphs.  `sizes`, `shapes`: sizes to which decode steps, and
        steps with slices, are padded.  `seconds`: time limit of captures.  `agree`: returns the minimum over all
        ranks."""
        self.logits = logits
        self._launches, self._batch, self._agree = launches, batch, agree
        self._sizes = sizes
        batch.shapes = Shapes(shapes)
        self._seconds = seconds  # seconds left for captures
        self._captured = False  # every size in use has all its graphs
        self._second_use: SecondUse | None = None  # set while graphs are recorded lazily
        self._postponed: deque[Callable[[], None]] = deque()  # captures deferred by the activation of a spare engine
        self._idle: dict[Shape, Mixed] = {}
        self.adapted: AdapterGraphs | None = None  # graphs of steps whose rows have LoRA adapters; None: no graphs

    def padded(self, count: int) -> int:
        """Return the number of rows of a step of `count` rows after padding."""
        return next_size(self._sizes, count) or count

    # ----------------------------------------------------------------------------------------------------- every step

    def decode(self, number: int, size: int, general: bool) -> bool:
        """Replay the model's graph of decode step `number` with `size` rows.  Returns False if there is none.

        `general`: the step will sample with any settings, not only greedily."""
        if self._batch.adapted:
            return self.adapted is not None and self.adapted.decode(number, size)
        if not self._captured and not self._recorded(number, size, general):
            return False
        self._decode_graphs.replay(size)
        return True

    def mixed(self, number: int, mixed: Mixed) -> bool:
        """Replay the model's graph of step `number`, which has slices.  Returns False if there is none."""
        if self._batch.adapted:
            return self.adapted is not None and self.adapted.mixed(number, mixed)
        if mixed.keeps is not None:  # a graph cannot copy recurrent state at positions that differ from step to step
            return False
        if mixed.shape not in self._batch.shapes or not (self._captured or self._recorded_mixed(number, mixed)):
            return False
        self._mixed_graphs.replay(mixed.shape)
        return True

    def sample(self, size: int, general: bool) -> None:
        """Sample from the logits that a graph of the model has computed, with a graph if this size has one."""
        if size in self._sample_graphs[general]:
            self._sample_graphs[general].replay(size)
        else:
            self._launches.sample(self._batch.decode_step(size), self.logits[:size], general)

    def sample_drafts(self, drafts: DraftRows, general: bool) -> Verified | None:
        """Sample and verify drafts, from the logits that a graph of the model has computed."""
        return self._launches.sample(self._batch.decode_step(len(drafts.behind)), self.logits, general, drafts)

    def _recorded(self, number: int, size: int, general: bool) -> bool:
        """Return whether step `number` has graphs of a decode step of this size.

        After the activation of a spare engine, graphs are captured when their launches run for the second time."""
        if self._second_use is None:
            return False
        kinds = self._decode_graphs, self._sample_graphs[general]
        missing = [graphs for graphs in kinds if size not in graphs]
        if missing and not self._second_use.due(number, *((id(graphs), size) for graphs in kinds)):
            return False
        return self._record([partial(graphs.capture, size, run=False) for graphs in missing])

    def _recorded_mixed(self, number: int, mixed: Mixed) -> bool:
        """Return whether the model has a graph of a step with these slices.  Records graphs as `_recorded` does."""
        if self._second_use is None:
            return False
        if mixed.shape in self._mixed_graphs:
            return True
        if not self._second_use.due(number, mixed.shape):
            return False
        self._idle[mixed.shape] = mixed  # pages of one shape always lie at the same addresses
        return self._record([partial(self._mixed_graphs.capture, mixed.shape, run=False)])

    def _record(self, captures: Sequence[Callable[[], None]]) -> bool:
        """Capture these graphs while requests are served.  After a capture that failed, returns False and stops lazy
        capture."""
        try:
            for capture in captures:
                capture()
        except RuntimeError as error:
            log.warning("CUDA graphs cannot be recorded while requests are served: %s", str(error).splitlines()[0])
            self._second_use = None
            torch.cuda.synchronize(self.logits.device)
            return False
        return True

    # ------------------------------------------------------------------------------------------------------- captures

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs now, for at most the seconds that are left."""
        self._make_graphs()
        decodes, mixed = self._captures()
        started = time.monotonic()
        done = capture_all(decodes, self._seconds, self._agree)
        if self._use_captured():
            done += capture_all(mixed, self._seconds - (time.monotonic() - started), self._agree)
            self._batch.shapes = Shapes(self._mixed_graphs.keys)
        log.info("%d CUDA graphs in %.1f s", done, time.monotonic() - started)

    def postpone(self) -> None:
        """Capture lazily: in idle moments, or when the same launches run a second time."""
        self._make_graphs()
        self._second_use = SecondUse()
        self._postponed.extend(itertools.chain(*self._captures()))

    @torch.inference_mode()
    def catch_up(self) -> bool:
        """Capture one of the graphs left to lazy capture.  Returns whether more are left.

        Call it only while no request runs: it frees the slots of ended sequences, and a capture runs an empty step."""
        if not self._postponed:
            return False
        self._batch.vacate()
        started = time.monotonic()
        try:
            self._postponed.popleft()()
        except RuntimeError as error:
            log.warning("no further CUDA graphs: %s", str(error).splitlines()[0])
            self._postponed.clear()
            torch.cuda.synchronize(self.logits.device)
        self._seconds -= time.monotonic() - started
        if self._seconds <= 0:
            self._postponed.clear()
        if not self._postponed and self._use_captured():
            self._second_use = None
            self._batch.shapes = Shapes(self._mixed_graphs.keys)
            log.info("CUDA graphs of %d batch sizes and %d mixed sizes", len(self._sizes), len(self._batch.shapes))
        return bool(self._postponed)

    def _make_graphs(self) -> None:
        """Create all kinds of graphs; capture none yet."""
        batch, launches = self._batch, self._launches

        def decode(size: int) -> None:
            step = batch.decode_step(size)
            batch.gather(step)
            launches.logits(launches.forward(step), None, self.logits[:size])

        def sample(general: bool) -> Callable[[int], None]:
            def launch(size: int) -> None:
                launches.sample(batch.decode_step(size), self.logits[:size], general)

            return launch

        def mixed(shape: Shape) -> None:
            step = batch.mixed_step(self._idle[shape])
            launches.logits(launches.forward(step), step.logits_at, self.logits[: shape.logits])

        where = Where()
        self.adapted = AdapterGraphs(launches, batch, self.logits, where)
        self._decode_graphs = Graphs(decode, where)
        self._sample_graphs = Graphs(sample(False), where), Graphs(sample(True), where)
        self._mixed_graphs = Graphs(mixed, where)

    def _captures(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Return the captures in order: decode steps of every size with both ways to sample; small steps with
        slices."""

        def decode(graphs: Graphs[int], size: int) -> None:
            if size not in graphs:  # else it was recorded while requests were served
                graphs.capture(size)

        def mixed(shape: Shape) -> None:
            if shape not in self._mixed_graphs:
                self._idle[shape] = self._batch.idle_step(shape)
                self._mixed_graphs.capture(shape)

        kinds = self._decode_graphs, *self._sample_graphs
        decodes: list[Callable[[], None]] = [
            partial(decode, graphs, size) for size in urgent(self._sizes) for graphs in kinds
        ]
        return decodes, [partial(mixed, shape) for shape in memory_first(self._batch.shapes)]

    def _use_captured(self) -> bool:
        """From now on use only sizes that have all their graphs.  Returns False if there are none."""
        kinds = self._decode_graphs, *self._sample_graphs
        if sizes := [size for size in self._decode_graphs.keys if all(size in graphs for graphs in kinds)]:
            self._sizes, self._captured = sizes, True
        return self._captured
