"""Weight files that note how much of them is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safetensors import safe_open
from torch import Tensor


class Noted:
    """A slice of a file, or a tensor in its place."""

    def __init__(self, stored: Any, note: Callable[[Tensor], None]) -> None:
        self._stored, self._note = stored, note

    def __getitem__(self, where: Any) -> Tensor:
        found: Tensor = self._stored[where]
        self._note(found)
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "get_shape" and isinstance(self._stored, Tensor):
            return lambda: list(self._stored.shape)
        return getattr(self._stored, name)


def noted_open(note: Callable[[Tensor], None]) -> Callable[..., Any]:
    """Return what takes the place of `safe_open`; `note` gets everything that is read of its slices."""

    class Opened:
        def __init__(self, *words: Any) -> None:
            self._file: Any = safe_open(*words)

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def get_slice(self, name: str) -> Noted:
            return Noted(self._file.get_slice(name), note)

    return Opened
