"""Checks that transformers' tokenizer equals the tokenizer that tokenizer.json describes.  No torch.

    tokenizer.json ── tokenizers.Tokenizer.from_file ──┐
          │                                            ├── equal parts, equal added tokens? ──> used, or refused
          └── AutoTokenizer, PreTrainedTokenizerFast ──┘

transformers 5 rebuilds the pipeline of many tokenizer classes from the vocabulary alone, without the normalizer or
pre-tokenizer of the file (huggingface/transformers#45488).  Then token ids differ, although texts round-trip.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend

PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # flags that decide where an added token matches in a text


def difference(own: Backend, made: Backend, *, ends: bool) -> str:
    """Return the name of the first part in which `made` differs from `own`, the file's pipeline; "": they are equal.

    `made`: the pipeline that transformers built; it may have further added tokens, from tokenizer_config.json.
    `ends`: whether to compare the tokens added before and after a text, too; False if tokenizer_config.json sets
    `add_bos_token` or `add_eos_token`."""
    for part in PARTS:
        if state(getattr(own, part)) != state(getattr(made, part)):
            return part
    made_tokens = made.get_added_tokens_decoder()
    for token, one in own.get_added_tokens_decoder().items():
        other = made_tokens.get(token)
        if other is None or other.content != one.content or any(getattr(one, f) != getattr(other, f) for f in FLAGS):
            return f"added token {token} ({one.content!r})"
    if ends and around(own) != around(made):
        return "post_processor"
    return ""


def around(backend: Backend) -> list[list[int]]:
    """Return the token ids of two sample texts, including the tokens that the post-processor adds."""
    return [backend.encode(text).ids for text in ("", "a")]


def state(part: Any) -> bytes:
    """Return the serialised form of a part of a pipeline; b"" if the pipeline has no such part."""
    return b"" if part is None else part.__getstate__()
