"""The model for CPU measurements shows every token as text: otherwise a client sees gaps that no process caused."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from loadtest.checkpoint import VOCAB, make_llama_42m
from service.text_stream import TextStream
from service.tokenizer import Tokenizer


def test_every_token_it_can_sample_greedily_has_text(tmp_path: Path) -> None:
    make_llama_42m(tmp_path)
    tokenizer = Tokenizer(str(tmp_path))
    assert len(tokenizer.table) == VOCAB
    rows = load_file(tmp_path / "model.safetensors")["lm_head.weight"].abs().sum(dim=1)
    never = {token for token in range(VOCAB) if rows[token] == 0}  # a logit of 0 is not the largest of 16,000
    silent = {token for token in range(VOCAB) if not TextStream(tokenizer).push([token])}
    assert 0 in silent  # the end of text
    assert silent <= never
    assert len(never) < VOCAB // 100
