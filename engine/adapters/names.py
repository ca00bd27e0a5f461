"""Names of adapters: `name` for clients, `name@digest` between processes, NAME=PATH in options."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.engine.adapters.errors import AdapterError
from quire.engine.adapters.files import CONFIG, PICKLE, WEIGHTS

MAX_CHARS = 128  # maximum characters of a name
MAX_PATH_CHARS = 4096
NAME = re.compile(r"[A-Za-z0-9_][\w.:/-]*", re.ASCII)
FOLDER = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)  # names that are allowed as folders in --lora-dir


def adapter_id(name: str, digest: str) -> str:
    """Return the id of an adapter in messages and plans: `name@digest`."""
    return f"{name}@{digest}"


def digest_part(adapter: str) -> str:
    """Return the digest in an adapter id; "" for the id ""."""
    return adapter.rpartition("@")[2]


def check_name(name: str) -> None:
    """Raise AdapterError unless clients can use the name as `model`."""
    if len(name) > MAX_CHARS:
        raise AdapterError(
            f"the name of an adapter has {len(name)} characters; at most {MAX_CHARS}", MAX_CHARS, len(name)
        )
    if not NAME.fullmatch(name):
        allowed = "letters, digits and . _ - : /"
        raise AdapterError(f"{name[:60]!r} is no name for an adapter: {allowed} are", allowed, name[:60])


def parse_option(words: str) -> dict[str, Path]:
    """Parse `NAME=PATH,NAME=PATH` into name -> path.  Raises AdapterError."""
    found: dict[str, Path] = {}
    for word in filter(None, (part.strip() for part in words.split(","))):
        name, equals, path = word.partition("=")
        if not equals or not path:
            raise AdapterError(f"--lora {word}: must be NAME=PATH")
        check_name(name)
        check_text(path)
        if name in found:
            raise AdapterError(f"--lora names {name} twice")
        found[name] = Path(path).expanduser().resolve()
    return found


def check_text(path: str) -> None:
    """Raise AdapterError for a path that is not valid UTF-8, so that messages cannot contain it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise AdapterError(f"{path}: the path of an adapter must be UTF-8") from None


def folder_of(name: str, directory: Path) -> Path | None:
    """Return the folder of the adapter `name` in `directory`; None: there is none.

    Raises AdapterError if links lead from the folder or its files out of the directory."""
    if len(name) > MAX_CHARS or not FOLDER.fullmatch(name):
        return None
    folder = directory / name
    if not (folder / CONFIG).is_file():
        return None
    check_within(folder, directory)
    return folder


def check_within(folder: Path, directory: Path) -> None:
    """Raise AdapterError if links lead from a folder, or from an adapter file in it, out of `directory`."""
    root = directory.resolve()
    for path in (folder, folder / CONFIG, folder / WEIGHTS, folder / PICKLE):
        try:
            inside = path.resolve().is_relative_to(root)
        except (OSError, RuntimeError):  # a link that leads to itself
            inside = False
        if not inside:
            raise AdapterError(f"{folder.name}: {path.name} leads out of --lora-dir")


def path_within(path: str, directory: Path) -> Path | None:
    """Return the normalised path if it lies below `directory`; None: it does not.

    A relative path is relative to the directory.  Only the text is checked, not the file system."""
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
        return None
    folder = Path(os.path.normpath(directory / path))
    return folder if directory in folder.parents else None
