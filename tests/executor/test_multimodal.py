"""Multimodal families whose text is served by their own class without towers, or by a causal class of `text_tower`.

docs/models.md has all of them, with more prompts; here are the cheap ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.config import EngineConfig
from quire.engine.executor import local
from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.models import hf
from quire.engine.executor.models.served_config import read_config, served_part
from quire.engine.executor.models.sharding import shard_proof
from quire.engine.executor.models.weight_reader import read_weights
from quire.engine.executor.ranks.ranks import Ranks
from quire.engine.llm import LLM
from quire.loadtest.studies.model_families import GREEDY, model_class, prompts
from quire.loadtest.studies.tiny_checkpoints import MORE_LAYERS, tiny_config
from tests.matrix import sampled
from tests.towers import make

pytestmark = pytest.mark.usefixtures("kernels", "one_thread")

CPU = torch.device("cpu")
NEW = 6  # tokens of an answer
BY_THEIR_CLASS = [
    "aria",
    "cohere2_vision",
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "ernie4_5_vl_moe",
    "exaone4_5",
    "fun_asr_nano",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "granite4_vision",
    "granite_docling",
    "granite_speech",
    "hunyuan_vl",
    "hyperclovax_vision_v2",
    "kimi_k25",
    "muse_glimmer",
    "paddleocr_vl",
    "qianfan_ocr",
    "qwen3_vl_moe",
]
BY_A_CAUSAL_CLASS = [
    "audioflamingo3",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "glmasr",
    "got_ocr2",
    "idefics2",
    "idefics3",
    "lighton_ocr",
    "llava_next",
    "llava_next_video",
    "musicflamingo",
    "ovis2",
    "pp_chart2table",
    "qwen2_audio",
    "qwen3_asr",
    "smolvlm",
    "video_llama_3",
    "video_llava",
    "vipllava",
    "voxtral",
]
# A few of each class, with experts and without, of images, sound and video; the others run nightly.
KEPT = [
    *("aria", "cohere2_vision", "glm4v_moe", "granite_speech", "hunyuan_vl", "kimi_k25", "muse_glimmer"),
    *("cosmos3_edge", "audioflamingo3", "deepseek_vl", "got_ocr2", "idefics3", "llava_next_video", "ovis2"),
]


@torch.inference_mode()
def own_text(family: str, directory: Path, prompt: list[int]) -> list[int]:
    """The choice by transformers' class with all its towers."""
    model = model_class(family).from_pretrained(directory, dtype=torch.float32).eval()
    known = torch.tensor([prompt])
    for _ in range(NEW):
        known = torch.cat([known, model(input_ids=known, use_cache=False).logits[:, -1:].argmax(2)], 1)
    return known[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", sampled(BY_THEIR_CLASS + BY_A_CAUSAL_CLASS, KEPT))
def test_text_equals_that_of_the_whole_class(family: str, tmp_path: Path) -> None:
    directory, prompt = make(tmp_path, family), prompts()[1]
    config = EngineConfig(model=str(directory), device="cpu", kv_blocks=16, max_seqs=2, threads=1, chunk_tokens=20)
    executor = local.LocalExecutor(config)
    llm = LLM.over(config, executor)
    [answer] = llm.generate([prompt], GREEDY, max_new_tokens=NEW)
    llm.close()
    assert answer.outputs[0].token_ids == own_text(family, directory, prompt)


@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "glm4v_moe", "hunyuan_vl", "paddleocr_vl", "cosmos3_edge"])
def test_angles_of_text_are_those_of_plain_rotary_embeddings(family: str, tmp_path: Path) -> None:
    """All axes of M-RoPE have one position, so each frequency turns by it, wherever the layout has the frequency."""
    model = hf.load_model(str(make(tmp_path, family)), dtype="auto", device=CPU).module
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    positions = torch.tensor([0, 1, 7, 300])
    text = model.config.get_text_config()
    share = text.rope_parameters.get("partial_rotary_factor", 1.0)
    size = int((getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) * share)
    plain = positions[:, None] / text.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2) / size)
    axes = positions[None, None].expand(len(text.rope_parameters["mrope_section"]), 1, -1)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), axes)
    for found, wanted in ((cos, plain.cos()), (sin, plain.sin())):
        pairs = torch.cat([wanted, wanted], 1)
        torch.testing.assert_close(found[0].sort(1).values, pairs.sort(1).values, rtol=1e-4, atol=1e-4)


def test_towers_are_neither_built_nor_read(tmp_path: Path) -> None:
    directory = make(tmp_path, "qwen3_vl_moe")
    file = directory / "model.safetensors"
    save_file({k: w for k, w in load_file(file).items() if "visual" not in k}, file, {"format": "pt"})
    names = {name for name, _ in hf.load_model(str(directory), dtype="auto", device=CPU).module.named_modules()}
    assert "model.language_model" in names
    assert not any("visual" in name for name in names)


def test_numbers_of_towers_do_not_matter(tmp_path: Path) -> None:
    """A quantised tower, in whatever format."""
    directory = make(tmp_path, "glm4v")
    file = directory / "model.safetensors"
    odd = {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(4, 4, dtype=torch.uint8)}
    save_file(load_file(file) | odd, file, {"format": "pt"})
    assert hf.load_model(str(directory), dtype="auto", device=CPU).max_model_len == 512


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.language_model.norm.weight", r"^.*: the weight files lack model\.language_model\.norm\.weight$"),
        (
            "",
            r"^glm4v: the weight files hold another_tower\.norm\.weight, which the model of this config",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_text(name: str, reason: str, tmp_path: Path) -> None:
    directory = make(tmp_path, "glm4v")
    file = directory / "model.safetensors"
    tensors = {k: w for k, w in load_file(file).items() if k != name}
    if not name:
        tensors["another_tower.norm.weight"] = torch.ones(128)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=reason):
        hf.load_model(str(directory), dtype="auto", device=CPU)


def test_the_parts_of_two_ranks_are_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path, "qwen3_vl_moe")
    config = served_part(read_config(directory), directory)
    whole = read_weights(directory, config, "auto").state_dict()
    monkeypatch.setattr(shard_proof, "prove_parts", lambda *_: None)  # needs the other rank
    parts = [read_weights(directory, config, "auto", ranks=Ranks(rank, 2)).state_dict() for rank in range(2)]
    halved = [name for name, tensor in whole.items() if parts[0][name].numel() * 2 == tensor.numel()]
    assert {name.split(".")[-2] for name in halved} >= {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "lm_head"}
    first = "model.language_model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(torch.cat([part[first] for part in parts]), whole[first])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("inkling_mm_model", "inkling_mm_model: its text part, inkling_text: layers of type hybrid; only full and"),
        ("mistral_large4", "mistral_large4: its text part, mistral_large4_text: layers of type indexed_attention"),
        ("blip-2", "blip-2: its class computes no text without 'pixel_values'"),
        ("idefics", "idefics: its class computes no text without 'pixel_values' and 'image_encoder_embeddings'"),
        (
            "gemma4_unified_assistant",
            "gemma4_unified_assistant: its class computes no text without 'inputs_embeds' and 'shared_kv_states'",
        ),
        ("pi0", "pi0: its config has no vocab_size, so it is no language model"),
        ("qwen3_omni_moe_thinker", "qwen3_omni_moe_thinker: its class computes logits of all tokens"),
        ("mllama", "mllama: layers of type cross_attention"),
        ("florence2", "florence2: an encoder-decoder"),
        ("paligemma", "paligemma: attention that is not causal self-attention"),
    ],
)
def test_a_refusal_names_what_is_missing(family: str, reason: str, tmp_path: Path) -> None:
    tiny_config(family, **MORE_LAYERS.get(family, {})).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as refused:
        hf.load_model(str(tmp_path), dtype="float32", device=CPU, random=True)
    assert str(refused.value).startswith(reason)


def test_a_change_of_a_tower_changes_nothing_that_is_served(tmp_path: Path) -> None:
    directory = make(tmp_path, "glm4v")
    changed = {"vision_config": {"hidden_act": "gelu"}, "text_config": {"rms_norm_eps": 0.001}}
    with pytest.raises(ModelLoadError, match=r"vision_config\.hidden_act has no effect on the model that is served$"):
        hf.load_model(str(directory), dtype="auto", device=CPU, hf_overrides=json.dumps(changed))
    del changed["vision_config"]
    model = hf.load_model(str(directory), dtype="auto", device=CPU, hf_overrides=json.dumps(changed))
    assert model.module.config.get_text_config().rms_norm_eps == 0.001
