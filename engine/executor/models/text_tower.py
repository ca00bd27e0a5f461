"""Serves the language model of a multimodal checkpoint as a causal model; the other parts are neither built nor read.

    config.json  {"model_type": "mistral3", "text_config": {...}, "vision_config": {...}}  ->  the text config
    tensors      language_model.model.layers.0...                                         ->  model.layers.0...

Without images every token of these models has one position on all axes.  So rotary embeddings in several dimensions
(M-RoPE) give the same angles as plain ones, and the language models of the Qwen VL families are Qwen2 and Qwen3.

Quantised tensors are renamed in the same way (`Names`): stored_weights.py, plain_weights.py and kv_scales.py get only
the names of the language model.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from quire.engine.executor.models.weights import UNCHANGED, Names, stored_tensors, weight_files

# Multimodal model type -> causal model type that computes its text; "": the type of its own text config.
TOWERS = {
    "audioflamingo3": "",
    "aya_vision": "",
    "deepseek_vl": "",
    "deepseek_vl_hybrid": "",
    "gemma3": "",
    "gemma4": "",
    "glmasr": "",
    "got_ocr2": "",
    "idefics2": "",
    "idefics3": "",
    "internvl": "",
    "janus": "",
    "lighton_ocr": "",
    "llama4": "",
    "llava": "",
    "llava_next": "",
    "llava_next_video": "",
    "llava_onevision": "",
    "mistral3": "",
    "musicflamingo": "",
    "ovis2": "",
    "pp_chart2table": "",
    "qwen2_audio": "",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_asr": "",
    "qwen3_vl": "qwen3",
    "smolvlm": "",
    "vibevoice_asr": "",
    "video_llama_3": "",
    "video_llava": "",
    "vipllava": "",
    "voxtral": "",
}
# Names of tensors in the files -> names in the language model.  Files of newer versions have another order of parts.
RENAMED = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language|text)_model\.(?:model\.)?": "model.",
}
# First parts of the names of tensors that only images, sound or video need.
OTHER_TOWERS = re.compile(
    r"(model\.)?(visual|vision_(tower|model|embedder|encoder|projection|resampler)|high_res_vision_\w+"
    r"|(video|image|audio)_tower|visual_embeddings_table|(acoustic|semantic)_tokenizer_encoder|(multi_modal_)?projector"
    r"|aligner|connector|vqmodel|generation_(embeddings|aligner|head)|embed_vision|embed_audio|image_newline)(\.|$)"
)
HEAD = re.compile(r"(^|\.)lm_head\.(weight|qweight)")  # or a part of its weight, such as `weight_packed`
M_ROPE = ("mrope_section", "mrope_interleaved")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def has_tower(config: PretrainedConfig) -> bool:
    """Whether a config describes a multimodal model whose language model can be served."""
    return config.model_type in TOWERS


def text_config(config: PretrainedConfig, directory: Path) -> PretrainedConfig:
    """Return the config of the language model of a multimodal model.

    The weight files of `directory`, if any, decide whether the LM head is tied to the embedding, because the config has
    `tie_word_embeddings` twice, with different meanings."""
    text = config.get_text_config()
    if kind := TOWERS[config.model_type]:
        described = text.to_dict()
        described.pop("model_type", None)
        rope = described.get("rope_parameters") or {}
        described["rope_parameters"] = {name: value for name, value in rope.items() if name not in M_ROPE}
        text = AutoConfig.for_model(kind, **described)
    lend_fields(config, text)
    names = stored_tensors(weight_files(directory)) if any(directory.glob("*.safetensors")) else {}
    text.update({"tie_word_embeddings": not any(HEAD.search(name) for name in names)})
    return text


def lend_fields(whole: PretrainedConfig, text: PretrainedConfig) -> None:
    """Copy special tokens and dtype from the complete model's config into the language model's config, which lacks
    them."""
    for name in TOKENS:
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(whole, name, None))
    if text.dtype is None:
        text.dtype = whole.dtype


def name_in_text(name: str) -> str:
    """Return the language model's name of a tensor in the files; empty: it belongs to another part of the checkpoint.

    A name that no rule matches stays unchanged, so that loading refuses it."""
    if OTHER_TOWERS.match(name):
        return ""
    for pattern, own in RENAMED.items():
        name = re.sub(pattern, own, name)
    return name


def name_in_whole(name: str) -> str:
    """Return the name that a tensor or module of the language model has in transformers' complete model."""
    return re.sub(r"^model\.", "model.language_model.", name)


def names_of(part: bool) -> Names:
    """Return the mapping of a checkpoint's names to the served model's names; part: a language model is served."""
    return Names(own=name_in_text, whole=name_in_whole) if part else UNCHANGED
