"""Logging in every process: one line per record, as text for a terminal or JSON for a collector.

Further values are passed in `fields`: `log.info("...", extra={"fields": {"request_id": ...}})`.  No line contains
prompt or output text.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

from quire.engine.common import log_queue

Format = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """Format a record as one JSON object; a traceback becomes the string `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class KeyValues(logging.Formatter):
    """Format a record as a text line, followed by ` key=value` per field."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = (f"{key}={_word(value)}" for key, value in fields(record).items())
        return " ".join([super().formatMessage(record), *pairs])


def _word(value: object) -> str:
    """Return the value as one word, quoted if it contains spaces, quotes or `=`."""
    text = str(value)
    return text if re.fullmatch(r"[^\s\"=]+", text) and text.isprintable() else json.dumps(text)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `fields` of a record."""
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


class Handler(logging.StreamHandler[TextIO]):
    """Writes records to a QueuedStream.  flush() waits for its queue, for at most DRAIN_S."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.stream.write(self.format(record) + self.terminator)  # without StreamHandler's flush, which would wait
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Write all queued lines.  logging.shutdown() calls it before the process ends, also before os._exit()."""
        log_queue.drain()


def start(form: Format) -> None:
    """Log to stderr from level INFO on, and make printing and logging non-blocking.  Call it once per process."""
    formatter = JsonLines() if form == "json" else KeyValues()

    def notice(dropped: int) -> str:
        text = log_queue.plain_notice(dropped)
        return formatter.format(logging.LogRecord("quire.log", logging.WARNING, __file__, 0, text, (), None))

    log_queue.install(notice)
    handler = Handler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
