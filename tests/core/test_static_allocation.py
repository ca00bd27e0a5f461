"""Static allocation (`loadtest/studies/baselines.py`), against which paging is measured."""

from __future__ import annotations

from tests.core.oracle import reference
from tests.core.rig import Rig


def test_static_allocation_holds_the_greatest_length_from_start_to_end() -> None:
    """Two of four fit at once, though each generates 3 of its 24 tokens: the waste that paging ends."""
    rig = Rig(blocks=16, size=4, admission="static")
    stop = reference([5] * 8, 0, 0, 11, frozenset())[2]
    ids = [rig.add([5] * 8, 24, stop_token_ids=[stop], ignore_eos=True) for _ in range(4)]
    rig.submit()
    assert [seq.table for seq in rig.core.live()] == [list(range(8)), list(range(8, 16)), [], []]
    assert rig.core.occupancy.used_positions() == (16, 64)
    assert rig.core.headroom.startable() == (0, 4)
    assert rig.core.batch.reserved_blocks == 16
    rig.run()
    assert all(len(rig.answers[request, 0]) == 3 for request in ids)
    assert rig.core.batch.reserved_blocks == 0


def test_static_continuations_share_nothing() -> None:
    rig = Rig(blocks=16, size=4, admission="static")
    rig.add([5] * 8, 8, n=3, ignore_eos=True)
    rig.submit()
    assert [len(seq.table) for seq in rig.core.live()] == [4, 4, 4]
    rig.run()
    assert rig.core.report.totals.prompt_tokens == 24
