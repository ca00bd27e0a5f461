"""AdapterFolder: looks up adapters by name in the operator's directory (`--lora-dir`), with the digest of their files.

    name ──> DIR/name ──stat of both files──> unchanged since the last lookup: return the cached digest
                                         └──> new or changed: read the files

So a new folder is served at once, the name of a removed folder is unknown, and changed files are another adapter.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from quire.engine.adapters.errors import AdapterError, AdapterMissing
from quire.engine.adapters.files import CONFIG, WEIGHTS, digest_of
from quire.engine.adapters.names import adapter_id, check_text, folder_of

MAX_DIGESTS = 10_000  # maximum cached digests, 0.3 KB each; a cached error takes up to 4 KB

Identity = tuple[tuple[int, ...], ...]  # file metadata that changes when the files change


class FoundAdapter(NamedTuple):
    """An adapter found in the directory."""

    id: str  # `name@digest`
    path: Path  # folder of the adapter's files


class AdapterFolder:
    """One directory of adapters.  Thread-safe; methods block on file-system calls."""

    def __init__(self, directory: Path) -> None:
        """Raises AdapterError if the directory does not exist."""
        self.directory = Path(os.path.abspath(directory.expanduser()))
        check_text(str(self.directory))
        if not self.directory.is_dir():
            raise AdapterError(f"--lora-dir {directory}: no such directory")
        self._lock = threading.Lock()
        # Folder -> (identity of its files, digest or error), least recently used first.
        self._digests: OrderedDict[Path, tuple[Identity, str | AdapterError]] = OrderedDict()

    def find(self, name: str) -> FoundAdapter | None:
        """Return the adapter with a name; None: there is none.

        Raises AdapterError for files that cannot be served, or that lie outside the directory."""
        try:
            folder = folder_of(name, self.directory)
        except OSError as error:
            raise AdapterError(f"{name}: {error.strerror or error}") from None
        return None if folder is None else FoundAdapter(adapter_id(name, self._digest(folder)), folder)

    def has(self, name: str) -> bool:
        """Return whether there is an adapter with a name, without reading its files."""
        try:
            return folder_of(name, self.directory) is not None
        except (OSError, AdapterError):
            return False

    def is_adapter(self, folder: Path) -> bool:
        """Return whether a folder contains a file with the name of an adapter file."""
        return any(os.path.lexists(folder / name) for name in (CONFIG, WEIGHTS))

    def _digest(self, folder: Path) -> str:
        identity = _identity(folder)
        with self._lock:
            known = self._digests.get(folder)
            if known is not None and known[0] == identity:
                self._digests.move_to_end(folder)
                return _digest_in(known[1])
        digest: str | AdapterError
        try:
            digest = digest_of(folder)
        except AdapterMissing:
            raise
        except AdapterError as error:
            digest = error
        with self._lock:
            self._digests[folder] = identity, digest
            while len(self._digests) > MAX_DIGESTS:
                self._digests.popitem(last=False)
        return _digest_in(digest)


def _digest_in(found: str | AdapterError) -> str:
    """Return a cached digest, or raise the cached error."""
    if isinstance(found, AdapterError):
        raise AdapterError(str(found), found.limit, found.given)
    return found


def _identity(folder: Path) -> Identity:
    """Return metadata that changes when an adapter's files change; an empty tuple for a missing file."""
    found: list[tuple[int, ...]] = []
    for name in (CONFIG, WEIGHTS):
        try:
            stat = os.stat(folder / name)
        except OSError:
            found.append(())
        else:
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)
