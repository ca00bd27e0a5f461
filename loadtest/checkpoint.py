"""The model the CPU figures are measured with: llama shape, 42M parameters, bf16, seeded random weights.

Asked greedily, it says only tokens that have text.  With ids the tokenizer does not know, or the half characters that
random weights love to repeat, 300 tokens in a row can show nothing: to a client a gap of seconds, made by nobody."""

from __future__ import annotations

import sysconfig
from pathlib import Path

VOCAB = 16_000


def make_llama_42m(directory: Path) -> None:
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
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )
    trainer = ByteLevelBPETokenizer()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trainer.train([str(path) for path in sources], vocab_size=VOCAB, special_tokens=["<|end|>"])
    if (known := trainer.get_vocab_size()) != VOCAB:
        raise ValueError(f"this Python's standard library makes a vocabulary of {known} tokens, not {VOCAB}")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for token in range(VOCAB):
            if trainer.decode([token]) in ("", "\N{REPLACEMENT CHARACTER}"):
                model.lm_head.weight[token] = 0  # its logit too: below the largest of the others
    model.save_pretrained(directory)
    words = PreTrainedTokenizerFast(tokenizer_object=trainer._tokenizer, bos_token="<|end|>", eos_token="<|end|>")
    words.save_pretrained(directory)
