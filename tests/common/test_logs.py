"""Log lines: one a record, for a terminal or for a collector."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from quire.engine.common import logs
from quire.engine.common.logs import JsonLines, KeyValues


def record(message: str, fields: dict[str, object] | None = None, *, failed: bool = False) -> logging.LogRecord:
    found = logging.LogRecord("quire.request", logging.INFO, "x.py", 1, message, (), None)
    if fields is not None:
        found.fields = fields
    if failed:
        try:
            raise ValueError("one\ntwo")
        except ValueError:
            found.exc_info = sys.exc_info()
    return found


def test_json_is_one_object_a_line() -> None:
    line = JsonLines().format(record("a\nb", {"tenant": "zürich", "seconds": 0.5, "resumed": True}, failed=True))
    assert "\n" not in line
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert "ValueError: one\ntwo" in said.pop("exception")
    assert said == {
        "level": "info",
        "logger": "quire.request",
        "message": "a\nb",
        "tenant": "zürich",
        "seconds": 0.5,
        "resumed": True,
    }


def test_text_quotes_what_is_not_one_word() -> None:
    line = KeyValues().format(record("request", {"id": "cmpl-1", "tenant": 'a "b" c', "forged": "x\nlevel=error"}))
    assert line.endswith(r'quire.request INFO request id=cmpl-1 tenant="a \"b\" c" forged="x\nlevel=error"')


@pytest.mark.parametrize(("form", "formatter"), [("text", KeyValues), ("json", JsonLines)])
def test_start_sends_every_record_to_stderr(
    form: logs.Format, formatter: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    logs.start(form)
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr
    assert isinstance(handler.formatter, formatter)
    assert root.level == logging.INFO
