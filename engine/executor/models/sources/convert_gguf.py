"""Turns a GGUF file of a llama model into a checkpoint that transformers reads: safetensors in bfloat16.

    blk.0.attn_q.weight   Q4_1   ─ dequantise ─> float32 ─ undo the order of rows ─> bfloat16  model.layers.0.self_attn.
                                                                                               q_proj.weight
    tokenizer.ggml.*      ──────────────────────────────> tokenizer.json, chat_template.jinja
    llama.*               ──────────────────────────────> config.json, generation_config.json

GGUF stores the rows of the query and key projections in another order than transformers.  Rotary embedding turns pairs
of values: GGUF keeps the two values of a pair adjacent, transformers keeps them half a head apart.

    a head of size 6      GGUF  a0 b0 a1 b1 a2 b2        transformers  a0 a1 a2 b0 b1 b2
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(file: Path, directory: Path, advance: Callable[[int], object]) -> None:
    """Write the checkpoint of `file` into an existing, empty directory.

    The model must be a llama with tied embeddings and SmolLM's tokenizer.  `advance` receives the bytes of each
    converted tensor.  Raises OSError and SafetensorError when the checkpoint cannot be written."""
    reader = GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    described = config(facts)
    described.save_pretrained(directory)
    tokenizer(facts).save_pretrained(directory)
    GenerationConfig(
        bos_token_id=described.bos_token_id,
        eos_token_id=described.eos_token_id,
        pad_token_id=described.pad_token_id,
        # Settings recommended by the model's authors.  At temperature 1 a model of this size becomes incoherent.
        do_sample=True,
        temperature=0.2,
        top_p=0.9,
    ).save_pretrained(directory)
    save_file(weights(reader, described, advance), directory / "model.safetensors", {"format": "pt"})


def config(facts: dict[str, Any]) -> LlamaConfig:
    """Return the configuration from the file's metadata."""
    heads = facts["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        head_dim=facts["llama.embedding_length"] // heads,
        max_position_embeddings=facts["llama.context_length"],
        # Stored as float32: 9.999999747378752e-06 stands for 1e-5.
        rms_norm_eps=float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
    )


def tokenizer(facts: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the byte-level BPE tokenizer, in which every digit is a token of its own."""
    pieces: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == TokenType.CONTROL]
    bpe.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    named = {role: pieces[facts[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos", "unknown", "padding")}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        additional_special_tokens=[piece for piece in special if piece not in named.values()],
        chat_template=facts["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=facts["llama.context_length"],
    )


def weights(reader: GGUFReader, config: LlamaConfig, advance: Callable[[int], object]) -> dict[str, torch.Tensor]:
    """Return every tensor under transformers' name, in bfloat16, shapes as the architecture has them."""
    found = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)  # a copy: the file is mapped read-only
        name = renamed(tensor.name)
        if name.endswith("q_proj.weight"):
            values = half_a_head_apart(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = half_a_head_apart(values, config.num_key_value_heads)
        found[name] = torch.from_numpy(values).to(torch.bfloat16)
        advance(found[name].nbytes)
    return found


def renamed(name: str) -> str:
    """Return transformers' name of a tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name).groups()  # type: ignore[union-attr]
    prefix = f"model.layers.{layer}." if layer else ""
    return f"{prefix}{NAMES[part]}.weight"


def half_a_head_apart(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows [heads * size, inputs] from GGUF's order to transformers'."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
