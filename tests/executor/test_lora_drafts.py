"""Adapters together with drafts, grammars, choices, preemption and swap: each answer is that of decoding alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quire.engine.core.policy.drafts import DraftController
from quire.engine.llm import LLM, Adapter, Completion
from quire.engine.wire.messages import Sampling
from tests.executor.matchers import PERSON, PROMPT, schema
from tests.executor.test_drafts import answers, open_llm
from tests.executor.test_lora import base_of
from tests.lora import write_adapter

Checkpoint = Callable[[str], Path]
SHORT_OF_BLOCKS = {"kv_blocks": 40, "max_model_len": 96, "admission": "threshold", "admit_threshold": 1.0}
# Two tokens only: text that repeats itself, so that there is something to draft.
TWO = [(7, 60.0), (8, 60.0)]
SAMPLINGS = [
    Sampling(temperature=0, ignore_eos=True),
    Sampling(seed=1, logit_bias=TWO),
    Sampling(seed=2, temperature=0.9, grammar=schema(PERSON)),
    Sampling(seed=3, temperature=1.2, top_p=0.9, logit_bias=TWO),
]


@pytest.fixture(scope="module")
def adapters(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter | None]:
    root, base = tmp_path_factory.mktemp("adapters"), base_of(checkpoint("llama"))
    folders = [write_adapter(root / f"{seed}", base, rank=8 * (1 + seed), seed=seed) for seed in range(2)]
    return [*(Adapter(folder.name, str(folder)) for folder in folders), None]


def ask(llm: LLM, adapters: list[Adapter | None], samplings: list[Sampling], *, n: int, new: int) -> list[Completion]:
    """Ask each adapter with each of the samplings, all at once."""
    done = [
        llm.submit(PROMPT, sampling, max_new_tokens=new, n=n, adapter=adapter)
        for adapter in adapters
        for sampling in samplings
    ]
    while llm.unfinished:
        llm.step()
    return done


@pytest.mark.parametrize(
    ("dtype", "memory"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("float32", {**SHORT_OF_BLOCKS, "preempt": "recompute"}),
        ("bfloat16", {**SHORT_OF_BLOCKS, "preempt": "swap"}),
    ],
    ids=["float32", "bfloat16", "recompute", "swap"],
)
def test_drafts_change_no_token_of_an_adapter(
    checkpoint: Checkpoint, adapters: list[Adapter | None], dtype: str, memory: dict[str, Any]
) -> None:
    """Two choices of each, greedy, sampled and under a grammar.  The second time answers of the tenant are known."""
    directory = checkpoint("llama")
    alone, drafting = open_llm(directory, dtype), open_llm(directory, dtype, drafts="on", **memory)
    want = [answers(ask(alone, [adapter], [one], n=2, new=48)) for adapter in adapters for one in SAMPLINGS]
    with mock.patch.object(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts]):
        for _ in range(2):
            found = ask(drafting, adapters, SAMPLINGS, n=2, new=48)
            assert [answers([one]) for one in found] == want
    totals = drafting.engine.core.report.totals
    assert totals.accepted_drafts["own"] > 0
    assert totals.accepted_drafts["tenant"] > 0
    assert bool(totals.preemptions) == bool(memory)
    assert bool(totals.swapped_in_blocks) == (memory.get("preempt") == "swap")
    for llm in (alone, drafting):
        llm.close()


def test_drafts_never_come_from_the_answers_of_another_adapter(
    checkpoint: Checkpoint, adapters: list[Adapter | None]
) -> None:
    """The grammar allows one text, which only this adapter's own answers may propose."""
    llm = open_llm(checkpoint("llama"), drafts="on")
    fixed = Sampling(temperature=0, logit_bias=TWO, ignore_eos=True)
    totals = llm.engine.core.report.totals
    with mock.patch.object(DraftController, "choose", lambda _, drafts, *__: [len(one.tokens) for _, one in drafts]):
        seen: list[int] = []
        for adapter in [*adapters, adapters[0]]:
            before = totals.drafted_tokens["tenant"]
            ask(llm, [adapter], [fixed], n=1, new=32)
            seen.append(totals.drafted_tokens["tenant"] - before)
    assert seen[:-1] == [0] * len(adapters)
    assert seen[-1] > 0
    llm.close()
