"""Sampling of one token per row on a CPU, against float64 and Python's unbounded integers."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.engine.executor import ops
from quire.engine.executor.sampling import CHOSEN, FORBIDDEN, IN_PROMPT, NOT_FINITE, NOTHING_ALLOWED, RECORD, STOP

WORDS = RECORD.itemsize // 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFF = {"scale": math.log2(math.e), "top_p": 1.0, "repetition": 1.0}


def sample(logits: Tensor, wishes: list[dict[str, float]], known: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and outcomes of rows with these fields of RECORD; the rest is off."""
    records = np.zeros(len(wishes), RECORD)
    for record, wish in zip(records, wishes, strict=True):
        for name, value in (OFF | wish).items():
            record[name] = value
    table = torch.from_numpy(records.view(np.int64).reshape(len(wishes), -1))
    slots = torch.arange(len(wishes))
    tokens, outcome = torch.full_like(slots, -7), torch.full_like(slots, 7, dtype=torch.uint8)
    ops.sample(logits, slots, torch.full_like(slots, known), table, True, tokens, outcome)
    return tokens, outcome


def reference_hash(seed: int, sibling: int, position: int) -> int:
    """SplitMix64's finaliser, three times, on unbounded integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    h = mix((seed + golden) & mask)
    h = mix(h ^ ((sibling + golden) & mask))
    return mix(h ^ ((position * golden) & mask))


def kept_weights(x: Tensor, temperature: float, k: int, p: float, min_p: float) -> Tensor:
    """[V] f64, by sorting."""
    w = ((x.double() - x.double().max()) / temperature).exp()
    down = w.sort(descending=True).values
    floor = float(down[k - 1]) if k else 0.0
    if p < 1:
        upto = down.masked_fill(down < floor, 0).cumsum(-1)
        floor = max(floor, float(down[int((upto < p * upto[-1]).sum())]))
    return w.masked_fill(w < max(floor, min_p), 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 100, 5003, 16_000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_tokens_are_those_of_float64(dtype: torch.dtype, vocab: int, spread: float) -> None:
    """Every draw gives the token of float64, or one within the rounding of float32 weights."""
    rng = random.Random(vocab)
    rows = 100
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)
    temperatures = [rng.choice([0.25, 1.0, 2.0]) for _ in range(rows)]
    wishes: list[dict[str, float]] = [
        {
            "scale": math.log2(math.e) / temperature,
            "seed": rng.randrange(2**63),
            "sibling": rng.randrange(5),
            "top_k": rng.choice([0, 0, 1, 2, vocab // 3, vocab - 1, vocab, vocab + 9]),
            "top_p": rng.choice([1.0, 1.0, 0.001, 0.5, 0.875, 0.9990234375]),  # exact in float32
            "min_p": rng.choice([0.0, 0.0, 0.0625]),
        }
        for temperature in temperatures
    ]
    tokens, outcome = sample(logits, wishes, known=17)
    assert not outcome.any()
    worst = 0.0
    for i, (wish, temperature) in enumerate(zip(wishes, temperatures, strict=True)):
        k = int(wish["top_k"]) if wish["top_k"] < vocab else 0
        w = kept_weights(logits[i], temperature, k, float(np.float32(wish["top_p"])), wish["min_p"])
        upto = (w / w.sum()).cumsum(-1)
        u = reference_hash(int(wish["seed"]), int(wish["sibling"]), 17) / 2**64
        token = int(tokens[i])
        first = float(upto[token - 1]) if token else 0.0
        worst = max(worst, first - u, u - float(upto[token]))
    assert worst < 1e-6  # measured: 0, all 3,600 draws agree


@pytest.mark.parametrize("field", ["top_k", "top_p"])
def test_ties_with_the_last_one_kept_are_kept(field: str) -> None:
    logits = torch.tensor([[1.0, 5.0, 0.0, 5.0, 5.0, -1.0]]).expand(500, -1)
    tokens, _ = sample(logits, [{"seed": i, field: 1 if field == "top_k" else 0.1} for i in range(500)])
    assert set(tokens.tolist()) == {1, 3, 4}


def test_the_hash_is_pinned() -> None:
    """An upgrade that changes these values changes every sampled answer that is replayed across it.

    Among 2^16 equal logits the first 16 bits of the hash are the token."""
    seeds = [0, 1, 2**63 - 1, *range(100, 110)]
    for sibling, position in ((0, 0), (3, 5), (0, 100_000), (2**31 - 1, 2**31 - 1)):
        tokens, _ = sample(torch.zeros(13, 1 << 16), [{"seed": s, "sibling": sibling} for s in seeds], known=position)
        assert tokens.tolist() == [reference_hash(s, sibling, position) >> 48 for s in seeds]


def test_draws_differ_by_seed_sibling_and_position_only() -> None:
    count, vocab = 1000, 1 << 16
    logits = torch.zeros(1, vocab).expand(count, -1)
    by_seed, _ = sample(logits, [{"seed": i} for i in range(count)])
    by_sibling, _ = sample(logits, [{"sibling": i} for i in range(count)])
    by_position, _ = sample(logits, [{"prompt_len": -i} for i in range(count)])
    for tokens in (by_seed, by_sibling, by_position):
        u = tokens.double() / vocab
        assert float(u.min()) < 0.01
        assert float(u.max()) > 0.99
        assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / count)
        assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 4 / math.sqrt(count)


def test_what_weighs_nothing_is_never_drawn() -> None:
    """Forbidden tokens, and tokens below 2^-31 of the maximum probability; at any temperature."""
    logits = torch.full((4000, 600), -22.0)  # e^-22 is about 2^-31.7
    logits[:, 300] = -1e30
    logits[:, 77] = 0.0
    logits[:, 599] = -math.inf
    for scale in (math.log2(math.e), 1e30):
        tokens, outcome = sample(logits, [{"seed": i, "scale": scale} for i in range(4000)])
        assert not outcome.any()
        assert (tokens == 77).all()


def test_padded_rows_and_views() -> None:
    logits = torch.randn(6, 300)
    table = torch.zeros(2, WORDS, dtype=torch.int64)  # greedy
    slots = torch.tensor([0, -1, 1])
    for general in (False, True):
        tokens, outcome = torch.full_like(slots, -7), torch.full((3,), 7, dtype=torch.uint8)
        ops.sample(logits[::2, 100:250], slots, slots, table, general, tokens, outcome)
        best = logits[::2, 100:250].argmax(-1)
        assert tokens.tolist() == [int(best[0]), 0, int(best[2])]
        assert not outcome.any()


@given(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_greatest_keys_of_parts_are_those_of_whole_rows(seed: int, parts: int, dtype: torch.dtype) -> None:
    """With ties within and across parts, values of both signs, zeros of both signs, and rows that are not finite."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (40, 97), generator=rng).to(dtype) / 2 - 2 * (seed % 2)
    logits[torch.rand(40, 97, generator=rng) < 0.05] *= -0.0
    for row, value in ((3, math.nan), (4, math.inf), (5, -math.inf)):
        logits[row, int(torch.randint(97, (), generator=rng))] = value
    logits[6] = -math.inf
    logits[7, 50:] = -math.inf
    slots = torch.arange(40) - 1
    wanted = torch.empty(40, dtype=torch.int64), torch.empty(40, dtype=torch.uint8)
    ops.sample(logits, slots, slots, torch.zeros(40, WORDS, dtype=torch.int64), False, *wanted)
    found = torch.empty(40, dtype=torch.int64), torch.empty(40, dtype=torch.uint8)
    borders = [97 * part // parts for part in range(parts + 1)]
    keys = torch.empty(parts, 40, dtype=torch.int64)
    for part, (first, end) in enumerate(itertools.pairwise(borders)):
        ops.argmax(logits[:, first:end], first, keys[part])
    ops.chosen(keys.amax(0), slots, *found)
    assert torch.equal(found[1], wanted[1])
    assert wanted[1].bool().sum() == 3
    assert torch.equal(found[0], wanted[0])


def test_tokens_of_parts_are_checked() -> None:
    logits, keys = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits: tokens 4194300 to 4194309, not 0 to 4194303"):
        ops.argmax(logits, 4194300, keys)
    with pytest.raises(ValueError, match="keys: rows is 1, logits has 2"):
        ops.argmax(logits, 0, keys[:1])
    with pytest.raises(ValueError, match="slots: rows is 1, keys has 2"):
        ops.chosen(keys, keys[:1], keys.clone(), torch.zeros(2, dtype=torch.uint8))


def test_shapes_and_indices_are_checked() -> None:
    logits, slots = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64)
    table, outcome = torch.zeros(4, WORDS, dtype=torch.int64), torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="known: rows is 1, logits has 2"):
        ops.sample(logits, slots, slots[:1], table, True, slots.clone(), outcome)
    with pytest.raises(ValueError, match="words of a slot is 7"):
        ops.sample(logits, slots, slots, table[:, :7], True, slots.clone(), outcome)
    with pytest.raises(ValueError, match="outcome: dtype is Long"):
        ops.sample(logits, slots, slots, table, True, slots.clone(), slots.clone())
    with pytest.raises(IndexError, match=r"slots\[1\] is 4, not in \[-1, 4\)"):
        ops.sample(logits, torch.tensor([0, 4]), slots, table, True, slots.clone(), outcome)
    with pytest.raises(ValueError, match="logits: dtype is Long"):
        ops.sample(logits.long(), slots, slots, table, True, slots.clone(), outcome)


def test_outcomes_tell_a_broken_model_from_an_impossible_request() -> None:
    """The outcome blames the model if the raw logits are not finite, else the request."""
    vocab, inf, nan = 2003, math.inf, math.nan
    allowed = torch.full((vocab,), FORBIDDEN, dtype=torch.int32)
    allowed[5] = STOP  # the only allowed token is a stop token, masked before min_tokens
    seen = torch.full((vocab,), IN_PROMPT - 2**32, dtype=torch.int32)
    wishes: list[dict[str, float]] = [
        {"marks": allowed.data_ptr(), "min_tokens": 1},
        {"marks": allowed.data_ptr(), "min_tokens": 0},
        {"marks": seen.data_ptr(), "repetition": 1e-320},  # 0 as float32: every positive logit becomes infinite
        {},
    ]
    wishes = [wish | {"scale": scale} for wish in wishes for scale in (0.0, 1.0)]
    for dtype in DTYPES:
        for bad, wanted in (
            ({}, [NOTHING_ALLOWED, CHOSEN, NOTHING_ALLOWED, CHOSEN]),
            ({5: nan}, [NOT_FINITE] * 4),
            ({5: inf}, [NOT_FINITE] * 4),
            ({5: -inf}, [NOTHING_ALLOWED, NOTHING_ALLOWED, NOTHING_ALLOWED, CHOSEN]),
            (dict.fromkeys(range(vocab), -inf), [NOT_FINITE] * 4),
        ):
            logits = torch.randn(len(wishes), vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
            for token, value in bad.items():
                logits[:, token] = value
            tokens, outcome = sample(logits, wishes)
            assert outcome[::2].tolist() == outcome[1::2].tolist() == wanted, (dtype, bad)
            assert not tokens[outcome != CHOSEN].any()
            assert (tokens[2:4] == (5 if wanted[1] == CHOSEN else 0)).all()


# -------------------------------------------------------------------------------------------------------------- masks


def packed(allowed: np.ndarray) -> np.ndarray:
    """[., ceil(V / 32)] i32 of [., V] bool.  The bits past V are ones, to test that no token is sampled from there."""
    rows, vocab = allowed.shape
    bits = np.ones((rows, -(-vocab // 32) * 32), bool)
    bits[:, :vocab] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 32, 640, 5003])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_a_mask_is_the_same_as_logits_of_minus_infinity(dtype: torch.dtype, vocab: int, share: float) -> None:
    """Greedy and drawn, with filters and penalties; rows without a mask are unaffected."""
    rng = np.random.default_rng(vocab)
    rows = 60
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).mul(3).to(dtype)
    allowed = rng.random((rows, vocab)) < share
    allowed[np.arange(rows), rng.integers(vocab, size=rows)] = True
    masks = packed(allowed)
    biases = np.zeros((rows, vocab), np.float32)
    biases[:, ::3] = 2
    wishes: list[dict[str, float]] = [
        {
            "scale": [0.0, math.log2(math.e)][i % 2],
            "seed": i,
            "top_k": [0, 3][i // 2 % 2],
            "top_p": [1.0, 0.875][i // 4 % 2],
            **({"bias": biases[i].ctypes.data} if i % 3 == 0 else {}),
        }
        for i in range(rows)
    ]
    masked = [wish | {"mask": masks[i].ctypes.data} for i, wish in enumerate(wishes)]
    tokens, outcome = sample(logits, masked)
    expected, _ = sample(logits.float().masked_fill(~torch.from_numpy(allowed), -math.inf), wishes)
    assert not outcome.any()
    assert tokens.tolist() == expected.tolist()
    assert allowed[np.arange(rows), tokens.numpy()].all()
    mixed, _ = sample(logits, [masked[i] if i % 2 else wish for i, wish in enumerate(wishes)])
    plain, _ = sample(logits, wishes)
    assert mixed[::2].tolist() == plain[::2].tolist()
    assert mixed[1::2].tolist() == tokens[1::2].tolist()


def test_a_mask_of_zeros_allows_nothing() -> None:
    logits = torch.randn(4, 70)
    masks = packed(np.zeros((4, 70), bool))
    wishes: list[dict[str, float]] = [{"scale": scale, "mask": masks[0].ctypes.data} for scale in (0.0, 1.0)]
    tokens, outcome = sample(logits[:2], wishes)
    assert outcome.tolist() == [NOTHING_ALLOWED] * 2
    assert tokens.tolist() == [0, 0]
    logits[0, 5] = math.nan
    tokens, outcome = sample(logits[:2], wishes)
    assert outcome.tolist() == [NOT_FINITE, NOTHING_ALLOWED]
