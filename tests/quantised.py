"""Quantised checkpoints, written by hand from what each format's authors publish, with their weights in float64.

A writer here shares no code with what it tests: it packs numbers one by one, with Python's integers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]  # by the end of the tensor's name, which follows the module's
E4M3_MAX = 448.0
WIDE: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}  # 512 inputs, 128 of k and v
# The same for the parts of two ranks.
TWICE_AS_WIDE: dict[str, Any] = WIDE | {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 1024}


@dataclass(frozen=True)
class Written:
    """How one kind of checkpoint is written."""

    config: dict[str, Any]
    quantise: Callable[[Tensor], tuple[Parts, Tensor]]  # float64 [out, in] -> parts, the exact weight
    file: dict[str, Any] = field(default_factory=dict)  # what hf_quant_config.json holds


def pack(rows: list[list[int]], bits: int) -> Tensor:
    """Pack the unsigned numbers of each row into int32 words, the first in the lowest bits; zeros fill the last."""
    numbers = 32 // bits
    packed = []
    for row in rows:
        words = []
        for at in range(0, len(row), numbers):
            word = sum(number << bits * place for place, number in enumerate(row[at : at + numbers]))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(words)
    return torch.tensor(packed, dtype=torch.int32)


def by_scale(scale_shape: str, block: int = 128, number: str = "float", name: str = "weight_scale") -> Any:
    """Return a writer of 8-bit weights with scales per tensor, channel or block."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (block, block)}[scale_shape]
        scale = torch.empty(-(-rows // high), -(-columns // wide), dtype=torch.float32)
        for i, j in np.ndindex(*scale.shape):
            piece = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            scale[i, j] = piece.abs().max() / (E4M3_MAX if number == "float" else 127)
        grid = scale.tolist()
        each = torch.tensor([[grid[i // high][j // wide] for j in range(columns)] for i in range(rows)]).double()
        stored = (
            (weight / each).to(torch.float8_e4m3fn) if number == "float" else (weight / each).round().to(torch.int8)
        )
        shaped = scale.reshape(()) if scale_shape == "tensor" else scale
        return {"weight": stored, name: shaped}, stored.double() * each

    return quantise


def in_groups(weight: Tensor, group: int, bits: int, symmetric: bool, of: Tensor | None = None) -> Any:
    """Return numbers, zero points [out, groups] and float16 scales [out, groups] for groups of columns."""
    of = torch.arange(weight.shape[1]) // group if of is None else of
    groups, top = int(of.max()) + 1, (1 << bits) - 1
    zeros = torch.empty(len(weight), groups, dtype=torch.int64)
    scales = torch.empty(len(weight), groups, dtype=torch.float16)
    for i in range(groups):
        piece = weight[:, of == i]
        low, high = piece.min(1).values.clamp(max=0), piece.max(1).values.clamp(min=0)
        if symmetric:
            scales[:, i] = (torch.maximum(-low, high) * 2 / top).half()
            zeros[:, i] = 1 << (bits - 1)
        else:
            scales[:, i] = ((high - low) / top).half()
            zeros[:, i] = (-low / scales[:, i].double()).round().clamp(0, top).to(torch.int64)
    numbers = (weight / scales.double()[:, of] + zeros[:, of]).round().clamp(0, top).to(torch.int64)
    return numbers, zeros, scales, (numbers - zeros[:, of]).double() * scales.double()[:, of]


def awq(group: int) -> Any:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        numbers, zeros, scales, exact = in_groups(weight, group, 4, symmetric=False)
        place = [0, 2, 4, 6, 1, 3, 5, 7]  # the column whose number is at each place of a word

        def interleaved(of: Tensor) -> list[list[int]]:
            return [[row[at + i] for at in range(0, len(row), 8) for i in place] for row in of.T.tolist()]

        qweight, qzeros = pack(interleaved(numbers), 4), pack(interleaved(zeros), 4)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}, exact

    return quantise


def groups_of(columns: int, group: int, order: bool) -> Tensor:
    """The group of each column; `order`: as after a quantisation that took the columns in another order."""
    of = torch.arange(columns) // (columns if group == -1 else group)
    return of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))] if order else of


def gptq(group: int, *, bits: int = 4, symmetric: bool = True, order: bool = False, version: int = 1) -> Any:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        of = groups_of(weight.shape[1], group, order)
        numbers, zeros, scales, exact = in_groups(weight, group, bits, symmetric, of)
        top = (1 << bits) - 1
        stored = (zeros - 1 & top) if version == 1 else zeros
        return {
            "qweight": pack(numbers.tolist(), bits).T.contiguous(),
            "qzeros": pack(stored.T.tolist(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": of.to(torch.int32),
        }, exact

    return quantise


def pack_quantised(group: int, *, bits: int = 4, symmetric: bool = True, order: bool = False) -> Any:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        of = groups_of(weight.shape[1], group, order)
        numbers, zeros, scales, exact = in_groups(weight, group, bits, symmetric, of)
        parts = {
            "weight_packed": pack(numbers.tolist(), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(zeros.T.tolist(), bits).T.contiguous()
        if order:
            parts["weight_g_idx"] = of.to(torch.int32)
        return parts, exact

    return quantise


def e2m1(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return two e2m1 numbers a byte and their values, float64 [out, in]; scale: of each element, float64."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = ((weight / scale).abs()[..., None] - values).abs().argmin(-1)
    low, high = (nearest + 8 * (weight < 0)).unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8), values[nearest] * scale * torch.where(weight < 0, -1, 1)


def nvfp4(names: str) -> Any:
    """Return a writer of e2m1 with e4m3 scales of 16 columns; names: modelopt or compressed-tensors, whose they are."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        largest = weight.unflatten(1, (-1, 16)).abs().amax(2)
        tensor_scale = (largest.max() / (E4M3_MAX * 6)).float()
        scale = (largest / 6 / tensor_scale.double()).to(torch.float8_e4m3fn)
        if names == "modelopt":
            packed, exact = e2m1(weight, (scale.float() * tensor_scale).double().repeat_interleave(16, 1))
            return {"weight": packed, "weight_scale": scale, "weight_scale_2": tensor_scale}, exact
        inverse = 1 / tensor_scale
        packed, exact = e2m1(weight, (scale.float() / inverse).double().repeat_interleave(16, 1))
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": inverse.reshape(1)}, exact

    return quantise


def mxfp4_packed(weight: Tensor) -> tuple[Parts, Tensor]:
    """Write e2m1 with a power of two for each 32 columns."""
    power = torch.floor(torch.log2(weight.unflatten(1, (-1, 32)).abs().amax(2))) - 2
    packed, exact = e2m1(weight, torch.exp2(power).repeat_interleave(32, 1))
    return {"weight_packed": packed, "weight_scale": (power + 127).to(torch.uint8)}, exact


def compressed(stored: str, strategy: str, *, inputs: bool = False, **weights: Any) -> dict[str, Any]:
    """inputs: they are rounded to 8 bits, too."""
    number = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": number, "input_activations": dynamic if inputs else None}
    config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"], "quantization_status": "compressed"}


def w4(group: int, **weights: Any) -> dict[str, Any]:
    strategy = "channel" if group == -1 else "group"
    number: dict[str, Any] = {"num_bits": 4, "type": "int", "group_size": None if group == -1 else group}
    return compressed("pack-quantized", strategy, **(number | weights))


FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MODELOPT: dict[str, Any] = {
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head*"]},
    "producer": {"name": "modelopt"},
}
MODELOPT_FP4: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
FP4: dict[str, Any] = {"num_bits": 4, "type": "float"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
KINDS = {
    "fp8-block": Written(FP8 | {"weight_block_size": [128, 128]}, by_scale("block", name="weight_scale_inv")),
    "fp8-odd-block": Written(FP8 | {"weight_block_size": [96, 96]}, by_scale("block", 96, name="weight_scale_inv")),
    "fp8-tensor": Written(FP8 | {"activation_scheme": "static"}, by_scale("tensor")),
    "ct-fp8-tensor": Written(compressed("float-quantized", "tensor"), by_scale("tensor")),
    "ct-fp8-channel": Written(compressed("float-quantized", "channel", inputs=True), by_scale("channel")),
    "ct-fp8-block": Written(
        compressed("float-quantized", "block", inputs=True, block_structure=[128, 128]), by_scale("block")
    ),
    "ct-int8": Written(compressed("int-quantized", "channel", type="int"), by_scale("channel", number="int")),
    "ct-int8-tensor": Written(compressed("int-quantized", "tensor", type="int"), by_scale("tensor", number="int")),
    "modelopt": Written(MODELOPT["quantization"] | {"quant_method": "modelopt"}, by_scale("tensor")),
    "modelopt-file": Written({}, by_scale("tensor"), MODELOPT),
    "modelopt-nvfp4": Written(MODELOPT_FP4 | {"quant_method": "modelopt"}, nvfp4("modelopt")),
    "nvfp4": Written(
        compressed("nvfp4-pack-quantized", "tensor_group", group_size=16, **FP4), nvfp4("compressed-tensors")
    ),
    "mxfp4-packed": Written(compressed("mxfp4-pack-quantized", "group", group_size=32, **FP4), mxfp4_packed),
    "awq-32": Written(AWQ | {"group_size": 32}, awq(32)),
    "awq-128": Written(AWQ | {"group_size": 128}, awq(128)),
    "gptq-32": Written(GPTQ, gptq(32)),
    "gptq-64-asym": Written(GPTQ | {"group_size": 64, "sym": False}, gptq(64, symmetric=False)),
    "gptq-128-order": Written(GPTQ | {"group_size": 128, "desc_act": True}, gptq(128, symmetric=False, order=True)),
    "gptq-all": Written(GPTQ | {"group_size": -1}, gptq(-1)),
    "gptq-8": Written(GPTQ | {"bits": 8}, gptq(32, bits=8)),
    "gptq-v2": Written(GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(32, symmetric=False, version=2)),
    "w4-32": Written(w4(32), pack_quantised(32)),
    "w4-64-asym": Written(w4(64, symmetric=False), pack_quantised(64, symmetric=False)),
    "w4-128-order": Written(w4(128, actorder="group"), pack_quantised(128, order=True)),
    "w4-all": Written(w4(-1), pack_quantised(-1)),
    "w8-64": Written(w4(64, num_bits=8), pack_quantised(64, bits=8)),
    "w8-all": Written(w4(-1, num_bits=8), pack_quantised(-1, bits=8)),
    "w8-all-asym": Written(w4(-1, num_bits=8, symmetric=False), pack_quantised(-1, bits=8, symmetric=False)),
}


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of [experts, in, out], 32 inputs a block; the largest number of a block becomes 4 or 6."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    of = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    power = torch.floor(torch.log2(of.abs().amax(-1))) - 2
    shrunk = of / torch.exp2(power)[..., None]
    nearest = (shrunk.abs()[..., None] - values).abs().argmin(-1) + 8 * (shrunk < 0)
    low, high = nearest.unflatten(-1, (16, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8), (power + 127).to(torch.uint8)


def quantise_checkpoint(plain: Path, directory: Path, kind: str, keep: tuple[str, ...] = ("lm_head",)) -> Parts:
    """Write a quantised copy of a checkpoint with one weight file; return all its weights as they should be read.

    keep: parts of names of modules that are not quantised, apart from embeddings."""
    written = KINDS[kind]
    shutil.copytree(plain, directory)
    stored: Parts = {}
    exact: Parts = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module, _, end = name.rpartition(".")
        if end != "weight" or tensor.dim() != 2 or "embed" in name or any(part in module for part in keep):
            stored[name] = exact[name] = tensor
            continue
        parts, exact[name] = written.quantise(tensor.double())
        stored |= {f"{module}.{part}": one for part, one in parts.items()}
        if "tensor" in kind or "modelopt" in kind:
            stored[f"{module}.input_scale"] = torch.tensor(0.5)
        if "modelopt" in kind and module.endswith(("k_proj", "v_proj")):
            stored[f"{module}.{module[-6]}_scale"] = torch.tensor(0.25)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    described = json.loads((directory / "config.json").read_bytes())
    if written.config:
        described["quantization_config"] = written.config
    (directory / "config.json").write_text(json.dumps(described))
    if written.file:
        (directory / "hf_quant_config.json").write_text(json.dumps(written.file))
    return exact


def store_experts_in_mxfp4(directory: Path) -> None:
    """Rewrite a gpt-oss checkpoint of one weight file as it is published."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4(tensors.pop(name))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    described = json.loads((directory / "config.json").read_bytes())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(described))
