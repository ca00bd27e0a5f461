"""Beam search against transformers' own, token for token in float32."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quire.engine.core.beams import BeamSearch, Row
from quire.engine.wire.messages import Beams

VOCAB, END = 64, 1
MODES: list[bool | Literal["never"]] = [False, True, "never"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model whose EOS token is neither rare nor sure, so that beams end at many lengths."""
    torch.manual_seed(5)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape, **heads, eos_token_id=None)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(25)[1:4] *= 1.6
    return model


@torch.no_grad()
def searched(model: PreTrainedModel, prompt: list[int], search: BeamSearch) -> list[tuple[list[int], float]]:
    """Run a search on rows of the model's full forward.  Returns (tokens, score) of each answer."""
    beams = [list(prompt)]
    while not search.done:
        logp = model(input_ids=torch.tensor(beams), use_cache=False).logits[:, -1].float().log_softmax(-1)
        values, ids = logp.topk(search.row_size)
        rows: list[Row] = list(zip(ids.tolist(), values.tolist(), strict=True))
        beams = [[*beams[parent], token] for parent, token in search.advance(rows)]
    return [(answer.path.unroll()[0], answer.score) for answer in search.answers]


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: list[int], ends: list[int], **how: Any) -> list[tuple[list[int], float]]:
    """The same by transformers."""
    how |= {"return_dict_in_generate": True, "output_scores": True, "use_cache": False}
    config = GenerationConfig(do_sample=False, eos_token_id=ends or None, pad_token_id=0, **how)
    found = model.generate(torch.tensor([prompt]), generation_config=config)
    scores = found.sequences_scores.tolist() if how["num_beams"] > 1 else [0.0]
    answers = []
    for tokens, score in zip(found.sequences.tolist(), scores, strict=True):
        new = tokens[len(prompt) :]
        at = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        answers.append((new[:at], score))
    return answers


def same(ours: list[tuple[list[int], float]], theirs: list[tuple[list[int], float]]) -> None:
    """Equal tokens in the same order; scores up to float32's rounding of sums.

    transformers computes with masks and with `width` rows from the first step on.  On some CPUs that changes the last
    bits of the model's own sums."""
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    if len(theirs) > 1:
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=1e-5)


@pytest.mark.parametrize("early_stopping", MODES)
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0, -1.0, 0.0])
def test_a_search_equals_transformers(
    model: PreTrainedModel, length_penalty: float, early_stopping: bool | Literal["never"]
) -> None:
    """All widths from 1 to 8; no EOS token, one and three; lengths at which beams end and at which all are cut."""
    ended = 0
    for width, (ends, new) in itertools.product(range(1, 9), [([END], 12), ([END, 2, 3], 7), ([], 4)]):
        prompt = [5 + width, 9, 30]
        beams = Beams(width, length_penalty, early_stopping)
        search = BeamSearch(beams, frozenset(ends), new, vocab_size=VOCAB)
        ours = searched(model, prompt, search)
        how: dict[str, Any] = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": new}
        if width > 1:
            how |= {"length_penalty": length_penalty, "early_stopping": early_stopping}
        same(ours, generated(model, prompt, ends, **how))
        ended += sum(answer.stopped for answer in search.answers)
    assert ended, "no answer ends before the greatest length"


def test_end_tokens_are_passed_over_before_min_tokens(model: PreTrainedModel) -> None:
    for width in (2, 4):
        prompt, how = [8, 9, 30], {"num_beams": width, "num_return_sequences": width, "max_new_tokens": 9}
        search = BeamSearch(Beams(width), frozenset([END, 2]), 9, min_tokens=4, vocab_size=VOCAB)
        same(searched(model, prompt, search), generated(model, prompt, [END, 2], min_new_tokens=4, **how))
        assert all(len(answer.path.unroll()[0]) > 4 for answer in search.answers)


def test_a_vocabulary_smaller_than_the_candidates_still_fills_every_beam() -> None:
    """Five tokens, two of which end: the first row has fewer candidates than a step keeps."""
    row = list(range(5)), [-1.0 - token for token in range(5)]
    search = BeamSearch(Beams(8, early_stopping="never"), frozenset([0, 1]), 6, vocab_size=5)
    children = search.advance([row])
    assert len(children) == 8
    assert {child.parent for child in children} == {0}
    while not search.done:
        assert len(search.advance([row] * 8)) in (0, 8)
    assert len(search.answers) == 8
    assert [answer.score for answer in search.answers] == sorted((a.score for a in search.answers), reverse=True)
