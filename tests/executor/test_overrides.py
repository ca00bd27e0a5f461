"""Changes of a checkpoint's config by the operator, what is refused of them, and contexts beyond the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.models import hf, overrides, rope
from quire.engine.executor.models.served_config import check_length, positions_of
from quire.engine.executor.models.weights import fingerprint
from quire.loadtest.studies.model_families import our_texts, own_texts
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint
from tests.towers import make

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MADE_FOR, LENGTH = 32, 96  # positions: of the checkpoint, and as served; prompts have 5, 33 and 61 tokens
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MADE_FOR}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": MADE_FOR,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + i / 4 for i in range(16)],
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama", max_position_embeddings=MADE_FOR)


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("tiny") / "phi3",
        "phi3",
        max_position_embeddings=4 * MADE_FOR,
        original_max_position_embeddings=MADE_FOR,
        rope_parameters=LONGROPE | {"rope_theta": 10_000.0},
    )


def load(directory: Path, changes: dict[str, Any] | str, **options: Any) -> hf.LoadedModel:
    text = changes if isinstance(changes, str) else json.dumps(changes)
    return hf.load_model(str(directory), dtype="auto", device=CPU, hf_overrides=text, **options)


def refusal(directory: Path, changes: dict[str, Any] | str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(directory, changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        {"type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "original_max_position_embeddings": MADE_FOR,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ],
    ids=lambda scaling: str(scaling.get("rope_type", "linear")),
)
def test_texts_beyond_the_models_own_length_equal_those_of_transformers(llama: Path, scaling: dict[str, Any]) -> None:
    wanted = own_texts(llama, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0} | scaling)
    assert wanted != own_texts(llama)
    ours = our_texts(llama, hf_overrides=json.dumps({"rope_scaling": scaling}), max_model_len=LENGTH)
    assert all(texts == wanted for texts in ours.values())


def test_dynamic_scaling_uses_the_angles_of_the_longest_sequence_for_all(llama: Path) -> None:
    """transformers does so, too, from its first sequence of that length on, until one is shorter than the model's."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    wanted = own_texts(llama, warm=LENGTH, rope_parameters=scaling | {"rope_theta": 10_000.0})
    ours = our_texts(llama, hf_overrides=json.dumps({"rope_scaling": scaling}), max_model_len=LENGTH)
    for texts in ours.values():
        assert texts[1:] == wanted[1:]


def test_longrope_beyond_its_original_length_equals_transformers(longrope: Path) -> None:
    """transformers takes the long factors for a sequence that is longer than the original length, from there on."""
    wanted = own_texts(longrope)
    for texts in our_texts(longrope, max_model_len=LENGTH).values():
        assert texts[1:] == wanted[1:]
        assert texts[0] != wanted[0]  # a short sequence, for which transformers takes the short factors
    assert load(longrope, "").max_model_len == MADE_FOR
    with pytest.raises(ModelLoadError, match=r"max_model_len 129 is over the 128 positions phi3 can serve"):
        load(longrope, "", max_model_len=4 * MADE_FOR + 1)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_angles_are_those_of_a_sequence_as_long_as_any(scaling: str, llama: Path, longrope: Path) -> None:
    directory = llama if scaling == "dynamic" else longrope
    changes = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}} if scaling == "dynamic" else {}
    plain = AutoModelForCausalLM.from_pretrained(directory, config=overrides.load_config(directory, changes))
    model = AutoModelForCausalLM.from_pretrained(directory, config=overrides.load_config(directory, changes))
    text = model.config.get_text_config()
    assert rope.fix_angles(model, text, positions_of(text), LENGTH)
    x = torch.ones(1, 1, 8)
    wanted = plain.model.rotary_emb(x, torch.arange(LENGTH)[None])
    for first, end in ((0, LENGTH), (0, 3), (7, 20)):
        found = model.model.rotary_emb(x, torch.arange(first, end)[None])
        assert all(torch.equal(ours, theirs[:, first:end]) for ours, theirs in zip(found, wanted, strict=True))
    short = plain.model.rotary_emb(x, torch.arange(3)[None])
    assert not torch.equal(short[0], wanted[0][:, :3])


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"rope_scaling": YARN}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 64),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}, 96),
        ({"rope_scaling": YARN, "max_position_embeddings": 500}, 500),
        ({"max_position_embeddings": 40}, 40),
    ],
)
def test_how_far_scaling_reaches(llama: Path, changes: dict[str, Any], most: int) -> None:
    own, config = overrides.load_config(llama, {}), overrides.load_config(llama, changes)
    assert check_length(config, most, own) == most
    assert check_length(config, 0, own) == changes.get("max_position_embeddings", MADE_FOR)  # unless asked for more
    with pytest.raises(ModelLoadError, match=rf"max_model_len {most + 1} is over the {most} positions llama can serve"):
        check_length(config, most + 1, own)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ("{", "--hf-overrides: not JSON: "),
        ("[1]", "--hf-overrides: must be a JSON object, such as {"),
        ({"rope_scalin": {}}, "--hf-overrides: llama has no rope_scalin; did you mean rope_scaling?"),
        ({"rope_scaling": {"kind": 1}}, "--hf-overrides: llama has no rope_scaling.kind"),
        ({"rope_scaling": 2}, "--hf-overrides: rope_scaling must be an object or null"),
        ({"rope_scaling": {"rope_type": "yam"}}, "--hf-overrides: rope_scaling.rope_type 'yam' is none of dynamic, "),
        ({"rope_scaling": {"rope_type": "linear"}}, "--hf-overrides: KeyError: "),
        ({"model_type": "qwen2"}, "--hf-overrides: model_type cannot be changed"),
        ({"hidden_size": "big"}, "--hf-overrides: "),
        (
            {"rope_scaling": YARN | {"factor": "x"}},
            "--hf-overrides: factor of rotary embeddings is 'x'; it must be a number over 0",
        ),
        (
            {"rope_scaling": YARN | {"factor": -4.0}},
            "--hf-overrides: factor of rotary embeddings is -4.0; it must be a number over 0",
        ),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": True}},
            "--hf-overrides: original_max_position_embeddings of rotary embeddings is True; it must be a number over 0",
        ),
        ({"rope_theta": "x"}, "--hf-overrides: rope_theta of rotary embeddings is 'x'; it must be a number over 0"),
        ({"max_position_embeddings": -5}, "--hf-overrides: max_position_embeddings is -5; it must be at least 1"),
        ({"hidden_act": "nonsense"}, "/"),
    ],
)
def test_what_is_refused(llama: Path, changes: dict[str, Any] | str, line: str) -> None:
    assert refusal(llama, changes).startswith(line)


def test_an_activation_that_does_not_exist_with_weights_made_up(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"llama: hidden_act is 'nonsense', which transformers does not know$"):
        load(llama, {"hidden_act": "nonsense"}, random=True)


def test_scaling_of_one_kind_of_layer_with_an_impossible_factor(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3_text")
    changes = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": -8.0}}}
    assert refusal(directory, changes).startswith("--hf-overrides: factor of rotary embeddings is -8.0; ")


def test_the_end_token_of_the_operator_wins_over_both_files(llama: Path, tmp_path: Path) -> None:
    assert load(llama, {}).eos_ids == [1]
    assert load(llama, {"eos_token_id": 5}).eos_ids == [5]
    assert load(llama, {"eos_token_id": [5, 6]}).eos_ids == [5, 6]
    tower = make(tmp_path, "gemma3")
    described = json.loads((tower / "config.json").read_bytes())
    (tower / "config.json").write_text(json.dumps(described | {"eos_token_id": [1]}))  # as in published files
    assert load(tower, {"eos_token_id": 5}).eos_ids == [5]
    assert load(tower, {"text_config": {"eos_token_id": 6}}).eos_ids == [6]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"text_config": {"tie_word_embeddings": True}}, "text_config.tie_word_embeddings"),
        ({"vision_config": {"image_size": 28}}, "vision_config.image_size"),
        ({"text_config": {"rms_norm_eps": 1e-3}, "spatial_merge_size": 4}, "spatial_merge_size"),
    ],
)
def test_a_change_of_what_is_not_served_is_refused(changes: dict[str, Any], path: str, tmp_path: Path) -> None:
    directory = make(tmp_path, "mistral3")
    assert refusal(directory, changes) == f"--hf-overrides: {path} has no effect on the model that is served"


def test_a_change_to_what_is_there_already(llama: Path) -> None:
    assert load(llama, {"max_position_embeddings": MADE_FOR}).max_model_len == MADE_FOR


def test_a_change_that_another_field_undoes_is_refused(longrope: Path) -> None:
    """phi3 names its original length twice, and one of the two decides."""
    said = refusal(longrope, {"rope_parameters": {"original_max_position_embeddings": 64}})
    place = "rope_parameters.original_max_position_embeddings"
    assert said == f"--hf-overrides: {place} stays 32: another field overrides it"
    both = {"rope_parameters": {"original_max_position_embeddings": 64}, "original_max_position_embeddings": 64}
    assert load(longrope, both).max_model_len == 64


def test_the_base_of_the_angles_lies_in_two_places(llama: Path) -> None:
    """In rope_parameters since transformers 5, where it wins over the field of this name."""
    assert overrides.load_config(llama, {"rope_theta": 5000.0}).rope_parameters["rope_theta"] == 5000.0
    scaled = overrides.load_config(llama, {"rope_scaling": YARN}).rope_parameters
    assert scaled["rope_theta"] == 10_000.0


def test_another_kind_of_scaling_keeps_no_field_of_the_one_before(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    directory = make_checkpoint(tmp_path / "llama", "llama", rope_parameters=linear)
    changed = overrides.load_config(directory, {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}})
    assert changed.rope_parameters == {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 77.0}
    assert overrides.load_config(directory, {"rope_scaling": {"factor": 3.0}}).rope_parameters == linear | {
        "factor": 3.0
    }
    assert overrides.load_config(directory, {"rope_scaling": None}).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 77.0,
    }


def test_scaling_of_one_kind_of_layer(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "gemma3", "gemma3_text")
    changes = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}
    config = overrides.load_config(directory, changes)
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert refusal(directory, {"rope_parameters": {"factor": 8.0}}).startswith(
        "--hf-overrides: gemma3_text has no rope_parameters.factor"
    )


def test_a_change_is_a_change_of_the_fingerprint(llama: Path, longrope: Path) -> None:
    def of(directory: Path, changes: dict[str, Any], **options: Any) -> str:
        model = load(directory, changes, **options)
        return fingerprint(model.directory, model.dtype, changes=model.changes)

    assert len({of(llama, {}), of(llama, {"rope_scaling": YARN}), of(llama, {"rms_norm_eps": 1e-3})}) == 3
    assert len({of(longrope, {}, max_model_len=length) for length in (32, 64, 96)}) == 3
    assert of(longrope, {}, max_model_len=16) == of(longrope, {})


def test_the_checkpoint_stays_as_it_is(llama: Path, checkpoint: Callable[[str], Path]) -> None:
    before = (llama / "config.json").read_bytes()
    model = load(llama, {"rms_norm_eps": 1e-3})
    assert model.module.config.rms_norm_eps == 1e-3
    assert (llama / "config.json").read_bytes() == before
