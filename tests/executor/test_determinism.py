"""Equal bits in any batch: alone, in a full batch, in chunks, after a preemption, after a prefix hit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.executor import ops
from quire.engine.executor.errors import ModelLoadError, UnsupportedModel
from quire.engine.executor.loading import load
from quire.engine.executor.models.hf import load_model
from quire.engine.executor.models.linear import Product
from quire.engine.llm import LLM, Completion
from quire.engine.wire.messages import Sampling
from tests.checkpoints import FAMILIES, VOCAB, make_checkpoint
from tests.executor.driver import CPU, Driver
from tests.executor.test_worker import words
from tests.matrix import sampled

Checkpoint = Callable[[str], Path]
DTYPES = ["float32", "bfloat16", "float16"]
MODELS = [
    *((family, "none") for family in FAMILIES),
    *((family, kind) for family in ("llama", "qwen2", "gemma2") for kind in ("int8", "int4")),
]
# Every dtype of one family, and each other model in one of them; the rest nightly.
CASES = [
    pytest.param(*model, dtype, marks=[] if number % 3 == place or model == ("llama", "none") else pytest.mark.nightly)
    for number, model in enumerate(MODELS)
    for place, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("family", "quantize", "dtype"), CASES)
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    checkpoint: Checkpoint, family: str, quantize: Literal["none", "int8", "int4"], dtype: str
) -> None:
    """Recompute equals decode: logits of every position, in one chunk, in chunks of 7, alone and in a full batch."""
    model = load_model(str(checkpoint(family)), dtype=dtype, device=CPU, deterministic=True, quantize=quantize)
    prompt = words(61)

    def logits(chunk: int, mates: int = 0) -> torch.Tensor:
        driver = Driver(model, blocks=64 + 20 * mates)
        driver.add(prompt, None, chunk=chunk, targets=True)
        for mate in range(mates):
            driver.add(words(5 + 9 * mate, mate), Sampling(temperature=1.0, seed=mate), chunk=3 + mate)
        found: list[torch.Tensor] = []
        while driver.running[0].computed < len(prompt):
            driver.step()
            count = min(chunk, len(prompt) - 1 - sum(len(logits) for logits in found))
            samples = len(driver.worker.logits) - count
            found.append(driver.worker.logits[samples:])
        return torch.cat(found)

    one_by_one = logits(1)
    assert one_by_one.shape == (60, VOCAB)
    assert torch.equal(logits(512), one_by_one)
    assert torch.equal(logits(7), one_by_one)
    assert torch.equal(logits(512, mates=6), one_by_one)
    assert torch.equal(logits(1, mates=6), one_by_one)


def requests() -> list[tuple[list[int], Sampling]]:
    """32 of them, half with a prefix in common; greedy, sampled, filtered."""
    rng = random.Random(3)
    shared = rng.choices(range(3, VOCAB), k=40)
    made = []
    for i in range(32):
        own = rng.choices(range(3, VOCAB), k=rng.randrange(1, 40))
        sampling = Sampling(
            temperature=0.0 if i % 4 == 0 else 1.0, top_p=0.9 if i % 4 == 2 else 1.0, seed=i, ignore_eos=True
        )
        made.append((shared + own if i % 2 else own, sampling))
    return made


def digest(texts: list[list[int]]) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def computed(
    directory: Path, dtype: str, jobs: list[tuple[list[int], Sampling]], batch: int, **options: object
) -> tuple[str, LLM]:
    """Return the hash of the jobs' text, of which `batch` at a time were there."""
    settings: dict[str, object] = {"kv_blocks": 400, "threads": 1, "prefix_cache": False} | options
    config = EngineConfig(
        model=str(directory),
        dtype=dtype,  # type: ignore[arg-type]
        deterministic=True,
        block_size=8,
        max_model_len=160,
        max_seqs=32,
        admission="threshold",
        admit_threshold=1.0,
        check_accounting=True,
        **settings,  # type: ignore[arg-type]
    )
    llm = LLM.over(config, load(config))
    done: list[Completion] = []
    for first in range(0, len(jobs), batch):
        group = [llm.submit(ids, sampling, max_new_tokens=12) for ids, sampling in jobs[first : first + batch]]
        while llm.unfinished:
            llm.step()
        done += group
    llm.close()
    return digest([each.outputs[0].token_ids for each in done]), llm


# Two fused, two as transformers made them: one of each per change.
@pytest.mark.parametrize(
    ("family", "dtype"),
    sampled(
        [("llama", "float32"), ("qwen3", "bfloat16"), ("gemma2", "float32"), ("gpt2", "bfloat16")],
        [("llama", "float32"), ("gpt2", "bfloat16")],
    ),
)
def test_same_text_however_it_was_computed(checkpoint: Checkpoint, family: str, dtype: str) -> None:
    """One at a time, all at once, in small chunks, with forced preemptions, on two threads: one hash."""

    def run(batch: int, **options: object) -> tuple[str, LLM]:
        return computed(checkpoint(family), dtype, requests(), batch, **options)

    wanted, _ = run(1)
    together, _ = run(32)
    assert together == wanted
    chunked, _ = run(32, step_tokens=48, chunk_tokens=5)
    assert chunked == wanted
    crowded, llm = run(32, kv_blocks=32, preempt="recompute")
    assert llm.engine.core.report.totals.recomputed_tokens > 0
    assert crowded == wanted
    cached, llm = run(8, prefix_cache=True)
    assert llm.engine.core.report.totals.cached_prompt_tokens > 0
    assert cached == wanted
    shared, _ = run(32, threads=2)
    assert shared == wanted


@pytest.mark.parametrize(
    ("family", "dtype", "ranks"),
    sampled([("llama", "bfloat16", 4), ("gemma2", "float32", 2)], [("gemma2", "float32", 2)]),
)
def test_same_text_of_several_ranks(tmp_path: Path, family: str, dtype: str, ranks: int) -> None:
    """The all-reduce has a fixed order, so it does not depend on the batch either."""
    directory = make_checkpoint(tmp_path / family, family, intermediate_size=256)

    def run(batch: int, **options: object) -> tuple[str, LLM]:
        return computed(directory, dtype, requests()[:20], batch, tensor_parallel=ranks, **options)

    wanted, _ = run(1)
    together, _ = run(20)
    assert together == wanted
    crowded, llm = run(20, kv_blocks=24, step_tokens=48, chunk_tokens=5, preempt="recompute")
    assert llm.engine.core.report.totals.recomputed_tokens > 0
    assert crowded == wanted


def test_parts_of_odd_width_are_refused(checkpoint: Checkpoint) -> None:
    """With one rank gemma2 has 192 outputs there, which torch takes 64 at a time; with two it has 96."""
    config = EngineConfig(model=str(checkpoint("gemma2")), deterministic=True, tensor_parallel=2)
    with pytest.raises(ModelLoadError, match=r"gemma2: --deterministic: .*mlp.gate_proj has 96 outputs, which is no"):
        load(config)


def test_what_cannot_be_promised_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def read(directory: Path, device: str = "cpu") -> None:
        load_model(str(directory), dtype="auto", device=torch.device(device), deterministic=True)

    with pytest.raises(UnsupportedModel, match=r"--deterministic: on a GPU .*; --device cpu can"):
        read(checkpoint("llama"), "cuda")
    shape: dict[str, Any] = {**FAMILIES["llama"], "num_local_experts": 4, "num_experts_per_tok": 2}
    experts = make_checkpoint(tmp_path / "mixtral", "mixtral", **shape)
    with pytest.raises(
        UnsupportedModel, match=r"mixtral: --deterministic: model\.layers\.0\.mlp\..* is the weight of a GEMM"
    ):
        read(experts)
    odd = make_checkpoint(tmp_path / "odd", "gpt2", n_inner=200)
    with pytest.raises(UnsupportedModel, match=r"mlp.c_fc has 200 outputs"):
        read(odd)


def test_without_the_flag_a_model_says_whether_it_depends_on_the_batch(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = load_model(str(checkpoint("llama")), dtype="float32", device=CPU, deterministic=True)
    assert model.batch_dependence == ""
    odd = make_checkpoint(tmp_path / "odd", "gpt2", n_inner=200)
    assert load_model(str(odd), dtype="float32", device=CPU).batch_dependence
    for dtype, widens in (("bfloat16", ops.widened_rows() is not None), ("float32", False)):
        for deterministic in (False, True):
            options: dict[str, Any] = {"deterministic": deterministic, "quantize": "int8"}
            model = load_model(str(checkpoint("llama")), dtype=dtype, device=CPU, **options)
            packs = [product.packed for product in model.module.modules() if isinstance(product, Product)]
            quantised = [packed for packed in packs if packed is not None and packed.scale is not None]
            assert any(packed.widen for packed in quantised) == (widens and not deterministic)
            assert model.batch_dependence == "" or not deterministic
            assert model.batch_dependence or deterministic or not widens
