"""Requests that another engine began: this one computes their tokens again and continues."""

from __future__ import annotations

import pytest

from quire.engine.wire.messages import Delta, Finish, Generate, Sampling
from tests.core.oracle import VOCAB
from tests.core.rig import FAR, Rig


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 9, 14])
def test_who_was_begun_elsewhere_goes_on_from_its_last_token(steps: int, caching: bool) -> None:
    rig = Rig(size=4, caching=caching)
    three = rig.add(list(range(1, 9)), 20, n=3, seed=1, ignore_eos=True)
    rig.add([5] * 3, 30, seed=2)
    rig.add([5] * 3, 30, seed=3, ignore_eos=True)
    rig.core.abort(three, 1)
    for _ in range(3):
        for _ in range(steps):
            if rig.submit():
                rig.commit()
        rig.crash()
    rig.run()
    assert rig.finishes[three, 1] == Finish("cancelled")


@pytest.mark.parametrize(("caching", "computed"), [(True, 12 + 4), (False, 12 + 12)])
def test_recompute_is_one_prefill_and_shared_blocks_are_found(caching: bool, computed: int) -> None:
    rig = Rig(size=4, caching=caching)
    rig.add(list(range(1, 9)), 20, n=2, seed=1, ignore_eos=True)
    for _ in range(4):
        rig.submit()
        rig.commit()
    rig.crash()
    rig.submit()
    rig.commit()
    assert rig.executor.forward_tokens == computed
    assert {len(tokens) for tokens in rig.answers.values()} == {5}
    totals = rig.core.report.totals
    assert (totals.prompt_tokens, totals.generated_tokens) == (0, 2)  # its prompt was counted where it began
    rig.run()


def test_what_another_engine_said_is_taken_as_it_is() -> None:
    rig = Rig(blocks=8, size=4, max_model_len=16)
    request = Generate("r", "gw", [1, 2, 3], 50, Sampling(), FAR, n=3)
    rig.requests["r"] = request
    rig.core.accept(request, [None, None, None])
    rig.collect_outputs()
    assert rig.over == {"r"}  # it had ended, but the result had not arrived
    assert rig.core.idle

    long = [1 + i % (VOCAB - 1) for i in range(13)]
    rig.over, rig.requests = set(), {}
    rig.core.accept(request, [long, None, None])  # an engine that could hold more accepted it
    out = rig.core.outputs()
    assert out.deltas["gw"] == [Delta("r", 13, [], Finish("length"), 0)]
    assert out.finished == ["r"]
    rig.core.accept(request, [[VOCAB], None, None])
    [delta] = rig.core.outputs().deltas["gw"]
    assert delta.finish is not None
    assert delta.finish.reason == "error"
    assert rig.core.idle
