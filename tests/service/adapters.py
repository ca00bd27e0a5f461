"""LoRA adapters of one layer, by the bytes of their files: a gateway reads them without a model."""

from __future__ import annotations

import struct
from pathlib import Path

from quire.engine.adapters.files import CONFIG, WEIGHTS


def write_tiny(folder: Path, weight: float = 0.0, *, rank: int = 1) -> Path:
    """Write an adapter of rank 1 whose values are `weight`.  `rank`: the one that its config names."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = f'"r": {rank}, "lora_alpha": 1, "target_modules": ["q_proj"]'
    (folder / CONFIG).write_text(f'{{"peft_type": "LORA", {fields}}}')
    name, header = "base_model.model.model.layers.0.self_attn.q_proj.lora_", b"{"
    for at, which in enumerate("AB"):
        offsets = f"[{4 * at},{4 * at + 4}]"
        header += f'"{name}{which}.weight":{{"dtype":"F32","shape":[1,1],"data_offsets":{offsets}}},'.encode()
    header = header[:-1] + b"}"
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + struct.pack("<ff", weight, weight))
    return folder
