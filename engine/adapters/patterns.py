"""Matches module names with the patterns of an adapter, with PEFT's semantics.

A pattern may be any regular expression.  A malicious pattern could run for hours and block the process, because
Python's matcher holds the GIL.  So all patterns except plain names are matched in a child process.  Its CPU time is
limited, because loads of other adapters wait meanwhile.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence

from quire.engine.adapters.errors import AdapterError
from quire.engine.common import child_python

CPU_S = 2  # maximum CPU seconds for all patterns of an adapter; patterns that PEFT writes take microseconds
LIMIT_S = 20.0  # maximum seconds until the child ends; a busy machine may start it late
MAX_PATTERNS, MAX_CHARS = 10_000, 10_000  # patterns per adapter; characters per pattern
PLAIN = re.compile(r"[\w.]+")
_CHILD = """
import json, re, resource, sys
patterns, names = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
try:
    json.dump([[bool(re.compile(p).fullmatch(n)) for n in names] for p in patterns], sys.stdout)
except (re.error, RecursionError, OverflowError) as error:
    sys.exit(f"not a regular expression: {error}")
"""


def endings(name: str) -> list[str]:
    """Return the plain patterns that match a module name: the name itself, and the suffix after each of its dots."""
    return [name, *(name[at + 1 :] for at, one in enumerate(name) if one == ".")]


def full_matches(patterns: Sequence[str], names: Sequence[str], where: str) -> dict[str, set[str]]:
    """Return pattern -> names that the regular expression matches completely.  Raises AdapterError."""
    if not patterns:
        return {}
    if len(patterns) > MAX_PATTERNS or max(map(len, patterns)) > MAX_CHARS:
        raise AdapterError(
            f"{where}: {len(patterns)} patterns of up to {max(map(len, patterns))} characters; at most "
            f"{MAX_PATTERNS} of {MAX_CHARS} are served"
        )
    command = child_python.command("-c", _CHILD, str(CPU_S))
    try:
        done = subprocess.run(
            command, input=json.dumps([patterns, names]), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise AdapterError(f"{where}: matching its patterns has not ended after {LIMIT_S:g} s") from None
    if done.returncode < 0:  # a signal has ended the child, such as SIGXCPU
        raise AdapterError(f"{where}: matching its patterns takes over {CPU_S} s of CPU time")
    if done.returncode:
        raise AdapterError(f"{where}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'bad pattern'}")
    rows: list[list[bool]] = json.loads(done.stdout)
    return {
        pattern: {name for name, hit in zip(names, row, strict=True) if hit}
        for pattern, row in zip(patterns, rows, strict=True)
    }


def by_key(keys: Iterable[str], names: Sequence[str], where: str) -> dict[str, str]:
    """Return name -> first key of `rank_pattern` or `alpha_pattern` that matches it.  Raises AdapterError."""
    rank = {key: at for at, key in enumerate(keys)}
    odd = {key: f"(.*\\.)?({key})" for key in rank if not PLAIN.fullmatch(key)}
    matched = full_matches(list(odd.values()), names, where)
    found: dict[str, str] = {}
    for name in names:
        hits = [end for end in endings(name) if end in rank and end not in odd]
        hits += [key for key, pattern in odd.items() if name in matched[pattern]]
        if hits:
            found[name] = min(hits, key=rank.__getitem__)
    return found
