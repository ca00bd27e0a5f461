"""Command and environment of Python child processes, so that they import the parent's code, never the user's files.

With `-m`, `-c` or an empty entry in PYTHONPATH, Python searches modules in the current directory first.  Users start
`quire serve` in arbitrary directories, where `quire/`, `redis/` or `types.py` may exist.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

import quire

PATH_VARIABLE = "PYTHONPATH"
ROOT = str(Path(quire.__file__).resolve().parents[1])  # folder that contains the package quire


def command(*words: str) -> list[str]:
    """Return the command that runs this interpreter with `words`, which begin with "-m" or "-c"."""
    return [sys.executable, "-P", *words]


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` with a PYTHONPATH without empty entries, by which a child finds the parent's packages.

    A source checkout becomes the first entry; an installed package needs no entry."""
    entries = [entry for entry in base.get(PATH_VARIABLE, "").split(os.pathsep) if entry]
    if ROOT not in {*site.getsitepackages(), site.getusersitepackages()}:
        entries = [ROOT, *(entry for entry in entries if entry != ROOT)]
    rest = {name: value for name, value in base.items() if name != PATH_VARIABLE}
    return rest | ({PATH_VARIABLE: os.pathsep.join(entries)} if entries else {})
