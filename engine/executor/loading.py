"""Chooses the executor of an engine: one worker in this process, or one process per rank."""

from __future__ import annotations

from quire.engine.config import EngineConfig
from quire.engine.executor.base import Executor
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.ranks.parallel import ParallelExecutor


def load(config: EngineConfig) -> Executor:
    """Load the model that `config` names (or the built-in one), allocate the KV cache, start.

    Raises ModelLoadError (UnsupportedModel, NotEnoughMemory) with one line for the operator.
    """
    return LocalExecutor(config) if config.tensor_parallel == 1 else ParallelExecutor(config)
