"""Models with recurrent layers: texts, states and refusals, on tiny checkpoints through the real loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.executor import attention, loading, ops
from quire.engine.executor.errors import ModelLoadError, NotEnoughMemory, UnsupportedModel
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.models import hf
from quire.engine.executor.models.linear import Linears
from quire.engine.executor.models.recurrent import families, gated_delta
from quire.engine.executor.models.recurrent.families import check_ranks
from quire.engine.executor.models.recurrent.gated_attention import Angles, GatedAttention, swap_attention
from quire.engine.executor.models.recurrent.gated_delta import GatedDelta
from quire.engine.executor.models.recurrent.plain_modules import (
    NORMS,
    GatedMLP,
    Norm,
    PreNormLayer,
    swap_plain_modules,
)
from quire.engine.executor.models.recurrent.proof import probe_recurrent, prove_recurrent
from quire.engine.executor.models.served_config import read_config
from quire.engine.executor.state_memory import divide_states
from quire.engine.llm import LLM
from quire.engine.loop import ConfigError
from quire.engine.wire.messages import FOREVER_MS, Generate, Sampling
from quire.loadtest.studies.model_families import GREEDY, own_texts, prompts
from quire.loadtest.studies.tiny_checkpoints import VOCAB
from tests.executor.driver import answer

KINDS = ("lfm2", "qwen3_5_text", "bamba")  # one of each kind of layer
CPU = torch.device("cpu")
MIB = 1 << 20
Tiny = Callable[[str], Path]


def serve(directory: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"kv_blocks": 64, "max_seqs": 4, "threads": 1, "state_memory_gib": 8 / 1024}
    config = EngineConfig(model=str(directory), device="cpu", **(defaults | options))
    return LLM.over(config, loading.load(config))


def load(directory: Path, **options: Any) -> hf.LoadedModel:
    settings: dict[str, Any] = {"dtype": "float32", "device": CPU}
    return hf.load_model(str(directory), **(settings | options))


def texts(
    llm: LLM, asked: list[list[int]], count: int = 12, sampling: Sampling = GREEDY, n: int = 1
) -> list[list[int]]:
    completions = llm.generate(asked, sampling, max_new_tokens=count, n=n)
    outputs = [output for completion in completions for output in completion.outputs]
    assert {output.finish_reason for output in outputs} == {"length"}
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", KINDS)
def test_prefixes_around_a_checkpoint_have_the_text_of_a_fresh_engine(family: str, tiny: Tiny) -> None:
    """The first prompt leaves checkpoints at 64, 128 and 192.  Others share it up to before, at and behind them."""
    base = [17 * i % (VOCAB - 3) + 3 for i in range(200)]
    asked = [[*base[: 64 + offset], *range(5, 25)] for offset in (0, 1, 15, 16, 63, 64, 100, 127)]
    plain = serve(tiny(family), prefix_cache=False)
    want = texts(plain, asked)
    plain.close()
    llm = serve(tiny(family), chunk_tokens=7)
    answer(llm, Generate("first", "g", base, 1, GREEDY, FOREVER_MS, anchors=[64]))
    totals = llm.engine.core.report.totals
    for prompt, text in zip(asked, want, strict=True):
        before = totals.cached_prompt_tokens
        assert texts(llm, [prompt]) == [text]
        assert totals.cached_prompt_tokens - before >= 64
    llm.engine.core.auditor.whole()
    llm.close()


@pytest.mark.parametrize("family", KINDS)
def test_choices_and_preemption_leave_the_text_alone(family: str, tiny: Tiny) -> None:
    """n = 3 by seed, and a pool too small for all, so that some are computed again."""
    sampling = Sampling(temperature=0.8, seed=5, ignore_eos=True)
    roomy = serve(tiny(family))
    want = [text for prompt in prompts() for text in texts(roomy, [prompt], 40, sampling, 3)]
    assert roomy.engine.core.report.totals.preemptions == 0
    roomy.close()
    tight = serve(tiny(family), kv_blocks=12, admission="threshold", admit_threshold=1.0, max_seqs=9, max_model_len=120)
    assert texts(tight, prompts(), 40, sampling, 3) == want
    assert tight.engine.core.report.totals.preemptions > 0
    tight.engine.core.auditor.whole()
    tight.close()


@pytest.mark.parametrize("family", KINDS)
def test_a_killed_engines_request_resumes_from_its_tokens(family: str, tiny: Tiny) -> None:
    llm = serve(tiny(family))
    prompt = prompts()[1]
    (want,) = texts(llm, [prompt], 20)
    llm.close()
    other = serve(tiny(family))
    assert want[:8] + answer(other, Generate("again", "g", prompt, 20, GREEDY, FOREVER_MS), [want[:8]]) == want
    other.close()


def test_prompts_decoded_together_are_the_texts_of_transformers(tiny: Tiny) -> None:
    llm = serve(tiny("olmo_hybrid"), step_tokens=40)
    assert texts(llm, prompts()) == own_texts(tiny("olmo_hybrid"))
    llm.close()


def test_the_proof_finds_a_leak_a_lost_state_and_a_wrong_decay(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    recur, conv = ops.linear_recurrence, ops.causal_conv
    directory = tiny("qwen3_5_text")

    def leaking(*inputs: Any, **how: Any) -> Tensor:
        q, k, v, decay, beta, states, rows, starts, keeps = inputs
        how["lens"] = how["lens"][-1:]
        return recur(q, k, v, decay, beta, states, rows[:1], starts[[0, -1]].contiguous(), keeps, **how)

    def forgetful(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, *others: Any, **how: Any) -> Tensor:
        return conv(x, weight, bias, torch.zeros_like(states), *others, **how)

    monkeypatch.setattr(ops, "linear_recurrence", leaking)
    with pytest.raises(UnsupportedModel, match=r"^qwen3_5_text: packed, its logits differ"):
        load(directory)
    monkeypatch.setattr(ops, "linear_recurrence", recur)
    monkeypatch.setattr(ops, "causal_conv", forgetful)
    with pytest.raises(UnsupportedModel, match=r"^qwen3_5_text: in chunks of 7, its logits differ"):
        load(directory)
    monkeypatch.setattr(ops, "causal_conv", conv)
    monkeypatch.setattr(gated_delta, "negative_exp", lambda logarithm: -2 * torch.exp(logarithm.float()))
    with pytest.raises(UnsupportedModel, match=r"^qwen3_5_text: packed, its logits differ"):
        load(directory)


@pytest.mark.parametrize("family", KINDS)
def test_bfloat16_is_proved_too(family: str, tiny: Tiny) -> None:
    assert load(tiny(family), dtype="bfloat16").states


def test_what_cannot_be_served_is_refused_in_one_line(tiny: Tiny) -> None:
    config = read_config(tiny("qwen3_5_text"))
    with pytest.raises(UnsupportedModel, match=r"--tensor-parallel is 2, at most 1"):
        check_ranks(config, 2)
    with pytest.raises(ConfigError, match=r"preempt is swap; with recurrent state it must be recompute"):
        serve(tiny("lfm2"), preempt="swap")


def test_an_unknown_kind_of_layer_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    described = json.loads((tiny("lfm2") / "config.json").read_text())
    described["layer_types"] = ["conv", "full_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelLoadError, match="lfm2: layers of type linear_attention"):
        load(tmp_path, random=True)


def test_too_little_memory_for_states_is_one_line_with_limit_and_value(tiny: Tiny) -> None:
    with pytest.raises(NotEnoughMemory, match=r"1 recurrent state of .* MiB each .* state_memory_gib is 0.01 MiB"):
        serve(tiny("qwen3_5_text"), max_seqs=0, state_memory_gib=1e-5)
    with pytest.raises(NotEnoughMemory, match=r"400 recurrent states of 0.07 MiB .* or lower max_seqs from 400"):
        serve(tiny("qwen3_5_text"), max_seqs=400)


@pytest.mark.parametrize(
    ("options", "slots", "checkpoints"),
    [
        ({}, 13, 13),  # half of 1 GiB; half of that for live states of 19 MiB
        ({"max_seqs": 20}, 20, 6),
        ({"state_memory_gib": 2.0}, 53, 54),
        ({"state_memory_gib": 30.0}, 256, 1024),
    ],
)
def test_memory_is_divided_between_live_states_and_checkpoints(
    options: dict[str, Any], slots: int, checkpoints: int
) -> None:
    sizes = {"state_bytes": 19 * MIB, "max_seqs": options.get("max_seqs", 256), "memory": 1 << 30}
    found = divide_states(EngineConfig(**options), **sizes)
    assert (found.slots, found.checkpoints) == (slots, checkpoints)
    assert found.bytes == (slots + checkpoints) * 19 * MIB


def test_the_batch_has_as_many_slots_as_there_are_live_states(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = EngineConfig(model=str(tiny("qwen3_5_text")), device="cpu", kv_memory_gib=4 / 1024, threads=1)
    executor = LocalExecutor(config)
    slots, checkpoints = executor.max_seqs, executor.info.checkpoints
    assert 0 < slots < 256
    assert checkpoints > 0
    (line,) = (message for message in caplog.messages if "live states" in message)
    assert f"{slots} live states and {checkpoints} checkpoints" in line
    held = executor.blocks * 16 * executor.info.kv_bytes_per_token + (slots + checkpoints) * executor.info.state_bytes
    assert held <= 4 * MIB
    executor.close()


@pytest.mark.parametrize(
    ("family", "replaced"),
    [
        ("qwen3_5_text", {Norm, GatedMLP, GatedDelta, GatedAttention, PreNormLayer, Angles}),
        ("qwen3_next", {Norm, GatedMLP, GatedDelta, GatedAttention, Angles}),
        ("qwen3_5_moe_text", {Norm, GatedDelta, GatedAttention, Angles}),
        ("olmo_hybrid", {Norm, GatedMLP, GatedDelta}),
        ("lfm2", {Norm, GatedMLP}),
    ],
)
def test_modules_of_a_gpu_compute_what_they_replace(family: str, replaced: set[type], tiny: Tiny) -> None:
    """The swap that only a GPU gets, on a CPU.  Norms have random weights: a checkpoint's own are all equal."""
    model = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32, attn_implementation=attention.NAME)
    model.eval().requires_grad_(False)
    for module in model.modules():
        if type(module).__name__ in NORMS:
            module.weight += torch.randn(module.weight.shape) / 4
    proof, states = probe_recurrent(model, 100), families.replace_layers(model)
    linears = Linears(ordered=True, dtype=torch.float32)
    swap_attention(model, 100, linears)
    swap_plain_modules(model, linears)
    assert replaced <= {type(module) for module in model.modules()}
    prove_recurrent(model, proof, states)
