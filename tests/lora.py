"""LoRA adapters as PEFT writes them, made by hand, and the reference: a transformers model with the adapter merged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
SIZE = 0.15  # scale of the random values: the text of an adapter differs from the base's after few tokens


def write_adapter(
    folder: Path,
    base: PreTrainedModel,
    *,
    rank: int = 8,
    targets: Iterable[str] | str = ALL,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = SIZE,
    ranks: Mapping[str, int] | None = None,
    modules: Iterable[str] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of random weights.

    `ranks`: by the end of a module's path.  `modules`: complete paths of what it changes; None: every linear layer of
    the base whose path ends with a target."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    paths = modules if modules is not None else [path for path, _ in linears(base) if path.endswith(tuple(targets))]
    tensors = {}
    for path in paths:
        own = next((value for end, value in (ranks or {}).items() if path.endswith(end)), rank)
        outputs, inputs = sizes(base.get_submodule(path))
        for which, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            values = torch.randn(shape, generator=generator) * size / math.sqrt(own if which == "B" else 1)
            tensors[f"base_model.model.{path}.lora_{which}.weight"] = values.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": base.name_or_path,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
        "rank_pattern": dict(ranks or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def linears(base: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    head = base.get_output_embeddings()
    return [
        (path, module)
        for path, module in base.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def sizes(linear: Any) -> tuple[int, int]:
    """Return (outputs, inputs)."""
    return tuple(linear.weight.T.shape if isinstance(linear, Conv1D) else linear.weight.shape)


def merged(checkpoint: Path, folder: Path) -> PreTrainedModel:
    """Return the base in float32 with the adapter merged into its weights, by the formulas of PEFT's documentation."""
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace("lora_A", "lora_B")]
        alpha = next(
            (value for key, value in config.get("alpha_pattern", {}).items() if re.match(rf"(.*\.)?({key})$", path)),
            config["lora_alpha"],
        )
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        linear: Any = base.get_submodule(path)
        delta: Tensor = scale * (b.float() @ a.float())
        linear.weight.data += delta.T if isinstance(linear, Conv1D) else delta
    return base
