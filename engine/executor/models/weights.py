"""The fingerprint of a model: engines with equal fingerprints share prefix digests.

It is a digest of the content of every weight file, the config and the dtype.  Hashing gigabytes takes seconds to
minutes, so files are hashed in parallel, and a file's digest is kept under ~/.cache/quire by (real path, size, mtime in
ns).  A file from the hub needs no hashing: the hub's cache stores large files under their own sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.engine.common import host_resources
from quire.engine.executor.disk_cache import cache_directory
from quire.engine.executor.errors import ModelLoadError

CACHE = cache_directory()
SHA256 = re.compile(r"[0-9a-f]{64}")
# Config fields that do not affect what the model computes: the software that wrote the file, and its origin.
NOT_MATHEMATICS = {"transformers_version", "_name_or_path"}


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sorted.  Raises ModelLoadError if there is none or a shard is
    absent.

    If there are several sets of files, the choice is that of transformers: `model.safetensors`, else the shards that
    the index names.  Without either, all files count."""
    whole = directory / "model.safetensors"  # a directory may have another copy, such as consolidated.safetensors
    if whole.is_file():
        return [whole]
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _shards(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory}: no *.safetensors file (pickled checkpoints are not loaded)")
    return files


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names, sorted."""
    try:
        shards = {index.parent / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not a weight index: {error!r}") from error
    if missing := sorted(shard.name for shard in shards if not shard.exists()):
        raise ModelLoadError(f"{index.parent}: {index.name} names {missing[0]}, which is not there")
    if not shards:
        raise ModelLoadError(f"{index}: it names no weight file")
    return sorted(shards)


class StoredTensor(NamedTuple):
    """One tensor in a weight file's header."""

    file: Path
    name: str  # name in the file
    dtype: str  # dtype as safetensors names it
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Names:
    """Mapping of tensor and module names in a checkpoint to names in the served model; by default the identity."""

    own: Callable[[str], str] = str  # name in the served model; empty: it has no such tensor
    whole: Callable[[str], str] = str  # name in transformers' model of the complete checkpoint


UNCHANGED = Names()


def stored_tensors(files: list[Path], names: Names = UNCHANGED) -> dict[str, StoredTensor]:
    """Return the tensors of these files that the served model has, by its names.  The files must have been checked.

    Raises ModelLoadError if two tensors would have one name."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        with file.open("rb") as stream:  # a header in JSON, after its length in 8 bytes, before the tensors
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, described in header.items():
            if name == "__metadata__" or not (own := names.own(name)):
                continue
            if own in found and found[own].name != name:
                both = " and ".join(sorted([name, found[own].name]))
                raise ModelLoadError(f"{file}: {both} are both {own} of the model")
            first, end = described["data_offsets"]
            found[own] = StoredTensor(file, name, described["dtype"], tuple(described["shape"]), end - first)
    return found


def fingerprint(
    directory: Path,
    dtype: torch.dtype,
    cache: Path = CACHE,
    *,
    random: bool = False,
    changes: dict[str, Any] | None = None,
) -> str:
    """Return 64 hex digits, equal only if weights (by content), config.json with its `changes`, and dtype are equal.

    `random`: weights that are in no file of the directory are random, from a fixed seed."""
    files = sorted(directory.glob("*.safetensors")) if random else weight_files(directory)
    config = json.loads((directory / "config.json").read_bytes())
    described = {key: value for key, value in config.items() if key not in NOT_MATHEMATICS}
    digests = dict(zip([file.name for file in files], _digests(files, cache), strict=True))
    computed = {"weights": digests, "config": described, "dtype": str(dtype)} | (
        {"changes": changes} if changes else {}
    )
    everything = json.dumps(computed, sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()


def _digests(files: list[Path], cache: Path) -> list[str]:
    store = cache / "digests.json"
    try:
        kept = dict(json.loads(store.read_bytes()))
    except (OSError, ValueError):  # absent or half written: hash again
        kept = {}
    keys, found = [_identity(file) for file in files], dict(kept)
    todo = []
    for file, key in zip(files, keys, strict=True):
        real = file.resolve()
        if real.parent.name == "blobs" and SHA256.fullmatch(real.name):  # the hub's cache: named by its content
            found[key] = real.name
        elif key not in found:
            todo.append((file, key))
    with ThreadPoolExecutor(host_resources.usable_cpus()) as pool:
        for (_, key), digest in zip(todo, pool.map(_sha256, [file for file, _ in todo]), strict=True):
            found[key] = digest
    if found != kept:
        _replace(store, json.dumps(found))
    return [found[key] for key in keys]


def _identity(file: Path) -> str:
    real = file.resolve()
    stat = real.stat()
    return f"{real}:{stat.st_size}:{stat.st_mtime_ns}"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write atomically.  An unwritable cache only costs time, so it is no error."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
