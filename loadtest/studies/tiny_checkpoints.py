"""Tiny checkpoints of any causal family of the installed transformers: random weights, no tokenizer.

A config starts from its class's defaults.  Fields that make a model large are recognised by name patterns, so most new
families of transformers need no entry here.  Head size 32, vocabulary of 640; each kind of layer occurs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from quire.engine.executor.models.progress_bars import no_bars

VOCAB = 640
MAX_LEN = 512  # positions
HIDDEN = 128
HEADS = 4
SEED = 1
# (pattern, size): the first pattern that matches a complete field name decides the field's value.
SIZES: list[tuple[str, int]] = [
    (r"vocab_size(_per_layer_input)?", VOCAB),
    (r"(hidden_size|n_embd|d_model|model_dim|word_embed_proj_dim|embedding_size|emb_dim)", HIDDEN),
    (r"(text|out)_hidden_size", HIDDEN),
    (r"(hidden_size_per_layer_input|altup_num_inputs|laurel_rank)", 16),
    (r"(moe|shared_expert|expert|mamba_expand).*(intermediate_size|ffn.*(size|dim))", HIDDEN),
    (r"(intermediate_size(_mlp)?|ffn_dim|d_ff|n_inner|ffn_hidden_size|dim_ff|feed_forward_size|mlp_hidden_size)", 192),
    (r"depth", 1),
    (r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers)", 2),
    (r"(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads)", HEADS),
    (r"(num_key_value_heads|num_kv_heads|multi_query_group_num|num_global_key_value_heads|swa_num_key_value_heads)", 2),
    (r"(swa_num_attention_heads)", HEADS),
    (r"((global_|swa_|attention_)?head_dim|kv_channels|swa_v_head_dim)", HIDDEN // HEADS),
    (r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|attention_chunk_size)", MAX_LEN),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok|moe_k|moe_topk|top_k_experts|experts_per_token|num_selected_experts)", 2),
    (r"(n_group|topk_group)", 1),
    (r"(sliding_window|local_attention|window_size)", 24),
    (r"(q_lora_rank|kv_lora_rank|qk_rope_head_dim|qk_nope_head_dim|index_head_dim)", 32),
    (r"(v_head_dim)", HIDDEN // HEADS),
    (r"(index_n_heads|index_topk)", 4),
    (r"(mamba_n_heads|linear_num_value_heads|linear_num_key_heads|mamba_num_heads)", HEADS),
    (r"(mamba_d_head|linear_key_head_dim|linear_value_head_dim|mamba_head_dim)", 64),
    (r"(num_kv_shared_layers|num_nextn_predict_layers)", 0),
    (r"(num_mem_blocks|first_k_dense_replace|num_dense_layers)", 1),
]
# Family -> fields that no pattern can set, because its parts must fit each other or its defaults lack a kind of layer.
# They also apply to the family's config inside another config.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_CONV, _HYBRID = "conv", "hybrid"


def _layers(*kinds: str, **fields: Any) -> dict[str, Any]:
    """Return config fields for layers of these kinds, one layer per kind, and further `fields`."""
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)} | fields


_MROPE = _ROPE | {"mrope_section": [4, 6, 6]}
_HALF_MROPE = _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
_WINDOWS = _layers(_FULL, _SLIDING, use_sliding_window=True)
_MIXTURE = {"mlp_layer_types": ["dense", "sparse"]}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere2_moe": _MIXTURE,
    "cohere_compass_text": _layers(_FULL, _SLIDING, rope_parameters={_FULL: _ROPE, _SLIDING: _ROPE}),
    "cosmos3_edge_text": {"rope_parameters": _ROPE | {"mrope_section": [6, 5, 5]}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": _layers(_FULL, _SLIDING, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2),
    "dots3_note": {
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN, "pyramid_num_routed": [-1, 4]},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dots3_note_text": _layers("indexed_attention", _SLIDING, **_MIXTURE)
    | {"num_key_value_heads": HEADS, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS}
    | {"swa_q_lora_rank": 32, "swa_kv_lora_rank": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16},
    "ernie4_5_vl_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [6, 6, 4]}},
    "falcon_h1": {"mamba_d_ssm": HEADS * 64},
    "gemma4_assistant": {
        "text_config": _layers(_SLIDING, _FULL, _SLIDING, _FULL, num_kv_shared_layers=4)
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    "glm4v_moe_text": {"rope_parameters": _HALF_MROPE},
    "glm4v_text": {"rope_parameters": _HALF_MROPE},
    "glm_ocr_text": {"rope_parameters": _HALF_MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    "granitemoehybrid": _layers(_LINEAR, _FULL),
    "hunyuan_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [4, 4, 4, 4]}},
    "laguna": _layers(_FULL, _SLIDING, **_MIXTURE),
    "lfm2": _layers(_CONV, _FULL, _CONV),
    "lfm2_moe": _layers(_CONV, _FULL, _CONV),
    "mamba2": {"head_dim": 2 * HIDDEN // HEADS},
    "mellum": _layers(_FULL, _SLIDING, **_MIXTURE),
    "minimax_m3_vl_text": _layers(_FULL, "minimax_m3_sparse", **_MIXTURE),
    "ministral": _layers(_FULL, _SLIDING),
    "mistral4": {"head_dim": 2 * HIDDEN // HEADS},  # both parts of a head together: with and without rotary embedding
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "muse_spark_text": _MIXTURE,
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "qwen2": _WINDOWS,
    "qwen2_moe": _WINDOWS,
    "qwen2_vl": {"vision_config": {"embed_dim": 64, "num_heads": 4, "depth": 1}},
    "qwen2_vl_text": _WINDOWS | {"rope_parameters": _MROPE},
    "qwen2_5_omni_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl": {"vision_config": {"depth": 1}},
    "qwen2_5_vl_text": _WINDOWS | {"rope_parameters": _MROPE},
    "qwen3": _WINDOWS,
    "qwen3_vl": {"vision_config": {"depth": 1, "deepstack_visual_indexes": [0]}},
    "qwen3_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": HIDDEN // HEADS,
        "axial_pos_embds_dim": [HIDDEN // 2, HIDDEN // 2],
    },
    "smollm3": _layers(_FULL, _SLIDING, use_sliding_window=True, sliding_window=24, no_rope_layers=[1, 0]),
    "zamba": _layers(_LINEAR, _HYBRID, _LINEAR, _HYBRID),
    "zamba2": _layers(_LINEAR, _HYBRID, _LINEAR, _HYBRID),
    "zaya": {"num_experts_per_tok": 1},
}
# The last two layers share the keys and values of the first two layers.
_SHARING = _layers(_SLIDING, _FULL, _SLIDING, _FULL, num_kv_shared_layers=2)
_ONE_DENSE = {"mlp_only_layers": [0]}
# Family -> further fields for kinds of layers that `layer_types` cannot express.
MORE_LAYERS: dict[str, dict[str, Any]] = {
    "gemma3n_text": _SHARING | {"intermediate_size": [192] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gemma4": {"text_config": _SHARING},
    "gemma4_text": _SHARING,
    "gemma4_unified": {"text_config": _SHARING},
    "gemma4_unified_assistant": {"text_config": _SHARING},
    "gemma4_unified_text": _SHARING,
    "qwen2_moe": _ONE_DENSE,
    "qwen3_moe": _ONE_DENSE,
}
# Special token ids within the tiny vocabulary.
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def tiny_config(family: str, **fields: Any) -> PretrainedConfig:
    """Return the config of a tiny model.  `fields` override or extend it; nested objects are merged.

    Raises any exception of the config class."""
    try:
        own = AutoConfig.for_model(family)
    except Exception:  # a family may refuse its own defaults
        own = AutoConfig.for_model(family, **FIELDS[family])
    return AutoConfig.for_model(family, **with_fields(changes(own), fields))


def with_fields(found: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return `found` updated by `fields`; nested objects are merged field by field."""
    merged = dict(found)
    for name, value in fields.items():
        within = isinstance(value, dict) and isinstance(found.get(name), dict)
        merged[name] = found[name] | value if within else value
    return merged


def changes(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields to change in a config to make its model tiny, nested configs included."""
    own = config.to_dict()
    names = [*own, *config.attribute_map]
    own_name = {name: config.attribute_map.get(name, name) for name in names}
    settable = [name for name in names if not isinstance(getattr(type(config), own_name[name], None), property)]
    found: dict[str, Any] = {}
    for name in settable:
        value = own[name] if name in own else getattr(config, name, None)
        if isinstance(value, dict):  # to_dict() has converted nested configs to dicts
            value = getattr(config, name, None)
        if isinstance(value, PretrainedConfig):
            found[name] = {"model_type": value.model_type} | changes(value)
        elif name in config.attribute_map and config.attribute_map[name] in names:
            continue  # an alias of a field that is changed already
        elif isinstance(value, int) and not isinstance(value, bool) and (size := size_of(name)) is not None:
            found[name] = size
    if "head_dim" in inspect.signature(type(config)).parameters:  # often None by default, with a size computed from it
        found["head_dim"] = HIDDEN // HEADS
    if "kv_lora_rank" in settable and "num_key_value_heads" in found:  # latent attention has keys for every head
        found["num_key_value_heads"] = HEADS
    if "layer_types" in settable and (kinds := getattr(config, "layer_types", None)):
        distinct = list(dict.fromkeys(kinds))
        layers = max(2, len(distinct))
        found["layer_types"] = [distinct[i % len(distinct)] for i in range(layers)]
        found["num_hidden_layers"] = layers
        for name in settable:  # fields of layer lists with one entry per layer
            value = own.get(name)
            if name != "layer_types" and isinstance(value, list) and len(value) == len(kinds):
                found[name] = [value[kinds.index(kind)] for kind in found["layer_types"]]
    found |= {name: value for name, value in SPECIAL.items() if name in settable}
    return with_fields(found, FIELDS.get(config.model_type, {}))


def size_of(name: str) -> int | None:
    """Return the tiny value of a field; None: the field stays unchanged."""
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    edit: Callable[[PreTrainedModel], None] | None = None,
    model_class: Any = AutoModelForCausalLM,
    **fields: Any,
) -> Path:
    """Write the tiny checkpoint of a family, in float32, and return its directory.  The weights have a fixed seed.

    model_class  transformers' class that creates the model from the config
    fields       override fields of the config
    edit         changes the model before it is saved

    Raises any exception of transformers for a config that does not suit these sizes."""
    config = tiny_config(family, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = model_class.from_config(config, dtype=torch.float32)
        for name, tensor in sorted(model.named_parameters()):
            if tensor.dim() > 1:
                tensor.data.normal_(std=0.15)
            elif "bias" in name or "sink" in name:
                tensor.data.normal_(std=0.1)
    if edit:
        edit(model)
    with no_bars():
        model.save_pretrained(directory)
    return directory
