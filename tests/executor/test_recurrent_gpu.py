"""Models with recurrent layers on a GPU, in bfloat16: each text against the float32 model of transformers.

Two ways to compute may differ where two logits nearly tie.  If no logit is further than e from the float32 model's, a
token is at most 2 e below the best one.  Transformers' own bfloat16 forward of the same text says how large e may be.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.config import EngineConfig
from quire.engine.executor import loading
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.models import hf
from quire.engine.executor.models.recurrent.families import FAMILIES
from quire.engine.llm import LLM
from quire.engine.wire.messages import FOREVER_MS, Generate
from quire.loadtest.studies.model_families import GREEDY
from quire.loadtest.studies.tiny_checkpoints import VOCAB
from tests.executor.driver import Driver, answer
from tests.executor.test_gpu import words

pytestmark = pytest.mark.gpu

DENSE = ("lfm2", "qwen3_5_text", "olmo_hybrid", "bamba", "falcon_h1")  # no expert whose choice is a near-tie
KINDS = ("lfm2", "qwen3_5_text", "bamba")  # one of each kind of layer
CUDA = torch.device("cuda")
Tiny = Callable[[str], Path]
Reference = Callable[[str], tuple[PreTrainedModel, PreTrainedModel]]


@pytest.fixture(scope="session")
def models(tiny: Tiny) -> Reference:
    """The model of transformers in float32 and in bfloat16, on a CPU."""
    made: dict[str, tuple[PreTrainedModel, PreTrainedModel]] = {}

    def make(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
        if family not in made:
            exact = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).eval()
            made[family] = exact, copy.deepcopy(exact).bfloat16()
        return made[family]

    return make


def serve(directory: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_blocks": 600, "max_seqs": 40, "step_tokens": 256}
    settings |= {"kernels": os.environ.get("QUIRE_KERNELS", ""), "state_memory_gib": 0.1}
    settings["itl_stretch"] = settings["step_target_s"] = 0.0  # measured times must not decide how prompts are cut
    config = EngineConfig(model=str(directory), **(settings | options))
    return LLM.over(config, loading.load(config))


def texts(llm: LLM, asked: list[list[int]], count: int = 24, n: int = 1) -> list[list[int]]:
    completions = llm.generate(asked, GREEDY, max_new_tokens=count, n=n)
    return [output.token_ids for completion in completions for output in completion.outputs]


@torch.no_grad()
def check_greedy(
    models: tuple[PreTrainedModel, PreTrainedModel], asked: list[list[int]], found: list[list[int]]
) -> None:
    """Fail unless most tokens are the argmax of the float32 model, and each is, within the noise of bfloat16."""
    clear = 0
    for prompt, text in zip(asked, found, strict=True):
        known = torch.tensor([prompt + text])
        exact, half = (
            each(input_ids=known, use_cache=False).logits[0, len(prompt) - 1 : -1].float() for each in models
        )
        best = exact.max(-1).values
        chosen = exact.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (best - chosen).max() <= 2 * (exact - half).abs().max()
        clear += int((best == chosen).sum())
    assert clear >= 0.9 * sum(map(len, found))


@pytest.mark.parametrize("chunk", [7, 64, 150])
@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_logits_stay_within_the_noise_of_bfloat16(family: str, chunk: int, tiny: Tiny, models: Reference) -> None:
    """Every position of a prompt: as far from the float32 model as transformers' own bfloat16 forward is."""
    prompt = words(150)
    exact, half = (
        each(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].float() for each in models(family)
    )
    loaded = hf.load_model(str(tiny(family)), dtype="bfloat16", device=CUDA)
    driver = Driver(loaded, graph_seconds=0, state_memory_gib=0.1)
    driver.add(prompt, None, targets=True, chunk=chunk)
    found = []
    while driver.running[0].computed < len(prompt):
        driver.step()
        found.append(driver.worker.logits)
    error = (torch.cat(found).float().cpu() - exact).pow(2).mean().sqrt()
    assert error <= 2 * (half - exact).pow(2).mean().sqrt()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_proved(family: str, tiny: Tiny) -> None:
    """Whole, packed, in chunks of 7 and from a checkpoint, against transformers' own forward on the GPU."""
    for dtype in ("bfloat16", "float16"):
        assert hf.load_model(str(tiny(family)), dtype=dtype, device=CUDA).states


@pytest.mark.parametrize("options", [{}, {"graph_seconds": 0}, {"chunk_tokens": 7}], ids=["graphs", "eager", "chunks"])
@pytest.mark.parametrize("family", DENSE)
def test_greedy_text_is_transformers_own(family: str, options: dict[str, Any], tiny: Tiny, models: Reference) -> None:
    """Sequences of many lengths together, so that decode steps and steps with prompts are padded."""
    prompts = [words(n, n) for n in (1, 2, 5, 16, 33, 48, 70, 130, 300)]
    llm = serve(tiny(family), **options)
    check_greedy(models(family), prompts, texts(llm, prompts))
    llm.engine.core.auditor.whole()
    llm.close()


@pytest.mark.parametrize("family", KINDS)
def test_prefixes_around_a_checkpoint_have_their_text(family: str, tiny: Tiny, models: Reference) -> None:
    """The first prompt leaves checkpoints at 64, 128 and 192.  Others share it up to before, at and behind them."""
    base = [17 * i % (VOCAB - 3) + 3 for i in range(200)]
    asked = [[*base[: 64 + offset], *range(5, 25)] for offset in (0, 1, 15, 16, 63, 64, 100, 127)]
    llm = serve(tiny(family), step_tokens=100)
    answer(llm, Generate("first", "g", base, 1, GREEDY, FOREVER_MS, anchors=[64]))
    totals = llm.engine.core.report.totals
    found = []
    for prompt in asked:
        before = totals.cached_prompt_tokens
        found += texts(llm, [prompt])
        assert totals.cached_prompt_tokens - before >= 64
    check_greedy(models(family), asked, found)
    check_greedy(models(family), asked, texts(llm, asked))  # all at once
    llm.engine.core.auditor.whole()
    llm.close()


@pytest.mark.parametrize("family", KINDS)
def test_preemption_pauses_and_choices_keep_the_text(family: str, tiny: Tiny, models: Reference) -> None:
    """Three choices per prompt, and a pool too small for all, so that sequences are recomputed from checkpoints."""
    prompts = [words(n, n) for n in (5, 33, 61, 20, 47)]
    tight = {"kv_blocks": 14, "admission": "threshold", "admit_threshold": 1.0, "max_seqs": 12, "max_model_len": 128}
    llm = serve(tiny(family), **tight)
    found = texts(llm, prompts, 40, 3)
    check_greedy(models(family), [prompt for prompt in prompts for _ in range(3)], found)
    assert llm.engine.core.report.totals.preemptions > 0
    llm.engine.core.auditor.whole()
    llm.close()


def test_the_memory_of_a_gpu_holds_states_and_blocks(tiny: Tiny) -> None:
    """By default states take at most half of what the GPU has; with kv_memory_gib, states and blocks share it."""
    kernels = os.environ.get("QUIRE_KERNELS", "")
    config = EngineConfig(model=str(tiny("qwen3_5_text")), dtype="bfloat16", kv_memory_gib=0.25, kernels=kernels)
    executor = LocalExecutor(config)
    states = (executor.max_seqs + executor.info.checkpoints) * executor.info.state_bytes
    assert states <= 0.125 * 2**30
    assert states + executor.blocks * 16 * executor.info.kv_bytes_per_token <= 0.25 * 2**30
    executor.close()
