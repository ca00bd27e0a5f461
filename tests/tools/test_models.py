"""The families that most people run, by the comparison that `python -m quire.loadtest.studies models` makes of all of
them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from quire.loadtest.studies import model_families as models
from quire.loadtest.studies.model_families import EQUAL, FAILS, REFUSED, Verdict, judge, page
from quire.loadtest.studies.tiny_checkpoints import tiny_config
from tests.matrix import sampled

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = """
    llama mistral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text gemma3 phi phi3 gpt2 gpt_neox opt mixtral
    gpt_oss olmo2 olmo3 olmoe granite granitemoe cohere cohere2 glm4 glm4_moe starcoder2 smollm3 exaone4 hunyuan_v1_moe
    gemma4_text gemma3n_text llama4_text dots1 dbrx deepseek_v3 mistral4 molmo2
    lfm2 lfm2_moe qwen3_next qwen3_5_text olmo_hybrid bamba granitemoehybrid falcon_h1 nemotron_h
"""
# One of each sort of layer, norm and way to store weights; the families that are built like one of these run nightly.
KEPT = """
    llama qwen2 qwen3 gemma2 gemma3 phi gpt2 gpt_neox mixtral qwen2_moe gpt_oss olmo2 granite cohere2 glm4 gemma3n_text
    llama4_text dbrx deepseek_v3 molmo2 lfm2 qwen3_next bamba nemotron_h
"""


@pytest.mark.parametrize("family", sampled(FAMILIES.split(), KEPT.split()))
def test_texts_of_a_family_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    assert judge(family, tmp_path / family) == Verdict(family, EQUAL)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "layers of type linear_attention"),
        ("gpt_neo", "computes attention itself"),
        ("zamba2", "layers of type hybrid"),
        ("bart", "an encoder-decoder"),
        ("evolla", "transformers has no class of this type"),
        ("musicgen", "an encoder-decoder"),
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


# Families that no tiny checkpoint can be made of, or that transformers cannot continue: the page says why.
UNTRIED = """
    chameleon deepseek_ocr2 diffusion_gemma fast_vlm gemma3n gemma4_assistant
    kyutai_speech_to_text nemo_speechlm nemotron_h_omni perception_lm qwen3_omni_moe step3p7
"""

# Kinds of layers that the code names but no text of the family has.
NOT_OF_TEXTS = {
    "falcon_h1": {"full_attention", "linear_attention"},  # each layer is "hybrid": it has both
    "muse_glimmer": {"window_attention"},  # its vision tower's, which is in the same file
    "muse_spark": {"window_attention"},  # likewise
    "paddleocr_vl": {"sliding_attention"},  # read of `layer_types`, which the config of its text has not
}


def kinds_of_layers(family: str) -> tuple[set[str], set[str]]:
    """Kinds of layers that the code of a family's text part names, and those of its tiny checkpoint."""
    text = tiny_config(family).get_text_config()
    code = Path(inspect.getfile(type(text)))
    modeling = code.with_name(code.name.replace("configuration_", "modeling_"))
    source = "".join(file.read_text() for file in (code, modeling) if file.exists())
    named = {kind for kind in ALLOWED_LAYER_TYPES if kind and f'"{kind}"' in source}
    fields = ("layer_types", "mlp_layer_types")
    return named, {kind for field in fields for kind in getattr(text, field, None) or []}


def test_tiny_checkpoints_of_served_families_have_every_kind_of_layer() -> None:
    equal = models.PAGE.read_text().partition("## Equal")[2].partition("## ")[0]
    families = re.findall("`([^`]+)`", equal)
    assert len(families) > 90
    lacking = {}
    for family in families:
        named, found = kinds_of_layers(family)
        if named - found:
            lacking[family] = named - found
    assert lacking == NOT_OF_TEXTS


def test_every_family_is_tried_but_those_that_transformers_cannot_make() -> None:
    untried = models.PAGE.read_text().partition("## Not tried")[2]
    assert set(re.findall("^. `([^`]+)`", untried, re.MULTILINE)) == set(UNTRIED.split())
    assert "not run" not in untried
    reasons = re.findall(r"^\| `[^`]+` \| (.*) \|$", models.PAGE.read_text(), re.MULTILINE)
    assert len(reasons) > 80
    assert all(reasons)
