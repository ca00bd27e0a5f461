"""Start-up of every command of this package: options, description, SIGTERM.

A command is a module with `add_arguments(parser)`, which declares its options, and `main(args, command)`, which runs it
and returns the exit status.  `command` is the text that a result records.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

AddArguments = Callable[[argparse.ArgumentParser], None]
Main = Callable[[argparse.Namespace, str], int]


def run(
    name: str,
    text: str | None,
    add_arguments: AddArguments,
    main: Main,
    words: Sequence[str] | None = None,
    *,
    package: str = "quire.loadtest",
) -> int:
    """Parse `words` (default: those of this process) and run the command `name` of `package`.

    Returns its exit status."""
    words = sys.argv[1:] if words is None else words
    raw = argparse.RawDescriptionHelpFormatter  # the descriptions are docstrings with examples and tables
    parser = argparse.ArgumentParser(prog=f"python -m {package} {name}", description=text, formatter_class=raw)
    add_arguments(parser)
    args = parser.parse_args(words)
    signal.signal(signal.SIGTERM, _exit)
    return main(args, shlex.join(["python", "-m", package, name, *words]))


def _exit(number: int, frame: FrameType | None) -> None:
    """Leave through SystemExit, so that the servers which a measurement has started are stopped too."""
    sys.exit(128 + number)
