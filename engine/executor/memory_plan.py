"""Stores, for the next start of an engine, how much memory its largest steps take.

Measuring it runs these steps, which would lengthen the activation of a spare engine by 0.25 s.  The measurement is
stored under ~/.cache/quire, keyed by all settings that affect it and by the engine's name.  `quire serve` makes a new
name each time it starts, so an upgraded version measures again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import torch

from quire.engine.config import EngineConfig
from quire.engine.executor.models.weights import CACHE

MAX_MEASUREMENTS = 32  # maximum measurements kept; older ones are dropped


class MemoryPlan:
    """The measured memory of one configuration."""

    def __init__(self, config: EngineConfig, directory: Path, sizes: str, cache: Path = CACHE) -> None:
        """`sizes`: values chosen for settings that the configuration leaves open."""
        self._store = cache / "activations.json"
        parts = [repr(config).replace("standby=True", "standby=False"), sizes, torch.__version__, _gpu()]
        model = (directory / "config.json").read_bytes()
        self._key = hashlib.sha256("\n".join(parts).encode() + model).hexdigest()

    def recall(self) -> int:
        """Return the stored bytes; 0: not known."""
        found = self._read().get(self._key, 0)
        return found if isinstance(found, int) and found > 0 else 0

    def remember(self, size: int) -> None:
        """Store the measured bytes.  An unwritable cache only costs time, so it is no error."""
        kept = {key: value for key, value in self._read().items() if key != self._key}
        kept = {**dict(list(kept.items())[1 - MAX_MEASUREMENTS :]), self._key: size}
        draft = self._store.with_name(f"{self._store.name}.{os.getpid()}")
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(kept), encoding="utf-8")
            draft.replace(self._store)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _read(self) -> dict[str, int]:
        try:
            return dict(json.loads(self._store.read_bytes()))
        except (OSError, ValueError, TypeError):  # absent, or written by other software
            return {}


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
