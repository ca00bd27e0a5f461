"""The measurement of grammars: schemas differ, no answer ends by itself, and both kinds compute the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from quire.loadtest.studies import structured


def test_schemas_are_valid_and_no_two_are_equal() -> None:
    for max_length in (0, 40):
        found = [json.dumps(schema) for schema in structured.schemas(50, max_length)]
        assert len(set(found)) == 50
        assert ("maxLength" in found[0]) == bool(max_length)
        for schema in found:
            jsonschema.Draft202012Validator.check_schema(json.loads(schema))


def test_the_command(checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch=2", "--tokens=12", "--rounds=2", "--kv-blocks=128", "--threads=1", "--dtype=float32"]
    assert structured.main([str(checkpoint("llama")), *options]) == 0
    figures = json.loads(capsys.readouterr().out)
    low, middle, high = (figures[f"batch2_{name}"] for name in ("ratio_low", "ratio", "ratio_high"))
    assert 0 < low <= middle <= high
    assert figures["batch2_mask_ms"] > 0
    assert figures["batch2_plain_steps"] >= 12
    assert 0 < figures["batch2_structured_steps"] < 24
    assert 0 <= figures["batch2_jumped"] < 1


def test_a_model_without_a_tokenizer_is_one_line(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint("llama") / name).read_bytes())
    assert structured.main([str(tmp_path), "--kv-blocks=128"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err
