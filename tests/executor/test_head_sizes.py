"""Keys and values of different sizes, and heads that a GPU caches with zeros behind them.

On a CPU greedy text equals that of transformers in float32, token for token.  On a GPU each token is the choice of the
float32 model, up to the noise of bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.models import hf
from quire.engine.executor.models.cache_shapes import GPU_HEAD_SIZES, cached_layers
from quire.engine.executor.models.fused import is_fused
from quire.loadtest.studies import model_families as models
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint
from tests.executor.test_gpu import check_greedy, llm, texts, words

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# name -> family, fields, and what the layers cache
NARROW: dict[str, tuple[str, dict[str, Any], set[KVShape]]] = {
    "mimo": ("mimo_v2_flash", {"head_dim": 48, "v_head_dim": 32}, {KVShape(2, 48), KVShape(4, 48)}),
    "mla": (
        "deepseek_v3",
        {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 32},
        {KVShape(4, 48)},
    ),
    "wide values": (
        "deepseek_v3",
        {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 64},
        {KVShape(4, 64)},
    ),
}


@pytest.mark.usefixtures("kernels", "one_thread")
@pytest.mark.parametrize("case", NARROW)
def test_values_of_another_size_than_keys(case: str, tmp_path: Path) -> None:
    family, fields, shapes = NARROW[case]
    directory = make_checkpoint(tmp_path / family, family, **fields)
    assert set(hf.load_model(str(directory), dtype="auto", device=CPU).layers) == shapes
    assert models.our_texts(directory) == dict.fromkeys(
        ("whole", "repeated", f"in chunks of {models.CHUNK}"), models.own_texts(directory)
    )


@pytest.mark.parametrize(("size", "cached"), [(32, 64), (64, 64), (72, 80), (112, 128), (160, 192), (200, 256)])
def test_heads_that_a_gpu_caches_with_zeros(size: int, cached: int) -> None:
    assert cached in GPU_HEAD_SIZES
    layers = [KVShape(2, size), KVShape(4, size, shares=0)]
    assert cached_layers("llama", layers, GPU) == [KVShape(2, cached), KVShape(4, cached, shares=0)]
    assert cached_layers("llama", layers, CPU) == layers


def test_heads_that_no_gpu_kernel_takes_are_refused() -> None:
    reason = r"^gemma4_text: head size 512; on a GPU it may be at most 256; --device cpu can do it$"
    with pytest.raises(UnsupportedModel, match=reason):
        cached_layers("gemma4_text", [KVShape(2, 256), KVShape(1, 512)], GPU)


ON_GPU: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("mimo_v2_flash", {"head_dim": 192, "v_head_dim": 128, "mlp_layer_types": ["dense"] * 2}),
    "mla": (
        "deepseek_v3",
        {
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 2,
        },
    ),
    "odd": ("llama", {"head_dim": 72}),
    "small": ("gpt_neox", {}),
    "two sizes": ("gemma4_text", {"head_dim": 128, "global_head_dim": 256}),
    "two numbers of heads": (
        "gemma4_text",
        {"head_dim": 64, "global_head_dim": 128, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "shared": (
        "gemma4_text",
        {"head_dim": 64, "global_head_dim": 128, "num_hidden_layers": 6, "num_kv_shared_layers": 3}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    ),
}


@pytest.fixture(scope="module", params=ON_GPU)
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, fields = ON_GPU[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("heads") / family, family, **fields)


PROMPTS = [words(count, count) for count in (1, 5, 33, 70, 130)]


def plain(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 40}, {"graph_seconds": 0.0}])
def test_greedy_text_on_a_gpu(on_gpu: Path, options: dict[str, Any]) -> None:
    engine = llm(on_gpu, **options)
    for _ in range(2):  # the second time from cached prefixes
        check_greedy(plain(on_gpu), PROMPTS, texts(engine, PROMPTS))
    engine.close()


@pytest.mark.gpu
def test_a_cache_in_e4m3_on_a_gpu(on_gpu: Path) -> None:
    """Its rounding may choose other tokens, so the text is only as long as it should be."""
    engine = llm(on_gpu, kv_dtype="e4m3")
    assert [len(text) for text in texts(engine, PROMPTS)] == [24] * len(PROMPTS)
    engine.close()


@pytest.mark.gpu
def test_blocks_of_all_shapes_return_from_the_host(on_gpu: Path) -> None:
    settings: dict[str, Any] = {
        "admission": "threshold",
        "admit_threshold": 1.0,
        "prefix_cache": False,
        "max_model_len": 200,
        "check_accounting": True,
    }
    engine = llm(on_gpu, kv_blocks=24, preempt="swap", **settings)
    found = texts(engine, PROMPTS * 2, count=40)
    assert engine.engine.core.report.totals.swapped_in_blocks > 0
    check_greedy(plain(on_gpu), PROMPTS * 2, found)
    engine.close()


@pytest.mark.gpu
def test_padded_heads_run_with_transformers_own_layers(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "llama", "llama", head_dim=72)
    model = hf.load_model(str(directory), dtype="bfloat16", device=GPU)
    assert model.layers == [KVShape(2, 80)] * 2
    assert not is_fused(model.module)
