"""LoRA adapters on a GPU: scheduler, slots, kernels and graphs; against the float32 model with the adapter merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from quire.engine.adapters.files import read_adapter
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.lora.adapter_graphs import AdapterGraphs
from quire.engine.executor.lora.device_slots import DeviceSlots
from quire.engine.executor.lora.packing import gpu_pack, values
from quire.engine.executor.models.hf import load_model
from quire.engine.executor.models.linear import Product
from quire.engine.executor.staging import Staging
from quire.engine.llm import LLM, Adapter
from quire.engine.wire.messages import Sampling
from tests.executor import test_gpu
from tests.executor.test_gpu import GREEDY, check_greedy, words
from tests.executor.test_lora import base_of
from tests.lora import merged, write_adapter

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def adapters(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Adapter]]:
    """Three adapters of a family: all layers, rank 8; some layers, rank 20 and other scales; rank 64."""
    made: dict[str, list[Adapter]] = {}

    def make(family: str) -> list[Adapter]:
        if family not in made:
            root, base = tmp_path_factory.mktemp(family), base_of(checkpoint(family))
            names = every_layer(family)
            folders = [
                write_adapter(root / "0", base, rank=8, targets=names),
                write_adapter(root / "1", base, rank=20, targets=names[:1] + names[-1:], seed=1, use_rslora=True),
                write_adapter(root / "2", base, rank=128, targets=names, seed=2, dtype=torch.bfloat16),
            ]
            made[family] = [Adapter(f"{family}-{folder.name}", str(folder)) for folder in folders]
        return made[family]

    return make


def every_layer(family: str) -> tuple[str, ...]:
    if family == "gpt2":
        return ("c_attn", "c_proj", "c_fc")
    return ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llm(checkpoint: Path, **changes: object) -> LLM:
    return test_gpu.llm(checkpoint, **({"lora_max_rank": 128} | changes))


def graphs_of(engine: LLM) -> AdapterGraphs | None:
    assert isinstance(engine.executor, LocalExecutor)
    assert engine.executor._worker is not None
    return engine.executor._worker._graphs.adapted


def answers(
    engine: LLM, prompts: list[list[int]], who: list[Adapter | None], sampling: Sampling = GREEDY, new: int = 24
) -> list[list[int]]:
    found = engine.generate(prompts, sampling, max_new_tokens=new, adapters=who)
    assert not any(one.outputs[0].message for one in found)
    return [one.outputs[0].token_ids for one in found]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])  # fused, with head norms, Conv1D, hooks
@pytest.mark.parametrize("options", [{}, {"lora_slots": 2}, {"chunk_tokens": 16}], ids=["plain", "two slots", "chunks"])
def test_text_is_that_of_merged_weights(
    checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]], family: str, options: dict[str, Any]
) -> None:
    """Adapters and the base in one batch, decode and prompt steps in graphs.  Each token is the argmax of the float32
    model with that adapter merged, unless a rival is within the noise of bfloat16."""
    own = adapters(family)
    who: list[Adapter | None] = [[*own, None][at % 4] for at in range(14)]
    prompts = [words(1 + 9 * at, at) for at in range(14)]
    engine = llm(checkpoint(family), **options)
    texts = answers(engine, prompts, who)
    texts = answers(engine, prompts, who)  # again, with graphs
    graphs = graphs_of(engine)
    assert graphs is not None
    assert graphs._decode.keys
    engine.close()
    for adapter in [*own, None]:
        mine = [at for at, one in enumerate(who) if one is adapter]
        model = merged(checkpoint(family), Path(adapter.path)) if adapter else base_of(checkpoint(family))
        check_greedy(model, [prompts[at] for at in mine], [texts[at] for at in mine])


def test_adapters_change_the_text(checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]]) -> None:
    engine, prompt = llm(checkpoint("llama")), words(30)
    texts = answers(engine, [prompt] * 4, [*adapters("llama"), None])
    assert len({tuple(text) for text in texts}) == 4
    engine.close()


def test_graphs_change_no_token(checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]]) -> None:
    own = adapters("llama")
    prompts = [words(1 + 7 * i % 90, i) for i in range(30)]
    who: list[Adapter | None] = [[None, *own][i % 4] for i in range(30)]
    found = []
    for seconds in (0.0, 60.0):
        engine = llm(checkpoint("llama"), graph_seconds=seconds, prefix_cache=False)
        answers(engine, prompts[:4], who[:4], new=1)  # loads: later, all start in the same step
        found.append([answers(engine, prompts, who) for _ in range(2)])
        found[-1] += [
            answers(engine, [words(40, 50 + at)], [own[0]]) for at in range(3)
        ]  # one slice: a size with a graph
        graphs = graphs_of(engine)
        assert (graphs is not None and bool(graphs._decode.keys) and bool(graphs._mixed.keys)) == bool(seconds)
        engine.close()
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_base_rows_keep_their_bits_beside_adapters(
    checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]]
) -> None:
    """Log-probabilities in a batch of the same shape without adapters, and of an engine without slots."""
    own, asked = adapters("llama"), Sampling(temperature=0, ignore_eos=True, logprobs=2)
    count = 40  # over 16 rows: with fewer the GEMM fuses the activation, whose last bit differs
    prompts = [words(20, at) for at in range(count)]
    mixture: list[Adapter | None] = [[None, *own][at % 4] for at in range(count)]
    found = []
    for slots, who in ((8, mixture), (8, [None] * count), (0, [None] * count)):
        engine = llm(checkpoint("llama"), lora_slots=slots, prefix_cache=False)
        engine.generate(prompts, asked, max_new_tokens=1, adapters=who)  # loads: later, all start in the same step
        one = engine.generate(prompts, asked, max_new_tokens=8, adapters=who)
        found.append([one[at].outputs[0].logprobs for at in range(0, count, 4)])
        engine.close()
    assert found[0] == found[1] == found[2]


def test_slots_are_replaced_while_others_decode(
    checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]]
) -> None:
    """One slot, adapters in turn, while a base row decodes: each answer is that of a server with all slots."""
    own = adapters("llama")
    engine = llm(checkpoint("llama"))
    expected = [answers(engine, [words(20)], [one])[0] for one in own]
    engine.close()
    engine = llm(checkpoint("llama"), lora_slots=1, prefix_cache=False)
    beside = engine.submit(words(9), GREEDY, max_new_tokens=400)
    found: list[list[int]] = []
    for adapter in own * 2:
        completion = engine.submit(words(20), GREEDY, max_new_tokens=24, adapter=adapter)
        while len(completion.outputs[0].token_ids) < 24:
            engine.step()
        found.append(completion.outputs[0].token_ids)
    assert len(beside.outputs[0].token_ids) < 400
    agree = sum(
        mine == its
        for text, whole in zip(found, expected * 2, strict=True)
        for mine, its in zip(text, whole, strict=True)
    )
    assert agree >= 0.8 * 24 * 6  # another batch shape rounds otherwise: near ties may fall the other way
    engine.close()


def test_choices_preemption_and_swap(checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]]) -> None:
    own = adapters("llama")
    who: list[Adapter | None] = [[None, *own][at % 4] for at in range(12)]
    prompts = [words(30, at) for at in range(12)]
    engine = llm(checkpoint("llama"))
    expected = answers(engine, prompts, who)
    engine.close()
    for preempt in ("recompute", "swap"):
        few = {"kv_blocks": 24, "admission": "threshold", "admit_threshold": 1.0, "preempt": preempt}
        engine = llm(checkpoint("llama"), **few)
        found = answers(engine, prompts, who)
        assert engine.engine.core.report.totals.preemptions
        agree = sum(mine[:12] == its[:12] for mine, its in zip(found, expected, strict=True))
        assert agree >= 9
        engine.close()


def test_a_rank_over_that_of_the_slots_is_refused(
    checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]]
) -> None:
    engine = llm(checkpoint("llama"), lora_max_rank=16)
    [found] = engine.generate([words(5)], GREEDY, adapters=adapters("llama")[2])
    assert "rank 128, --lora-max-rank allows 16" in found.outputs[0].message
    engine.close()


@pytest.mark.parametrize("quantize", ["none", "fp8", "int4"])
@pytest.mark.parametrize("count", [3, 40])
def test_a_site_adds_what_its_adapter_makes_of_the_input(
    wide: Callable[[str], tuple[Path, Path, dict[str, Any]]],
    tmp_path: Path,
    quantize: Literal["none", "fp8", "int4"],
    count: int,
) -> None:
    """Each GEMM of 16-bit and quantised bases against float64.  Rows without an adapter are those without LoRA."""
    directory = wide("ct-fp8-channel")[0]
    model = load_model(str(directory), dtype="bfloat16", device=CUDA, quantize=quantize, adapters=True)
    assert model.sites is not None
    folder = write_adapter(tmp_path / "a", base_of(directory), rank=8)
    packed = gpu_pack(model.sites.sites, model.dtype, 16)(file := read_adapter(folder, 1 << 30))
    assert packed.weights.is_pinned()
    slots = DeviceSlots(model.sites.sites, slots=2, max_rank=16, max_rows=64, dtype=model.dtype, device=CUDA)
    slots.load(1, packed)
    staging = Staging(capacity=1 << 16, steps=2, device=CUDA)
    staging.begin_step()
    of_row = np.full(64, -1, dtype=np.int32)
    of_row[1 : count - 1] = 1
    slots.stage(of_row, staging)
    staging.send()
    slots.apply()
    mine, base = list(range(1, count - 1)), [0, count - 1]
    products = [one for one in model.module.modules() if isinstance(one, Product) and one.adapted is not None]
    assert len(products) == len(model.sites.sites) == 8
    for product in products:
        assert product.adapted is not None
        site = model.sites.sites[product.adapted.number]
        x = torch.randn(count, site.inputs, generator=torch.Generator().manual_seed(1)).to(CUDA, model.dtype)
        silu, product.silu_mul, product.norm = product.silu_mul, False, None
        model.sites.rows = None
        without = product(x)
        model.sites.rows = slots.rows
        found = product(x)
        assert torch.equal(found[base], without[base])
        for part in site.parts:
            a, b = (torch.from_numpy(values(one).astype(np.float64)) for one in file.pairs[part.path])
            delta = x[mine].double().cpu() @ a.T @ b.T * 2
            columns = slice(part.first, part.first + part.outputs)
            error = (found[mine, columns].double().cpu() - without[mine, columns].double().cpu() - delta).abs().max()
            assert error <= 0.02 * max(delta.abs().max(), without.abs().max().cpu())
            assert delta.abs().max() > 0.1
        product.silu_mul = silu
        model.sites.rows = None


def test_a_step_with_adapters_allocates_nothing(
    checkpoint: Checkpoint, adapters: Callable[[str], list[Adapter]]
) -> None:
    """Counted by torch's allocator while all rows decode with graphs."""
    engine = llm(checkpoint("llama"), max_model_len=1024, kv_blocks=2600)
    own = adapters("llama")
    for _ in range(2):
        for at in range(40):
            engine.submit(words(20, at), GREEDY, max_new_tokens=60, adapter=own[at % 3])
        completions = list(engine.unfinished.values())
        while not all(one.outputs[0].token_ids for one in completions):
            engine.step()
        for _ in range(5):
            engine.step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(20):
            engine.step()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        while engine.unfinished:
            engine.step()
    assert after == before
    engine.close()
