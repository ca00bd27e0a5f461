"""Sampling against naive references, exact distributions, and itself in other company."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from quire.engine.core.plan import Sampler
from quire.engine.executor import ops
from quire.engine.executor.sampling import CHOSEN, NOT_FINITE, Report, SamplerBank, logprobs_of
from quire.engine.wire.messages import Sampling, TokenLogprob

VOCAB = 1000
PROMPT = 10
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    ops.load()


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def bank_of(samplers: dict[int, Sampler], vocab: int = VOCAB) -> SamplerBank:
    bank = SamplerBank(max_seqs=max(samplers, default=0) + 1, vocab_size=vocab, device=torch.device("cpu"))
    for slot, sampler in samplers.items():
        bank.assign(slot, sampler)
    return bank


class Sampled(NamedTuple):
    tokens: Tensor
    outcome: Tensor
    logprobs: dict[int, TokenLogprob]


def sample(bank: SamplerBank, logits: Tensor, who: tuple[int, ...], slots: Tensor, known: Tensor) -> Sampled:
    bank.flush()
    tokens, outcome = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.uint8)
    bank.run(logits, slots, known, tokens, outcome, bank.general)
    found = bank.logprobs(logits, who, tokens)
    return Sampled(tokens, outcome, found.by_slot() if found else {})


def choose(
    logits: Tensor, samplings: list[Sampling], *, outputs: int = 0, stop_ids: list[int] | None = None
) -> Sampled:
    """One token for each row of logits, every row with PROMPT prompt tokens and `outputs` outputs before it."""
    history = list(range(PROMPT + outputs))
    rows = tuple(range(len(samplings)))
    bank = bank_of({i: Sampler(s, PROMPT, stop_ids or [], history) for i, s in enumerate(samplings)}, logits.shape[1])
    return sample(bank, logits, rows, torch.tensor(rows), torch.full((len(rows),), PROMPT + outputs))


def naive(logits: Tensor, s: Sampling) -> Tensor:
    """The distribution [V] f64 that a row samples from, written the slow and obvious way."""
    p = (logits.double() / s.temperature).softmax(-1)
    if s.top_k:
        p[p < p.sort(descending=True).values[s.top_k - 1]] = 0
        p /= p.sum()
    if s.top_p < 1:
        likeliest = p.sort(descending=True)
        before = likeliest.values.cumsum(-1) - likeliest.values
        p[likeliest.indices[before >= s.top_p]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


MIXES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    Sampling(temperature=2.0, top_k=1),
]


@pytest.mark.parametrize("s", MIXES, ids=str)
def test_samples_follow_the_exact_distribution(s: Sampling) -> None:
    """Chi-square over 20,000 draws of one row, with bins of an expected count of at least 5. 1 in 10^5 would fail by
    chance; the seeds are fixed, so none does."""
    count, vocab = 20_000, 60
    row = logits_of(1, vocab, seed=3, scale=1.5)
    tokens = choose(row.expand(count, -1), [msgspec.structs.replace(s, seed=i) for i in range(count)]).tokens
    seen, expected = torch.bincount(tokens, minlength=vocab).double(), naive(row[0], s) * count
    assert seen[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([seen[~rare], seen[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    statistic = float(((observed - wanted)[keep] ** 2 / wanted[keep]).sum())
    freedom = int(keep.sum()) - 1
    # Wilson-Hilferty: the quantile of chi-square that a normal variable exceeds once in 10^5.
    assert statistic <= freedom * (1 - 2 / (9 * max(freedom, 1)) + 4.27 * math.sqrt(2 / (9 * max(freedom, 1)))) ** 3


@pytest.mark.parametrize("vocab", [256, 999, 16_000])
def test_a_token_never_depends_on_the_batch(vocab: int) -> None:
    """Bit for bit: 40 rows with mixed wishes together, alone, in pairs and backwards give the same tokens."""
    rng = random.Random(0)
    logits = logits_of(40, vocab, 5)
    samplers = {
        row: Sampler(
            Sampling(
                temperature=rng.choice([0, 0.3, 1.0, 5.0]),
                top_p=rng.choice([1.0, 0.9, 0.5]),
                top_k=rng.choice([0, 3, 100]),
                min_p=rng.choice([0, 0.01]),
                seed=rng.randrange(2**63),
                frequency_penalty=rng.choice([0, 0, 0.5]),
                repetition_penalty=rng.choice([1, 1, 1.2]),
            ),
            PROMPT,
            [],
            list(range(PROMPT + row % 5)),
            sibling=row % 3,
        )
        for row in range(40)
    }
    known = torch.tensor([PROMPT + row % 5 for row in range(40)])
    together = sample(bank_of(samplers, vocab), logits, tuple(range(40)), torch.arange(40), known).tokens.tolist()
    for size in (1, 2, 7):
        for first in range(0, 40, size):
            rows = list(range(first, min(first + size, 40)))[::-1]
            bank = bank_of(samplers, vocab)
            got = sample(bank, logits[rows], tuple(rows), torch.tensor(rows), known[rows]).tokens.tolist()
            assert got == [together[row] for row in rows]


def test_greedy_takes_the_first_of_equals() -> None:
    """As argmax does; in bfloat16 the most probable tokens are often equal."""
    logits = logits_of(64, seed=8).clamp(max=2.0).bfloat16()
    assert choose(logits, [GREEDY] * 64).tokens.tolist() == logits.argmax(-1).tolist()
    assert choose(logits, [Sampling(temperature=0, min_tokens=1)] * 64).tokens.tolist() == logits.argmax(-1).tolist()


def test_greedy_rows_among_others() -> None:
    logits = logits_of(4)
    best = logits.argmax(-1).tolist()
    assert choose(logits, [GREEDY] * 4).tokens.tolist() == best
    mixed = [GREEDY, Sampling(temperature=1, seed=1), GREEDY, Sampling(temperature=0, logit_bias=[(7, 100.0)])]
    got = choose(logits, mixed).tokens.tolist()
    assert (got[0], got[2], got[3]) == (best[0], best[2], 7)
    assert choose(logits.bfloat16(), [GREEDY] * 4).tokens.tolist() == logits.bfloat16().argmax(-1).tolist()


def test_penalties_equal_transformers_and_the_formula() -> None:
    logits = logits_of(3)
    history = [3, 4, 4, 5, *range(20, 26), 7, 7, 7, 3]  # ten of prompt, four of output
    repetition = RepetitionPenaltyLogitsProcessor(1.5)
    s = [
        Sampling(temperature=0, repetition_penalty=1.5, logprobs=0),
        Sampling(temperature=0, presence_penalty=1.5),
        Sampling(temperature=0, frequency_penalty=1.5),
    ]
    logits[:, 7] = logits.max() + 2.0  # the token that is penalised most would win without
    logits[0, 3] = -1.0
    adjusted = [
        repetition(torch.tensor([history]), logits[:1])[0],
        logits[1] - 1.5 * torch.isin(torch.arange(VOCAB), torch.tensor(history[10:])),
        logits[2] - 1.5 * torch.bincount(torch.tensor(history[10:]), minlength=VOCAB),
    ]
    bank = bank_of({i: Sampler(one, PROMPT, [], history) for i, one in enumerate(s)})
    # The order of the tokens shows the adjusted logits, when the bias forbids each one after it was chosen.
    for _ in range(30):
        tokens = sample(bank, logits, (0, 1, 2), torch.arange(3), torch.full((3,), 14)).tokens.tolist()
        assert tokens == [int(x.argmax()) for x in adjusted]
        for i, token in enumerate(tokens):
            adjusted[i][token] = -math.inf
            s[i] = msgspec.structs.replace(s[i], logit_bias=[*s[i].logit_bias, (token, -1e6)])
            bank.assign(i, Sampler(s[i], PROMPT, [], history))


def test_counts_grow_with_what_is_sampled_and_rows_are_recycled() -> None:
    """With logits that never change, a frequency penalty walks down the ranking, one token after another."""
    logits = torch.arange(0, -VOCAB, -1).float()[None] * 0.1
    s = Sampling(temperature=0, frequency_penalty=2.0)
    bank = SamplerBank(max_seqs=11, vocab_size=VOCAB, device=torch.device("cpu"))
    bank.assign(0, Sampler(s, PROMPT, [], list(range(900, 910))))
    known, want, counts = PROMPT, [], torch.zeros(VOCAB)
    got = []
    rows = (0,)
    for _ in range(30):
        token = int((logits[0] - 2.0 * counts).argmax())
        counts[token] += 1
        want.append(token)
        got += sample(bank, logits, rows, torch.tensor(rows), torch.tensor([known])).tokens.tolist()
        known += 1
    assert got == want
    for slot in (5, 6, 7, 8, 9, 10):  # more than the pool's first size; the last reuses the place of slot 0
        bank.free(slot - 5)
        bank.assign(slot, Sampler(s, PROMPT, [], list(range(PROMPT))))
        assert sample(bank, logits, (slot,), torch.tensor([slot]), torch.tensor([PROMPT])).tokens.tolist() == [0]


def test_masks_and_bias() -> None:
    logits = logits_of(4)
    best = logits.argmax(-1).tolist()
    s = [
        Sampling(temperature=0, allowed_token_ids=[5, 6]),
        Sampling(temperature=0, min_tokens=3),
        Sampling(temperature=0, logit_bias=[(best[2], -100.0)]),
        Sampling(temperature=1.0, allowed_token_ids=[8]),
    ]
    got = choose(logits, s, outputs=2, stop_ids=[best[1]]).tokens.tolist()
    assert got[0] == (5 if logits[0, 5] > logits[0, 6] else 6)
    assert got[1] == logits[1].topk(2).indices.tolist()[1]  # two outputs so far: the stop token is masked
    assert got[2] == logits[2].topk(2).indices.tolist()[1]
    assert got[3] == 8
    assert choose(logits, s, outputs=3, stop_ids=[best[1]]).tokens.tolist()[1] == best[1]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(3)
    s = [Sampling(temperature=0.5, seed=4, logprobs=3, top_k=2), GREEDY, Sampling(temperature=0, logprobs=0)]
    got = choose(logits, s)
    wanted = logits.log_softmax(-1)
    assert set(got.logprobs) == {0, 2}
    token = int(got.tokens[0])
    assert got.logprobs[0].logprob == pytest.approx(float(wanted[0, token]), abs=1e-5)
    assert [t for t, _ in got.logprobs[0].top] == wanted[0].topk(3).indices.tolist()
    assert [v for _, v in got.logprobs[0].top] == pytest.approx(wanted[0].topk(3).values.tolist(), abs=1e-5)
    assert got.logprobs[2].top == []
    assert len(logprobs_of(logits_of(150), torch.zeros(150, dtype=torch.int64), [Report(0, 2)] * 150).entries()) == 150


def test_logprobs_of_named_tokens_replace_the_likeliest() -> None:
    """In the order asked for, of the raw logits, among rows that ask for the most probable or for nothing."""
    logits = logits_of(4)
    rare = logits.argmin(-1).tolist()
    s = [
        Sampling(temperature=1.0, seed=4, logprobs=3, logprob_token_ids=[9, rare[0], 7], top_k=2),
        GREEDY,
        Sampling(temperature=0, logprobs=2),
        Sampling(temperature=0, logprobs=0, logprob_token_ids=[rare[3]], allowed_token_ids=[5]),
    ]
    assert [one.alternatives for one in s] == [3, -1, 2, 1]
    for kind in (torch.float32, torch.bfloat16):
        got, wanted = choose(logits.to(kind), s), logits.to(kind).float().log_softmax(-1)
        for row, named in ((0, [9, rare[0], 7]), (3, [rare[3]])):
            found = got.logprobs[row]
            assert found.logprob == pytest.approx(float(wanted[row, got.tokens[row]]), abs=1e-5)
            assert [token for token, _ in found.top] == named
            assert [value for _, value in found.top] == pytest.approx(wanted[row, named].tolist(), abs=1e-5)
        assert [t for t, _ in got.logprobs[2].top] == wanted[2].topk(2).indices.tolist()
        assert set(got.logprobs) == {0, 2, 3}


def test_logprobs_of_named_tokens_of_more_rows_than_one_part_has() -> None:
    logits, tokens = logits_of(150, 60), torch.arange(150) % 60
    asked = [Report(row, 0, tuple(range(row % 3))) if row % 3 else Report(row, 2) for row in range(150)]
    found, wanted = logprobs_of(logits, tokens, asked).by_slot(), logits.log_softmax(-1)
    for row, report in enumerate(asked):
        named = list(report.named) or wanted[row].topk(2).indices.tolist()
        assert found[row].logprob == pytest.approx(float(wanted[row, tokens[row]]), abs=1e-5)
        assert [token for token, _ in found[row].top] == named
        assert [value for _, value in found[row].top] == pytest.approx(wanted[row, named].tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("s", [GREEDY, Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=0, min_tokens=1)])
def test_rows_that_are_not_finite_are_reported(bad: float, s: Sampling) -> None:
    logits = logits_of(3)
    logits[1, 77] = bad
    got = choose(logits, [s] * 3)
    assert got.outcome.tolist() == [CHOSEN, NOT_FINITE, CHOSEN]
    assert int(got.tokens[1]) == 0  # an id the next step can be fed
    every = logits_of(2)
    every[0] = float("-inf")
    assert choose(every, [s] * 2).outcome.tolist() == [NOT_FINITE, CHOSEN]
