"""Drafts on a GPU: two steps in flight without them, graphs of steps with drafts, the kernels of short slices.

Sums on a GPU depend on a step's shape, so logits differ in their last bits, as they do with other batch mates.
Most tests therefore sample at a temperature of a million: tokens then depend on seed and position alone, and the
log-probabilities of equal texts show what was computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quire.engine.config import EngineConfig
from quire.engine.core.policy.drafts import DraftController
from quire.engine.executor.drafter import SuffixDrafter
from quire.engine.executor.loading import load
from quire.engine.executor.staged_plan import Mixed
from quire.engine.executor.step_graphs import StepGraphs
from quire.engine.llm import LLM
from quire.engine.wire.messages import Sampling
from tests.checkpoints import VOCAB
from tests.core.drafters import AllDrafts
from tests.executor.driver import fail_next_step
from tests.executor.matchers import PERSON, PROMPT, choice, schema
from tests.executor.test_drafts import answers, compare, replaying, run

pytestmark = pytest.mark.gpu

Checkpoint = Callable[[str], Path]
HOT = 1e6  # a temperature at which every token is as probable as any other
NOISE = 0.15  # maximum difference of a log-probability by the order of sums in 16 bits


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(f"{count}{seed}").choices(range(3, VOCAB), k=count)


def open_llm(checkpoint: Path, **changes: Any) -> LLM:
    """Drafts are on, so that their graphs are captured; a test chooses the drafter."""
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_blocks": 600, "max_seqs": 40, "step_tokens": 256}
    options |= {"max_model_len": 400, "itl_stretch": 0.0, "step_target_s": 0.0, "drafts": "on"}
    options |= {"check_accounting": True, "poison_free_blocks": True}
    config = EngineConfig(model=str(checkpoint), **(options | changes))
    llm = LLM.over(config, load(config))
    assert isinstance(llm.engine.core.drafts.drafter, SuffixDrafter)
    llm.engine.core.drafts.drafter = None
    return llm


def hot(seed: int, **others: Any) -> Sampling:
    return Sampling(**({"temperature": HOT, "seed": seed, "ignore_eos": True, "logprobs": 0} | others))


def check_logprobs(plain: list[Any], drafted: list[Any]) -> None:
    for before, after in zip(plain, drafted, strict=True):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert len(one.logprobs) == len(other.logprobs) == len(one.token_ids)
            assert [each.logprob for each in other.logprobs] == pytest.approx(
                [each.logprob for each in one.logprobs], abs=NOISE
            )


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["launches", "graphs"])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "bfloat16"), ("llama", "float16"), ("qwen3", "bfloat16"), ("gemma2", "bfloat16")]
)
def test_each_token_has_the_logits_of_a_step_of_its_own(
    checkpoint: Checkpoint, family: str, dtype: str, seconds: float
) -> None:
    """Drafts that are right, wrong, and right up to some place, of one sequence and of many."""
    llm = open_llm(checkpoint(family), dtype=dtype, graph_seconds=seconds)
    for count, n in ((1, 1), (3, 2), (20, 1)):
        prompts = [words(5 + 11 * at % 70, at) for at in range(count)]
        samplings = [hot(at) for at in range(count)]
        for right in (None, 0, 6):
            plain, drafted, accepted = compare(llm, prompts, samplings, right, n=n)
            check_logprobs(plain, drafted)
            assert (accepted == 0) == (right == 0)
    llm.close()


def test_steps_with_drafts_replay_graphs(checkpoint: Checkpoint) -> None:
    """Steps of up to 40 sequences, most of which draft: sizes with graphs hold the others, too."""
    replayed: list[bool] = []
    replay = StepGraphs.mixed

    def count(graphs: StepGraphs, number: int, mixed: Mixed) -> bool:
        found = replay(graphs, number, mixed)
        if mixed.drafts is not None:
            replayed.append(found)
        return found

    llm = open_llm(checkpoint("llama"), max_seqs=80, step_tokens=512)
    with mock.patch.object(StepGraphs, "mixed", count):
        for streams in (1, 2, 7, 40):
            compare(llm, [words(9, at) for at in range(streams)], [hot(at) for at in range(streams)], None)
    assert len(replayed) > 40
    assert sum(replayed) >= 0.9 * len(replayed)
    llm.close()


def test_a_takeover_records_the_graphs_of_drafts_later(checkpoint: Checkpoint) -> None:
    llm = open_llm(checkpoint("llama"), standby=True, kv_memory_gib=0.1)
    for _ in range(3):
        plain, drafted, _ = compare(llm, [words(9, at) for at in range(3)], [hot(at) for at in range(3)], None)
        check_logprobs(plain, drafted)
    llm.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "e4m3"])
@pytest.mark.parametrize("quantize", ["none", "fp8", "int4"])
def test_quantised_models_draft(checkpoint: Checkpoint, quantize: str, kv_dtype: str) -> None:
    llm = open_llm(checkpoint("llama"), quantize=quantize, kv_dtype=kv_dtype)
    prompts, samplings = [words(20 + at, at) for at in range(5)], [hot(at) for at in range(5)]
    *_, accepted = compare(llm, prompts, samplings, 4)
    assert accepted > 0
    llm.close()


def test_a_preempted_answer_drafts_on(checkpoint: Checkpoint) -> None:
    small = open_llm(
        checkpoint("llama"),
        kv_blocks=26,
        block_size=8,
        max_model_len=120,
        admission="threshold",
        admit_threshold=1.0,
        prefix_cache=False,
    )
    prompts = [words(30, at) for at in range(5)]
    plain, drafted, accepted = compare(small, prompts, [hot(at) for at in range(5)], None, new=60)
    check_logprobs(plain, drafted)
    assert accepted > 0
    assert small.engine.core.report.totals.preemptions > 0
    small.close()


def test_a_failed_step_drops_its_drafts(checkpoint: Checkpoint) -> None:
    llm = open_llm(checkpoint("llama"))
    drafts = llm.engine.core.drafts
    (plain,) = run(llm, [PROMPT], [hot(1)])
    drafts.drafter = replaying([PROMPT + plain.outputs[0].token_ids], 4)
    done = llm.submit(PROMPT, hot(1), max_new_tokens=40)
    for _ in range(6):
        llm.step()
    fail_next_step(llm)
    while llm.unfinished:
        llm.step()
    drafts.reset()
    drafts.drafter = None
    assert answers([done]) == answers([plain])
    llm.close()


def test_each_position_of_a_draft_has_the_mask_of_its_grammar(checkpoint: Checkpoint) -> None:
    """With jumps over forced tokens in between, and drafts that the grammar forbids."""
    llm = open_llm(checkpoint("llama"))
    samplings = [
        hot(1, grammar=schema(PERSON), ignore_eos=False),
        hot(2, grammar=choice("one two three", "one two four"), ignore_eos=False),
        hot(3),
    ]
    prompts = [PROMPT, PROMPT[::-1], words(30)]
    for right in (None, 6):
        *_, accepted = compare(llm, prompts, samplings, right, n=2, new=120)
        assert accepted > 0
    llm.close()


def test_the_drafter_and_the_controller_change_no_token(checkpoint: Checkpoint) -> None:
    """As an engine runs: texts of two tokens repeat themselves; drafts are computed where they pay, and then always."""
    llm = open_llm(checkpoint("llama"))
    core = llm.engine.core
    samplings = [hot(seed, logit_bias=[(7, 1e9), (8, 1e9)]) for seed in range(6)]
    prompts = [words(12, at) for at in range(6)]
    plain = answers(run(llm, prompts, samplings, new=150))
    core.drafts.drafter = drafter = SuffixDrafter(llm.executor.max_seqs)
    assert answers(run(llm, prompts, samplings, new=150)) == plain
    with mock.patch.object(DraftController, "pays", return_value=True):
        assert answers(run(llm, prompts, samplings, new=150)) == plain
    counts = core.report.totals
    assert counts.accepted_drafts["own"] + counts.accepted_drafts["tenant"] > 0
    core.drafts.reset()
    core.drafts.drafter = None
    drafter.close()
    llm.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_texts_differ_no_more_often_than_by_batch_size(
    checkpoint: Checkpoint, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiny random models nearly tie often.  Figures: first differences per token, 30 at a time against the same among
    200, and without drafts against with: both compute up to 256 tokens in a step."""
    llm = open_llm(checkpoint("llama"), dtype=dtype, max_seqs=200, kv_blocks=2400)
    drafts = llm.engine.core.drafts
    rates = {}
    for temperature in (0.0, 0.7, 1.2):
        prompts = [words(10 + at % 30, at) for at in range(200)]
        samplings = [Sampling(temperature=temperature, seed=at, ignore_eos=True) for at in range(200)]
        among = run(llm, prompts, samplings, new=100)[:30]
        prompts, samplings = prompts[:30], samplings[:30]
        plain = run(llm, prompts, samplings, new=100)
        said = [ids + done.outputs[0].token_ids for ids, done in zip(prompts, plain, strict=True)]
        drafts.drafter, drafts.policy = replaying(said, None), AllDrafts()
        drafted = run(llm, prompts, samplings, new=100)
        drafts.reset()
        drafts.drafter = None
        rates[temperature] = differences(plain, among), differences(plain, drafted)
    with capsys.disabled():
        print(f"\n{dtype}: (differences, tokens) by batch size, by drafts: {rates}")
    by_batch, by_drafts = (sum(each[at][0] for each in rates.values()) for at in (0, 1))
    tokens = [sum(each[at][1] for each in rates.values()) for at in (0, 1)]
    assert by_drafts / tokens[1] <= (by_batch + 3 * (by_batch + 1) ** 0.5) / tokens[0]
    llm.close()


def differences(first: list[Any], second: list[Any]) -> tuple[int, int]:
    """(texts that differ, tokens up to the first difference in each)."""
    count = tokens = 0
    for one, other in zip(first, second, strict=True):
        pairs = list(zip(one.outputs[0].token_ids, other.outputs[0].token_ids, strict=True))
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        count += same < len(pairs)
        tokens += min(same + 1, len(pairs))
    return count, tokens
