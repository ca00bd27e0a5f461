"""Fetches only the needed files of a checkpoint on the hub.

Repositories hold weights several times: `consolidated.safetensors` of Mistral, `original/` of Llama, variants of other
dtypes.  So the small files are fetched first; among them is the index, if any, which names the weight files.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

from huggingface_hub import DryRunFileInfo, snapshot_download
from tqdm import tqdm

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.progress import Progress

log = logging.getLogger(__name__)

SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
WITHIN_FOLDERS = ["*/*"]
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
FOREIGN = "consolidated*.safetensors"  # tensors by the names of Mistral's own code


def fetch(name: str) -> Path:
    """Return the local directory with a repository's checkpoint, fetched if it is not in the hub's cache yet.

    Complete files in the cache are not fetched again.  An incomplete file is resumed.  Raises ModelLoadError, before
    weights are fetched, if they could not be loaded; and errors of the hub client."""
    snapshot = functools.partial(snapshot_download, name, tqdm_class=progress_lines(f"downloading {name}"))
    directory = Path(snapshot(allow_patterns=SMALL, ignore_patterns=WITHIN_FOLDERS))
    snapshot = functools.partial(snapshot, revision=directory.name)  # the repository may change during the download
    snapshot(allow_patterns=weight_names(directory), ignore_patterns=WITHIN_FOLDERS)
    if any(directory.glob("*.safetensors")):
        return directory
    others: dict[str, Any] = {"allow_patterns": ["*.safetensors"], "ignore_patterns": [*WITHIN_FOLDERS, FOREIGN]}
    if snapshot(**others, dry_run=True):
        snapshot(**others)
    elif files := snapshot(allow_patterns=[FOREIGN], ignore_patterns=WITHIN_FOLDERS, dry_run=True):
        foreign = min(file.filename for file in files if isinstance(file, DryRunFileInfo))
        reason = "whose tensors have other names than those of transformers; it has no model.safetensors"
        raise ModelLoadError(f"{name}: its weights are in {foreign}, {reason}")
    return directory


def progress_lines(what: str) -> Any:
    """Return a replacement of the hub client's progress bar that logs the bytes of all files in complete lines.

    The client's own bars are shown on a terminal only."""

    class Lines(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            of_bytes = options.get("unit") == "B" and str(options.get("desc", "")).startswith("Downloading")
            self._progress = Progress(log.info, what, 0, in_bytes=True) if of_bytes else None

        def update(self, n: float | None = 1) -> None:
            if self._progress is not None:
                self._progress.expect(int(self.total or 0))  # grows as files are begun
                self._progress.advance(int(n or 0))

    return Lines


def weight_names(directory: Path) -> list[str]:
    """Return the names of a checkpoint's weight files, from its index if it has a readable one."""
    try:
        return sorted(set(json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or refused when the weights are read
        return [WHOLE]
