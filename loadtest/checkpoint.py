"""The model of the measurements on a CPU: llama shape, 42M parameters, bf16, seeded random weights."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

VOCAB = 16_000
SOURCES = 200  # source files that train the tokenizer: enough for VOCAB tokens


def make_llama_42m(directory: Path, context: int = 4096) -> None:
    """Write a checkpoint: hidden 512, 8 layers, 8 heads on 4 KV heads, intermediate 1,536, byte-level BPE tokenizer.

    Clients measure when text arrives, and a greedy model with random weights repeats a few tokens.  So every token that
    it can choose has text.  The other tokens, single bytes of longer characters and the end of sequence, have zeros in
    the last layer.  Among 16,000 logits the largest is never 0. `logit_bias` can still force them."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )
    trainer = ByteLevelBPETokenizer()
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:SOURCES]
    trainer.train([str(path) for path in sources], vocab_size=VOCAB, special_tokens=["<|end|>"])
    words = PreTrainedTokenizerFast(tokenizer_object=trainer._tokenizer, bos_token="<|end|>", eos_token="<|end|>")
    if len(words) != VOCAB:
        raise RuntimeError(f"the tokenizer learned {len(words)} tokens of {VOCAB}: too little text in SOURCES files")
    words.save_pretrained(directory)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    mute = [token for token in range(VOCAB) if not has_text(words.decode([token], skip_special_tokens=True))]
    with torch.no_grad():
        model.lm_head.weight[mute] = 0
    model.save_pretrained(directory)


def prepare(directory: Path) -> tuple[int, int]:
    """Return the model's vocabulary size and end-of-sequence id.  Makes the 42M model if the directory holds none."""
    if not (directory / "config.json").exists():
        print(f"making the 42M model in {directory}", flush=True)
        make_llama_42m(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    end = config.get("eos_token_id") or 0
    return int(config["vocab_size"]), int(end[0] if isinstance(end, list) else end)


def has_text(decoded: str) -> bool:
    """Return whether a server can send the text at once: part of a character waits for its other bytes."""
    return bool(decoded) and "\ufffd" not in decoded
