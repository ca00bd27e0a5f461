"""LoRA adapters through scheduler, worker and kernels: the text is that of a model with the adapter merged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.engine.adapters.files import read_adapter
from quire.engine.commands import Resume
from quire.engine.config import EngineConfig
from quire.engine.executor import ops
from quire.engine.executor.local import LocalExecutor
from quire.engine.executor.lora.packing import packer_for, values
from quire.engine.executor.models.hf import load_model
from quire.engine.executor.models.linear import Product
from quire.engine.llm import LLM, Adapter, Completion, Output
from quire.engine.wire.messages import FOREVER_MS, Beams, Generate, Sampling
from quire.loadtest.studies.tiny_checkpoints import make_checkpoint as make_tiny
from tests.checkpoints import VOCAB
from tests.executor.driver import CPU, fail_next_step
from tests.lora import linears, merged, write_adapter
from tests.matrix import each_value

NEW = 12
GREEDY = Sampling(temperature=0, ignore_eos=True)


def base_of(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def reference(model: PreTrainedModel, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers answers greedily."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(4, 24))] for _ in range(count)]


def serve(directory: Path, **options: Any) -> LLM:
    sizes = {"dtype": "float32", "threads": 1, "kv_blocks": 128, "max_seqs": 40, "step_tokens": 64, "chunk_tokens": 7}
    return LLM(str(directory), **(sizes | options))


@pytest.mark.parametrize(
    "family", each_value(["llama", "gpt2", "phi3", "gemma2", "opt", "qwen3", "gpt_neox", "mistral"])
)
def test_every_layer_of_a_family_takes_adapters(checkpoint: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    """GEMMs of ours and of transformers' modules, fused ones (c_attn, qkv_proj) and separate ones; with base rows."""
    directory = checkpoint(family)
    base = base_of(directory)
    folder = write_adapter(
        tmp_path / "a", base, modules=[path for path, _ in linears(base)], targets="all-linear", size=0.1
    )
    prompts, llm = prompts_of(2), serve(directory)
    adapter = Adapter("a", str(folder))
    found = llm.generate(prompts * 2, GREEDY, max_new_tokens=NEW, adapters=[adapter, adapter, None, None])
    llm.close()
    own = merged(directory, folder)
    expected = [reference(own, prompt) for prompt in prompts] + [reference(base, prompt) for prompt in prompts]
    assert [one.outputs[0].token_ids for one in found] == expected
    assert expected[:2] != expected[2:]


@pytest.fixture(scope="module")
def five(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    """Adapters of llama with ranks 8, 16 and 64, of all layers, some layers, other scales and 16-bit values."""
    root, base = tmp_path_factory.mktemp("five"), base_of(checkpoint("llama"))
    folders = [
        write_adapter(root / "0", base, rank=8),
        write_adapter(root / "1", base, rank=16, seed=1, use_rslora=True, size=0.08),
        write_adapter(root / "2", base, rank=64, seed=2, lora_alpha=16),
        write_adapter(root / "3", base, rank=8, seed=3, targets=("q_proj", "down_proj"), dtype=torch.bfloat16),
        write_adapter(
            root / "4",
            base,
            rank=16,
            seed=4,
            ranks={"v_proj": 4, "layers.1.mlp.up_proj": 64},
            alpha_pattern={"k_proj": 3, r"^model\.layers\.0\..*o_proj": 5},
        ),
    ]
    return [Adapter(folder.name, str(folder)) for folder in folders]


@pytest.fixture(scope="module")
def mixed(checkpoint: Callable[[str], Path], five: list[Adapter]) -> list[tuple[list[int], Adapter | None, list[int]]]:
    """32 prompts of five adapters and the base, with what the merged models answer."""
    directory = checkpoint("llama")
    models = {"": base_of(directory)} | {one.name: merged(directory, Path(one.path)) for one in five}
    who: list[Adapter | None] = [[*five, None][at % 6] for at in range(32)]
    prompts = prompts_of(32, seed=7)
    return [
        (prompt, adapter, reference(models[adapter.name if adapter else ""], prompt))
        for prompt, adapter in zip(prompts, who, strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_blocks": 24, "admission": "threshold", "admit_threshold": 1.0, "preempt": "recompute"},
        {"kv_blocks": 24, "admission": "threshold", "admit_threshold": 1.0, "preempt": "swap"},
        {"lora_slots": 2},
    ],
    ids=["plain", "recompute", "swap", "two slots"],
)
def test_a_mixed_batch_of_32_equals_the_merged_models(
    checkpoint: Callable[[str], Path],
    mixed: list[tuple[list[int], Adapter | None, list[int]]],
    options: dict[str, Any],
) -> None:
    """Twice: the second time prompts are in the prefix cache.  With few blocks sequences are preempted."""
    llm = serve(checkpoint("llama"), **({"poison_free_blocks": True, "check_accounting": True} | options))
    for _ in range(2):
        found = llm.generate([one[0] for one in mixed], GREEDY, max_new_tokens=NEW, adapters=[one[1] for one in mixed])
        assert [one.outputs[0].token_ids for one in found] == [one[2] for one in mixed]
    totals = llm.engine.core.report.totals
    assert totals.cached_prompt_tokens
    assert bool(totals.preemptions) == ("preempt" in options)
    assert bool(totals.swapped_in_blocks) == (options.get("preempt") == "swap")
    llm.close()


def test_an_answer_resumes_on_another_engine(
    checkpoint: Callable[[str], Path], mixed: list[tuple[list[int], Adapter | None, list[int]]]
) -> None:
    """The first engine died after some tokens: the second one loads the adapter by the request alone."""
    llm = serve(checkpoint("llama"))
    completions = []
    for at, (prompt, adapter, whole) in enumerate(mixed[:8]):
        request = Generate(f"r{at}", "", prompt, NEW, GREEDY, FOREVER_MS)
        if adapter is not None:
            request = Generate(
                *(f"r{at}", "", prompt, NEW, GREEDY, FOREVER_MS), adapter=adapter.id(), adapter_path=adapter.path
            )
        completions.append(llm.unfinished.setdefault(request.id, Completion(prompt, [Output(token_ids=whole[:5])])))
        llm._open_outputs[request.id] = 1
        llm._box.commands.append(Resume(request, [whole[:5]]))
    while llm.unfinished:
        llm.step()
    assert [one.outputs[0].token_ids for one in completions] == [one[2] for one in mixed[:8]]
    llm.close()


def test_a_failed_step_forgets_no_adapter(
    checkpoint: Callable[[str], Path], mixed: list[tuple[list[int], Adapter | None, list[int]]]
) -> None:
    llm = serve(checkpoint("llama"))
    prompt, adapter, whole = mixed[0]
    completion = llm.submit(prompt, GREEDY, max_new_tokens=NEW, adapter=adapter)
    while len(completion.outputs[0].token_ids) < 3:
        llm.step()
    fail_next_step(llm)
    while llm.unfinished:
        llm.step()
    assert completion.outputs[0].token_ids == whole
    llm.close()


def test_choices_and_beams_have_the_adapter(
    checkpoint: Callable[[str], Path], mixed: list[tuple[list[int], Adapter | None, list[int]]]
) -> None:
    """Forks inherit it; beams re-fork with it.  A beam of width 1 is greedy."""
    llm = serve(checkpoint("llama"))
    prompt, adapter, whole = mixed[1]
    (found,) = llm.generate([prompt], GREEDY, max_new_tokens=NEW, n=3, adapters=adapter)
    assert [one.token_ids for one in found.outputs] == [whole] * 3
    (found,) = llm.generate(
        [prompt], Sampling(temperature=0, ignore_eos=True), max_new_tokens=NEW, beams=Beams(1), adapters=adapter
    )
    assert found.outputs[0].token_ids == whole
    llm.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_rows_keep_their_bits_beside_adapters(
    checkpoint: Callable[[str], Path], five: list[Adapter], dtype: str
) -> None:
    """With --deterministic a request's log-probabilities are the same alone and in a batch with adapters."""
    llm = serve(checkpoint("llama"), dtype=dtype, deterministic=True, prefix_cache=False)
    prompts = prompts_of(6, seed=3)
    asked = Sampling(temperature=0, ignore_eos=True, logprobs=2)
    who: list[Adapter | None] = [None, five[0], None, five[2], five[0], five[4]]
    alone = [llm.generate([p], asked, max_new_tokens=6, adapters=[a])[0] for p, a in zip(prompts, who, strict=True)]
    together = llm.generate(prompts, asked, max_new_tokens=6, adapters=who)
    assert [one.outputs[0].logprobs for one in together] == [one.outputs[0].logprobs for one in alone]
    llm.close()


@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")])
def test_a_site_adds_what_its_adapter_makes_of_the_input(
    checkpoint: Callable[[str], Path], plain: Path, five: list[Adapter], dtype: str, quantize: Any
) -> None:
    """Each GEMM of 16-bit and quantised bases against float64.  Rows without an adapter are those without LoRA."""
    directory = checkpoint("llama") if quantize == "none" else plain
    model = load_model(str(directory), dtype=dtype, device=CPU, quantize=quantize, adapters=True)
    assert model.sites is not None
    folder = Path(five[4].path)
    if quantize != "none":
        folder = write_adapter(folder.parent / "wide", base_of(plain), rank=8, seed=5)
    packed = packer_for(model.sites.sites, model.dtype).pack(file := read_adapter(folder, 1 << 30))
    rows, starts = torch.tensor([1, 4], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    adapters = ops.AdapterRows([packed.weights], [packed.table], rows, starts)
    products = [one for one in model.module.modules() if isinstance(one, Product) and one.adapted is not None]
    assert len(products) == len(model.sites.sites) == 8
    for product in products:
        assert product.adapted is not None
        site = model.sites.sites[product.adapted.number]
        x = torch.randn(6, site.inputs, generator=torch.Generator().manual_seed(1)).to(model.dtype)
        silu, product.silu_mul, product.norm = product.silu_mul, False, None
        model.sites.rows = None
        without = product(x)
        model.sites.rows = adapters
        found = product(x)
        untouched = [0, 2, 3, 5]
        assert torch.equal(found[untouched], without[untouched])
        for part in site.parts:
            pair = file.pairs[part.path]
            config = file.config
            alpha = 3 if part.path.endswith("k_proj") and config.alpha_pattern else config.lora_alpha
            alpha = 5 if "layers.0." in part.path and "o_proj" in part.path and config.alpha_pattern else alpha
            a, b = (torch.from_numpy(values(one).astype(np.float64)) for one in pair)
            delta = x[[1, 4]].double() @ a.T @ b.T * (alpha / len(a))
            columns = slice(part.first, part.first + part.outputs)
            error = (found[[1, 4], columns].double() - without[[1, 4], columns].double() - delta).abs().max()
            scale = max(delta.abs().max(), without.abs().max())
            assert error <= scale * (0.02 if dtype == "bfloat16" else 1e-5)
        product.silu_mul = silu


def test_the_layout_is_that_of_the_kernels() -> None:
    """numpy packs as `ops.pack_weight` does, for odd sizes too; bfloat16 is rounded to the nearest, ties to even."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        packer = packer_for([], dtype)
        for out, inner in ((1, 1), (5, 7), (64, 48), (33, 130)):
            weight = torch.randn(out, inner)
            bits = packer.layout.shrink(packer._rounded(weight.numpy(), "w"))
            packed = ops.pack_weight(weight.to(dtype), ordered=True)
            assert packed is not None
            assert torch.equal(torch.from_numpy(bits).view(dtype), packed.values.reshape(-1))


def test_without_slots_the_model_is_as_it_was(checkpoint: Callable[[str], Path], five: list[Adapter]) -> None:
    llm = serve(checkpoint("llama"), lora_slots=0)
    assert isinstance(llm.executor, LocalExecutor)
    assert llm.executor.adapter_store is None
    (found,) = llm.generate(prompts_of(1), GREEDY, adapters=five[0])
    assert "takes no LoRA adapters" in found.outputs[0].message
    llm.close()


class Calls(TorchDispatchMode):
    """The operators of torch and of ours that were called, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((str(func), [each.shape for each in args if isinstance(each, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_step_without_adapter_rows_calls_what_a_server_without_lora_calls(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """All operators of prompts and decode steps, after the engine has served an adapter."""
    adapter = Adapter("one", str(write_adapter(tmp_path / "one", base_of(checkpoint(family)))))
    made = []
    for slots in (0, 8):
        llm = serve(checkpoint(family), lora_slots=slots, prefix_cache=False, itl_stretch=0.0, step_target_s=0.0)
        llm.generate(prompts_of(6), GREEDY, max_new_tokens=NEW, adapters=[adapter, None] * 3 if slots else None)
        with Calls() as calls:
            llm.generate(prompts_of(6, seed=5), GREEDY, max_new_tokens=NEW)
        made.append(calls.made)
        llm.close()
    assert len(made[0]) > 10 * NEW
    assert made[0] == made[1]


def test_experts_take_no_adapter(tmp_path: Path) -> None:
    """In a mixture the attention takes adapters; what routes tokens to experts would see other rows."""
    directory = make_tiny(tmp_path / "mixture", "qwen3_moe")
    base = base_of(directory)
    paths = [path for path, _ in linears(base) if "self_attn" in path]
    folder = write_adapter(tmp_path / "a", base, modules=paths, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    config = EngineConfig(model=str(directory), dtype="float32", threads=1, kv_blocks=32, max_seqs=4)
    llm = LLM.over(config, LocalExecutor(config))
    prompt = prompts_of(1)[0]
    vocab = base.config.vocab_size
    prompt = [token % vocab for token in prompt]
    (found,) = llm.generate([prompt], GREEDY, max_new_tokens=6, adapters=Adapter("a", str(folder)))
    assert found.outputs[0].token_ids == reference(merged(directory, folder), prompt, 6)
    llm.close()
