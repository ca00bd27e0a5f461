"""Proves that transformers' tokenizer is the one that tokenizer.json describes.  No torch.

    tokenizer.json ── tokenizers.Tokenizer.from_file ──┐
          │                                            ├── equal parts, equal added tokens? ──> used, or refused
          └── AutoTokenizer, PreTrainedTokenizerFast ──┘

transformers 5 rebuilds the pipeline of many tokenizer classes from their vocabulary alone, and so drops a normalizer or
pre-tokenizer that the file has (huggingface/transformers#45488): the ids differ, the text round-trips.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend

PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # how a text is searched for an added token


def difference(own: Backend, made: Backend, *, ends: bool) -> str:
    """Return the first part in which `made` differs from the file's pipeline, `own`; "" if their token ids are equal.

    `made` may have further added tokens, which tokenizer_config.json names.  `ends`: the tokens before and after a
    text must be the file's as well; False if tokenizer_config.json says `add_bos_token` or `add_eos_token`."""
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
    """Return the token ids of two texts with the tokens that the post-processor adds to each."""
    return [backend.encode(text).ids for text in ("", "a")]


def state(part: Any) -> bytes:
    """Return the serialised form of a part of a pipeline; b"" for an absent one."""
    return b"" if part is None else part.__getstate__()
