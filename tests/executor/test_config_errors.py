"""A config or a weight that transformers fails on is refused in one line that names the field or the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models import hf
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", "llama")


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as refused:
        hf.load_model(str(directory), dtype="auto", device=CPU)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "rope_parameters.type is 'mrope', which transformers does not know"),
        (
            {"rope_scaling": {"rope_type": "ntk"}},
            "rope_parameters.rope_type is 'ntk', which transformers does not know",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": None}},
            "rope_parameters.factor is None; it must be a number",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
            "rope_scaling.beta_fast is 'x'; it must be a number",
        ),
        ({"rope_theta": None}, "rope_theta is None; it must be a number"),
        ({"rope_scaling": "yarn"}, "Field 'rope_parameters' with value 'yarn'"),
        ({"hidden_act": "nonsense"}, "hidden_act is 'nonsense', which transformers does not know"),
        ({"hidden_size": "8"}, "Field 'hidden_size' expected int, got str (value: '8')"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        ({"vocab_size": -1}, "vocab_size is -1; it must be at least 1"),
        ({"head_dim": 7}, "`head_dim`=7"),
    ],
)
def test_the_line_names_the_field_and_its_value(llama: Path, fields: dict[str, Any], reason: str) -> None:
    file = llama / "config.json"
    described = json.loads(file.read_bytes())
    described.pop("rope_parameters")
    file.write_text(json.dumps(described | fields))
    line = refusal(llama)
    assert line.startswith(str(llama))
    assert reason in line


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_weight_without_values_is_named(llama: Path, name: str, tied: bool) -> None:
    file = llama / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"tie_word_embeddings": tied}))
    weights = load_file(llama / "model.safetensors")
    weights[name] = torch.zeros(0)
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    assert refusal(llama).startswith(f"{llama}/model.safetensors: {name} of shape [0] holds no values")
