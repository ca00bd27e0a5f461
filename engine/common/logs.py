"""How both processes log: one line a record, as text for a terminal or JSON for a collector.

What a record says beyond its message is in `fields`: `log.info("...", extra={"fields": {"request_id": ...}})`.  No line
carries prompt or output text.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Format = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """One JSON object a record; a traceback is one of its strings."""

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
    """The usual line, and ` key=value` of each field."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        said = (f"{key}={_word(value)}" for key, value in fields(record).items())
        return " ".join([super().formatMessage(record), *said])


def _word(value: object) -> str:
    """One word of a line: what could be taken for several is quoted."""
    text = str(value)
    return text if re.fullmatch(r"[^\s\"=]+", text) and text.isprintable() else json.dumps(text)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What it says beyond its message."""
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


def start(form: Format) -> None:
    """Once a process: records from INFO on go to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else KeyValues())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
