"""Decode steps as CUDA graphs: one launch by the host instead of hundreds.

    slots that decode  1   2   4   8   16  24  ...  max_seqs     sizes with a graph; a step is padded to the next size
    model      graph   o   o   o   o   o   o         o           padding has slot -1 and length 0
    sampling   graph   o   o   o   o   o   o         o           greedy only
               graph   o   o   o   o   o   o         o           any sampling settings

Model and sampling are separate graphs, so that the model is captured only once for the two ways to sample.  The model
also has graphs for a few sizes of steps with prompt slices (`slice_shapes`), which use the same graphs of sampling, and
of steps with drafts (`draft_shapes`), whose sampling is launched eagerly.  All graphs share one memory pool, because
they run one after another.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from quire.engine.executor.progress import Progress
from quire.engine.executor.shapes import Shape

log = logging.getLogger(__name__)
SPLIT = 16  # with up to this many tokens of drafting sequences, attention treats each token as a sequence
Key = TypeVar("Key")


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes that get a graph, up to `most`.  More sizes would mean less padding, but a later start."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 64), most}
    return sorted(size for size in sizes if size <= most)


def urgent(sizes: list[int]) -> list[int]:
    """Return the order of captures: the largest first, because it allocates the memory pool, then powers of two, in
    case time runs out."""
    powers = [size for size in sizes if size & (size - 1) == 0]
    return list(dict.fromkeys([sizes[-1], *reversed(powers), *reversed(sizes)]))


def next_size(sizes: list[int], count: int) -> int | None:
    """Return the smallest of the ascending sizes that is at least `count`; None if all are smaller."""
    at = bisect.bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


def slice_shapes(max_seqs: int, step_tokens: int) -> list[Shape]:
    """Return the shapes of steps with slices that get a graph.  Larger steps keep the device busy while they launch."""
    shapes = []
    for tokens in (64, 128, 256, 512, 1024, 2048):
        slices = max(4, tokens // 32)
        most = min(max_seqs - slices, step_tokens - tokens)
        for decodes in sorted({min(size, most) for size in (0, 16, 64, 128, 256, 1024)} if most >= 0 else ()):
            samples = decodes + slices
            shapes.append(Shape(decodes, tokens, slices, samples, samples))
    return shapes


def draft_shapes(max_seqs: int, step_tokens: int) -> list[Shape]:
    """Return the shapes of steps with drafts that get a graph: 2 to 512 tokens of slices, at least 2 per slice.

    Logits are computed for all tokens.  Slices need not be equally long: 32 tokens are 16 slices of 2 or one of 32.
    Up to SPLIT tokens, attention treats each token as a sequence of its own (`Shapes.is_split`)."""
    shapes = []
    for tokens in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        sizes = {tokens} if tokens <= SPLIT else {min(size, tokens // 2, max_seqs) for size in (64, 256)}
        for slices in sorted(sizes):
            most = min(max_seqs - slices, step_tokens - tokens)
            for decodes in sorted({min(size, most) for size in (0, 4, 8, 16, 32, 64, 128, 256)} if most >= 0 else ()):
                shapes.append(Shape(decodes, tokens, slices, decodes + slices, decodes + tokens))
    return shapes


def mixed_shapes(max_seqs: int, step_tokens: int, *, drafts: bool) -> list[Shape]:
    """Return the shapes of all steps with slices that get a graph; `drafts`: also of steps with drafts."""
    return slice_shapes(max_seqs, step_tokens) + (draft_shapes(max_seqs, step_tokens) if drafts else [])


def memory_first(shapes: Iterable[Shape]) -> list[Shape]:
    """Return mixed steps in the order of their capture: the one with the most tokens first, so that all others find
    their memory in the pool, then from the smallest on, in case time runs out.

    Captured in ascending order, the graphs of a 30B mixture of experts did not fit into 80 GB beside its weights."""
    by_tokens = sorted(shapes, key=lambda shape: shape.total)
    return [*by_tokens[-1:], *by_tokens[:-1]]


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Suspend Python's garbage collection: if it frees CUDA memory or graphs during a capture, the capture fails."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Where:
    """The memory pool and the capture stream that all graphs of a process share (cuBLAS has memory per stream)."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class Graphs(Generic[Key]):
    """Graphs of one kind of launches, by size.  `run(key)` launches them; all tensors that they touch are static."""

    def __init__(self, run: Callable[[Key], None], where: Where) -> None:
        self._run = run
        self._where = where
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}

    def capture(self, key: Key, *, run: bool = True) -> None:
        """Run the launches once, which loads kernels and fills caches, then record them.  Raises RuntimeError if that
        fails.

        run: False if the same launches have run before, and running them now would change sequences that are being
        served.  Capturing computes nothing; it waits until the steps in flight are done."""
        stream = self._where.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if run:
                self._run(key)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with no_collections():
                # Other threads of this process may use the device meanwhile.
                graph.capture_begin(pool=self._where.pool, capture_error_mode="thread_local")
                try:
                    self._run(key)
                finally:
                    graph.capture_end()
        self._graphs[key] = graph

    @property
    def keys(self) -> list[Key]:
        return sorted(self._graphs)  # type: ignore[type-var]

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def replay(self, key: Key) -> None:
        self._graphs[key].replay()


class SecondUse:
    """Lazy capture of CUDA graphs while requests are served: launches are captured when they run for the second time.

    The first time they run eagerly, which loads their kernels.  One batch size is captured per step, so the pause
    stays short: about 12 ms per graph of an 8B model."""

    def __init__(self) -> None:
        self._used: set[object] = set()
        self._step = -1

    def due(self, step: int, *launches: object) -> bool:
        """Return whether to capture these launches in `step`: all of them have been used before.  If not, they now
        count as used."""
        if not self._used.issuperset(launches):
            self._used.update(launches)
            return False
        if self._step == step:
            return False
        self._step = step
        return True


def capture_all(jobs: Sequence[Callable[[], None]], seconds: float, agree: Callable[[int], int] = int) -> int:
    """Run captures in this order, and begin none after `seconds`.  Return how many were done.

    agree: returns the minimum over all ranks, which must capture the same graphs.

    Returns 0 for a model that reads device values on the host: it runs without graphs."""
    started = time.monotonic()
    progress = Progress(log.info, "capturing CUDA graphs", len(jobs))
    for done, capture in enumerate(jobs):
        if done and not agree(time.monotonic() - started <= seconds):
            return done
        try:
            capture()
        except RuntimeError as error:
            if done:
                raise
            log.warning("this model runs without CUDA graphs, which is slow: %s", str(error).splitlines()[0])
            torch.cuda.synchronize()
            return 0
        progress.advance()
    return len(jobs)
