"""Command and environment of child processes that run Python.  They import the parent's code, never the user's files.

Python puts the current directory first on the module search path for `-m` and `-c`, and for an empty entry of
PYTHONPATH.  Users start `quire serve` in directories of their own, where `quire/`, `redis/` or `types.py` may exist.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

import quire

PATH_VARIABLE = "PYTHONPATH"
ROOT = str(Path(quire.__file__).resolve().parents[1])  # folder of the package quire


def command(*words: str) -> list[str]:
    """Return the command that runs this interpreter with `words`, which begin with "-m" or "-c"."""
    return [sys.executable, "-P", *words]


def environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` with a PYTHONPATH by which a child finds the parent's packages, and no empty entries in it.

    A checkout goes first; an installed package is found without."""
    entries = [entry for entry in base.get(PATH_VARIABLE, "").split(os.pathsep) if entry]
    if ROOT not in {*site.getsitepackages(), site.getusersitepackages()}:
        entries = [ROOT, *(entry for entry in entries if entry != ROOT)]
    rest = {name: value for name, value in base.items() if name != PATH_VARIABLE}
    return rest | ({PATH_VARIABLE: os.pathsep.join(entries)} if entries else {})
