"""Multimodal checkpoints served for their text: equal to the complete models, of which only the text part is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.models import hf, overrides
from quire.engine.executor.models.fused import is_fused
from quire.engine.executor.models.served_config import read_config, served_part
from quire.engine.executor.models.sharding import shard_proof
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.ranks.ranks import Ranks
from quire.loadtest.studies.model_families import EQUAL, Verdict, judge
from tests.matrix import sampled
from tests.towers import make, reorder

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FUSED = {"internvl", "llava", "llava_onevision", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}


def load(directory: Path, **options: object) -> hf.LoadedModel:
    return hf.load_model(str(directory), dtype="auto", device=CPU, **options)  # type: ignore[arg-type]


# Most of the others: test_multimodal.py.
FAMILIES = FUSED | {"aya_vision", "gemma3", "gemma4", "llama4"}


# Each family is in one of the two samples.
KEPT = ["aya_vision", "gemma4", "llama4", "llava", "mistral3", "qwen2_5_vl"]
KEPT_BY_RANKS = ["gemma3", "internvl", "llava_onevision", "qwen2_vl", "qwen3_vl"]


@pytest.mark.parametrize("family", sampled(sorted(FAMILIES), KEPT))
def test_texts_equal_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    assert judge(family, tmp_path / family) == Verdict(family, EQUAL)
    model = load(tmp_path / family)
    assert is_fused(model.module) == (family in FUSED)
    names = " ".join(name for name, _ in model.module.named_modules())
    assert "vis" not in names
    assert "multi_modal" not in names


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("language_model.model.layers.1.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"),
        ("another_tower.norm.weight", "another_tower.norm.weight"),
    ],
)
def test_tensors_of_no_known_part_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    file = make(tmp_path, "mistral3") / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(128)}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"^mistral: the weight files hold {reason}, which the model of this"):
        load(file.parent)


def test_a_missing_tensor_of_the_text_part(tmp_path: Path) -> None:
    file = make(tmp_path, "qwen2_5_vl") / "model.safetensors"
    save_file({k: w for k, w in load_file(file).items() if k != "model.norm.weight"}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"the weight files lack model\.norm\.weight$"):
        load(file.parent)


@pytest.mark.parametrize("family", sampled(sorted(FAMILIES - {"llama4"}), KEPT_BY_RANKS))
def test_the_parts_of_two_ranks_are_the_text_part(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path, family, **({"text_config": {"global_head_dim": 32}} if family == "gemma4" else {}))
    config = served_part(read_config(directory), directory)
    whole = read_weights(directory, config, "auto", part=True).state_dict()
    monkeypatch.setattr(shard_proof, "prove_parts", lambda *_: None)  # needs the other rank
    parts = [read_weights(directory, config, "auto", part=True, ranks=Ranks(rank, 2)) for rank in range(2)]
    divided = 0
    for name, tensor in whole.items():
        first, second = (part.state_dict()[name] for part in parts)
        if first.shape == tensor.shape:
            assert torch.equal(first, tensor), name
            continue
        divided += 1
        dim = next(i for i, (a, b) in enumerate(zip(first.shape, tensor.shape, strict=True)) if a != b)
        halves = 2 if name.endswith("gate_up_proj") else 1
        split = [part.chunk(halves, dim) for part in (first, second)]
        assert torch.equal(torch.cat([half[i] for i in range(halves) for half in split], dim), tensor), name
    assert divided >= 2 * 7


def test_tensors_of_no_known_part_are_refused_by_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_proof, "prove_parts", lambda *_: None)
    directory = make(tmp_path, "mistral3")
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"another_tower.norm.weight": torch.ones(128)}, file, {"format": "pt"})
    config = served_part(read_config(directory), directory)
    with pytest.raises(UnsupportedModel, match=r"^mistral: the weight files hold another_tower\.norm\.weight, which"):
        read_weights(directory, config, "auto", part=True, ranks=Ranks(0, 2))


def test_integers_of_other_towers_do_not_matter(tmp_path: Path) -> None:
    directory = make(tmp_path, "llava")
    file = directory / "model.safetensors"
    positions = {"model.vision_tower.vision_model.embeddings.position_ids": torch.arange(4)[None]}
    save_file(load_file(file) | positions, file, {"format": "pt"})
    assert load(directory).max_model_len == 512


def test_tensors_under_the_names_of_newer_versions(tmp_path: Path) -> None:
    """Files have language_model.model.layers for what transformers calls model.language_model.layers."""
    directory = make(tmp_path, "llava")
    wanted = load(directory).module.state_dict()
    before = load_file(directory / "model.safetensors").keys()
    reorder(directory, "new")
    assert not before & load_file(directory / "model.safetensors").keys()
    found = load(directory).module.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_fields_of_the_text_at_the_top_of_the_file(tmp_path: Path) -> None:
    """As files of Qwen2.5-VL have them; a model's card prescribes yarn there."""
    directory = make(tmp_path, "qwen2_5_vl")
    described = json.loads((directory / "config.json").read_bytes())
    text = described.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = text | described | {"rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    (directory / "config.json").write_text(json.dumps(flat))
    assert load(directory).max_model_len == 512
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    model = load(directory, hf_overrides=json.dumps({"rope_scaling": yarn}), max_model_len=1024)
    assert model.max_model_len == 1024
    rope = model.module.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 2.0, 10_000.0)
    whole = overrides.load_config(directory, {"rope_scaling": yarn}).get_text_config()
    assert whole.rope_parameters["mrope_section"] == scaling["mrope_section"]


def test_a_field_of_the_text_part_is_named_with_it(tmp_path: Path) -> None:
    directory = make(tmp_path, "mistral3")
    assert load(directory, hf_overrides='{"text_config": {"rms_norm_eps": 0.001}}').module.config.rms_norm_eps == 0.001
    with pytest.raises(ModelLoadError, match=r"mistral3 has no rms_norm_eps; its text part has: text_config\.rms_norm"):
        load(directory, hf_overrides='{"rms_norm_eps": 0.001}')


def test_llama4_is_served_within_one_chunk(tmp_path: Path) -> None:
    """There its chunked attention sees all, and its temperature, which depends on the place in the batch, is one."""
    text = {"attention_chunk_size": 64, "floor_scale": 60, "max_position_embeddings": 512}
    directory = make(tmp_path, "llama4", text_config=text)
    assert load(directory).max_model_len == 59
    bound = "the positions before its attention's temperature changes"
    with pytest.raises(ModelLoadError, match=rf"60 is over the 59 positions llama4_text can serve; .* within {bound}$"):
        load(directory, max_model_len=60)
    assert not load(directory).module.config.attn_temperature_tuning
    directory = make(tmp_path / "chunk", "llama4")
    with pytest.raises(
        ModelLoadError, match=r"513 is over the 512 positions .* within the first chunk of its attention$"
    ):
        load(directory, max_model_len=513)
