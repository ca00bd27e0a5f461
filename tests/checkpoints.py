"""Tiny checkpoints of every supported family: random weights, a real tokenizer, loadable by `from_pretrained`.

Two or three layers, head size 64, a vocabulary of 640.  The weights are large enough that attention matters and greedy
text varies.  Sliding windows are short: a prompt of a few dozen tokens exceeds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from quire.engine.executor.models.sources.builtin import save_checkpoint, train_tokenizer

VOCAB = 640
MAX_LEN = 1024
_LLAMA: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 24},
    "qwen2": {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {"num_attention_heads": 2},
    "qwen3": _LLAMA | {"tie_word_embeddings": True},
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_LEN,
    },
    "gpt2": {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": MAX_LEN},
    "gpt_neox": {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_LEN,
    },
    "phi3": {key: value for key, value in _LLAMA.items() if key != "head_dim"}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 40},
    "gemma2": _LLAMA
    | {
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "query_pre_attn_scalar": 48,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(VOCAB, corpus_bytes=200_000)


def config_of(family: str, **changes: object) -> PretrainedConfig:
    """Return the config of a tiny model; `changes` override or add fields."""
    words = tokenizer()
    special = {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.eos_token_id,
    }
    return AutoConfig.for_model(family, **(FAMILIES.get(family, {}) | special | changes))


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    edit: Callable[[PreTrainedModel], None] | None = None,
    **changes: object,
) -> Path:
    """Write the tiny checkpoint of a family and return its directory.

    The weights are the same every time.  An existing directory is kept.  `edit` changes the model before saving."""
    if directory.is_dir():
        return directory
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config_of(family, **changes))
        for name, tensor in sorted(model.named_parameters()):
            if tensor.dim() > 1:
                tensor.data.normal_(std=0.15)
            elif "bias" in name:
                tensor.data.normal_(std=0.1)
    if edit:
        edit(model)
    save_checkpoint(model.to(dtype), tokenizer(), directory)
    return directory
