"""The executor in this process: a worker on a thread of its own.

While torch, which lets go of the interpreter inside its kernels, computes a step, the bus thread and, with `depth` 2,
the engine's loop go on.  Plans go in through one queue and results come out of another, in order.
"""

from __future__ import annotations

import logging
import os
from queue import SimpleQueue
from threading import Thread

import torch

from engine.config import EngineConfig
from engine.core.plan import StepPlan, StepResult
from engine.executor.base import Executor, ModelInfo, StepError
from engine.executor.kv_cache import bytes_per_token
from engine.executor.models import builtin
from engine.executor.models.hf import load_model, one_line
from engine.executor.models.weights import fingerprint
from engine.executor.worker import Worker

log = logging.getLogger(__name__)


class LocalExecutor:
    """An `engine.executor.base.Executor` over one worker.  Not thread-safe: one loop owns it.

    Everything that touches torch, loading included, happens on the executor's own thread.  OpenMP keeps a team of
    threads for each thread that ever computed; with a second team the runtime takes the machine for oversubscribed and
    sends waiting threads to sleep at every barrier.  Measured on 2 cores, the products of a 42M-parameter model, one
    team against two: 2.4 ms against 7.7 ms a step at batch 1, 3.3 ms against 9.1 ms at batch 64.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the model, take the KV memory, start.  Raises ModelLoadError."""
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | Exception] = SimpleQueue()
        self._started: SimpleQueue[tuple[ModelInfo, int, torch.device] | BaseException] = SimpleQueue()
        self._in_flight = 0
        self._failure: Exception | None = None  # until it is collected, further steps are not run
        self._thread = Thread(target=self._serve, args=(config,), name="executor", daemon=True)
        self._thread.start()
        started = self._started.get()
        if isinstance(started, BaseException):
            self._thread.join()
            raise started
        self.info, self.blocks, device = started
        # A device computes step N while Python plans N+1.  On a CPU both want the same cores: planning ahead gains
        # nothing (5.5 to 5.8 ms a token at batch 1 with depth 1, 5.6 to 6.0 with 2), computes a row too many after each
        # stop token, and lets whoever arrives during step N wait for N+1 as well.
        self.depth = 1 if device.type == "cpu" else 2

    def submit(self, plan: StepPlan) -> None:
        """Queue one step; returns at once.  At most `depth` may be in flight."""
        if self._in_flight >= self.depth:
            raise RuntimeError(f"{self._in_flight} steps in flight: collect one first")
        self._in_flight += 1
        self._plans.put(plan)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight.  Raises StepError if it failed; every step in flight is then void."""
        if not self._in_flight:
            raise RuntimeError("no step in flight")
        self._in_flight -= 1
        result = self._results.get()
        if isinstance(result, StepResult):
            return result
        while self._in_flight:  # what was queued behind it comes out void
            self._in_flight -= 1
            self._results.get()
        self._failure = None  # nothing is queued now
        raise StepError(one_line(result)) from result

    def close(self) -> None:
        """Finish the steps in flight, stop the thread."""
        self._plans.put(None)
        self._thread.join()

    def _serve(self, config: EngineConfig) -> None:
        try:
            torch.set_num_threads(config.threads or os.cpu_count() or 1)  # of this thread's team
            worker, info = _start(config)
        except BaseException as error:
            self._started.put(error)
            return
        self._started.put((info, worker.blocks, worker.device))
        while (plan := self._plans.get()) is not None:
            if self._failure is None:
                try:
                    self._results.put(worker.run(plan))
                    continue
                except Exception as error:
                    log.exception("step %d failed", plan.step)
                    self._failure = error
                    worker.reset()
            self._results.put(self._failure)


def _start(config: EngineConfig) -> tuple[Worker, ModelInfo]:
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(
        config.model or str(builtin.builtin()),
        dtype=config.dtype,
        device=torch.device(auto if config.device == "auto" else config.device),
        max_model_len=config.max_model_len,
    )
    info = ModelInfo(
        name=config.served_name or config.model or builtin.NAME,
        fingerprint=fingerprint(model.directory, model.dtype),
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_ids=model.eos_ids,
        kv_bytes_per_token=bytes_per_token(model.layers, model.dtype),
    )
    return Worker(config, model), info


def load(config: EngineConfig) -> Executor:
    """Load the model that `config` names (or the built-in one), take the KV memory, start.

    Raises ModelLoadError (UnsupportedModel, NotEnoughMemory) with one line for the operator.
    """
    return LocalExecutor(config)
