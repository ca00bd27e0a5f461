"""The GPU step path: graphs, staging, feeding back; against transformers and against itself.

bfloat16 throughout.  Greedy tokens of two ways to compute may differ where two logits nearly tie.  So tokens are
compared where the float32 model has a clear winner.
"""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

from quire.engine.config import EngineConfig
from quire.engine.core.plan import Sampler, Slice, Start, StepPlan
from quire.engine.executor.base import StepError
from quire.engine.executor.errors import UnsupportedModel
from quire.engine.executor.loading import load
from quire.engine.executor.models.hf import load_model
from quire.engine.executor.worker import MAX_LOGPROBS
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from tests.checkpoints import VOCAB, make_checkpoint
from tests.executor.driver import Driver

pytestmark = pytest.mark.gpu

KERNELS = os.environ.get("QUIRE_KERNELS", "")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "gemma2"]
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
Checkpoint = Callable[[str], Path]
Reference = Callable[[str], PreTrainedModel]


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(f"{count}{seed}").choices(range(3, VOCAB), k=count)


def llm(checkpoint: Path, **changes: object) -> LLM:
    options = {"dtype": "bfloat16", "kv_blocks": 600, "max_seqs": 40, "step_tokens": 256, "kernels": KERNELS}
    options["itl_stretch"] = options["step_target_s"] = 0.0  # measured times must not decide how prompts are cut
    config = EngineConfig(model=str(checkpoint), **(options | changes))  # type: ignore[arg-type]
    return LLM.over(config, load(config))


def texts(engine: LLM, prompts: list[list[int]], sampling: Sampling = GREEDY, count: int = 24) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in engine.generate(prompts, sampling, max_new_tokens=count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_within_the_noise_of_bfloat16(checkpoint: Checkpoint, reference: Reference, family: str) -> None:
    """Every position of a prompt, in chunks: as far from the float32 model as transformers' own bfloat16 forward is."""
    prompt = words(150)
    exact = reference(family)(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].detach()
    half = copy.deepcopy(reference(family)).bfloat16().cuda()
    own = half(input_ids=torch.tensor([prompt]).cuda(), use_cache=False).logits[0, :-1].detach().float().cpu()
    noise = (own - exact).pow(2).mean().sqrt()
    device = torch.device("cuda")
    driver = Driver(load_model(str(checkpoint(family)), dtype="bfloat16", device=device), graph_seconds=0)
    driver.add(prompt, None, targets=True, chunk=64)
    got = []
    while driver.running[0].computed < len(prompt):
        driver.step()
        got.append(driver.worker.logits)
    error = (torch.cat(got).float().cpu() - exact).pow(2).mean().sqrt()
    assert error <= 2 * noise


@pytest.mark.parametrize("quantize", ["none", "fp8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])  # all swapped; plain; steps after the LM head
def test_logits_are_not_rounded_to_sixteen_bits(
    checkpoint: Checkpoint, family: str, quantize: Literal["none", "fp8", "int4"]
) -> None:
    device = torch.device("cuda")
    for rows in (1, 40):  # our kernel, the library's GEMMs
        model = load_model(str(checkpoint(family)), dtype="bfloat16", device=device, quantize=quantize)
        driver = Driver(model, graph_seconds=0)
        for row in range(rows):
            driver.add(words(9, row))
        driver.step()
        logits = driver.worker.logits
        assert logits.dtype == torch.float32
        assert (logits != logits.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_transformers_own(checkpoint: Checkpoint, reference: Reference, family: str) -> None:
    """Each token is the argmax of the float32 model after what came before, unless a rival is within the noise."""
    prompts = [words(n, n) for n in (1, 5, 16, 33, 48, 70, 130)]
    check_greedy(reference(family), prompts, texts(llm(checkpoint(family)), prompts))


def check_greedy(model: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Fail unless each token of the answers is the argmax of `model`, or within its noise, and most are the argmax."""
    clear = 0
    for prompt, text in zip(prompts, answers, strict=True):
        known = torch.tensor([prompt + text])
        logits = model(input_ids=known, use_cache=False).logits[0, len(prompt) - 1 : -1].detach()
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (best - chosen).max() < 0.1 * logits.std()
        clear += int((best == chosen).sum())
    assert clear >= 0.9 * sum(map(len, answers))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_graphs_change_no_token(checkpoint: Checkpoint, family: str) -> None:
    """Rows come and go, so that graphs of several sizes run, padded and not."""
    prompts = [words(1 + 7 * i % 90, i) for i in range(30)]
    counts = [3 + 5 * i % 40 for i in range(30)]
    sampled = Sampling(temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    mixture = [GREEDY if i % 3 else sampled for i in range(30)]
    for samplings in ([GREEDY] * 30, mixture):
        found = []
        for seconds in (0.0, 60.0):
            engine = llm(checkpoint(family), graph_seconds=seconds)
            answers = engine.generate(prompts, samplings, max_new_tokens=counts)
            found.append([answer.outputs[0].token_ids for answer in answers])
        assert found[0] == found[1]


def test_seeded_text_does_not_change_with_the_company(checkpoint: Checkpoint) -> None:
    engine = llm(checkpoint("llama"))
    sampling = Sampling(temperature=0.7, seed=11, ignore_eos=True)
    [alone] = texts(engine, [words(20)], sampling)
    together = texts(engine, [words(20), *(words(30, i) for i in range(9))], sampling)
    assert together[0][:8] == alone[:8]


def test_logprobs_and_prompt_logprobs(checkpoint: Checkpoint, reference: Reference) -> None:
    prompt = words(40)
    engine = llm(checkpoint("llama"))
    asked = Sampling(temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    [answer] = engine.generate([prompt], asked, max_new_tokens=5)
    known = torch.tensor([prompt + answer.outputs[0].token_ids])
    exact = reference("llama")(input_ids=known, use_cache=False).logits[0].detach().log_softmax(-1)
    assert answer.prompt_logprobs is not None
    said = [entry.logprob for entry in answer.prompt_logprobs + answer.outputs[0].logprobs]
    wanted = exact[:-1].gather(1, known[0, 1:, None])[:, 0].tolist()
    assert said == pytest.approx(wanted, abs=0.25)
    assert [len(entry.top) for entry in answer.outputs[0].logprobs] == [3] * 5


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2 caps its logits: three tensors of them at one time
def test_scoring_stays_within_the_memory_plan(tmp_path: Path, family: str) -> None:
    """Two prompts of 1,000 tokens, all scored in one step.  Logits of all of them would take 80 MB a tensor."""
    made = make_checkpoint(tmp_path / "wide", family, vocab_size=20_000)
    model = load_model(str(made), dtype="bfloat16", device=torch.device("cuda"))
    driver = Driver(model, graph_seconds=0)
    launches = driver.worker._launches
    launches.logits = lambda forward, at, **_: forward.logits(at)  # type: ignore[method-assign]  # without its copies
    planned = launches.peak_bytes(driver.config.max_seqs, driver.config.step_tokens, MAX_LOGPROBS)
    slots = [driver.add(words(1000, i), chunk=1000, targets=True)[0] for i in range(2)]
    plan = driver.plan()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = driver.run(plan)
    assert torch.cuda.max_memory_allocated() - before <= planned + (1 << 20)
    assert [len(result.prompt_logprobs[slot]) for slot in slots] == [999, 999]


def test_ten_thousand_steps_allocate_nothing(checkpoint: Checkpoint) -> None:
    """Counted by torch's allocator, host side included, while all slots decode."""
    engine = llm(checkpoint("llama"), max_model_len=1024, kv_blocks=2600)
    steps = 0
    while steps < 10_000:
        joined = [engine.submit(words(20, i), GREEDY, max_new_tokens=900) for i in range(40)]
        while not all(each.outputs[0].token_ids for each in joined):
            engine.step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        while engine.engine.core.running == 40:
            engine.step()
            steps += 1
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        while not engine.engine.core.idle:
            engine.step()
    assert engine.executor.depth == 2


def test_a_late_host_makes_no_step_longer(checkpoint: Checkpoint) -> None:
    """A step lasts as long as the device computes, not until its result is collected."""
    executor = llm(checkpoint("llama")).executor
    start = StepPlan(1, starts=[Start(0, [0])], slices=[Slice(0, 0, [5, 6, 7], Sampler(GREEDY, 3, []))])
    executor.submit(start)
    executor.collect()
    executor.submit(StepPlan(2))
    time.sleep(0.2)
    assert 0 < executor.collect().step_s < 0.1


def test_closing_gives_the_memory_back(checkpoint: Checkpoint) -> None:
    """Graphs and worker refer to each other, and what was there at the start is frozen to the garbage collector."""
    llm(checkpoint("llama")).close()  # what stays for good: libraries, their workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = llm(checkpoint("llama"), kv_blocks=60_000)
    taken = torch.cuda.memory_allocated() - before
    engine.close()
    assert torch.cuda.memory_allocated() - before < taken / 10  # cuBLAS keeps 32 MiB for each stream it has seen


def test_a_failed_step_leaves_the_executor_usable(checkpoint: Checkpoint) -> None:
    executor = llm(checkpoint("llama")).executor
    sampler = Sampler(Sampling(temperature=0), 4, [])

    def prompt(step: int) -> StepPlan:
        return StepPlan(step, starts=[Start(0, [0])], slices=[Slice(0, 0, [5, 6, 7, 8], sampler)])

    executor.submit(prompt(1))
    executor.submit(StepPlan(2))
    before = executor.collect().tokens, executor.collect().tokens
    executor.submit(StepPlan(3, freed_slots=[0], slices=[Slice(0, 0, [5] * 300, sampler)]))  # more than a step holds
    executor.submit(StepPlan(4))
    with pytest.raises(StepError, match="a step of 300 tokens"):
        executor.collect()
    executor.submit(prompt(5))
    executor.submit(StepPlan(6))
    assert (executor.collect().tokens, executor.collect().tokens) == before
    executor.close()


def test_float32_is_refused_with_the_dtypes_that_a_gpu_computes(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedModel, match="choose --dtype bfloat16 or float16"):
        llm(checkpoint("llama"), dtype="float32")


def test_random_weights_need_no_weight_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint("qwen3") / "config.json").read_bytes())
    engine = llm(tmp_path, load="random")
    assert len(texts(engine, [words(9)])[0]) == 24
