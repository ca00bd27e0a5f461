"""Sampling on the GPU: the same tokens as the CPU operator for any logits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.core.plan import Sampler
from quire.engine.executor import ops
from quire.engine.executor.sampling import CHOSEN, NOT_FINITE, NOTHING_ALLOWED, SamplerBank
from quire.engine.wire.messages import Sampling

pytestmark = pytest.mark.gpu

PROMPT = 10
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def nasty(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of every special case, repeated."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g)
    for i in range(rows):
        match i % 10:
            case 0 | 1 | 2:
                x[i] *= 3
            case 3:
                x[i] *= 0.01  # nearly uniform
            case 4:
                x[i] = 1.5  # uniform
            case 5:
                x[i] = (x[i] * 2).round()  # a few values, each many times
            case 6:
                x[i, torch.rand(vocab, generator=g) < 0.9] = float("-inf")
            case 7:
                x[i, int(torch.randint(vocab, (), generator=g))] = 60.0  # one token has nearly all probability
            case 8:
                x[i] = x[i] * 20 - 200
            case _:
                x[i] = -x[i].abs() * 1e-3
                x[i, vocab // 2 :] = -0.0
        if i % 23 == 22:
            x[i, int(torch.randint(vocab, (), generator=g))] = [float("nan"), float("inf"), float("-inf")][i % 3]
        if i % 101 == 100:
            x[i] = float("-inf")
    return x.to(dtype)


def wishes(rng: random.Random, vocab: int) -> Sampling:
    return Sampling(
        temperature=rng.choice([0, 0, 0.01, 0.7, 1.0, 1.0, 3.0]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 1e-6, 0.9999]),
        top_k=rng.choice([0, 0, 1, 2, 50, vocab - 1, vocab, vocab + 5, 3000]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        seed=rng.randrange(2**63),
        frequency_penalty=rng.choice([0, 0, 0, 0.5, -1.0]),
        presence_penalty=rng.choice([0, 0, 0, 0.3]),
        repetition_penalty=rng.choice([1, 1, 1, 1.2, 0.9]),
        min_tokens=rng.choice([0, 0, PROMPT]),
        logit_bias=[(rng.randrange(vocab), rng.uniform(-5, 5)) for _ in range(rng.choice([0, 0, 0, 3]))],
        allowed_token_ids=rng.sample(range(vocab), min(vocab, 7)) if rng.random() < 0.1 else [],
    )


def banks(samplers: list[Sampler], vocab: int) -> tuple[SamplerBank, SamplerBank]:
    def bank(device: str) -> SamplerBank:
        made = SamplerBank(max_seqs=len(samplers), vocab_size=vocab, device=torch.device(device))
        for slot, sampler in enumerate(samplers):
            made.assign(slot, sampler)
        return made

    return bank("cpu"), bank("cuda")


def choose(bank: SamplerBank, logits: Tensor, slots: Tensor, known: Tensor) -> tuple[list[int], list[int]]:
    """Sample into poisoned memory; return tokens and outcomes."""
    device = bank._device
    tokens = torch.full((len(slots),), -7, dtype=torch.int64, device=device)
    outcome = torch.arange(len(slots), dtype=torch.uint8, device=device)
    bank.flush()
    bank.run(logits.to(device), slots.to(device), known.to(device), tokens, outcome, bank.general)
    return tokens.tolist(), outcome.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [
        *((300, 7), (300, 256), (200, 1003), (600, 32_000), (61, 50_257), (40, 128_256), (64, 151_936), (1, 700_001)),
        *((9, 1003), (9, 32_000), (3, 32_000), (16, 151_936)),  # larger clusters, some warps without a tile
    ],
)
def test_tokens_equal_the_cpus(dtype: torch.dtype, rows: int, vocab: int) -> None:
    """Two steps, so that the token counts matter."""
    rng = random.Random(vocab)
    samplers = [
        Sampler(wishes(rng, vocab), PROMPT, [0, vocab // 3], [rng.randrange(vocab) for _ in range(PROMPT + 4)], row % 3)
        for row in range(rows)
    ]
    cpu, gpu = banks(samplers, vocab)
    order = list(range(rows))
    for step in range(2):
        logits = nasty(rows, vocab, dtype, step)
        rng.shuffle(order)
        known = torch.tensor([PROMPT + 4 + step + row % 5 for row in order])
        slots = torch.tensor(order)
        assert choose(gpu, logits, slots, known) == choose(cpu, logits, slots, known)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(300, 7), (300, 256), (200, 1003), (61, 50_257), (64, 151_936), (9, 32_000), (1, 700_001)]
)
def test_tokens_under_a_mask_equal_the_cpus(dtype: torch.dtype, rows: int, vocab: int) -> None:
    """Every other row has a mask, in addition to all other settings; some allow one token, some none."""
    rng, numbers = random.Random(vocab), np.random.default_rng(vocab)
    words = -(-vocab // 32)
    share = numbers.choice([0.001, 0.1, 0.5, 0.99], size=(rows, 1))
    bits = numbers.random((rows, 32 * words)) < share
    bits[::10] = False
    bits[::20, vocab // 2] = True
    host = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    device = torch.from_numpy(host).cuda()
    samplers = [
        Sampler(wishes(rng, vocab), PROMPT, [0, vocab // 3], [rng.randrange(vocab) for _ in range(PROMPT)], row % 3)
        for row in range(rows)
    ]
    cpu, gpu = banks(samplers, vocab)
    for row in range(0, rows, 2):
        for bank, address in ((cpu, host[row].ctypes.data), (gpu, device[row].data_ptr())):
            bank._records["mask"][row] = address
            bank._general.add(row)
    slots, known = torch.arange(rows), torch.full((rows,), PROMPT)
    for step in range(2):
        logits = nasty(rows, vocab, dtype, step)
        tokens, outcomes = choose(gpu, logits, slots, known + step)
        assert (tokens, outcomes) == choose(cpu, logits, slots, known + step)
        masked = [row for row in range(0, rows, 2) if outcomes[row] == CHOSEN]
        assert all(bits[row, tokens[row]] for row in masked)
    assert outcomes[10::20] == [NOTHING_ALLOWED] * len(outcomes[10::20])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 1003, 32_000, 151_936])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_greedy_is_argmax(dtype: torch.dtype, vocab: int, rows: int) -> None:
    logits = nasty(rows, vocab, dtype, 3).cuda()
    _, bank = banks([Sampler(Sampling(temperature=0), PROMPT, [])] * rows, vocab)
    assert not bank.general
    slots = torch.arange(rows).cuda()
    for general in (False, True):
        tokens, outcome = torch.full_like(slots, -7), torch.full_like(slots, 7, dtype=torch.uint8)
        bank.flush()
        bank.run(logits, slots, slots + PROMPT, tokens, outcome, general)
        peak = logits.amax(-1)
        sound = peak.isfinite()
        first = (logits == peak[:, None]).int().argmax(-1)  # torch's argmax need not be the first on a GPU
        assert torch.equal(outcome == CHOSEN, sound)
        assert torch.equal(outcome == NOT_FINITE, ~sound)
        assert torch.equal(tokens, first.masked_fill(~sound, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "parts"), [(5, 1), (1003, 2), (32_001, 3), (151_936, 2)])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_the_greatest_keys_of_parts_are_those_of_whole_rows(
    dtype: torch.dtype, vocab: int, parts: int, rows: int
) -> None:
    logits = nasty(rows, vocab, dtype, 3)
    slots = torch.arange(rows)
    slots[rows // 2] = -1
    keys = {device: torch.empty(parts, rows, dtype=torch.int64, device=device) for device in ("cpu", "cuda")}
    found = {}
    for device, own in keys.items():
        at, there = slots.to(device), logits.to(device)
        for part in range(parts):
            first, end = vocab * part // parts, vocab * (part + 1) // parts
            ops.argmax(there[:, first:end], first, own[part])
        tokens, outcome = torch.full_like(at, -7), torch.full_like(at, 7, dtype=torch.uint8)
        ops.chosen(own.amax(0), at, tokens, outcome)
        found[device] = tokens.tolist(), outcome.tolist()
    assert found["cuda"] == found["cpu"]
    peak = logits.amax(-1)
    sound = peak.isfinite() & (slots >= 0)
    likeliest = (logits == peak[:, None]).int().argmax(-1).masked_fill(~sound, 0)
    assert found["cuda"][0] == likeliest.tolist()


def test_rows_that_do_not_start_at_16_bytes_and_rows_without_a_slot() -> None:
    logits = nasty(50, 1000, torch.bfloat16, 0).cuda()[:, 3:903]
    samplers = [Sampler(Sampling(temperature=1.0, seed=i, top_p=0.9), PROMPT, []) for i in range(50)]
    cpu, gpu = banks(samplers, 900)
    slots = torch.arange(50)
    slots[::7] = -1
    known = torch.full((50,), PROMPT)
    tokens, outcome = choose(gpu, logits, slots, known)
    assert (tokens, outcome) == choose(cpu, logits, slots, known)
    assert not any(outcome[::7])
    assert not any(tokens[::7])


def test_a_recorded_graph_serves_whoever_is_seated_later() -> None:
    rows, vocab = 16, 32_000
    logits = torch.empty(rows, vocab, device="cuda", dtype=torch.bfloat16)
    slots = torch.full((rows,), -1, device="cuda")
    known = torch.zeros(rows, dtype=torch.int64, device="cuda")
    tokens, outcome = torch.zeros_like(slots), torch.zeros_like(slots, dtype=torch.uint8)
    cpu, gpu = banks([Sampler(Sampling(), PROMPT, [])] * rows, vocab)
    gpu.flush()
    gpu.run(logits, slots, known, tokens, outcome, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.run(logits, slots, known, tokens, outcome, True)
    rng = random.Random(5)
    for step in range(10):
        host = nasty(rows, vocab, torch.bfloat16, step)
        for row in rng.sample(range(rows), 5):
            sampler = Sampler(wishes(rng, vocab), PROMPT, [3], list(range(PROMPT + 2)), step)
            cpu.assign(row, sampler)
            gpu.assign(row, sampler)
        gpu.flush()
        order = torch.randperm(rows)
        logits.copy_(host)
        slots.copy_(order)
        known.fill_(PROMPT + step)
        graph.replay()
        assert (tokens.tolist(), outcome.tolist()) == choose(cpu, host, order, known)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151_936), (9, 1003), (300, 5003)])
def test_outcomes_tell_a_broken_model_from_an_impossible_request(dtype: torch.dtype, rows: int, vocab: int) -> None:
    """No row has an allowed token; every third has raw logits that are not finite."""
    stops = [7, vocab - 1]
    asked = [
        Sampling(temperature=row % 2, top_p=0.9, top_k=5, allowed_token_ids=stops, min_tokens=3) for row in range(rows)
    ]
    cpu, gpu = banks([Sampler(s, PROMPT, stops) for s in asked], vocab)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).to(dtype)
    logits[::3, 7] = float("nan")
    slots, known = torch.arange(rows), torch.full((rows,), PROMPT)
    wanted = [NOTHING_ALLOWED if row % 3 else NOT_FINITE for row in range(rows)]
    assert choose(gpu, logits, slots, known) == choose(cpu, logits, slots, known) == ([0] * rows, wanted)
    for bank in (cpu, gpu):  # once min_tokens are out, the stop tokens are allowed
        tokens, outcomes = choose(bank, logits, slots, known + 3)
        assert all(outcome == (CHOSEN if row % 3 else NOT_FINITE) for row, outcome in enumerate(outcomes))
        assert all(token in stops for row, token in enumerate(tokens) if row % 3)
