"""Hides every progress bar of transformers, because processes that share a terminal log complete lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers.utils import logging

LOADING = "Loading weights"  # the text of the bar over the tensors of a checkpoint


@contextlib.contextmanager
def no_bars(loading: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> Iterator[None]:
    """Show no bars inside this context.  `loading` wraps the iterable of (name, tensor) pairs that are loaded."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") == LOADING:
            return loading(*args)
        return factory(*args, **{**options, "disable": True})

    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
