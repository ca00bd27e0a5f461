"""The base class of every error that ends a process in one line instead of a traceback."""

from __future__ import annotations


class OperatorError(Exception):
    """An error that an operator can fix; its text is one line with the cause and, if known, the remedy.

    Every `main` catches this class, prints the line to stderr and exits with `exit_status`.  Any other exception is a
    bug, and its traceback belongs in the log.
    """

    exit_status = 1
