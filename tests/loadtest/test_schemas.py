"""The study of JSON schemas: counts of a small made-up collection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.loadtest.studies import schemas

NUMBER: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
UNIQUE: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def test_schemas_are_counted_by_set_and_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, schema in (("one/a", NUMBER), ("one/b", {**NUMBER, "x-label": 1}), ("two/a", UNIQUE)):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(schema))
    tests = [{"valid": True, "data": {"a": 1}}, {"valid": False, "data": {"a": "x"}}, {"valid": False, "data": []}]
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "a.json").write_text(json.dumps({"schema": NUMBER, "tests": tests}))
    assert schemas.main([str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schemas"], found["accepted"]) == (4, 3)
    assert {name: row[:2] for name, row in found["by_set"].items()} == {"one": [2, 2], "two": [1, 0], "three": [1, 1]}
    assert (found["invalid"], found["invalid_refused"], found["valid"], found["valid_written"]) == (2, 2, 1, 1)
    assert sum(found["reasons"].values()) == 1
    assert {name: len(paths) for name, paths in schemas.drawn(tmp_path, 1, 1).items()} == {
        "one": 1,
        "two": 1,
        "three": 1,
    }
