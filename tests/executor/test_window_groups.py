"""Layers with sliding windows on real models: texts equal transformers' whatever is released, found and preempted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import EngineConfig
from quire.engine.core.plan import WindowGroup
from quire.engine.executor import loading
from quire.engine.executor.errors import ModelLoadError
from quire.engine.executor.kv_cache import KVShape
from quire.engine.executor.kv_groups import KVGroup, blocks_held, divide, group_layers, grouping_windows, held_share
from quire.engine.llm import LLM
from quire.engine.wire.messages import FOREVER_MS, Beams, Generate, Sampling
from quire.loadtest.studies.model_families import GREEDY, model_class, own_texts, prompts
from quire.loadtest.studies.tiny_checkpoints import VOCAB
from tests.executor.driver import answer

# Windows of 24 tokens next to layers that see everything.  Those of Mistral and of Starcoder are all of one kind.
FAMILIES = (
    *("gpt_oss", "gemma2", "gemma3_text", "gemma4_text", "gemma3n_text", "cohere2", "olmo3", "exaone4"),
    *("qwen2", "qwen3", "ministral", "smollm3"),
)
ONE_KIND = ("mistral", "llama")
Windowed = Callable[[str], Path]
GIB = 1 << 30


def serve(directory: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"kv_blocks": 64, "max_seqs": 4, "step_tokens": 64, "threads": 1}
    config = EngineConfig(model=str(directory), device="cpu", poison_free_blocks=True, **(defaults | options))
    return LLM.over(config, loading.load(config))


def texts(
    llm: LLM, asked: list[list[int]], count: int = 12, sampling: Sampling = GREEDY, n: int = 1
) -> list[list[int]]:
    completions = llm.generate(asked, sampling, max_new_tokens=count, n=n)
    llm.engine.core.auditor.whole()
    return [output.token_ids for completion in completions for output in completion.outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_transformers(family: str, windowed: Windowed) -> None:
    """In one slice, from cached prefixes, in chunks of 7, and preempted; freed blocks are NaN."""
    want = own_texts(windowed(family), model_class=model_class(family))
    llm = serve(windowed(family))
    assert [group.window for group in llm.executor.info.windows] == [24]
    assert texts(llm, prompts()) == want
    assert texts(llm, prompts()) == want
    assert llm.engine.core.report.totals.cached_prompt_tokens > 0
    llm.close()
    tight = {"kv_blocks": 9, "max_model_len": 100, "admission": "threshold", "admit_threshold": 1.0}
    for options in ({"prefix_cache": False}, tight | {"preempt": "swap"}, tight):
        llm = serve(windowed(family), chunk_tokens=7, **options)
        assert texts(llm, prompts()) == want
        llm.close()


@pytest.mark.parametrize("family", ONE_KIND)
def test_models_of_one_kind_of_layers_have_one_table(family: str, windowed: Windowed) -> None:
    llm = serve(windowed(family), chunk_tokens=7)
    assert llm.executor.info.windows == []
    assert texts(llm, prompts()) == own_texts(windowed(family))
    llm.close()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2"])
def test_prompts_that_leave_a_cached_one_anywhere_have_the_text_of_a_fresh_engine(
    family: str, windowed: Windowed
) -> None:
    base = [17 * i % (VOCAB - 3) + 3 for i in range(150)]
    asked = [[*base[:at], *range(5, 25)] for at in (16, 31, 63, 64, 65, 79, 80, 87, 88, 89, 100, 128, 149)]
    plain = serve(windowed(family), prefix_cache=False)
    want = [text for prompt in asked for text in texts(plain, [prompt])]
    plain.close()
    llm = serve(windowed(family), chunk_tokens=7)
    answer(llm, Generate("first", "g", base, 1, GREEDY, FOREVER_MS, anchors=[64]))
    assert [text for prompt in asked for text in texts(llm, [prompt])] == want
    assert llm.engine.core.report.totals.cached_prompt_tokens > 0
    llm.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_choices_and_preemption_leave_the_text_alone(preempt: str, depth: int, windowed: Windowed) -> None:
    """`depth` 2: planned ahead, as on a GPU."""
    sampling = Sampling(temperature=0.8, seed=5, ignore_eos=True)
    roomy = serve(windowed("gpt_oss"))
    want = [text for prompt in prompts() for text in texts(roomy, [prompt], 40, sampling, 3)]
    assert roomy.engine.core.report.totals.preemptions == 0
    roomy.close()
    tight = {"kv_blocks": 12, "admission": "threshold", "admit_threshold": 1.0, "max_seqs": 9, "max_model_len": 120}
    llm = serve(windowed("gpt_oss"), preempt=preempt, **tight)
    llm.executor.depth = depth
    assert texts(llm, prompts(), 40, sampling, 3) == want
    totals = llm.engine.core.report.totals
    assert totals.preemptions > 0
    assert (totals.swap_preemptions > 0) == (preempt == "swap")
    llm.close()


def test_a_killed_engines_request_resumes_from_its_tokens(windowed: Windowed) -> None:
    llm = serve(windowed("gemma3_text"))
    prompt = prompts()[1]
    (want,) = texts(llm, [prompt], 50)
    llm.close()
    other = serve(windowed("gemma3_text"))
    assert want[:30] + answer(other, Generate("again", "g", prompt, 50, GREEDY, FOREVER_MS), [want[:30]]) == want
    other.close()


def test_beams_have_the_answers_of_one_table(windowed: Windowed) -> None:
    request = Generate("b", "g", prompts()[1], 30, Sampling(ignore_eos=True), FOREVER_MS, n=2, beams=Beams(3))
    llm = serve(windowed("gpt_oss"))
    found = answer(llm, request)
    assert llm.executor.info.windows
    llm.close()
    plain = serve(windowed("gpt_oss"), window_groups="off")
    assert not plain.executor.info.windows
    assert answer(plain, request) == found
    plain.close()


def test_the_canary_has_blocks_of_every_group(windowed: Windowed) -> None:
    llm = serve(windowed("gpt_oss"))
    llm.engine.canary.run()
    llm.engine.canary.run()
    assert llm.engine.canary.counts.equal == 2
    llm.engine.core.auditor.whole()
    assert texts(llm, prompts()) == own_texts(windowed("gpt_oss"))
    llm.close()


def test_the_start_says_how_memory_is_divided(windowed: Windowed, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = serve(windowed("gpt_oss"), kv_blocks=0, kv_memory_gib=0.01, max_seqs=8)
    assert "1 layers with a window of 24 tokens have" in caplog.text
    assert "of what it would take with one block table" in caplog.text
    (group,) = llm.executor.info.windows
    each = llm.executor.info.kv_bytes_per_token * 16
    assert (llm.executor.blocks + group.blocks) * each <= 0.01 * GIB < (llm.executor.blocks + group.blocks + 1) * each
    assert llm.engine.core.limits.max_seqs == 8
    llm.close()


# Config shapes: (layers, KV heads, head size, window) of each kind of layer, window 0: none.
SHAPES = {
    "gpt-oss-20b": ([(12, 8, 64, 0), (12, 8, 64, 128)], 0.51),
    "Gemma 3 27B": ([(10, 16, 128, 0), (52, 16, 128, 1024)], 0.27),
    "Gemma 4 31B": ([(10, 4, 512, 0), (50, 16, 256, 1024)], 0.21),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_sequence_of_8k_tokens_takes(name: str) -> None:
    kinds, share = SHAPES[name]
    layers = [KVShape(heads, size) for count, heads, size, _ in kinds for _ in range(count)]
    windows = [window for count, _, _, window in kinds for _ in range(count)]
    groups = group_layers(layers, windows, 2, 131_072)
    assert [group.window for group in groups] == [window for *_, window in kinds]
    assert [len(group.layers) for group in groups] == [count for count, *_ in kinds]
    assert round(held_share(groups, 8192, 16), 2) == share
    assert held_share(groups[:1], 8192, 16) == 1.0


def test_layers_that_read_the_cache_of_another_one_are_in_its_group() -> None:
    """Layer 2 reads layer 0 without a window, so layer 0 keeps everything.  Layer 3 reads layer 1 with a longer one."""
    layers = [KVShape(1, 64), KVShape(1, 64), KVShape(1, 64, shares=0), KVShape(1, 64, shares=1), KVShape(1, 64)]
    found = group_layers(layers, [24, 24, 0, 32, 8], 4, 1000)
    assert [(group.window, group.layers) for group in found] == [(0, (0, 2)), (32, (1, 3)), (8, (4,))]
    assert [group.token_bytes for group in found] == [2 * 64 * 4] * 3
    assert [group.window for group in group_layers(layers, [], 4, 1000)] == [0]
    assert [group.window for group in group_layers(layers, [24, 24, 0, 32, 8], 4, 20)] == [0, 8]
    assert [group.window for group in group_layers(layers, [24] * 5, 4, 1000)] == [24]


@pytest.mark.parametrize(
    ("memory", "sequences"),
    [(64 * GIB, 256), (GIB, 60), (GIB // 8, 6)],
)
def test_little_memory_is_divided_for_sequences_of_four_windows(memory: int, sequences: int) -> None:
    groups = [KVGroup(0, (0,), 24_576), KVGroup(128, (1,), 24_576)]
    sizes = {"block_size": 16, "longest": 8192, "slots": 256, "step_tokens": 1024, "kv_blocks": 0}
    (window,) = divide(groups, memory=memory, **sizes)
    assert (window.blocks - 64) // (10 + 10 / 8) == pytest.approx(sequences, abs=1)
    full = (memory // (16 * 24_576)) - window.blocks
    assert full > memory // (2 * 16 * 24_576)
    assert blocks_held(window, 8192, 16) == 9 == WindowGroup(128, 0).blocks_per_sequence(16, 8192)


def test_ranks_group_no_layers() -> None:
    windows = [24, 0]
    found = {option: grouping_windows(option, windows, ranks=1, recurrent=False) for option in ("auto", "on", "off")}
    assert found == {"auto": windows, "on": windows, "off": ()}
    assert grouping_windows("auto", windows, ranks=2, recurrent=False) == ()
    with pytest.raises(ModelLoadError, match=r"window_groups is on and tensor_parallel is 2: .*; set it to auto"):
        grouping_windows("on", windows, ranks=2, recurrent=False)


def test_a_recurrent_model_refuses_window_groups(windowed: Windowed) -> None:
    with pytest.raises(ModelLoadError, match="window_groups is on and the model has recurrent layers"):
        serve(windowed("lfm2"), window_groups="on")


def test_too_little_memory_for_windows_leaves_one_table() -> None:
    groups = [KVGroup(0, (0,), 24_576), KVGroup(128, (1,), 24_576)]
    sizes = {"block_size": 16, "longest": 8192, "slots": 256, "step_tokens": 1024, "kv_blocks": 0}
    assert divide(groups, memory=40 * 16 * 24_576, **sizes) == []


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2"])  # layer by layer, and all in one operator
def test_a_layer_never_reads_more_than_its_group_keeps(
    family: str, windowed: Windowed, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong window of a group is an error, not a wrong answer."""
    llm = serve(windowed(family))
    caches = llm.executor._worker._batch._caches  # type: ignore[attr-defined]
    caches[:] = [cache._replace(window=min(cache.window, 8)) for cache in caches]
    (completion,) = llm.generate([prompts()[0]], GREEDY, max_new_tokens=4)
    assert completion.outputs[0].finish_reason == "error"
    assert "a layer reads 24 tokens of a cache that keeps 8" in caplog.text
    llm.close()
