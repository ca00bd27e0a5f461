"""Every way in which a request ends: refusal, length, abort, failed row, deadline, reassignment."""

from __future__ import annotations

import pytest

from quire.engine.core.plan import StepResult
from quire.engine.wire.messages import CONSTRAINT, Finish
from tests.core.oracle import VOCAB
from tests.core.rig import Rig


def test_requests_that_cannot_run_are_refused_with_both_numbers() -> None:
    rig = Rig(blocks=4, size=4, max_seqs=4)
    rig.add([1] * 16, 4)
    rig.add([1, VOCAB], 4)
    rig.add([1, 2], 4, n=5)
    rig.run()
    messages = [finish.message for finish in rig.finishes.values()]
    assert messages[0] == "the prompt has 16 tokens; this engine holds 16, output included"
    assert messages[1] == f"the prompt must hold token ids from 0 to {VOCAB - 1}, at least one"
    assert messages[2] == "n is 5; this engine runs at most 4 sequences"
    assert {finish.code for finish in rig.finishes.values()} == {CONSTRAINT}, "the request is at fault: 400, not 500"
    assert rig.over == {"r0", "r1", "r2"}


def test_model_length_ends_a_sequence() -> None:
    rig = Rig(max_model_len=20)
    request = rig.add([1] * 15, 100, ignore_eos=True)
    rig.run()
    assert len(rig.answers[request, 0]) == 5
    assert rig.finishes[request, 0].reason == "length"


def test_abort_frees_blocks_at_once_and_a_failed_row_ends_its_request_alone() -> None:
    rig = Rig(size=4)
    gone = rig.add([1] * 9, 50, n=2, ignore_eos=True)
    bad = rig.add([2] * 9, 50, ignore_eos=True)
    good = rig.add([3] * 9, 50, ignore_eos=True)
    for _ in range(4):
        rig.submit()
        rig.commit()
    held = rig.pool.total - rig.pool.available
    rig.core.abort(gone)
    rig.collect_outputs()
    assert rig.pool.total - rig.pool.available < held
    rig.submit()
    result = rig.executor.collect()
    row = next(seq.slot for seq in rig.core.live() if seq.request.id == bad)
    rig.core.commit(StepResult(result.step, result.slots, result.tokens, failed={row: "not a number"}))
    rig.collect_outputs()
    rig.run()
    assert rig.finishes[gone, 0].reason == rig.finishes[gone, 1].reason == "cancelled"
    assert rig.finishes[bad, 0] == Finish("error", message="not a number")
    assert rig.finishes[good, 0].reason == "length"


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_continuation_ends_and_the_others_go_on(index: int, after: int) -> None:
    """Before it was seated, while its prompt is computed in chunks, right after the fork, and later."""
    rig = Rig(chunk_tokens=5)
    request = rig.add([1] * 9, 12, n=3, ignore_eos=True)
    for _ in range(after):
        rig.submit()
        rig.commit()
    for _ in range(2):
        rig.core.abort(request, index)
        rig.collect_outputs()
    rig.run()
    reasons = [rig.finishes[request, i].reason for i in range(3)]
    assert reasons == ["cancelled" if i == index else "length" for i in range(3)]
    assert rig.over == {request}
    assert len(rig.answers[request, index]) == max(0, after - 1)


def test_a_request_that_went_to_another_engine_is_dropped_without_a_word() -> None:
    rig = Rig()
    lost = rig.add([1] * 9, 50, n=2, ignore_eos=True)
    kept = rig.add([2] * 9, 10, ignore_eos=True)
    for _ in range(3):
        rig.submit()
        rig.commit()
    said = len(rig.deltas)
    rig.core.drop(lost)
    rig.core.drop("unknown")
    rig.collect_outputs()
    assert len(rig.deltas) == said
    rig.run()
    assert rig.over == {kept}


def test_deadline_ends_waiting_and_running_requests() -> None:
    rig = Rig(max_seqs=1)
    running = rig.add([1] * 4, 50, ignore_eos=True, deadline=1000)
    waiting = rig.add([1] * 4, 50, ignore_eos=True, deadline=500)
    rig.submit()
    rig.commit()
    rig.now = 600
    rig.submit()
    assert rig.finishes[waiting, 0].reason == "deadline"
    rig.now = 1000
    rig.submit()
    assert rig.finishes[running, 0].reason == "deadline"
    rig.run()
