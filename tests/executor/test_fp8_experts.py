"""Experts that stay in e4m3: as checkpoints store them or rounded at load, and those that do not, with a reason."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.executor import ops
from quire.engine.executor.models import fused, fusible, hf
from quire.engine.executor.models.fused import Mixture, is_fused
from quire.engine.executor.models.hf import LoadedModel, load_model
from quire.engine.executor.models.quantised import quantising
from quire.engine.executor.models.quantised.fp8_experts import StoredFp8, await_rounding, rounded_rows, rows_of_int4
from quire.engine.executor.models.quantised.quantised import Quantised
from quire.engine.executor.models.quantised.quantised_experts import PackedExperts, QuantisedExperts
from quire.engine.executor.models.served_config import read_config
from quire.engine.executor.models.weight_reader import read_weights
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.executor.driver import logits_of
from tests.executor.test_gpu import words
from tests.quantised import Parts, quantise_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Sizes that the kernels can tile; but for "wide", GEMMs of a GPU take no linear layer (inputs are no multiples of 128).
SIZES: dict[str, Any] = dict(FAMILIES["llama"]) | {
    "hidden_size": 192,
    "intermediate_size": 192,
    "head_dim": 64,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 192,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES,
    "mixtral": SIZES,
    "qwen3_moe wide": SIZES | {"hidden_size": 256, "moe_intermediate_size": 128},
    "glm4_moe": SIZES | GROUPS,  # shared experts, keeps transformers' layers
}
NARROW = [kind for kind in MODELS if "wide" not in kind]
STORED = ["fp8-block", "fp8-tensor", "ct-fp8-channel", "ct-fp8-block"]
INT4 = ["gptq-64-asym", "gptq-all", "w4-64-asym", "w4-all"]
ROUTERS = ("lm_head", "mlp.gate", "moe.gate")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("fp8_experts")
    return lambda kind: make_checkpoint(root / kind.replace(" ", "_"), kind.split()[0], **MODELS[kind])


@pytest.fixture(scope="module")
def stored(plain: Callable[[str], Path]) -> Callable[[str, str], tuple[Path, Parts]]:
    """A checkpoint of a kind of model, quantised one way, and its exact weights."""
    made: dict[tuple[str, str], tuple[Path, Parts]] = {}

    def make(kind: str, how: str) -> tuple[Path, Parts]:
        if (kind, how) not in made:
            directory = plain(kind).parent / f"{plain(kind).name}-{how}"
            made[kind, how] = directory, quantise_checkpoint(plain(kind), directory, how, keep=ROUTERS)
        return made[kind, how]

    return make


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve experts on a CPU as on a Hopper GPU: our decoder, and the operators' plain loops."""
    monkeypatch.setattr(fused, "has_plain_decoder", fusible.has_known_parts)
    monkeypatch.setattr(ops, "takes_all_pairs", lambda hidden, inner, device: True)
    monkeypatch.setattr(quantising, "packs_experts", lambda device, dtype: True)
    monkeypatch.setattr(hf, "check_kind", lambda kind, device: None)


def packed_of(model: LoadedModel) -> int:
    """Count the layers whose experts are packed."""
    mixtures = [module for module in model.module.modules() if isinstance(module, Mixture) and module.packed]
    return len(mixtures) + sum(isinstance(module, PackedExperts) for module in model.module.modules())


def load(directory: Path, device: torch.device = CPU, dtype: str = "float32", **options: Any) -> LoadedModel:
    return load_model(str(directory), dtype=dtype, device=device, **{"own_experts": True} | options)


def write_exact(directory: Path, exact: Parts, to: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint with the weights of a quantised one."""
    shutil.copytree(directory, to)
    tensors = {name: weight.to(dtype).contiguous() for name, weight in exact.items()}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("qwen3_moe", how) for how in STORED + INT4), *(("qwen3_moe wide", how) for how in ("awq-128",))],
)
def test_stored_experts_give_the_bits_of_dequantised_ones(
    stored: Callable[[str, str], tuple[Path, Parts]],
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    how: str,
) -> None:
    directory, _ = stored(kind, how)
    with caplog.at_level(logging.INFO):
        kept = load(directory)
    assert is_fused(kept.module)
    assert packed_of(kept) == 2
    assert "weights of experts" not in kept.changes  # values are those of the files
    assert "experts of 2 layers stay in fp8: they take 0.0 GB" in caplog.text
    assert "not served in fp8" not in caplog.text
    monkeypatch.setattr(quantising, "packs_experts", lambda device, dtype: False)
    with caplog.at_level(logging.INFO):
        wide = load(directory)
    assert packed_of(wide) == 0
    reason = "only a Hopper GPU in bfloat16 has kernels for them"
    assert f"experts of 2 layers (Qwen3MoeExperts) are not served in fp8: {reason}" in caplog.text
    assert torch.equal(logits_of(kept, words(50), 7), logits_of(wide, words(50), 7))


def test_stored_experts_of_other_names(
    stored: Callable[[str, str], tuple[Path, Parts]], plain: Callable[[str], Path], on_cpu: None, tmp_path: Path
) -> None:
    """w1, w2 and w3 of mixtral, in a module that has another name in files than in the model."""
    directory, exact = stored("mixtral", "fp8-block")
    kept = load(directory)
    assert packed_of(kept) == 2
    wide = load(write_exact(plain("mixtral"), exact, tmp_path / "exact", torch.float32))
    torch.testing.assert_close(logits_of(kept, words(50), 50), logits_of(wide, words(50), 50))


def test_experts_inside_the_layers_of_transformers(
    stored: Callable[[str, str], tuple[Path, Parts]],
    plain: Callable[[str], Path],
    on_cpu: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second layer is a mixture with a shared expert and groups of experts."""
    directory, exact = stored("glm4_moe", "ct-fp8-channel")
    with caplog.at_level(logging.INFO):
        kept = load(directory)
    assert not is_fused(kept.module)
    assert packed_of(kept) == 1
    assert "experts of 1 layers stay in fp8" in caplog.text
    exact_model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        write_exact(plain("glm4_moe"), exact, tmp_path / "exact", torch.float32), dtype=torch.float32
    )
    want = exact_model(input_ids=torch.tensor([words(50)]), use_cache=False).logits[0, :-1]
    torch.testing.assert_close(logits_of(kept, words(50), 7), want, rtol=1e-4, atol=1e-4)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert packed_of(load(directory, own_experts=False)) == 0
    assert "experts of 1 layers (Glm4MoeExperts) are not served in fp8: --no-own-experts" in caplog.text


@pytest.mark.parametrize("kind", NARROW)
def test_experts_are_rounded_at_load(plain: Callable[[str], Path], on_cpu: None, tmp_path: Path, kind: str) -> None:
    check_rounded(plain(kind), CPU, tmp_path / "exact")


def check_rounded(directory: Path, device: torch.device, exact: Path) -> None:
    """Assert that `--quantize fp8` serves experts as `Quantised.of` rounds them.  exact: where to write those."""
    model = load(directory, device, "bfloat16", quantize="fp8")
    assert packed_of(model) == (1 if "glm4" in directory.name else 2)
    assert model.changes["weights of experts"] == "fp8"
    tensors = load_file(directory / "model.safetensors")
    for name, weight in tensors.items():
        if ".experts." in name:
            tensors[name] = Quantised.of(weight, torch.float8_e4m3fn).dequantised(torch.float32)
    near(model, write_exact(directory, tensors, exact, torch.float32))


def test_int4_rounds_experts_to_fp8_on_a_gpu(
    plain: Callable[[str], Path], on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GEMM of experts takes int4.  On a CPU they keep their dtype."""
    directory = plain("qwen3_moe")
    monkeypatch.setattr(quantising, "await_rounding", lambda experts, device: await_rounding(experts, CPU))
    for device, rounded in ((CUDA, 2), (CPU, 0)):
        loading = quantising.Quantising("int4", device)
        module = read_weights(directory, read_config(directory), "bfloat16", quantising=loading)
        assert sum(isinstance(each, QuantisedExperts) for each in module.modules()) == rounded
        assert ("weights of experts" in loading.changes) == bool(rounded)


def test_random_weights_are_rounded(plain: Callable[[str], Path], on_cpu: None, tmp_path: Path) -> None:
    shutil.copy(plain("qwen3_moe") / "config.json", tmp_path)
    assert packed_of(load(tmp_path, dtype="bfloat16", quantize="fp8", random=True)) == 2


def test_random_weights_are_freed_one_by_one(
    plain: Callable[[str], Path], on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise both dtypes of all experts must fit at once: Qwen3-30B-A3B did not load on a GPU of 80 GB."""
    shutil.copy(plain("qwen3_moe") / "config.json", tmp_path)
    swap, left = quantising.Quantising.swap, []

    def watched(self: quantising.Quantising, model: PreTrainedModel) -> None:
        weights = [weight for name, weight in model.named_parameters() if "experts" in name]
        storages = [StorageWeakRef(weight.untyped_storage()) for weight in weights]
        del weights
        swap(self, model)
        left.append([storage.expired() for storage in storages])

    monkeypatch.setattr(quantising.Quantising, "swap", watched)
    load(tmp_path, dtype="bfloat16", quantize="fp8", random=True)
    assert left == [[True] * 4]


@pytest.mark.parametrize("how", ["fp8-odd-block", "gptq-32", "ct-int8"])
def test_groups_that_the_kernels_do_not_take_are_dequantised(
    stored: Callable[[str, str], tuple[Path, Parts]], on_cpu: None, how: str
) -> None:
    """Groups of 96 and 32 columns have several scales within a tile; int8 has no kernel."""
    assert packed_of(load(stored("qwen3_moe", how)[0])) == 0


def test_values_of_4_bits_are_exact() -> None:
    """All values and zero points; the first half of the inputs has other zero points than the second."""
    numbers = torch.arange(256, dtype=torch.uint8).repeat(16, 1)  # all pairs: 512 inputs
    zero = torch.arange(16, dtype=torch.uint8)[:, None].repeat(1, 2)
    weight = Quantised(numbers, torch.rand(16, 2), torch.cat([zero[:, :1], 15 - zero[:, 1:]], 1))
    assert torch.equal(
        StoredFp8(rows_of_int4(weight)[None]).dequantised(torch.float32)[0], weight.dequantised(torch.float32)
    )


def test_a_layer_with_one_expert_in_another_format_is_dequantised(
    stored: Callable[[str, str], tuple[Path, Parts]], on_cpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, exact = stored("qwen3_moe", "ct-fp8-channel")
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    del tensors[f"{name}_scale"]
    tensors[name] = exact[name].float()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.INFO):
        model = load(copy)
    assert packed_of(model) == 1
    reason = "not every weight is stored in e4m3 or 4 bits, with groups that the kernels take"
    assert f"experts of 1 layers (Qwen3MoeExperts) are not served in fp8: {reason}" in caplog.text


def test_sizes_that_the_kernels_do_not_take_keep_their_dtype(
    tmp_path: Path, on_cpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3_moe", **SIZES | {"moe_intermediate_size": 96})
    quantise_checkpoint(directory, tmp_path / "stored", "ct-fp8-channel", keep=ROUTERS)
    with caplog.at_level(logging.INFO):
        assert packed_of(load(tmp_path / "stored")) == 0
    reason = "hidden size 192 or inner size 96 is no multiple of 64"
    assert f"experts of 2 layers (Qwen3MoeExperts) are not served in fp8: {reason}" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
@pytest.mark.parametrize("how", ["ct-fp8-channel", "rounded", "random"])
def test_the_dtype_of_the_model_decides_before_weights_are_read(
    stored: Callable[[str, str], tuple[Path, Parts]],
    plain: Callable[[str], Path],
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    how: str,
    dtype: str,
) -> None:
    source = plain("qwen3_moe") if how in ("rounded", "random") else stored("qwen3_moe", how)[0]
    directory = Path(shutil.copytree(source, tmp_path / "copy"))
    config = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    asked = set[tuple[torch.device, torch.dtype]]()

    def packs(device: torch.device, dtype: torch.dtype) -> bool:
        asked.add((device, dtype))
        return True

    monkeypatch.setattr(quantising, "packs_experts", packs)
    options: dict[str, Any] = {"quantize": "none" if how not in ("rounded", "random") else "fp8"}
    if how == "random":
        (directory / "model.safetensors").unlink()
    assert packed_of(load(directory, dtype=dtype, random=how == "random", **options)) == 2
    assert asked == {(CPU, torch.bfloat16)}


def test_rounding_is_that_of_linear_layers() -> None:
    """By rows, in float32; packing and moving keep the values."""
    weight = torch.randn(3, 128, 192)
    rounded = StoredFp8(rounded_rows(weight))
    assert rounded.shape == weight.shape
    want = [Quantised.of(expert, torch.float8_e4m3fn).dequantised(torch.float32) for expert in weight]
    assert torch.equal(rounded.dequantised(torch.float32), torch.stack(want))
    assert torch.equal(rounded.to(torch.Tensor.clone).dequantised(torch.float32), torch.stack(want))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("how", STORED + INT4)
def test_stored_experts_on_a_gpu(
    stored: Callable[[str, str], tuple[Path, Parts]], plain: Callable[[str], Path], tmp_path: Path, kind: str, how: str
) -> None:
    """Logits of a prompt are about as near to the float32 model of the exact weights as its own bfloat16 forward is."""
    directory, exact = stored(kind, how)
    model = load(directory, CUDA, "bfloat16")
    assert packed_of(model) == (1 if kind == "glm4_moe" else 2)
    near(model, write_exact(plain(kind), exact, tmp_path / "exact", torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NARROW)
def test_rounded_experts_on_a_gpu(plain: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    check_rounded(plain(kind), CUDA, tmp_path / "exact")


@torch.inference_mode()
def near(model: LoadedModel, exact: Path) -> None:
    """Assert that logits are at most 2 times as far from the exact float32 model as its own bfloat16 forward is."""
    ids = torch.tensor([words(50)])
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    want = plain(input_ids=ids, use_cache=False).logits[0, :-1]
    device = model.module.device
    own = plain.bfloat16().to(device)(input_ids=ids.to(device), use_cache=False).logits[0, :-1].float().cpu()
    found = logits_of(model, words(50), 50).float().cpu()
    assert (found - want).square().mean().sqrt() <= 2 * (own - want).square().mean().sqrt()
