"""Checkpoints that compressed-tensors itself writes mean the same to Quire and to that package.

llm-compressor, too, has this package pack its weights and write its configs.  Tests choose scales and zero points by
the package's formula.  The package no longer writes `g_idx` (`actorder: group`), so that part stays hand-made:
`tests/quantised.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    generate_gparam,
    maybe_pad_tensor_for_block_quant,
)
from transformers import AutoModelForCausalLM

from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.models.quantised.kv_scales import read_kv_scales
from quire.engine.executor.models.quantised.quantisation import quantisation_config, read_quantisation
from tests.checkpoints import make_checkpoint
from tests.executor.test_hf import refusal
from tests.executor.test_quantised import CPU, GPU, check_greedy, loaded, served_weights
from tests.matrix import each_value
from tests.quantised import WIDE

Exact = dict[str, torch.Tensor]
Write = Callable[..., tuple[Path, Exact]]
Kept = tuple[int, torch.dtype | None]  # layers that keep their quantised weights, and the dtype of these
LINEAR = ("Linear",)
NONE: Kept = (0, None)
INT4: Kept = (14, torch.uint8)
INT8: Kept = (14, torch.int8)
FP8: Kept = (14, torch.float8_e4m3fn)


def weights(bits: int = 4, *, targets: tuple[str, ...] = LINEAR, **described: Any) -> QuantizationScheme:
    """A scheme whose inputs keep their dtype."""
    return QuantizationScheme(targets=list(targets), weights=QuantizationArgs(num_bits=bits, **described))


def with_inputs(bits: int, **described: Any) -> QuantizationScheme:
    """A scheme whose inputs are rounded to integers of 8 bits."""
    scheme = weights(bits, **described)
    scheme.input_activations = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    return scheme


def preset(name: str) -> QuantizationScheme:
    """A scheme of the package, by the name that users of llm-compressor choose it by."""
    return preset_name_to_scheme(name, list(LINEAR))


@dataclass(frozen=True)
class Kind:
    """Format of one kind of checkpoint, and the layers that a CPU serves with their stored quantised weights."""

    schemes: list[QuantizationScheme]
    format: str  # as its config calls it
    kept: Kept = NONE
    ignore: tuple[str, ...] = ("lm_head",)
    changes: dict[str, Any] = field(default_factory=dict)  # changes to the model's config


# down_proj has 132 inputs: the last word of 8 values is not full.  No int4 GEMM accepts that size, which is no
# multiple of 32.  up_proj has 132 outputs, so the last word of its zero points is not full.
ODD: dict[str, Any] = {"intermediate_size": 132}
BLOCKS: dict[str, Any] = {"type": "float", "strategy": "block", "block_structure": [128, 128]}
KINDS = {
    "w4-32": Kind([weights(group_size=32)], "pack-quantized", INT4),
    "w4-32-asym": Kind([weights(group_size=32, symmetric=False)], "pack-quantized", INT4),
    "w4-128": Kind([preset("W4A16")], "pack-quantized", INT4),
    "w4-128-asym": Kind([preset("W4A16_ASYM")], "pack-quantized", INT4),
    "w4-order": Kind([weights(group_size=32, actorder="weight")], "pack-quantized", INT4),
    "w4-channel": Kind([weights(strategy="channel")], "pack-quantized", INT4),
    "w4-odd-asym": Kind(
        [weights(strategy="channel", symmetric=False)], "pack-quantized", (12, torch.uint8), changes=ODD
    ),
    "w8-128": Kind([preset("W8A16")], "pack-quantized"),
    "w8-channel": Kind([weights(8, strategy="channel")], "pack-quantized", INT8),
    "w8-odd-asym": Kind([weights(8, strategy="channel", symmetric=False)], "pack-quantized", changes=ODD),
    "int8": Kind([preset("INT8")], "int-quantized", INT8),
    "int8-asym": Kind([with_inputs(8, strategy="channel", symmetric=False)], "int-quantized"),
    "int8-tensor": Kind([with_inputs(8, strategy="tensor")], "int-quantized", INT8),
    "fp8-tensor": Kind([preset("FP8")], "float-quantized"),
    "fp8-channel": Kind([preset("FP8_DYNAMIC")], "float-quantized"),
    "fp8-block": Kind([preset("FP8_BLOCK")], "float-quantized"),
    "fp8-odd-block": Kind([preset("FP8_BLOCK")], "float-quantized", changes=ODD),
    "fp8-weights-tensor": Kind([weights(8, type="float", strategy="tensor")], "naive-quantized"),
    "fp8-weights-channel": Kind([weights(8, type="float", strategy="channel")], "naive-quantized"),
    "fp8-weights-block": Kind([weights(8, **BLOCKS)], "naive-quantized"),
    "ignored": Kind(
        [weights(group_size=32)],
        "pack-quantized",
        (11, torch.uint8),
        ("lm_head", "re:.*down_proj$", "model.layers.1.self_attn.q_proj"),
    ),
    "two-groups": Kind(
        [
            weights(group_size=32, targets=(r"re:.*self_attn\..*",)),
            weights(group_size=32, targets=(r"re:.*mlp\..*",)),
        ],
        "pack-quantized",
        INT4,
    ),
    "with-head": Kind([weights(group_size=32)], "pack-quantized", INT4, ()),
    "nvfp4": Kind([preset("NVFP4")], "nvfp4-pack-quantized"),
    "nvfp4-weights": Kind([preset("NVFP4A16")], "nvfp4-pack-quantized"),
    "mxfp4-weights": Kind([preset("MXFP4A16")], "mxfp4-pack-quantized"),
    "with-embeddings": Kind([weights(8, strategy="channel", targets=("Linear", "Embedding"))], "pack-quantized", INT8),
}
UNREAD = {
    "w4a8": ([preset("W4A8")], "int-quantized: int of 4 bits"),
    "w4afp8": ([preset("W4AFP8")], "int-quantized: int of 4 bits"),
    "int8-groups": ([with_inputs(8, group_size=32)], "int-quantized, group"),
    "w4-tensor": ([weights(strategy="tensor")], "pack-quantized, tensor"),
    "w3": ([preset("W3A16")], "pack-quantized: int of 3 bits"),
    "mxfp8": ([preset("MXFP8A16")], "mxfp8-quantized"),
    "mixed": (
        [
            weights(group_size=32, targets=(r"re:.*self_attn\..*",)),
            weights(8, targets=(r"re:.*mlp\..*",), type="float", strategy="channel"),
        ],
        "groups of several kinds",
    ),
}


def extremes(weight: torch.Tensor, how: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return minimum and maximum of the weights that share a scale, in the shape of the scales."""
    if how.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if how.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if how.strategy in ("group", "tensor_group"):
        groups = weight.unflatten(1, (-1, how.group_size))
        return groups.amin(2), groups.amax(2)
    high, wide = how.block_structure
    blocks = maybe_pad_tensor_for_block_quant(weight, (high, wide)).unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def compress(
    plain: Path, directory: Path, schemes: list[QuantizationScheme], ignore: tuple[str, ...], **more: Any
) -> Exact:
    """Write a quantised copy of a checkpoint; return all its weights as compressed-tensors dequantises them."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    names = model.state_dict().keys()
    groups = {f"group_{number}": scheme.model_copy(deep=True) for number, scheme in enumerate(schemes)}
    config = QuantizationConfig(config_groups=groups, ignore=list(ignore), **more)
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        how = getattr(module, "quantization_scheme", None)
        if how is not None and how.weights is not None:
            whole = None
            if how.weights.strategy == "tensor_group":
                whole = generate_gparam(module.weight.data.amin(), module.weight.data.amax())
                module.weight_global_scale.data.copy_(whole)
            scale, zero = calculate_qparams(*extremes(module.weight.data, how.weights), how.weights, whole)
            assert module.weight_scale.shape == scale.shape
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.copy_(zero)
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("input_scale", "k_scale", "v_scale"):
                parameter.data.copy_(torch.arange(1, parameter.numel() + 1).reshape(parameter.shape) / 8)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    shutil.copytree(plain, directory)
    model.save_pretrained(directory)
    compressor.update_config(str(directory))
    compressor.decompress_model(model)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name in names}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Unquantised checkpoints whose sizes every fp8 GEMM accepts, unless `changes` replace them."""
    root = tmp_path_factory.mktemp("reference")

    def make(dtype: torch.dtype, **changes: Any) -> Path:
        name = "-".join(map(str, [dtype, *changes.values()]))
        sizes = {"intermediate_size": 512, "num_key_value_heads": 2, **WIDE} | changes
        return make_checkpoint(root / name, "llama", dtype=dtype, **sizes)

    return make


@pytest.fixture(scope="module")
def compressed(reference: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Write:
    """The checkpoint of each kind and dtype, with the weights that compressed-tensors makes of it."""
    root, made = tmp_path_factory.mktemp("compressed"), dict[Path, Exact]()

    def make(name: str, dtype: torch.dtype) -> tuple[Path, Exact]:
        directory, kind = root / f"{name}-{dtype}", KINDS[name]
        if directory not in made:
            made[directory] = compress(reference(dtype, **kind.changes), directory, kind.schemes, kind.ignore)
        return directory, made[directory]

    return make


@pytest.mark.parametrize(("kind", "dtype"), each_value(list(KINDS), [torch.bfloat16, torch.float16, torch.float32]))
def test_weights_equal_those_of_the_reference_package(compressed: Write, kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, in the dtype of the checkpoint: both round only value * scale.

    The package makes weights of e2m1 in bfloat16, whatever the dtype of the model."""
    directory, exact = compressed(kind, dtype)
    described = quantisation_config(directory)
    assert described is not None
    assert described["format"] == KINDS[kind].format
    found = loaded(directory, "float32" if "fp4" in kind else str(dtype).removeprefix("torch."))
    assert found.keys() == exact.keys()
    if "fp4" in kind:
        narrow = {name: torch.bfloat16 if "proj" in name else dtype for name in found}
        found = {name: tensor.to(narrow[name]).to(dtype) for name, tensor in found.items()}
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, exact[name])]


ON_HOPPER = {
    "w4-32": INT4,
    "w4-128-asym": INT4,
    "w4-channel": INT4,
    "fp8-tensor": FP8,
    "fp8-channel": FP8,
    "fp8-block": FP8,
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("kind", "device", "wanted"),
    [(name, CPU, kind.kept) for name, kind in KINDS.items()] + [(name, GPU, kept) for name, kept in ON_HOPPER.items()],
)
def test_numbers_that_stay_as_stored_mean_the_same(
    compressed: Write, kind: str, device: torch.device, wanted: Kept
) -> None:
    layers, dtype = wanted
    directory, exact = compressed(kind, torch.float32)
    kept = served_weights(directory, "none", device)
    assert [weight.values.dtype for weight in kept.values()] == [dtype] * layers
    for name, weight in kept.items():
        assert torch.equal(weight.dequantised(torch.float32), exact[f"{name}.weight"]), name


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_the_reference_weights(
    compressed: Write, reference: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """Compared with transformers over the weights that compressed-tensors dequantised, in float32."""
    directory, exact = compressed(kind, torch.float32)
    check_greedy(reference(torch.float32, **KINDS[kind].changes), directory, exact, tmp_path)


@pytest.mark.parametrize("kind", UNREAD)
def test_what_the_reference_package_writes_and_no_reader_knows_is_refused_by_name(
    reference: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    schemes, named = UNREAD[kind]
    compress(reference(torch.bfloat16), tmp_path / kind, schemes, ("lm_head",))
    reason = "which is not implemented; serve an unquantised copy"
    assert refusal(tmp_path / kind) == f"llama: weights quantised by compressed-tensors ({named}), {reason}"


def test_the_ignore_list_that_it_writes(compressed: Write) -> None:
    """It names each module that matched a pattern; the list is checked against the tensors."""
    how = read_quantisation(compressed("ignored", torch.float32)[0], "llama")
    assert how is not None
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert set(how.ignored) == {"lm_head", "model.layers.1.self_attn.q_proj", *down}
    kept = served_weights(compressed("ignored", torch.float32)[0], "none")
    assert not kept.keys() & set(how.ignored)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_scales_of_an_e4m3_cache(reference: Callable[..., Path], tmp_path: Path, strategy: str) -> None:
    """One number of a layer, or one of each KV head."""
    scheme = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
    compress(reference(torch.bfloat16), tmp_path / "kv", [preset("FP8_DYNAMIC")], ("lm_head",), kv_cache_scheme=scheme)
    found = read_kv_scales(tmp_path / "kv", "llama", [KVShape(2, 64)] * 2)
    heads = [1 / 8, 1 / 8] if strategy == "tensor" else [1 / 8, 2 / 8]
    assert [layer.tolist() for layer in found or [] if layer is not None] == [[heads, heads]] * 2
