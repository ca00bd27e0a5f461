"""The families that most people run, by the comparison that `python -m engine.tools models` makes of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.tools import models
from engine.tools.models import EQUAL, FAILS, REFUSED, Verdict, judge, page
from engine.tools.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = """
    llama mistral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text gemma3 phi phi3 gpt2 gpt_neox opt mixtral
    gpt_oss olmo2 olmo3 olmoe granite granitemoe cohere cohere2 glm4 glm4_moe starcoder2 smollm3 exaone4 hunyuan_v1_moe
    gemma4_text llama4_text
"""


@pytest.mark.parametrize("family", FAMILIES.split())
def test_texts_of_a_family_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    assert judge(family, tmp_path / family) == Verdict(family, EQUAL)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", "head size"),
        ("mamba", "computes attention by itself"),
    ],
)
def test_families_that_are_refused_say_why(family: str, reason: str, tmp_path: Path) -> None:
    verdict = judge(family, tmp_path / family)
    assert verdict.outcome == REFUSED
    assert reason in verdict.reason


def test_a_text_that_differs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[1, 2]]
    monkeypatch.setattr(models, "our_texts", lambda directory, **options: {"whole": texts, "repeated": [[1, 3]]})
    monkeypatch.setattr(models, "own_texts", lambda directory, **options: texts)
    assert judge("llama", tmp_path / "llama") == Verdict("llama", models.DIFFERENT, "repeated")

    def broken(directory: Path, **options: int) -> None:
        raise RuntimeError("no logits\nat all")

    monkeypatch.setattr(models, "our_texts", broken)
    assert judge("llama", tmp_path / "again") == Verdict("llama", FAILS, "RuntimeError: no logits")


def test_texts_of_several_ranks_are_compared_with_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {1: {"whole": [[1]], "repeated": [[1]]}, 2: {"whole": [[1]], "repeated": [[2]]}, 4: {"whole": [[1]]}}
    monkeypatch.setattr(models, "our_texts", lambda directory, tensor_parallel=1: texts[tensor_parallel])
    assert judge("llama", tmp_path / "two", 2) == Verdict("llama", models.DIFFERENT, "repeated")
    assert judge("llama", tmp_path / "four", 4) == Verdict("llama", EQUAL)


def test_the_page_hides_no_family() -> None:
    page_text = page([Verdict(name, outcome, "a | b") for name, outcome in zip("abcdef", models.MEANING, strict=True)])
    for name, outcome in zip("abcdef", models.MEANING, strict=True):
        assert f"`{name}`" in page_text
        assert f"| {outcome} | 1 |" in page_text
    assert "a \\| b" in page_text


def test_a_tiny_checkpoint_has_every_kind_of_layer(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3_text")
    text = (directory / "config.json").read_text()
    assert "sliding_attention" in text
    assert "full_attention" in text
