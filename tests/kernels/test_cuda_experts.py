"""A mixture of experts on a GPU, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quire.engine.executor import ops
from quire.engine.executor.models.quantised.dequantise import dequantise_mxfp4
from tests.kernels.test_cuda_linear import CUDA, error, randn

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top"), [(2, 2), (8, 2), (60, 4), (128, 8), (200, 32), (512, 10)])
@pytest.mark.parametrize("tokens", [1, 7, 700])
def test_routes(dtype: torch.dtype, experts: int, top: int, tokens: int) -> None:
    """The largest logits, of equal ones the first; their shares of all."""
    logits = (4 * randn(tokens, experts, dtype=dtype)).round()  # many are equal
    shares = logits.double().softmax(-1)
    order = torch.argsort(logits.double(), dim=-1, descending=True, stable=True)[:, :top]
    for normalise, rounded in ((False, False), (True, False), (True, True)):
        chosen, weights = ops.route(logits, top, normalise=normalise, rounded=rounded)
        assert torch.equal(chosen.long(), order)
        wanted = shares.gather(1, order)
        if normalise:
            wanted = wanted / wanted.sum(-1, keepdim=True)
        step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # between numbers below the normal ones
        rtol, atol = (torch.finfo(dtype).eps, step) if rounded else (1e-5, 0.0)
        torch.testing.assert_close(weights.double(), wanted, rtol=rtol, atol=atol)
        assert not rounded or torch.equal(weights.to(dtype).float(), weights)


def test_numbers_that_are_not_finite_route_to_experts_that_exist() -> None:
    logits = randn(4, 40, dtype=torch.bfloat16)
    logits[0, 3], logits[1], logits[2, 5] = math.nan, math.nan, math.inf
    logits[3] = -math.inf
    chosen, weights = ops.route(logits, 8, normalise=True, rounded=True)
    assert ((chosen >= 0) & (chosen < 40)).all()
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    assert weights.isnan().any(1).all()


def made(count: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        randn(count, 2 * inner, hidden, dtype=dtype) / math.sqrt(hidden),
        randn(count, hidden, inner, dtype=dtype) / math.sqrt(inner),
    )


def exact(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamped: ops.Clamped | None = None,
) -> torch.Tensor:
    """What `ops.experts` adds, in float64, rounded to x's dtype where it is: arguments as there."""
    result = torch.zeros_like(x, dtype=torch.float64)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        both = x[tokens].double() @ gate_up[expert].double().T
        if gate_up_bias is not None:
            both += gate_up_bias[expert].double()
        if clamped is None:
            gate, up = both.to(x.dtype).double().chunk(2, -1)
            between = torch.nn.functional.silu(gate).to(x.dtype).double() * up
        else:
            gate, up = both[:, ::2].clamp(max=clamped.limit), both[:, 1::2].clamp(-clamped.limit, clamped.limit)
            between = gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)
        y = between.to(x.dtype).double() @ down[expert].double().T
        if down_bias is not None:
            y += down_bias[expert].double()
        result.index_add_(0, tokens, weights[tokens, places].double()[:, None] * y)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "top", "hidden", "inner"),
    [
        *((4, 2, 64, 40), (8, 2, 256, 512), (128, 8, 2048, 768), (16, 4, 1000, 104), (8, 8, 8, 8)),
        # Rows of 1, 5, 7 and 9 slabs of 64 values, with 4 slabs per stage.  With few rows some CTAs have no items.
        *((1, 1, 64, 64), (300, 8, 320, 448), (5, 3, 576, 64)),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2, 5, 9, 17, 33, 64])
def test_experts(tokens: int, count: int, top: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    """With sizes that are multiples of 64, which have kernels of their own on Hopper, and others."""
    x, plus = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype)
    weights = made(count, hidden, inner, dtype)
    chosen, shares = ops.route(randn(tokens, count, dtype=dtype), top, normalise=True, rounded=False)
    before = plus.clone()
    alone = ops.experts(x, chosen, shares, *weights)
    assert torch.equal(alone, ops.experts(x, chosen, shares, *weights, torch.zeros_like(x)))
    assert ops.experts(x, chosen, shares, *weights, plus) is plus
    # A result and a sum are rounded, and what is between them three times.
    assert error(plus, before.double() + exact(x, chosen, shares, *weights)) < 2 * torch.finfo(dtype).eps


CLAMPED = ops.Clamped(alpha=1.702, limit=7.0)


def skip_unless_taken(pairs: int, hidden: int, inner: int) -> None:
    if pairs > ops.MAX_PAIRS and not ops.takes_all_pairs(hidden, inner, CUDA):
        pytest.skip("more pairs than this GPU's kernel takes with these sizes")


def leave_nan() -> None:
    """Give NaN back to torch's allocator, which hands it out again: what a kernel does not write is then NaN."""
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 27):
        torch.full((size,), math.nan, dtype=torch.bfloat16, device=CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "top", "hidden", "inner"),
    # Fewer rows than an item has, more than one item with the last not full, slabs fewer and more than stages.
    [(8, 2, 64, 64), (16, 4, 320, 448), (128, 8, 512, 192), (300, 6, 576, 64), (512, 10, 128, 128), (1, 1, 256, 320)],
)
@pytest.mark.parametrize("tokens", [27, 65, 97, 129, 193, 300, 513, 820, 1025, 2048, 4096])
def test_any_number_of_tokens(tokens: int, count: int, top: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    """On Hopper, with sizes that are multiples of 64.  Up to 8,192 pairs one CTA sorts them."""
    skip_unless_taken(tokens * top, hidden, inner)
    x, plus = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype)
    weights = made(count, hidden, inner, dtype)
    chosen, shares = ops.route(randn(tokens, count, dtype=dtype), top, normalise=True, rounded=False)
    before = plus.clone()
    leave_nan()
    assert ops.experts(x, chosen, shares, *weights, plus) is plus
    assert error(plus, before.double() + exact(x, chosen, shares, *weights)) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "top", "hidden", "inner"),
    [(4, 2, 64, 40), (32, 4, 2880, 2880), (16, 4, 1000, 104), (8, 8, 8, 8), (20, 3, 512, 384), (7, 2, 320, 64)],
)
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 64, 170, 1000])
def test_clamped_experts_with_biases(
    tokens: int, count: int, top: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    """As gpt-oss has them.  Inputs are so large that either clamp acts on a part of the values."""
    skip_unless_taken(tokens * top, hidden, inner)
    x, plus = 4 * randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype)
    weights = made(count, hidden, inner, dtype)
    biases: dict[str, Any] = {
        "gate_up_bias": 4 * randn(count, 2 * inner, dtype=dtype),
        "down_bias": 4 * randn(count, hidden, dtype=dtype),
    }
    chosen, shares = ops.route(randn(tokens, count, dtype=dtype), top, normalise=True, rounded=True)
    before = plus.clone()
    assert ops.experts(x, chosen, shares, *weights, plus, **biases, clamped=CLAMPED) is plus
    wanted = before.double() + exact(x, chosen, shares, *weights, **biases, clamped=CLAMPED)
    assert error(plus, wanted) < 2 * torch.finfo(dtype).eps
    for name in biases:
        without = before.double() + exact(x, chosen, shares, *weights, **biases | {name: None}, clamped=CLAMPED)
        assert error(plus, without) > 0.05


@pytest.mark.parametrize("clamped", [None, CLAMPED])
@pytest.mark.parametrize("biased", [{"gate_up_bias"}, {"down_bias"}, set()])
def test_every_activation_with_either_bias(clamped: ops.Clamped | None, biased: set[str]) -> None:
    x, weights = 3 * randn(19, 256, dtype=torch.bfloat16), made(8, 256, 136, torch.bfloat16)
    biases: dict[str, Any] = {
        name: randn(8, size, dtype=torch.bfloat16)
        for name, size in (("gate_up_bias", 272), ("down_bias", 256))
        if name in biased
    }
    chosen, shares = ops.route(randn(19, 8, dtype=torch.bfloat16), 4, normalise=True, rounded=False)
    out = ops.experts(x, chosen, shares, *weights, torch.zeros_like(x), **biases, clamped=clamped)
    assert error(out, exact(x, chosen, shares, *weights, **biases, clamped=clamped)) < 2 * torch.finfo(x.dtype).eps


def test_clamping_keeps_nan_and_takes_infinities() -> None:
    """A gate of -inf is NaN in torch, too: -inf times a sigmoid of 0."""
    x = torch.ones(1, 8, dtype=torch.bfloat16, device=CUDA)
    gate_up, down = torch.zeros(1, 16, 8, dtype=x.dtype, device=CUDA), torch.eye(8, dtype=x.dtype, device=CUDA)[None]
    bias = torch.zeros(1, 16, dtype=x.dtype, device=CUDA)
    bias[0, ::2] = torch.tensor([math.nan, 1, math.inf, 1, 1, -300, 300, -math.inf])
    bias[0, 1::2] = torch.tensor([1, math.nan, 0, math.inf, -math.inf, 1, -300, 1])
    chosen = torch.zeros(1, 1, dtype=torch.int32, device=CUDA)
    # One of the eight at a time: NaN times 0 of another row of `down` is NaN.
    for row in range(8):
        of_row = torch.zeros_like(down)
        of_row[0, :, row] = 1
        only = bias.clone()
        only[0, [at for at in range(16) if at // 2 != row]] = 0
        out = ops.experts(
            x,
            chosen,
            torch.ones(1, 1, device=CUDA),
            gate_up,
            of_row,
            torch.zeros_like(x),
            gate_up_bias=only,
            clamped=CLAMPED,
        )
        gate, up = only[0, 2 * row].double(), only[0, 2 * row + 1].double()
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        wanted = (gate * torch.sigmoid(1.702 * gate) * (up + 1)).expand(8)
        torch.testing.assert_close(out[0].double(), wanted, rtol=0.01, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("hidden", "inner"), [(512, 384), (200, 72)])
@pytest.mark.parametrize("tokens", [1, 6, 8, 9, 16, 17, 32, 33, 64, 65, 170, 193, 400, 3000])
def test_tokens_that_all_want_the_same_experts(tokens: int, hidden: int, inner: int) -> None:
    """In tiles of up to eight pairs, or of up to 192; the last one is not full.  17 experts are empty."""
    skip_unless_taken(tokens * 3, hidden, inner)
    x, weights = randn(tokens, hidden, dtype=torch.bfloat16), made(20, hidden, inner, torch.bfloat16)
    chosen = torch.tensor([[19, 0, 7]] * tokens, dtype=torch.int32, device=CUDA)
    shares = torch.rand(tokens, 3, device=CUDA)
    out = ops.experts(x, chosen, shares, *weights, torch.zeros_like(x))
    assert error(out, exact(x, chosen, shares, *weights)) < 2 * torch.finfo(torch.bfloat16).eps


def skewed(kind: str, tokens: int, count: int, top: int) -> torch.Tensor:
    """The experts of each token, all different.  zipf: expert i is 1 / (i + 1) times as likely as expert 0.
    hot: all tokens have the expert in the middle, and any of the others."""
    share = torch.ones(count, device=CUDA)
    if kind == "zipf":
        share /= torch.arange(1, count + 1, device=CUDA)
        return torch.multinomial(share.expand(tokens, -1), top).int()
    share[count // 2] = 0
    others = torch.multinomial(share.expand(tokens, -1), top - 1).int()
    return torch.cat([others, torch.full_like(others[:, :1], count // 2)], 1)


@pytest.mark.parametrize("kind", ["zipf", "hot"])
@pytest.mark.parametrize(
    ("count", "top", "hidden", "inner"),
    [(128, 8, 2048, 768), (32, 4, 2880, 2880), (500, 3, 64, 128), (24, 6, 576, 320), (24, 6, 200, 72)],
)
@pytest.mark.parametrize("tokens", [2, 16, 33, 64, 250, 1500])
def test_skewed_routing(tokens: int, count: int, top: int, hidden: int, inner: int, kind: str) -> None:
    """Experts with one pair and with as many as there are tokens, in one call."""
    skip_unless_taken(tokens * top, hidden, inner)
    x, weights = randn(tokens, hidden, dtype=torch.bfloat16), made(count, hidden, inner, torch.bfloat16)
    chosen, shares = skewed(kind, tokens, count, top), torch.rand(tokens, top, device=CUDA)
    out = ops.experts(x, chosen, shares, *weights, torch.zeros_like(x))
    assert error(out, exact(x, chosen, shares, *weights)) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("count", "hidden", "inner"), [(24, 512, 256), (8, 512, 256), (24, 200, 72)])
def test_a_token_does_not_depend_on_the_others(count: int, hidden: int, inner: int) -> None:
    """Of 8 experts some have over 32 of the 240 pairs, which are computed 32 at a time."""
    x, weights = randn(40, hidden, dtype=torch.bfloat16), made(count, hidden, inner, torch.bfloat16)
    chosen, shares = ops.route(randn(40, count, dtype=torch.bfloat16), 6, normalise=False, rounded=True)
    clamped: dict[str, Any] = {
        "gate_up_bias": randn(count, 2 * inner, dtype=torch.bfloat16),
        "down_bias": randn(count, hidden, dtype=torch.bfloat16),
        "clamped": CLAMPED,
    }
    for options in ({}, clamped):
        together = ops.experts(x, chosen, shares, *weights, torch.zeros_like(x), **options)
        for first, end in [(0, 1), (1, 3), (3, 20), (20, 40)]:
            part = slice(first, end)
            alone = ops.experts(x[part], chosen[part], shares[part], *weights, torch.zeros_like(x[part]), **options)
            assert torch.equal(alone, together[part])


@pytest.mark.parametrize("experts", [20, 200])
@pytest.mark.parametrize("clamped", [None, CLAMPED])
def test_a_token_among_many_does_not_depend_on_the_others(clamped: ops.Clamped | None, experts: int) -> None:
    """With more than 256 pairs in each call, which all take one kernel."""
    skip_unless_taken(9000, 320, 192)
    x, weights = randn(1500, 320, dtype=torch.bfloat16), made(experts, 320, 192, torch.bfloat16)
    chosen, shares = ops.route(randn(1500, experts, dtype=torch.bfloat16), 6, normalise=False, rounded=True)
    together = ops.experts(x, chosen, shares, *weights, torch.zeros_like(x), clamped=clamped)
    for first, end in [(0, 43), (43, 200), (200, 1500)]:
        part = slice(first, end)
        alone = ops.experts(x[part], chosen[part], shares[part], *weights, torch.zeros_like(x[part]), clamped=clamped)
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (200, 72)])
@pytest.mark.parametrize("tokens", [1, 9, 64, 100, 900, 3000])
def test_replayed_in_a_graph(tokens: int, hidden: int, inner: int) -> None:
    """Eight layers with other experts than those that were chosen while they were captured.

    Kernels start before those in front have ended.  A layer's choice is stored where that of the layer before was."""
    skip_unless_taken(tokens * 4, hidden, inner)
    layers = [made(32, hidden, inner, torch.bfloat16) for _ in range(8)]
    x, logits = randn(tokens, hidden, dtype=torch.bfloat16), randn(8, tokens, 32, dtype=torch.bfloat16)

    def run(*, wait: bool) -> torch.Tensor:
        y = x.clone()
        for layer, weights in enumerate(layers):
            chosen = ops.route(logits[layer], 4, normalise=True, rounded=True)
            if wait:
                torch.cuda.synchronize()
            ops.experts(y, *chosen, *weights, y)
            del chosen
        return y

    run(wait=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(wait=False)
    for _ in range(20):
        x.copy_(randn(tokens, hidden, dtype=torch.bfloat16))
        logits.copy_(randn(8, tokens, 32, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(out, run(wait=True))


def test_what_does_not_fit_is_refused() -> None:
    x, (gate_up, down) = randn(65, 64, dtype=torch.bfloat16), made(8, 64, 32, torch.bfloat16)
    assert not ops.takes_all_pairs(64, 32, x.device)
    chosen, shares = ops.route(randn(65, 8, dtype=torch.bfloat16), 8, normalise=True, rounded=True)
    with pytest.raises(ValueError, match="520 experts of all tokens, the maximum is 512"):
        ops.experts(x, chosen, shares, gate_up, down, torch.zeros_like(x))
    with pytest.raises(ValueError, match="600 experts, the maximum is 512"):
        ops.route(randn(1, 600, dtype=torch.bfloat16), 2, normalise=True, rounded=True)
    with pytest.raises(ValueError, match="9 experts of a token"):
        ops.route(randn(1, 8, dtype=torch.bfloat16), 9, normalise=True, rounded=True)
    with pytest.raises(ValueError, match="gate and up rows"):
        ops.experts(x[:2], chosen[:2], shares[:2], gate_up[:, :-2].contiguous(), down, torch.zeros_like(x[:2]))
    with pytest.raises(ValueError, match="needs BFloat16 or Half"):
        ops.route(torch.zeros(1, 8, device=CUDA), 2, normalise=True, rounded=True)
    many = torch.zeros(513, 8, 8, dtype=x.dtype, device=CUDA)
    with pytest.raises(ValueError, match="down: 513 experts, the maximum is 512"):
        ops.experts(many[0, :1], chosen[:1], shares[:1], many.repeat(1, 2, 1), many, many[1, :1])
    few = (x[:2], chosen[:2], shares[:2], gate_up, down, torch.zeros_like(x[:2]))
    with pytest.raises(ValueError, match="gate_up_bias: gate and up rows is 32, down has 64"):
        ops.experts(*few, gate_up_bias=x.new_zeros(8, 32))
    with pytest.raises(ValueError, match="down_bias: experts is 7"):
        ops.experts(*few, down_bias=x.new_zeros(7, 64))
    with pytest.raises(ValueError, match="down_bias: dtype is Float, x has BFloat16"):
        ops.experts(*few, down_bias=torch.zeros(8, 64, device=CUDA))
    with pytest.raises(ValueError, match="gate_up_bias: is on cpu"):
        ops.experts(*few, gate_up_bias=torch.zeros(8, 64, dtype=x.dtype))
    with pytest.raises(ValueError, match="gate_up_bias: is not contiguous"):
        ops.experts(*few, gate_up_bias=x.new_zeros(64, 8).T)
    with pytest.raises(ValueError, match="limit: 0 is not over 0"):
        ops.experts(*few, clamped=ops.Clamped(1.702, 0.0))
    with pytest.raises(ValueError, match="alpha: nan is not finite"):
        ops.experts(*few, clamped=ops.Clamped(math.nan, 7.0))
    with pytest.raises(ValueError, match="activation: gelu is neither silu nor clamped"):
        torch.ops.quire.experts.default(*few[:4], None, down, None, "gelu", 0.0, 0.0, True, few[-1])


def takes_packed(hidden: int, inner: int) -> None:
    if not ops.takes_all_pairs(hidden, inner, CUDA):
        pytest.skip("packed experts need a Hopper GPU")


PACKED_SIZES = [(8, 2, 128, 64), (32, 4, 320, 448), (5, 3, 576, 192), (32, 4, 2880, 2880)]
PACKED_TOKENS = [1, 2, 7, 33, 64, 130, 300, 1000]


@pytest.mark.parametrize(("count", "top", "hidden", "inner"), PACKED_SIZES)
@pytest.mark.parametrize("tokens", PACKED_TOKENS)
def test_experts_in_mxfp4(tokens: int, count: int, top: int, hidden: int, inner: int) -> None:
    """As near to float64 as bf16 experts, with equal bits for a token alone; scales up to the largest."""
    takes_packed(hidden, inner)
    stored = [
        (
            torch.randint(0, 256, (count, rows, size // 32, 16), dtype=torch.uint8, device=CUDA),
            torch.randint(118, 124, (count, rows, size // 32), dtype=torch.uint8, device=CUDA),
        )
        for rows, size in ((2 * inner, hidden), (hidden, inner))
    ]
    stored[0][1][0, 5], stored[0][1][0, 7] = ops.LARGEST_SCALE, 0
    packed = [ops.pack_mxfp4(*weight, interleaved=gate) for weight, gate in zip(stored, (True, False), strict=True)]
    wide = [dequantise_mxfp4(*weight, torch.bfloat16).mT for weight in stored]
    x = randn(tokens, hidden, dtype=torch.bfloat16)
    biases: dict[str, Any] = {
        "gate_up_bias": randn(count, 2 * inner, dtype=x.dtype),
        "down_bias": randn(count, hidden, dtype=x.dtype),
    }
    chosen, shares = ops.route(randn(tokens, count, dtype=x.dtype), top, normalise=True, rounded=True)
    leave_nan()
    out = ops.experts(x, chosen, shares, packed[0], packed[1], torch.zeros_like(x), **biases, clamped=CLAMPED)
    assert error(out, exact(x, chosen, shares, *wide, **biases, clamped=CLAMPED)) < 2 * torch.finfo(x.dtype).eps
    if tokens * top <= 16 * count:  # more pairs per expert take another kernel
        plus = torch.zeros_like(x[:1])
        ops.experts(x[:1], chosen[:1], shares[:1], packed[0], packed[1], plus, **biases, clamped=CLAMPED)
        assert torch.equal(out[:1], plus)


@pytest.mark.parametrize(("count", "top", "hidden", "inner"), PACKED_SIZES)
@pytest.mark.parametrize("tokens", PACKED_TOKENS)
def test_experts_in_fp8(tokens: int, count: int, top: int, hidden: int, inner: int) -> None:
    """Scales of rows for gate and up, of a row's groups for down."""
    takes_packed(hidden, inner)
    values = [weight.to(torch.float8_e4m3fn) for weight in made(count, hidden, inner, torch.float32)]
    groups = 1, inner // ops.TILE
    scales = [torch.rand(*weight.shape[:2], of, device=CUDA) + 0.5 for weight, of in zip(values, groups, strict=True)]
    packed = [ops.pack_fp8(value, scale) for value, scale in zip(values, scales, strict=True)]
    wide = [
        (value.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).bfloat16()
        for value, scale in zip(values, scales, strict=True)
    ]
    x = randn(tokens, hidden, dtype=torch.bfloat16)
    chosen, shares = ops.route(randn(tokens, count, dtype=x.dtype), top, normalise=True, rounded=True)
    leave_nan()
    out = ops.experts(x, chosen, shares, packed[0], packed[1], torch.zeros_like(x))
    assert error(out, exact(x, chosen, shares, *wide)) < 2 * torch.finfo(x.dtype).eps
