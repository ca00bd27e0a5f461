"""Layers with different head sizes or head counts, and layers that read the cache of another one, as in Gemma 4 and 3n.

Greedy text equals that of transformers' generate in float32, token for token, whatever happens to a sequence's blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.executor import loading, local, ops
from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.models import hf
from quire.engine.llm import LLM
from quire.engine.wire.messages import Beams
from quire.loadtest.studies import model_families as models
from quire.loadtest.studies.tiny_checkpoints import VOCAB, make_checkpoint
from tests.executor.test_beams import same, theirs
from tests.executor.test_preempt import Witness
from tests.matrix import sampled

pytestmark = pytest.mark.usefixtures("kernels")

ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention"]
# name -> family, fields, and what its layers cache
CASES: dict[str, tuple[str, dict[str, Any], list[KVShape]]] = {
    "small": ("gemma4_text", {"head_dim": 32, "global_head_dim": 16}, [KVShape(2, 32), KVShape(2, 16)]),
    "published": (
        "gemma4_text",
        {"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        [KVShape(2, 256), KVShape(1, 512)],
    ),
    "experts": (
        "gemma4_text",
        {"global_head_dim": 64, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 64},
        [KVShape(2, 32), KVShape(2, 64)],
    ),
    "shared": (
        "gemma4_text",
        {"global_head_dim": 64, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": ALTERNATING * 2},
        [*[KVShape(2, 32)] * 2, KVShape(2, 64), *[KVShape(2, 32, shares=1)] * 2, KVShape(2, 64, shares=2)],
    ),
    "gemma3n": (
        "gemma3n_text",
        {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": ALTERNATING * 2}
        | {"activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [192] * 6},
        [*[KVShape(2, 32)] * 3, *[KVShape(2, 32, shares=1)] * 2, KVShape(2, 32, shares=2)],
    ),
    "large": ("llama", {"head_dim": 512}, [KVShape(2, 512)] * 2),
}


# "small" and "large" run nightly: "published" has two sizes of heads too, and one of 512.
@pytest.fixture(scope="module", params=sampled(list(CASES), ["published", "experts", "shared", "gemma3n"]))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, fields, _ = CASES[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("unequal") / request.param, family, **fields)


@pytest.fixture(scope="module")
def wanted(directory: Path) -> list[list[int]]:
    return models.own_texts(directory)


def config(directory: Path, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {"kv_blocks": 128, "block_size": 8, "max_seqs": 8, "threads": 1}
    settings |= {"check_accounting": True, "poison_free_blocks": True}
    return EngineConfig(model=str(directory), **(settings | options))


def answers(directory: Path, n: int = 1, **options: Any) -> list[list[int]]:
    llm = LLM.over(config(directory, **options), loading.load(config(directory, **options)))
    done = llm.generate(models.prompts(), models.GREEDY, max_new_tokens=models.OUTPUT, n=n)
    llm.close()
    return [output.token_ids for completion in done for output in completion.outputs]


def test_the_probe_sees_each_layer(directory: Path) -> None:
    model = hf.load_model(str(directory), dtype="auto", device=torch.device("cpu"))
    assert model.layers == CASES[directory.name][2]


def test_whole_with_prefixes_cached_and_in_chunks(directory: Path, wanted: list[list[int]]) -> None:
    found = models.our_texts(directory, block_size=8, poison_free_blocks=True)
    assert found == dict.fromkeys(("whole", "repeated", "in chunks of 7"), wanted)
    assert answers(directory, chunk_tokens=1) == wanted


def test_swapped_out_and_back(directory: Path) -> None:
    """Every byte returns, of each shape: a block that was not copied would be NaN."""
    prompts = models.prompts() * 2

    def texts(**options: Any) -> tuple[LLM, Witness, list[list[int]]]:
        settings = config(directory, admission="threshold", admit_threshold=1.0, prefix_cache=False, **options)
        executor = local.LocalExecutor(settings)
        witness = Witness(executor)
        llm = LLM.over(settings, executor)
        done = llm.generate(prompts, models.GREEDY, max_new_tokens=40)
        llm.close()
        return llm, witness, [output.token_ids for completion in done for output in completion.outputs]

    _, _, calm = texts(kv_blocks=200)
    crowded, witness, got = texts(kv_blocks=34, max_model_len=120, preempt="swap")
    totals = crowded.engine.core.report.totals
    assert got == calm
    assert totals.swap_preemptions == totals.preemptions > 0
    assert witness.returned == totals.swapped_in_blocks > 0


def test_recomputed_after_preemption(directory: Path) -> None:
    prompts = models.prompts() * 2
    found = []
    for options in ({"kv_blocks": 200}, {"kv_blocks": 34, "max_model_len": 120, "preempt": "recompute"}):
        settings = config(directory, admission="threshold", admit_threshold=1.0, **options)
        llm = LLM.over(settings, loading.load(settings))
        done = llm.generate(prompts, models.GREEDY, max_new_tokens=40)
        found.append([output.token_ids for completion in done for output in completion.outputs])
        preemptions = llm.engine.core.report.totals.preemptions
        llm.close()
    assert preemptions > 0
    assert found[0] == found[1]


def test_answers_of_one_prompt_copy_the_block_that_they_write(
    directory: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []
    copy = ops.block_copy

    def noted(caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
        copied.extend({tuple(cache.shape[1:]) for cache in caches})
        copy(caches, pairs)

    monkeypatch.setattr(ops, "block_copy", noted)
    assert answers(directory, n=2) == [text for text in wanted for _ in range(2)]
    assert set(copied) == {(layer.heads, 8, layer.head_size) for layer in CASES[directory.name][2]}


@pytest.mark.parametrize("width", [2, 5])
def test_beams(directory: Path, width: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    settings = config(directory, max_seqs=24, kv_blocks=160)
    llm = LLM.over(settings, loading.load(settings))
    for prompt in models.prompts():
        [done] = llm.generate([prompt], models.GREEDY, max_new_tokens=12, n=width, beams=Beams(width))
        want = theirs(model, prompt, [VOCAB - 1], num_beams=width, num_return_sequences=width)
        same(done.outputs, want, width)
    llm.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "e4m3"])
def test_chunks_do_not_change_a_token_of_any_cache(directory: Path, kv_dtype: str) -> None:
    whole = answers(directory, kv_dtype=kv_dtype)
    assert answers(directory, kv_dtype=kv_dtype, chunk_tokens=7) == whole


def test_two_ranks_with_heads_of_two_sizes(tmp_path: Path) -> None:
    family, fields, _ = CASES["small"]
    directory = make_checkpoint(tmp_path / "small", family, **fields)
    found = models.our_texts(directory, block_size=8, tensor_parallel=2)
    assert found == dict.fromkeys(("whole", "repeated", "in chunks of 7"), models.own_texts(directory))


@pytest.mark.parametrize(
    ("case", "reason"),
    [("published", "of layers with 1 and 2 KV heads"), ("shared", "of layers that share keys and values")],
)
def test_what_ranks_do_not_divide_is_refused_by_name(tmp_path: Path, case: str, reason: str) -> None:
    family, fields, _ = CASES[case]
    directory = make_checkpoint(tmp_path / case, family, **fields)
    with pytest.raises(ModelLoadError, match=f"^gemma4_text: --tensor-parallel {reason}$"):
        loading.load(config(directory, tensor_parallel=2))


def test_layers_that_share_take_no_memory(tmp_path: Path) -> None:
    family, fields, _ = CASES["shared"]
    directory = make_checkpoint(tmp_path / "shared", family, **fields)
    loaded = loading.load(config(directory))
    windows = sum(group.block_bytes // 8 for group in loaded.info.windows)  # blocks of 8 tokens
    assert loaded.info.kv_bytes_per_token + windows == 2 * (2 * 2 * 32 + 2 * 64) * 4  # float32: three of six layers
    loaded.close()


def test_weights_that_sharing_layers_do_not_use(tmp_path: Path) -> None:
    """Published files hold keys' and values' projections of all layers."""
    family, fields, _ = CASES["shared"]
    directory = make_checkpoint(tmp_path / "shared", family, **fields)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    unused = {f"model.layers.4.self_attn.{name}.weight": torch.ones(64, 128) for name in ("k_proj", "v_proj")}
    assert not unused.keys() & tensors.keys()
    save_file(tensors | unused, file, {"format": "pt"})
    assert models.our_texts(directory)["whole"] == models.own_texts(directory)
