"""The files of a checkpoint on the hub that are needed, and no others.

Repositories hold weights several times: `consolidated.safetensors` of Mistral, `original/` of Llama, variants of other
dtypes.  So the small files are fetched first; among them is the index, if any, which names the weight files.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download

SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
WITHIN_FOLDERS = ["*/*"]
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def fetch(name: str) -> Path:
    """Return the local directory with a repository's checkpoint, fetched where it is not in the hub's cache yet.

    Files that are complete there are not fetched again.  Raises what the hub client raises."""
    directory = Path(snapshot_download(name, allow_patterns=SMALL, ignore_patterns=WITHIN_FOLDERS))
    revision = directory.name  # of the files so far: the repository may change meanwhile
    for wanted in (weight_names(directory), ["*.safetensors"]):
        snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=WITHIN_FOLDERS)
        if any(directory.glob("*.safetensors")):
            break
    return directory


def weight_names(directory: Path) -> list[str]:
    """Return the names of a checkpoint's weight files, from its index if it has a readable one."""
    try:
        return sorted(set(json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or refused when the weights are read
        return [WHOLE]
