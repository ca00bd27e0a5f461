"""KeptAdapters: which adapter without requests is evicted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.engine.adapters import kept as module
from quire.engine.adapters.kept import HALF_LIFE, KeptAdapters


def used(kept: KeptAdapters, *adapters: str) -> None:
    for adapter in adapters:
        kept.note_use(adapter)
        kept.add(adapter)


def test_requests_for_rare_adapters_evict_no_frequent_one() -> None:
    kept = KeptAdapters()
    used(kept, "a", "b", "a", "b", "rare1", "rare2", "rare3")
    assert [kept.pop() for _ in range(3)] == ["rare1", "rare2", "rare3"]
    assert sorted(kept) == ["a", "b"]


def test_of_adapters_used_once_the_one_used_longest_ago_goes() -> None:
    kept = KeptAdapters()
    used(kept, "b", "c", "a")
    assert [kept.pop() for _ in range(3)] == ["b", "c", "a"]
    with pytest.raises(IndexError):
        kept.pop()


def test_old_uses_count_less() -> None:
    """Eight uses, two half-lives ago, count less than three uses since."""
    kept = KeptAdapters()
    used(kept, *["old"] * 8, *["busy"] * 2 * HALF_LIFE, *["new"] * 3)
    assert [kept.pop() for _ in range(3)] == ["old", "new", "busy"]


def test_an_evicted_adapter_has_its_uses_when_it_returns() -> None:
    kept = KeptAdapters()
    used(kept, "a", "a", "b", "b", "b")
    assert kept.pop() == "a"
    used(kept, "c", "c", "a")
    assert kept.pop() == "c"


def test_an_adapter_with_requests_is_not_evicted() -> None:
    kept = KeptAdapters()
    used(kept, "a", "b", "b")
    kept.remove("a")
    assert "a" not in kept
    assert kept.pop() == "b"
    assert not kept
    kept.add("a")
    assert kept.pop() == "a"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SCORES", 4)
    kept = KeptAdapters()
    for turn in range(100):
        for name in range(6):
            used(kept, f"a{name}")
            kept.remove(f"a{name}")
            kept.add(f"a{name}")
        if turn % 10 == 5:
            kept.pop()
    assert len(kept._scores) == 4
    assert len(kept._heap) == len(kept._queued) <= 6
    assert sorted(kept.pop() for _ in range(len(kept))) == [f"a{name}" for name in range(6)]


def test_scores_are_sums_of_decayed_uses_in_any_order() -> None:
    """Random uses, holds and evictions, compared with sums of decayed uses."""
    rng = random.Random(41)
    kept, evicted = KeptAdapters(), Counter[str]()
    times: dict[str, list[int]] = {name: [] for name in "abcdefgh"}
    present: set[str] = set()
    for turn in range(1, 3000):
        name = rng.choices("abcdefgh", [8, 4, 2, 1, 1, 1, 1, 1])[0]
        kept.note_use(name)
        times[name].append(turn)
        kept.add(name)
        present.add(name)
        if rng.random() < 0.3 and present:
            held = rng.choice(sorted(present))
            kept.remove(held)
            present.remove(held)
        if len(present) > 5:
            score = {one: sum(2 ** ((at - turn) / HALF_LIFE) for at in times[one]) for one in present}
            victim = kept.pop()
            assert score[victim] == pytest.approx(min(score.values()))
            present.remove(victim)
            evicted[victim] += 1
    assert evicted["a"] < evicted["h"]
