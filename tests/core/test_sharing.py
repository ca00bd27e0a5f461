"""What sequences share: cached prefixes, the blocks of a forked prompt, its log probabilities."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.wire.messages import Finish
from tests.core.rig import Rig


def test_second_request_finds_the_shared_prefix() -> None:
    """Same 512-token system prompt: 512 tokens cached, prefill down by 95 % and more."""
    rig = Rig(blocks=200, size=16, step_tokens=2048, chunk_tokens=2048)
    system = [1 + i % 40 for i in range(512)]
    rig.add([*system, 1, 2, 3], 4, ignore_eos=True)
    rig.run()
    first = rig.executor.forward_tokens
    rig.add([*system, 4, 5, 6, 7], 4, ignore_eos=True)
    rig.run()
    assert [d.cached_tokens for d in rig.deltas if d.first == 0] == [0, 512]
    assert rig.executor.forward_tokens - first <= 0.05 * 515
    rig.add([*system, 4, 5, 6, 7], 4, salt="tenant", ignore_eos=True)
    rig.run()
    assert rig.deltas[-4].cached_tokens == 0


def test_after_a_reset_no_prefix_is_found_and_running_requests_stay() -> None:
    rig = Rig()
    prompt = list(range(1, 33))
    rig.add(prompt, 3, ignore_eos=True)
    rig.run()
    rig.add(prompt, 20, ignore_eos=True)  # it runs during the reset, on blocks that the cache had
    rig.submit()
    rig.commit()
    computed = rig.executor.forward_tokens
    rig.core.reset_prefix_cache()
    rig.core.auditor.whole()
    last = rig.add(prompt, 3, ignore_eos=True)
    rig.run()
    cached = {delta.id: delta.cached_tokens for delta in rig.deltas if delta.first == 0}
    assert cached == {"r0": 0, "r1": 28, last: 0}
    assert rig.executor.forward_tokens - computed >= len(prompt)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    rig = Rig(size=4)
    for _ in range(2):
        rig.add([3] * 16, 4, ignore_eos=True)
        rig.run()
    assert [d.cached_tokens for d in rig.deltas if d.first == 0] == [0, 12]


def test_generated_text_is_reused_as_a_prefix() -> None:
    """Multi-turn chat: the next turn's prompt contains the last answer."""
    rig = Rig(size=4)
    first = rig.add([3] * 6, 11, ignore_eos=True)
    rig.run()
    rig.add([3] * 6 + rig.answers[first, 0] + [1], 4, ignore_eos=True)
    rig.run()
    assert [d.cached_tokens for d in rig.deltas if d.first == 0] == [0, 16]


@pytest.mark.parametrize(("n", "prompt", "copies"), [(2, 6, 1), (2, 8, 0), (8, 8, 0), (4, 7, 3), (1, 6, 0)])
def test_copy_on_write_copies_only_the_shared_partly_filled_block(n: int, prompt: int, copies: int) -> None:
    """N choices of a prompt copy n-1 blocks, or none when the prompt ends with a block."""
    rig = Rig(size=4, max_seqs=8)
    rig.add([1 + i for i in range(prompt)], 6, n=n, ignore_eos=True)
    rig.run()
    assert rig.executor.copied == rig.core.report.totals.copied_blocks == copies
    assert rig.core.report.totals.prompt_tokens == prompt  # one prefill


def test_parallel_samples_share_the_prompt() -> None:
    """Blocks saved by sharing, ShareGPT-like lengths (161 in, 338 out), n = 2..6: at least 16.2 % (SOSP 2023)."""
    for n in range(2, 7):
        rig = Rig(blocks=400, size=16, step_tokens=512, chunk_tokens=512)
        rig.add([1] * 161, 338, n=n, ignore_eos=True)
        shared = alone = 0
        while rig.submit():
            rig.commit()
            live = list(rig.core.live())
            shared += len({block for seq in live for block in seq.table})
            alone += sum(len(seq.table) for seq in live)
        assert 1 - shared / alone >= 0.162


def test_first_finishing_sibling_leaves_the_others_intact() -> None:
    """Siblings stop at different times; freed blocks are poisoned; texts stay right."""
    for seed in range(20):
        rig = Rig(size=4)
        rig.add([2, 3, 5, 7, 11, 13], 40, n=5, seed=seed)
        rig.add([2, 3, 5, 7, 11, 13, 17], 40, n=3, seed=seed + 100)
        rig.run()
        lengths = {len(answer) for answer in rig.answers.values()}
        if len(lengths) > 2:
            break
    else:
        pytest.fail("no seed lets siblings end at different times: the test shows nothing")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("leaves", [None, 0, 1])
def test_every_continuation_gets_the_log_probabilities_of_the_prompt(depth: int, leaves: int | None) -> None:
    """Forks share their leader's; whichever of them is aborted, the others still have them."""
    rig = Rig(depth=depth, chunk_tokens=3)
    prompt = list(range(1, 9))
    request = rig.add(prompt, 3, n=3, ignore_eos=True, prompt_logprobs=0)
    while rig.submit():
        if leaves is not None and rig.core.step == 3:  # the last chunk is on its way
            rig.core.abort(request, leaves)
            rig.collect_outputs()
        if len(rig.executor.plans) == depth:
            rig.commit()
    rig.run()
    firsts = {delta.index: delta for delta in rig.deltas if delta.token_ids and delta.first == 0}
    assert set(firsts) == {0, 1, 2} - {leaves}
    for delta in firsts.values():
        assert delta.prompt_logprobs is not None
        assert [entry.logprob for entry in delta.prompt_logprobs] == [-float(token) for token in prompt[1:]]


@pytest.mark.parametrize("fault", ["failed", "impossible"])
def test_the_cache_loses_a_prefix_only_to_logits_that_are_not_finite(fault: str) -> None:
    """A request whose own settings leave no token has computed its prompt as any other has."""
    rig = Rig(size=4)
    before, bad = rig.add([1] * 41, 1), rig.add([1] * 41, 20, n=2, ignore_eos=True)
    rig.submit()
    rig.commit()
    rig.submit()
    result = rig.executor.collect()
    row = next(seq.slot for seq in rig.core.live() if seq.request.id == bad)
    told = {fault: {row: "no token"}}
    rig.core.commit(msgspec.structs.replace(result, **told))
    rig.collect_outputs()
    rig.run()
    assert rig.over == {before, bad}
    ended = Finish("error", message="no token", code="constraint" if fault == "impossible" else "")
    assert rig.finishes[bad, 0] == rig.finishes[bad, 1] == ended
    after = rig.add([1] * 41, 1)
    rig.run()
    [delta] = [delta for delta in rig.deltas if delta.id == after]
    assert delta.cached_tokens == (40 if fault == "impossible" else 0)
