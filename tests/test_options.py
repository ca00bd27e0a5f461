"""What .ci/options.py writes is current, and every option says what it is for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from quire.engine.common import settings
from quire.service.cli import CLIENTS

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("options", ROOT / ".ci" / "options.py")
assert spec is not None
assert spec.loader is not None
options = importlib.util.module_from_spec(spec)
spec.loader.exec_module(options)
STALE = "not current: run .venv/bin/python .ci/options.py"


def test_the_pages_and_the_charts_schema_are_current() -> None:
    assert options.PAGE.read_text(encoding="utf-8") == options.page(), STALE
    assert options.API.read_text(encoding="utf-8") == options.api(), STALE
    assert json.loads(options.SCHEMA.read_text(encoding="utf-8")) == json.loads(options.schema()), STALE


@pytest.mark.parametrize("program", options.SECTIONS)
def test_every_option_says_what_it_does(program: str) -> None:
    cls, _ = options.SECTIONS[program]
    for option in settings.options(cls):
        assert len(option.description.split()) > 1, option.name
        assert option.description.endswith("."), option.name


def test_programs_mean_the_same_by_the_same_name() -> None:
    """One variable QUIRE_X reaches every program, so X must take the same values in each.

    Clients for a terminal read no variable but the API key."""
    limits: dict[str, list[str]] = {}
    for cls in (cls for name, (cls, _) in options.SECTIONS.items() if name not in CLIENTS):
        for option in settings.options(cls):
            assert limits.setdefault(option.name, option.limits) == option.limits, option.name


def test_the_page_of_the_api_shows_every_limit() -> None:
    written = options.API.read_text(encoding="utf-8").split(options.BEGIN)[1].split(options.END)[0]
    for limit in options.limits.LIMITS.values():
        assert f"`{limit.field.split(', ')[0]}`" in written, limit.field
        assert limit.counts in written, limit.field
