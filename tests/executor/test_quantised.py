"""Quantised checkpoints: their configs, their weights against float64, and greedy text through the real loader."""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from quire.engine.executor import attention, ops
from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.models import end_tokens, hf
from quire.engine.executor.models.quantised.dequantise import as_stored, dequantise
from quire.engine.executor.models.quantised.quantisation import Quantisation, read_quantisation
from quire.engine.executor.models.quantised.quantised import DTYPE, Quantised, QuantisedLinear
from quire.engine.executor.models.quantised.quantising import Quantising
from quire.engine.executor.models.served_config import read_config
from quire.engine.executor.models.weight_reader import read_weights
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from tests.checkpoints import make_checkpoint
from tests.executor.driver import NEW, Driver, greedy, served
from tests.executor.test_hf import refusal, rewrite
from tests.executor.test_quantize import at_all_tokens, mean_square, stored_on_gpu
from tests.executor.test_worker import words
from tests.quantised import FP4, GPTQ, KINDS, WIDE, Written, compressed, pack_quantised, quantise_checkpoint, w4

CPU = torch.device("cpu")


def written(directory: Path, config: dict[str, Any] | None, **files: Any) -> Path:
    """A directory with what is read of a quantisation, and no weights."""
    described = {} if config is None else {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(described))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def loaded(directory: Path, dtype: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint before any submodule is swapped."""
    return read_weights(directory, read_config(directory), dtype).state_dict()


READ = {
    "fp8-block": Quantisation("fp8", "scaled", "block", 8, block=(128, 128), quantises_activations=True),
    "fp8-tensor": Quantisation("fp8", "scaled", "tensor", 8, quantises_activations=True),
    "ct-fp8-tensor": Quantisation("compressed-tensors", "scaled", "tensor", 8, ignored=("lm_head",)),
    "ct-fp8-channel": Quantisation(
        "compressed-tensors", "scaled", "channel", 8, ignored=("lm_head",), quantises_activations=True
    ),
    "modelopt-file": Quantisation(
        "modelopt", "scaled", "tensor", 8, ignored=("re:lm_head.*$",), quantises_activations=True
    ),
    "modelopt-nvfp4": Quantisation(
        "modelopt", "fp4", "group", 4, group=16, ignored=("lm_head",), demanded=frozenset({"scale_2"})
    ),
    "nvfp4": Quantisation(
        "compressed-tensors", "fp4", "group", 4, group=16, ignored=("lm_head",), demanded=frozenset({"global_scale"})
    ),
    "mxfp4-packed": Quantisation("compressed-tensors", "fp4", "group", 4, group=32, ignored=("lm_head",)),
    "awq-128": Quantisation("awq", "awq", "group", 4, group=128),
    "gptq-64-asym": Quantisation("gptq", "gptq", "group", 4, group=64, zero_shift=1),
    "gptq-v2": Quantisation("gptq", "gptq", "group", 4, group=32),
    "gptq-all": Quantisation("gptq", "gptq", "channel", 4, zero_shift=1),
    "gptq-128-order": Quantisation("gptq", "gptq", "group", 4, group=128, zero_shift=1, demanded=frozenset({"g_idx"})),
    "w4-64-asym": Quantisation(
        "compressed-tensors",
        "packed",
        "group",
        4,
        group=64,
        ignored=("lm_head",),
        demanded=frozenset({"zero_point"}),
    ),
    "w4-128-order": Quantisation(
        "compressed-tensors", "packed", "group", 4, group=128, ignored=("lm_head",), demanded=frozenset({"g_idx"})
    ),
    "w4-all": Quantisation("compressed-tensors", "packed", "channel", 4, ignored=("lm_head",)),
    "w8-64": Quantisation("compressed-tensors", "packed", "group", 8, group=64, ignored=("lm_head",)),
}


@pytest.mark.parametrize("kind", READ)
def test_a_config_says_how_weights_are_stored(tmp_path: Path, kind: str) -> None:
    config = KINDS[kind].config or None
    files = {"hf_quant_config": KINDS[kind].file} if KINDS[kind].file else {}
    assert read_quantisation(written(tmp_path, config, **files), "llama") == READ[kind]


def test_a_checkpoint_that_is_not_quantised(plain: Path) -> None:
    assert read_quantisation(plain, "llama") is None


def test_a_config_inside_the_config_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": KINDS["awq-32"].config}}))
    assert read_quantisation(tmp_path, "any") == Quantisation("awq", "awq", "group", 4, group=32)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "auto-round", "bits": 4}, "auto-round"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt (NVFP4_AWQ)"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt (MIXED_PRECISION)"),
    ({"quant_method": "modelopt"}, "modelopt"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 (e5m2)"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8 (experts in fp4)"),
    ({"quant_method": "mxfp4"}, "mxfp4 (of another model than gpt_oss)"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 128}, "awq (gemv)"),
    ({"quant_method": "awq", "bits": 3, "group_size": 128}, "awq (3 bits)"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq (3 bits)"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "gptq (marlin)"),
    (GPTQ | {"dynamic": {"-:x": {}, "+:y": {"bits": 8}}}, "gptq (the rule +:y in dynamic: bits 8)"),
    (GPTQ | {"dynamic": {"y": {"bits": 4, "group_size": 64}}}, "gptq (the rule y in dynamic: group_size 64)"),
    (GPTQ | {"dynamic": {"+:y": {"desc_act": True}}}, "gptq (the rule +:y in dynamic: desc_act True)"),
    (GPTQ | {"dynamic": {"+:y": {"adapter": None}}}, "gptq (the rule +:y in dynamic: adapter None)"),
    (
        compressed("nvfp4-pack-quantized", "tensor_group", group_size=16),
        "compressed-tensors (nvfp4-pack-quantized: float of 8 bits)",
    ),
    (
        compressed("nvfp4-pack-quantized", "tensor_group", group_size=32, **FP4),
        "compressed-tensors (nvfp4-pack-quantized, tensor_group of 32)",
    ),
    (
        compressed("nvfp4-pack-quantized", "tensor_group", group_size=16, symmetric=False, **FP4),
        "compressed-tensors (nvfp4-pack-quantized: float of 4 bits, zero_point)",
    ),
    ({**w4(128), "config_groups": {}}, "compressed-tensors (without weights)"),
    (compressed("marlin-24", "group"), "compressed-tensors (marlin-24)"),
    (w4(128, num_bits=3), "compressed-tensors (pack-quantized: int of 3 bits)"),
    (
        w4(128) | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "compressed-tensors (transform_config: rotations of activations and weights)",
    ),
    (compressed("float-quantized", "token"), "compressed-tensors (float-quantized, token)"),
    (
        {
            **w4(128),
            "config_groups": {"a": w4(128)["config_groups"]["group_0"], "b": w4(64)["config_groups"]["group_0"]},
        },
        "compressed-tensors (groups of several kinds)",
    ),
]


@pytest.mark.parametrize("order", [None, "weight", "static", False])
def test_an_order_that_needs_no_groups_of_columns(tmp_path: Path, order: object) -> None:
    described = w4(128, actorder=order) | {"transform_config": {}}
    found = read_quantisation(written(tmp_path, described), "llama")
    assert found is not None
    assert not found.demanded


@pytest.mark.parametrize(("config", "named"), REFUSED)
def test_what_no_reader_knows_is_refused_by_name(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_quantisation(written(tmp_path, config), "llama")
    assert str(caught.value) == (
        f"llama: weights quantised by {named}, which is not implemented; serve an unquantised copy"
    )


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": "many", "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "modules_to_not_convert": ["re:("]},
        [],
    ],
)
def test_a_config_that_cannot_be_read(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_quantisation(written(tmp_path, config), "llama")
    assert "\n" not in str(caught.value)


SAME = {name: GPTQ[name] for name in ("bits", "group_size", "sym", "desc_act")}


@pytest.mark.parametrize(
    ("rules", "ignored"),
    [
        (None, set()),
        ({r"+:.*\.up_proj": SAME, "lm_head": {}}, set()),
        ({r"-:.*\.up_proj": {}, r"-:nothing": {}}, {"up_proj"}),
        ({r"+:.*\.up_proj": SAME, r"-:.*\.(up|down)_proj": {}}, {"down_proj"}),
        ({r".*\.x|.*\.up_proj": SAME, r"-:.*\.x|.*\.(up|down)_proj": {}}, {"down_proj"}),
        ({r"-:.*\.(up|down)_proj": {}, r"+:.*\.up_proj": SAME}, {"up_proj", "down_proj"}),
    ],
)
def test_the_first_rule_of_gptq_that_matches_a_module_decides(tmp_path: Path, rules: Any, ignored: set[str]) -> None:
    found = read_quantisation(written(tmp_path, GPTQ | {"dynamic": rules}), "llama")
    assert found is not None
    names = {"up_proj", "down_proj", "gate_proj"}
    assert {name for name in names if found.ignores(f"model.layers.0.mlp.{name}")} == ignored


def test_modules_that_a_config_ignores() -> None:
    how = Quantisation("x", "scaled", "tensor", 8, ignored=("lm_head", r"re:.*\.gate$"))
    assert how.ignores("lm_head")
    assert how.ignores("model.layers.0.mlp.gate")
    assert not how.ignores("model.layers.0.mlp.gate_proj")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_those_in_float64(quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str) -> None:
    directory, exact = quantised(kind)
    found = loaded(directory, "float32")
    assert found.keys() == exact.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), exact[name].double(), rtol=1e-7, atol=0)
    for name, tensor in loaded(directory, "bfloat16").items():
        assert torch.equal(tensor, found[name].bfloat16()), name


def served_weights(
    directory: Path, quantize: Literal["none", "int8", "fp8", "int4"], device: torch.device = CPU
) -> dict[str, Quantised]:
    """The weights of a checkpoint's layers that have 8 or 4 bits when it is served."""
    model = read_weights(directory, read_config(directory), "bfloat16", quantising=Quantising(quantize, device))
    found = {name: part.quantised for name, part in model.named_modules() if isinstance(part, QuantisedLinear)}
    head = found.pop("lm_head", None)
    assert (head is not None) == (quantize == "int4")
    assert head is None or head.values.dtype == (torch.int8 if device == CPU else torch.float8_e4m3fn)
    return found


def check_exact(kept: dict[str, Quantised], exact: dict[str, Any]) -> None:
    """All linear layers are kept, and mean the weights that were stored."""
    assert len(kept) == 14
    for name, weight in kept.items():
        torch.testing.assert_close(
            weight.dequantised(torch.float32).double(), exact[f"{name}.weight"], rtol=1e-7, atol=0
        )


@pytest.mark.parametrize("kind", ["ct-int8", "ct-int8-tensor", "w8-all"])
def test_int8_of_rows_stays_as_it_is_stored(quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str) -> None:
    directory, exact = quantised(kind)
    for quantize in ("none", "int8"):
        kept = served_weights(directory, quantize)
        assert {weight.values.dtype for weight in kept.values()} == {torch.int8}
        check_exact(kept, exact)
    model = hf.load_model(str(directory), dtype="bfloat16", device=CPU)
    assert model.changes == {"weights of linear layers": "int8 as stored"}


INT4_IN_PART = ["gptq-128-order", "w4-128-order"]  # one group in some layers, so that these are in order
INT4 = ["awq-32", "awq-128", "gptq-32", "gptq-64-asym", "gptq-all", "gptq-v2", "w4-32", "w4-64-asym", "w4-all"]


@pytest.mark.parametrize("kind", INT4)
def test_int4_stays_as_it_is_stored(quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str) -> None:
    directory, exact = quantised(kind)
    for quantize in ("none", "int4"):
        kept = served_weights(directory, quantize)
        check_exact(kept, exact)
        for weight in kept.values():
            assert weight.values.dtype == torch.uint8
            assert weight.values.shape == (weight.shape[0], weight.shape[1] // 2)
            assert weight.values.untyped_storage().nbytes() == weight.values.numel()


def test_how_the_fingerprint_names_int4(quantised: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    """A layer that the config ignores keeps its dtype without --quantize int4, and is rounded with it."""
    found = {}
    for quantize in ("none", "int4", "int8"):
        loading = Quantising(quantize, CPU)
        directory = quantised("awq-32")[0]
        read_weights(directory, read_config(directory), "bfloat16", quantising=loading)
        found[quantize] = loading.changes["weights of linear layers"]
    assert found == {"none": "int4 as stored", "int4": "int4, int4 as stored", "int8": "int8"}


@pytest.mark.parametrize("kind", INT4_IN_PART)
def test_columns_in_the_order_of_their_importance_are_dequantised(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str
) -> None:
    """The others have 128 inputs, that is, one group."""
    kept = served_weights(quantised(kind)[0], "none")
    assert {name.rpartition(".")[2] for name in kept} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def test_groups_that_no_product_has_are_dequantised(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = w4(16)
    monkeypatch.setitem(KINDS, "w4-16", Written(config, pack_quantised(16)))
    exact = quantise_checkpoint(plain, tmp_path / "w4-16", "w4-16")
    assert served_weights(tmp_path / "w4-16", "none") == {}
    check_greedy(plain, tmp_path / "w4-16", exact, tmp_path)


def test_a_row_of_more_inputs_than_a_group_may_have() -> None:
    """A scale of a complete row becomes the equal scales of its groups."""
    weight = torch.randn(3, 8192, generator=torch.Generator().manual_seed(1)).double()
    for symmetric in (True, False):
        parts, exact = pack_quantised(-1, symmetric=symmetric)(weight)
        how = Quantisation("compressed-tensors", "packed", "channel", 4)
        kept = as_stored(how, {name.removeprefix("weight_"): part for name, part in parts.items()})
        assert kept.scale.shape == (3, 256)
        assert torch.equal(kept.dequantised(torch.float32).double(), exact.float().double())
        x = torch.randn(2, 8192)
        y = ops.packed_linear(x, ops.pack_int4(kept.values, kept.scale, kept.zero), None)
        torch.testing.assert_close(y.double(), x.double() @ exact.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("kind", "asked"), [("awq-32", "int8"), ("w4-all", "int8"), ("ct-int8", "int4")])
def test_another_kind_is_rounded_on_request(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str, asked: Literal["int8", "int4"]
) -> None:
    directory, exact = quantised(kind)
    rounded = served_weights(directory, asked)
    assert len(rounded) == 14
    for name, weight in rounded.items():
        wanted = Quantised.of(exact[f"{name}.weight"].float(), weight.values.dtype)
        assert weight.values.dtype == DTYPE[asked]
        torch.testing.assert_close(
            weight.dequantised(torch.float32), wanted.dequantised(torch.float32), atol=0.01, rtol=0
        )


@pytest.mark.parametrize("kind", ["awq-32", "gptq-64-asym", "w4-64-asym", "w4-all"])
def test_logits_of_int4_are_those_of_the_stored_weights(
    plain: Path, quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path, kind: str
) -> None:
    """As close to transformers' float32 model as activations quantised to 16 bits allow.

    In each of 14 GEMMs an activation has an error of at most a 65,000th of the largest in its row."""
    directory, exact = quantised(kind)
    write_exact(plain, exact, tmp_path / "exact", torch.float32)
    model = hf.load_model(str(directory), dtype="float32", device=CPU)
    driver = Driver(model, graph_seconds=0)
    driver.add(words(60), None, targets=True)
    driver.step()
    want = at_all_tokens(AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32), words(60))[:-1]
    got = driver.worker.logits.float()
    assert mean_square(got - want) <= 14 / 65_000 * float(want.abs().max())


GPU = torch.device("cuda")  # the reader never uses this device
FP8_KINDS = ["fp8-block", "fp8-tensor", "ct-fp8-channel", "ct-fp8-block", "modelopt", "modelopt-file"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_stays_as_it_is_stored(wide: Callable[[str], tuple[Path, Path, dict[str, Any]]], kind: str) -> None:
    """On a GPU with GEMMs for it, also with --quantize fp8, which would quantise again."""
    _, directory, exact = wide(kind)
    quantising = Quantising("none", GPU)
    read_weights(directory, read_config(directory), "bfloat16", quantising=quantising)
    assert quantising.changes == {"weights of linear layers": "fp8 as stored"}
    assert quantising.quantises_activations
    for quantize in ("none", "fp8"):
        kept = served_weights(directory, quantize, GPU)
        assert len(kept) == 14
        for name, weight in kept.items():
            assert weight.values.dtype == torch.float8_e4m3fn
            assert weight.scale.dim() == (2 if "block" in kind else 1)
            torch.testing.assert_close(
                weight.dequantised(torch.float32).double(), exact[f"{name}.weight"], rtol=1e-7, atol=0
            )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["fp8-odd-block", "ct-fp8-tensor", "ct-int8", "w8-all", "gptq-8"])
def test_what_no_product_of_a_gpu_takes_is_dequantised(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str
) -> None:
    """Also e4m3 checkpoints whose config keeps activations in 16 bits: ct-fp8-tensor."""
    assert served_weights(quantised(kind)[0], "none", GPU) == {}


@pytest.mark.usefixtures("hopper")
def test_fp8_stays_only_where_its_products_are(
    wide: Callable[[str], tuple[Path, Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, blocks, _), (_, rows, _) = wide("fp8-block"), wide("ct-fp8-channel")
    monkeypatch.setattr(ops, "multiplies_blocks", lambda device: False)  # an older library
    assert served_weights(blocks, "none", GPU) == {}
    assert len(served_weights(rows, "none", GPU)) == 14
    with_float16 = Quantising("none", GPU)
    read_weights(rows, read_config(rows), "float16", quantising=with_float16)
    assert not with_float16.kept
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert served_weights(rows, "none", GPU) == {}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", INT4)
def test_int4_stays_as_it_is_stored_on_a_gpu(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str
) -> None:
    directory, exact = quantised(kind)
    quantising = Quantising("none", GPU)
    read_weights(directory, read_config(directory), "bfloat16", quantising=quantising)
    assert quantising.changes == {"weights of linear layers": "int4 as stored"}
    assert not quantising.quantises_activations
    for quantize in ("none", "int4"):
        kept = served_weights(directory, quantize, GPU)
        check_exact(kept, exact)
        assert {weight.values.dtype for weight in kept.values()} == {torch.uint8}


@pytest.mark.usefixtures("hopper")
def test_a_head_in_e4m3_rounds_its_inputs(quantised: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    directory = quantised("awq-32")[0]
    for device, rounds in ((GPU, True), (CPU, False)):
        quantising = Quantising("int4", device)
        read_weights(directory, read_config(directory), "bfloat16", quantising=quantising)
        assert quantising.quantises_activations == rounds


@pytest.mark.usefixtures("hopper")
def test_int4_stays_only_where_its_products_are(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = quantised("w4-64-asym")[0]
    with_float16 = Quantising("none", GPU)
    read_weights(directory, read_config(directory), "float16", quantising=with_float16)
    assert not with_float16.kept
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert served_weights(directory, "none", GPU) == {}


@pytest.mark.usefixtures("hopper")
def test_layers_whose_sizes_no_int4_product_of_a_gpu_takes_are_dequantised(tmp_path: Path) -> None:
    """`down_proj` has 224 inputs: groups of 32, but no multiple of 128.  A CPU keeps it."""
    make_checkpoint(tmp_path / "plain", "llama", intermediate_size=224, num_key_value_heads=2, **WIDE)
    quantise_checkpoint(tmp_path / "plain", tmp_path / "odd", "awq-32")
    kept = served_weights(tmp_path / "odd", "none", GPU)
    assert len(kept) == 12
    assert not any(name.endswith("down_proj") for name in kept)
    assert len(served_weights(tmp_path / "odd", "none", CPU)) == 14


@pytest.mark.usefixtures("hopper")
def test_layers_of_other_sizes_are_dequantised(tmp_path: Path) -> None:
    """Of 192 units: a block of `up_proj` is not full, and `down_proj` has too few inputs.  The others stay."""
    make_checkpoint(tmp_path / "plain", "llama", intermediate_size=192, num_key_value_heads=2, **WIDE)
    quantise_checkpoint(tmp_path / "plain", tmp_path / "odd", "fp8-block")
    kept = served_weights(tmp_path / "odd", "none", GPU)
    assert {name.rpartition(".")[2] for name in kept} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("kind", ["ct-fp8-channel", "w8-64", "w8-all-asym", "gptq-8", "fp8-block"])
def test_what_is_no_int8_of_rows_is_rounded_on_request_only(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], kind: str
) -> None:
    directory, exact = quantised(kind)
    assert served_weights(directory, "none") == {}
    rounded = served_weights(directory, "int8")
    assert len(rounded) == 14
    for name, weight in rounded.items():
        wanted = Quantised.of(exact[f"{name}.weight"].float(), torch.int8)
        torch.testing.assert_close(weight.scale, wanted.scale)
        assert (weight.values != wanted.values).float().mean() < 1e-3  # dequantised in float32, not in float64


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_one_float_weight_at_a_time(
    plain: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["int8", "int4"]
) -> None:
    """While a checkpoint is rounded, no weight is held in floating point once the next one is read."""
    seen: list[weakref.ref[torch.Tensor]] = []
    held = []
    rounded = Quantised.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[Quantised], weight: torch.Tensor, *others: Any) -> Quantised:
        held.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(weight))
        return rounded(cls, weight, *others)

    monkeypatch.setattr(Quantised, "of", classmethod(of))
    assert len(served_weights(plain, kind)) == 14
    assert held[:14] == [0] * 14


SERVED = ["fp8-block", "ct-fp8-channel", "ct-int8", "w8-all", "modelopt-file", "awq-32", "gptq-128-order", "w4-64-asym"]
SERVED += ["modelopt-nvfp4", "nvfp4", "mxfp4-packed"]


@pytest.mark.parametrize("kind", SERVED)
def test_greedy_text_of_quantised_checkpoints(
    plain: Path, quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path, kind: str
) -> None:
    """Equal to transformers' over the same weights, written as a checkpoint that is not quantised."""
    directory, exact = quantised(kind)
    check_greedy(plain, directory, exact, tmp_path)


@pytest.mark.parametrize("kind", ["fp8-block", "w4-32", "modelopt-nvfp4"])
def test_experts_that_are_quantised_one_by_one(tmp_path: Path, kind: str) -> None:
    """transformers joins the experts of a layer to one tensor, after each was dequantised."""
    plain = make_tiny(tmp_path / "plain", "qwen3_moe")
    exact = quantise_checkpoint(plain, tmp_path / kind, kind, keep=("lm_head", "mlp.gate"))
    assert sum("experts" in name for name in exact) == 2 * 4 * 3
    check_greedy(plain, tmp_path / kind, exact, tmp_path)


def check_greedy(plain: Path, directory: Path, exact: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare what is served with transformers' answer over the `exact` weights."""
    write_exact(plain, exact, folder / "exact", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / "exact", dtype=torch.float32).eval()
    prompt = words(40)
    assert served(directory, prompt) == greedy(model, prompt)


def test_transformers_reads_blocks_of_fp8_in_the_same_way(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = quantised("fp8-block")
    # It asks for accelerate, which this does not need.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    config = FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config, dtype=torch.float32).eval()
    ours = loaded(directory, "float32")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.state_dict().items())
    assert served(directory, words(40)) == greedy(theirs, words(40))


def test_experts_in_mxfp4(gpt_oss: Path) -> None:
    options: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(gpt_oss, dtype=torch.float32, **options).eval()
    ours = loaded(gpt_oss, "float32")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.state_dict().items())
    prompt = words(40)
    assert served(gpt_oss, prompt) == greedy(theirs, prompt)


@pytest.mark.parametrize("kind", ["fp8-block", "w4-32", "gptq-32"])
def test_weights_are_made_one_by_one_in_the_thread_that_loads(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Threads that run ahead would hold many weights twice, stored and dequantised."""
    threads = []

    def noted(*parts: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        return dequantise(*parts)

    monkeypatch.setattr("quire.engine.executor.models.quantised.stored_weights.dequantise", noted)
    loaded(quantised(kind)[0], "bfloat16")
    assert threads == [threading.get_ident()] * 14


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (
            "fp8-block",
            lambda t: t.pop(f"{UP}.weight_scale_inv"),
            "is F8_E4M3, and its scales are not in the weight files",
        ),
        ("ct-int8", lambda t: t.pop(f"{UP}.weight_scale"), "is I8, and its scales are not in the weight files"),
        (
            "awq-32",
            lambda t: t.update({f"{UP}.bias": torch.ones(256, dtype=torch.int8)}),
            "is I8, and its scales are not in the weight files",
        ),
        ("awq-32", lambda t: t.pop(f"{UP}.qzeros"), "its qzeros is not in the files"),
        ("w4-32", lambda t: t.pop(f"{UP}.weight_scale"), "its scale is not in the files"),
        (
            "gptq-128-order",
            lambda t: t.pop(f"{UP}.g_idx"),
            "its g_idx, which the config requires, is not in the files",
        ),
        (
            "w4-128-order",
            lambda t: t.pop(f"{UP}.weight_g_idx"),
            "its g_idx, which the config requires, is not in the files",
        ),
        (
            "w4-64-asym",
            lambda t: t.pop(f"{UP}.weight_zero_point"),
            "its zero_point, which the config requires, is not in the files",
        ),
        (
            "gptq-32",
            lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][:2].clone()}),
            "its qzeros has shape [4, 32] instead of [2, 32]",
        ),
        (
            "ct-fp8-channel",
            lambda t: t.update({f"{UP}.weight_scale": torch.ones(1)}),
            "its scale has shape [1] instead of [256, 1]",
        ),
        (
            "fp8-block",
            lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(2, 1, dtype=torch.uint8)}),
            "its scale is U8",
        ),
        (
            "fp8-block",
            lambda t: t.update({f"{UP}.weight": torch.ones(256, 128)}),
            "it is F32 and has a scale",
        ),
    ],
)
def test_tensors_that_make_no_weight_are_refused(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]],
    tmp_path: Path,
    kind: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    reason: str,
) -> None:
    damaged = Path(shutil.copytree(quantised(kind)[0], tmp_path / "damaged"))
    rewrite(damaged, change)
    said = refusal(damaged)
    assert UP in said
    assert said.endswith(reason)


def test_a_module_that_is_quantised_and_ignored_is_refused(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(quantised("fp8-block")[0], tmp_path / "damaged"))
    config = KINDS["fp8-block"].config | {"modules_to_not_convert": [UP]}
    rewrite(damaged, lambda weights: None, quantization_config=config)
    assert refusal(damaged) == f"llama: {UP}.weight is quantised by fp8, but the config says that it is not"


def test_a_rule_of_gptq_that_leaves_layers_unquantised(plain: Path, tmp_path: Path) -> None:
    """It is accepted where the layers are stored as plain weights, and refused where they are quantised."""
    rules = {r"+:.*\.q_proj": SAME, r"-:.*\.down_proj": {}, r"-:.*\.router": {}}
    exact = quantise_checkpoint(plain, tmp_path / "gptq", "gptq-32", keep=("lm_head", "down_proj"))
    rewrite(tmp_path / "gptq", lambda weights: None, quantization_config=GPTQ | {"dynamic": rules})
    found = loaded(tmp_path / "gptq", "float32")
    assert found.keys() == exact.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), exact[name].double(), rtol=1e-7, atol=0)
    rules = {r"-:.*\.1\..*up_proj": {}} | rules
    rewrite(tmp_path / "gptq", lambda weights: None, quantization_config=GPTQ | {"dynamic": rules})
    assert refusal(tmp_path / "gptq") == f"llama: {UP}.weight is quantised by gptq, but the config says that it is not"


def test_groups_that_do_not_exist(quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(quantised("gptq-32")[0], tmp_path / "damaged"))
    rewrite(damaged, lambda weights: weights[f"{UP}.g_idx"].fill_(4))
    with pytest.raises(ModelLoadError, match="a column is of group 4, and there are 4"):
        hf.load_model(str(damaged), dtype="auto", device=CPU)


def test_biases_of_zeros_that_gptq_gave_to_every_layer(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """The config denies them.  Zeros change nothing; other biases would."""
    copy = Path(shutil.copytree(quantised("gptq-32")[0], tmp_path / "copy"))
    rewrite(copy, lambda weights: weights.update({f"{UP}.bias": torch.zeros(256)}))
    loaded(copy, "auto")
    rewrite(copy, lambda weights: weights.update({f"{UP}.bias": torch.ones(256)}))
    assert refusal(copy) == f"llama: the weight files hold {UP}.bias, which the model of this config does not use"


def test_quantised_shards_and_the_end_token_of_generation(
    quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """Parts of a weight may lie in different files.  generation_config.json counts as for any checkpoint."""
    whole = quantised("w4-32")[0]
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, name in enumerate(sorted(tensors)):
        halves[number % 2][name] = tensors[name]
    index: dict[str, str] = {}
    for number, half in enumerate(halves):
        save_file(half, copy / f"model-{number}.safetensors", {"format": "pt"})
        index |= dict.fromkeys(half, f"model-{number}.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    described = json.loads((copy / "generation_config.json").read_bytes())
    (copy / "generation_config.json").write_text(json.dumps(described | {"eos_token_id": [7, 5]}))
    module = read_weights(copy, read_config(copy), "auto")
    assert all(map(torch.equal, module.state_dict().values(), loaded(whole, "auto").values()))
    assert end_tokens.eos_ids(module, copy, module.config.vocab_size)[:2] == [7, 5]
    assert module.config._attn_implementation == attention.NAME


def test_layers_that_store_their_transpose_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    quantise_checkpoint(checkpoint("gpt2"), tmp_path / "gpt2", "fp8-tensor", keep=("lm_head", "wte", "wpe"))
    assert refusal(tmp_path / "gpt2") == "gpt2: quantised weights of layers that store their transpose"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {*FP8_KINDS, *INT4, *INT4_IN_PART}))
def test_quantised_checkpoints_on_a_gpu(
    plain: Path, quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path, kind: str
) -> None:
    """The answer is that of the same weights in a checkpoint that is not quantised."""
    directory, exact = quantised(kind)
    write_exact(plain, exact, tmp_path / "exact", torch.bfloat16)
    assert answer_on_gpu(directory) == answer_on_gpu(tmp_path / "exact")


@pytest.mark.gpu
def test_experts_in_mxfp4_on_a_gpu(gpt_oss: Path, tmp_path: Path) -> None:
    """The answer is that of the same weights in a checkpoint that is not quantised."""
    options: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True)}
    exact = AutoModelForCausalLM.from_pretrained(gpt_oss, dtype=torch.bfloat16, **options)
    shutil.copytree(gpt_oss, tmp_path / "exact")
    described = json.loads((gpt_oss / "config.json").read_bytes())
    del described["quantization_config"]
    (tmp_path / "exact" / "config.json").write_text(json.dumps(described))
    save_file(exact.state_dict(), tmp_path / "exact" / "model.safetensors", {"format": "pt"})
    assert answer_on_gpu(gpt_oss) == answer_on_gpu(tmp_path / "exact")


def answer_on_gpu(directory: Path) -> list[int]:
    model = hf.load_model(str(directory), dtype="bfloat16", device=torch.device("cuda"))
    driver = Driver(model, graph_seconds=0)
    driver.add(words(40))
    while len(driver.running[0].output) < NEW:
        driver.step()
    return driver.running[0].output[:NEW]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_checkpoints_on_a_gpu(
    wide: Callable[[str], tuple[Path, Path, dict[str, Any]]], tmp_path: Path, kind: str
) -> None:
    """Logits of a prompt, whose inputs are rounded to e4m3: 4 bits fewer than bfloat16.

    So the error is at most 16 times that of the float32 model's own bfloat16 forward, over the stored weights."""
    plain, directory, exact = wide(kind)
    write_exact(plain, exact, tmp_path / "exact", torch.bfloat16)
    model = hf.load_model(str(directory), dtype="bfloat16", device=torch.device("cuda"))
    assert model.changes == {"weights of linear layers": "fp8 as stored"}
    assert stored_on_gpu(model.module, ops.Fp8) == 8
    prompt = words(150)
    driver = Driver(model, graph_seconds=0)
    driver.add(prompt, None, targets=True)
    driver.step()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    want = at_all_tokens(whole, prompt)[:-1]
    own = at_all_tokens(whole.bfloat16().cuda(), prompt)[:-1]
    assert mean_square(driver.worker.logits.float().cpu() - want) <= 16 * mean_square(own - want)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 150])
@pytest.mark.parametrize("kind", [*INT4, *INT4_IN_PART])
def test_int4_checkpoints_on_a_gpu(
    plain: Path, quantised: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path, kind: str, tokens: int
) -> None:
    """Logits of a prompt: as far from the float32 model of the stored weights as its own bfloat16 forward is."""
    directory, exact = quantised(kind)
    write_exact(plain, exact, tmp_path / "exact", torch.float32)
    model = hf.load_model(str(directory), dtype="bfloat16", device=torch.device("cuda"))
    assert model.changes == {"weights of linear layers": "int4 as stored"}
    assert stored_on_gpu(model.module, ops.Int4) == (8 if kind in INT4 else 4)
    prompt = words(tokens)
    driver = Driver(model, graph_seconds=0)
    driver.add(prompt, None, targets=True)
    driver.step()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    want = at_all_tokens(whole, prompt)[:-1]
    own = at_all_tokens(whole.bfloat16().cuda(), prompt)[:-1]
    assert mean_square(driver.worker.logits.float().cpu() - want) <= 2 * mean_square(own - want)


def write_exact(plain: Path, exact: dict[str, torch.Tensor], directory: Path, dtype: torch.dtype) -> None:
    """Write a copy of the plain checkpoint with these weights."""
    shutil.copytree(plain, directory)
    save_file({name: tensor.to(dtype) for name, tensor in exact.items()}, directory / "model.safetensors")
