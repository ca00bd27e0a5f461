"""Errors injected into the block accounting of a busy scheduler: the check names each of them at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.core.blocks import AccountingError, DoubleFree, Leak
from quire.engine.core.sequence import Sequence, State
from tests.core.rig import Rig

PROMPT = [7 + i % 11 for i in range(18)]  # four blocks of 4 and a half


def busy() -> Rig:
    """Siblings that share a prompt, two more that found it in the cache, one in the host's memory, idle blocks."""
    rig = Rig(blocks=48, host_blocks=48, preempt="swap", depth=1)
    rig.add([5] * 12, 2)
    rig.run()
    rig.add(PROMPT, 40, n=3, ignore_eos=True)
    step(rig, 3)
    for last in (20, 21):
        rig.add([*PROMPT, last], 40, ignore_eos=True)
    step(rig, 3)
    rig.core.preemption.preempt(min(live(rig), key=lambda seq: (seq.request.id != "r3", seq.index)))
    rig.core.auditor.whole()
    assert len(live(rig)) == 4
    assert rig.pool.idle
    assert rig.pool._free
    assert [seq.state for seq in rig.core.live()].count(State.WAITING) == 1
    return rig


def step(rig: Rig, steps: int) -> None:
    for _ in range(steps):
        assert rig.submit()
        rig.commit()


def live(rig: Rig) -> list[Sequence]:
    return [seq for seq in rig.core.live() if seq.table]


def shared(rig: Rig) -> int:
    return live(rig)[0].table[0]


def own(rig: Rig) -> int:
    return live(rig)[0].table[-1]


def first_sibling_frees_a_shared_block(rig: Rig) -> None:
    """As if the first to finish took the blocks of all with it."""
    block = shared(rig)
    rig.pool._refs[block] = 0
    rig.pool._unseal(block)
    rig.pool._free.append(block)


def table_dropped_without_release(rig: Rig) -> None:
    seq = live(rig)[1]
    rig.core.requests._groups[seq.request.id].remove(seq)
    rig.core.batch.slots.occupants[seq.slot] = None
    rig.core.batch.slots._free.append(seq.slot)


def table_released_twice(rig: Rig) -> None:
    rig.pool.release(live(rig)[0].table[:1])


def block_freed_twice(rig: Rig) -> None:
    rig.pool._free.append(rig.pool._free[0])


def held_block_freed(rig: Rig) -> None:
    rig.pool._free.append(own(rig))


def free_block_lost(rig: Rig) -> None:
    rig.pool._free.pop()


def one_reference_too_many(rig: Rig) -> None:
    rig.pool._refs[shared(rig)] += 1


def one_reference_too_few(rig: Rig) -> None:
    rig.pool._refs[shared(rig)] -= 1


def reference_to_a_free_block(rig: Rig) -> None:
    rig.pool._refs[rig.pool._free[3]] = 1


def idle_block_is_free_too(rig: Rig) -> None:
    rig.pool._free.append(next(iter(rig.pool._idle)))


def held_block_is_idle_too(rig: Rig) -> None:
    rig.pool._idle[shared(rig)] = None


def table_names_a_free_block(rig: Rig) -> None:
    live(rig)[0].table[-1] = rig.pool._free[0]


def table_names_a_neighbours_block(rig: Rig) -> None:
    live(rig)[0].table[-1] = live(rig)[1].table[-1]


def table_names_a_block_twice(rig: Rig) -> None:
    live(rig)[0].table[-1] = shared(rig)


def table_too_short(rig: Rig) -> None:
    rig.pool.release([live(rig)[0].table.pop()])


def idle_block_without_content(rig: Rig) -> None:
    rig.pool._unseal(next(iter(rig.pool._idle)))


def digest_finds_another_block(rig: Rig) -> None:
    digest = rig.pool._digest[shared(rig)]
    assert digest is not None
    rig.pool._index[digest] = own(rig)


def sealed_block_counts_as_unsealed(rig: Rig) -> None:
    rig.pool._sealed[next(iter(rig.pool._idle))] = 0


def host_block_lost(rig: Rig) -> None:
    rig.host._free.pop()


def host_block_given_back_early(rig: Rig) -> None:
    [away] = [seq for seq in rig.core.live() if seq.host]
    rig.host.release(away.host[:1])


FAULTS: list[tuple[Callable[[Rig], None], type[AccountingError]]] = [
    (first_sibling_frees_a_shared_block, DoubleFree),
    (table_dropped_without_release, Leak),
    (table_released_twice, DoubleFree),
    (block_freed_twice, DoubleFree),
    (held_block_freed, DoubleFree),
    (free_block_lost, Leak),
    (one_reference_too_many, Leak),
    (one_reference_too_few, DoubleFree),
    (reference_to_a_free_block, AccountingError),
    (idle_block_is_free_too, DoubleFree),
    (held_block_is_idle_too, DoubleFree),
    (table_names_a_free_block, AccountingError),
    (table_names_a_neighbours_block, AccountingError),
    (table_names_a_block_twice, AccountingError),
    (table_too_short, AccountingError),
    (idle_block_without_content, AccountingError),
    (digest_finds_another_block, AccountingError),
    (sealed_block_counts_as_unsealed, AccountingError),
    (host_block_lost, Leak),
    (host_block_given_back_early, DoubleFree),
]


@pytest.mark.parametrize(("fault", "kind"), FAULTS, ids=lambda value: value.__name__)
def test_a_seeded_fault_is_found(fault: Callable[[Rig], None], kind: type[AccountingError]) -> None:
    rig = busy()
    fault(rig)
    with pytest.raises(kind):
        rig.core.auditor.whole()


def test_a_free_block_that_is_lost_is_found() -> None:
    """A free block is missing while another one stands there twice: no sum is wrong, and no block by itself."""
    rig = busy()
    rig.pool._free[0] = rig.pool._free[1]
    with pytest.raises(AccountingError, match="in the free list"):
        rig.core.auditor.whole()


def test_audits_are_counted() -> None:
    rig = busy()
    before = rig.core.report.totals.audits
    rig.core.auditor.whole()
    assert rig.core.report.totals.audits == before + 1
