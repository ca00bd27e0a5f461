"""The model the CPU figures are measured with: llama shape, 42M parameters, bf16, seeded random weights."""

from __future__ import annotations

import sysconfig
from pathlib import Path

VOCAB = 16_000


def make_llama_42m(directory: Path, context: int = 4096) -> None:
    """Hidden 512, 8 layers, 8 heads on 4 KV heads, intermediate 1,536; byte-level BPE over the standard library."""
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
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    trainer = ByteLevelBPETokenizer()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    trainer.train([str(path) for path in sources], vocab_size=VOCAB, special_tokens=["<|end|>"])
    words = PreTrainedTokenizerFast(tokenizer_object=trainer._tokenizer, bos_token="<|end|>", eos_token="<|end|>")
    words.save_pretrained(directory)
