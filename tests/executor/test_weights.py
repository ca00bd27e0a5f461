from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models import weights
from quire.engine.executor.models.quantised.plain_weights import PlainWeights
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.served_config import read_config
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.models.weights import fingerprint, weight_files


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "model"))


def test_one_changed_byte_of_weights_is_another_model(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model, torch.float32, tmp_path / "cache")
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    after = fingerprint(model, torch.float32, tmp_path / "cache")
    assert before != after
    assert len(after) == 64
    content[-1] ^= 1
    file.write_bytes(content)
    assert fingerprint(model, torch.float32, tmp_path / "cache") == before


def test_dtype_and_config_are_part_of_it(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model, torch.float32, tmp_path)
    assert fingerprint(model, torch.bfloat16, tmp_path) != before
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_version": "1.2.3"}))
    assert fingerprint(model, torch.float32, tmp_path) == before
    (model / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-3}))
    assert fingerprint(model, torch.float32, tmp_path) != before


def test_where_it_lies_is_not(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model, torch.float32, tmp_path / "cache")
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    assert fingerprint(Path(moved), torch.float32, tmp_path / "cache") == before


def test_a_file_is_hashed_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(model, torch.float32, tmp_path / "cache")
    monkeypatch.setattr(weights, "_sha256", lambda file: pytest.fail("hashed again"))
    assert fingerprint(model, torch.float32, tmp_path / "cache") == before
    monkeypatch.undo()
    (tmp_path / "cache" / "digests.json").write_text("{half")
    assert fingerprint(model, torch.float32, tmp_path / "cache") == before


def test_a_cache_that_cannot_be_written_only_costs_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert fingerprint(model, torch.float32, tmp_path / "file") == fingerprint(model, torch.float32, tmp_path / "cache")


def test_a_blob_of_the_hub_is_not_hashed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache keeps a large file as blobs/<its sha256> and links to it."""
    plain = fingerprint(model, torch.float32, tmp_path / "cache")
    blob = tmp_path / "blobs" / weights._sha256(model / "model.safetensors")
    blob.parent.mkdir()
    os.rename(model / "model.safetensors", blob)
    (model / "model.safetensors").symlink_to(blob)
    monkeypatch.setattr(weights, "_sha256", lambda file: pytest.fail("hashed"))
    assert fingerprint(model, torch.float32, tmp_path / "other") == plain


def test_of_random_weights_those_in_files_count(model: Path, tmp_path: Path) -> None:
    both = fingerprint(model, torch.float32, tmp_path / "cache", random=True)
    (model / "model.safetensors").unlink()
    assert fingerprint(model, torch.float32, tmp_path / "cache", random=True) != both


def test_a_whole_file_wins_over_an_index_and_its_shards(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As in transformers.  Both kinds lie in directories whose files were converted twice."""
    both = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "both"))
    AutoModelForCausalLM.from_pretrained(both).save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    tensors = load_file(both / "model.safetensors")
    changed = {name: tensor * 1.5 for name, tensor in tensors.items()}
    for shard in (tmp_path / "shards").glob("model*"):
        shutil.copy(shard, both)
    before = fingerprint(both, torch.float32, tmp_path / "cache")
    save_file(changed, both / "model.safetensors", {"format": "pt"})
    assert weight_files(both) == [both / "model.safetensors"]
    assert fingerprint(both, torch.float32, tmp_path / "cache") != before
    name = "model.layers.1.self_attn.o_proj.weight"
    config = read_config(both)
    assert torch.equal(read_weights(both, config, "auto").state_dict()[name], changed[name])
    with PlainWeights(both).opened({}, torch.float32, Quantising("none", torch.device("cpu"))) as stored:
        assert torch.equal(stored[name][...], changed[name])


def test_an_index_that_names_no_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ModelLoadError, match=r"index\.json: it names no weight file$"):
        weight_files(model)


def test_weights_that_the_config_names_are_refused(model: Path) -> None:
    """transformers would load that file, and nothing else here would know of it."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(ModelLoadError, match=r"config\.json: transformers_weights names other\.safetensors"):
        read_config(model)
