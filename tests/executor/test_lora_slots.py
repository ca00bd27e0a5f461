"""LoRA as a GPU computes it, on a CPU: packed blocks, slots, rows in tiles, padded steps; the operators are twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.core.plan import StepPlan
from quire.engine.executor import ops
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.lora.bank import AdapterBank
from quire.engine.executor.lora.device_slots import DeviceSlots
from quire.engine.executor.lora.packing import PackedAdapter, gpu_pack
from quire.engine.executor.lora.sites import Sites
from quire.engine.executor.lora.store import AdapterStore
from quire.engine.llm import LLM, Adapter
from tests import lora_twin
from tests.executor.test_lora import GREEDY, base_of, prompts_of, reference, serve
from tests.lora import ALL, merged, write_adapter

NEW = 8


@pytest.fixture
def on_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines take the way of a GPU.  Returns the slots of all loads so far."""
    loads: list[int] = []

    def of(
        cls: type[AdapterBank],
        config: EngineConfig,
        sites: Sites,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_seqs: int,
        rows: int,
    ) -> AdapterBank:
        sizes = {"slots": config.lora_slots, "max_rank": 64, "max_rows": max(rows, max_seqs)}
        slots = DeviceSlots(sites.sites, **sizes, dtype=dtype, device=device)
        take = slots.load

        def load(slot: int, packed: PackedAdapter) -> None:
            loads.append(slot)
            take(slot, packed)

        monkeypatch.setattr(slots, "load", load)
        return cls(AdapterStore(gpu_pack(sites.sites, dtype, 64), 1 << 30), max_seqs, slots)

    monkeypatch.setattr(AdapterBank, "of", classmethod(of))
    monkeypatch.setattr(ops, "lora_shrink", lora_twin.lora_shrink)
    monkeypatch.setattr(ops, "lora_expand", lora_twin.lora_expand)
    monkeypatch.setattr(ops, "lora_on_gpu", lora_twin.lora_on_gpu)
    return loads


def open_llm(directory: Path, **options: Any) -> LLM:
    llm = serve(directory, **options)
    assert isinstance(llm.executor, LocalExecutor)
    assert llm.executor._worker is not None
    decoder = getattr(llm.executor._worker._loaded.module, "model", None)
    if decoder is not None and hasattr(decoder, "whole"):
        decoder.whole = None  # layer by layer, as on a GPU
    return llm


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ALL), ("qwen3", ALL), ("gpt2", ("c_attn", "c_proj", "c_fc"))]
)
def test_text_is_that_of_merged_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path, on_slots: list[int], family: str, targets: tuple[str, ...]
) -> None:
    """Float32, three adapters in two slots and the base, prompts in chunks, twice: the merged models' tokens."""
    directory, base = checkpoint(family), base_of(checkpoint(family))
    folders = [
        write_adapter(tmp_path / "0", base, rank=8, targets=targets),
        write_adapter(tmp_path / "1", base, rank=20, targets=targets[-2:], seed=1, use_rslora=True),
        write_adapter(tmp_path / "2", base, rank=64, targets=targets, seed=2),
    ]
    models = [merged(directory, folder) for folder in folders] + [base]
    adapters = [*(Adapter(folder.name, str(folder)) for folder in folders), None]
    prompts = prompts_of(8, seed=5)
    expected = [reference(models[at % 4], prompt, NEW) for at, prompt in enumerate(prompts)]
    assert expected[0] != reference(base, prompts[0], NEW)
    llm = open_llm(directory, lora_slots=2)
    for _ in range(2):
        found = llm.generate(prompts, GREEDY, max_new_tokens=NEW, adapters=[adapters[at % 4] for at in range(8)])
        assert [one.outputs[0].token_ids for one in found] == expected
    assert set(on_slots) == {0, 1}
    assert len(on_slots) > 2  # a slot had more than one adapter
    llm.close()


def test_a_rank_over_that_of_the_slots_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, on_slots: list[int]
) -> None:
    folder = write_adapter(tmp_path / "a", base_of(checkpoint("llama")), rank=65)
    llm = open_llm(checkpoint("llama"))
    (found,) = llm.generate(prompts_of(1), GREEDY, adapters=Adapter("a", str(folder)))
    assert "rank 65, --lora-max-rank allows 64" in found.outputs[0].message
    llm.close()


def test_rows_of_a_padded_step_lie_where_its_tensors_have_them(
    checkpoint: Callable[[str], Path], tmp_path: Path, on_slots: list[int]
) -> None:
    """A step with slices is padded between decoding slots and slices; a decode step behind its slots.  Rows of decode
    steps are staged again after a step with slices used the buffers."""
    folder = write_adapter(tmp_path / "a", base_of(checkpoint("llama")))
    llm = open_llm(checkpoint("llama"))
    found: list[tuple[list[int], tuple[int, int] | None]] = []
    assert isinstance(llm.executor, LocalExecutor)
    assert llm.executor._worker is not None
    bank = llm.executor._worker._adapters
    assert bank is not None
    rows_of = bank.rows

    def rows(plan: StepPlan, decoding: Any, all_decoding: Any, staging: Any, padded: Any = None) -> Any:
        """Pad every step with slices by 3 decoding rows, and 5 rows at its end."""
        wide = (len(decoding) + 3, len(decoding) + 3 + sum(len(one.token_ids) for one in plan.slices) + 5)
        answer = rows_of(plan, decoding, all_decoding, staging, wide if plan.slices else None)
        if answer is not None:
            bank.apply()
            tiles = bank.device_slots.rows.tiles  # type: ignore[union-attr]
            order = bank.device_slots.rows.order  # type: ignore[union-attr]
            of = [order[first : first + count].tolist() for slot, first, count, _ in tiles.tolist() if slot >= 0]
            found.append(([row for rows in of for row in rows], wide if plan.slices else None))
        return None  # the model runs without adapters

    bank.rows = rows  # type: ignore[method-assign]
    adapter = Adapter("a", str(folder))
    llm.submit([5] * 4, GREEDY, max_new_tokens=30)
    one = llm.submit([5] * 4, GREEDY, max_new_tokens=12, adapter=adapter)
    while len(one.outputs[0].token_ids) < 4:
        llm.step()
    llm.submit([6] * 6, GREEDY, max_new_tokens=4, adapter=adapter)
    while llm.unfinished:
        llm.step()
    decodes = [rows for rows, wide in found if wide is None]
    assert [1] in decodes  # the base row is row 0
    assert [1, 2] in decodes
    together = [(rows, wide) for rows, wide in found if wide is not None and wide[0] == 5]
    assert together == [([1, *range(5, 11)], (5, 16))]
    llm.close()
