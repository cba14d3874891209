"""Each error term against float32 code that does the step; each check shown able to fail."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references import bounds, products
from references.activations import SIMPLE, function
from references.bounds import Interval, exactly, opened, router_weights, store, sum_over_slots, times
from references.formats import limits, saturate, torch_dtype
from references.products import Operand, lowest_bit, scaled
from references.tests.one_matrix import matmul
from references.vocabulary import Accumulator, Activation, Format

SEEDS = st.integers(0, 2**31)
ACCUMULATED = (Format.INT8, Format.E4M3FN, Format.E5M2, Format.BF16, Format.FP16, Format.FP32)


def operand(x: Interval, fmt: Format) -> Operand:
    return products.operand(x, fmt, Accumulator.FP32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grid_values(fmt: Format, rows: int, cols: int, g: torch.Generator, spread: float = 1.0) -> torch.Tensor:
    x = torch.randn(rows, cols, generator=g, dtype=torch.float64) * torch.exp2(spread * torch.randn(rows, cols, generator=g))
    top = 100.0 if fmt in (Format.INT8, Format.E4M3FN, Format.E5M2) else 1.0
    return saturate(x * top / x.abs().max(), fmt)


def fp32_sum(products: torch.Tensor, how: str, g: torch.Generator) -> torch.Tensor:
    """Sum over the last dimension in float32: a random order, pairwise, or the worst order (cancelling pairs last)."""
    order = torch.randperm(products.shape[-1], generator=g)
    products = products.sort(-1).values if how == "sorted" else products[..., order]
    if how != "pairwise":
        total = torch.zeros(products.shape[:-1])
        for k in range(products.shape[-1]):
            total = total + products[..., k]
        return total
    while products.shape[-1] > 1:
        odd = products[..., -1:] if products.shape[-1] % 2 else products[..., :0]
        products = torch.cat([products[..., 0 : products.shape[-1] // 2 * 2 : 2] + products[..., 1::2], odd], -1)
    return products[..., 0]


def holds(interval: Interval, value: torch.Tensor) -> bool:
    return bool(((interval.low <= value) & (value <= interval.high)).all())


# ------------------------------------------------------------------------------------------------------------------ accumulation


@settings(max_examples=60)
@given(
    st.sampled_from(ACCUMULATED),
    st.sampled_from(ACCUMULATED),
    st.integers(1, 200),
    st.sampled_from(["random", "pairwise", "sorted"]),
    st.floats(0, 3),
    SEEDS,
)
def test_every_float32_summation_order_stays_inside(a_fmt: Format, w_fmt: Format, k: int, how: str, spread: float, seed: int) -> None:
    g = generator(seed)
    a, w = grid_values(a_fmt, 3, k, g, spread), grid_values(w_fmt, 4, k, g, spread)
    interval = matmul(operand(exactly(a), a_fmt), operand(exactly(w), w_fmt), Accumulator.FP32)
    products = a.float()[:, None, :] * w.float()[None, :, :]
    assert holds(interval, fp32_sum(products, how, g).double())
    assert holds(interval, a @ w.T)


def test_a_half_precision_accumulator_is_outside() -> None:
    g = generator(0)
    a, w = grid_values(Format.E4M3FN, 8, 128, g), grid_values(Format.E4M3FN, 8, 128, g)
    interval = matmul(operand(exactly(a), Format.E4M3FN), operand(exactly(w), Format.E4M3FN), Accumulator.FP32)
    total = torch.zeros(8, 8, dtype=torch.bfloat16)
    for k in range(128):
        total = total + (a[:, k : k + 1] * w[:, k]).bfloat16()
    assert not holds(interval, total.double())


def test_a_truncating_accumulator_is_outside() -> None:
    """14 bits kept of each addend, as Hopper's FP8 tensor cores do: a model of its own, not covered by fp32's."""
    g = generator(1)
    a, w = grid_values(Format.E4M3FN, 8, 256, g), grid_values(Format.E4M3FN, 8, 256, g)
    interval = matmul(operand(exactly(a), Format.E4M3FN), operand(exactly(w), Format.E4M3FN), Accumulator.FP32)
    products = a[:, None, :] * w[None, :, :]
    unit = torch.exp2(torch.floor(torch.log2(products.abs().amax(-1, keepdim=True))) - 13)
    assert not holds(interval, (torch.trunc(products / unit) * unit).sum(-1))


@pytest.mark.parametrize("fmt", [Format.INT8, Format.BF16, Format.FP32])
def test_integers_below_2_to_24_have_no_radius(fmt: Format) -> None:
    a = torch.randint(-8, 9, (5, 300), generator=generator(2)).double()
    w = torch.randint(-8, 9, (6, 300), generator=generator(3)).double()
    for accumulator in Accumulator:
        interval = (
            matmul(operand(exactly(a), fmt), operand(exactly(w * 2.0**-7), fmt), accumulator)
            if fmt is not Format.INT8
            else matmul(operand(exactly(a), fmt), operand(exactly(w), fmt), accumulator)
        )
        assert torch.equal(interval.low, interval.high)


def test_int32_tiles_round_only_beyond_2_to_24() -> None:
    ones = torch.full((1, 2048), 127.0, dtype=torch.float64)
    inside = matmul(operand(exactly(ones[:, :1000]), Format.INT8), operand(exactly(ones[:, :1000]), Format.INT8), Accumulator.INT32)
    assert torch.equal(inside.low, inside.high)
    beyond = matmul(operand(exactly(ones), Format.INT8), operand(exactly(ones), Format.INT8), Accumulator.INT32)
    assert (beyond.high > beyond.low).all()
    total = torch.zeros(1)
    for tile in torch.split(ones, 32, 1):
        total = total + tile.square().sum().float()
    assert holds(beyond, total.double())


def test_fp8_accumulation_is_nearly_exact_and_the_bound_knows() -> None:
    """Random FP8 codes over K = 256: the classical bound is hundreds of ulps of the largest partial sum, this one a few."""
    g = generator(4)
    a, w = (saturate(torch.randn(16, 256, generator=g).double() * 150, Format.E4M3FN) for _ in range(2))
    interval = matmul(operand(exactly(a), Format.E4M3FN), operand(exactly(w), Format.E4M3FN), Accumulator.FP32)
    products = a[:, None, :] * w[None, :, :]
    ulp = torch.exp2(torch.floor(torch.log2((products.abs().sum(-1) + products.sum(-1).abs()) / 2)) - 23)
    radius = (interval.high - interval.low) / 2 / ulp
    lowest = lowest_bit(products)
    lemma = (ulp.unsqueeze(-1) - lowest).clamp_min(0).sum(-1) / ulp
    assert (radius >= lemma - 1e-9).all()
    assert float(radius.median()) < 2.0
    assert float(radius.max()) < 255 / 2


@settings(max_examples=40)
@given(st.sampled_from([Format.INT8, Format.E4M3FN, Format.BF16]), st.integers(1, 80), SEEDS)
def test_products_of_intervals_hold_every_choice_of_codes(fmt: Format, k: int, seed: int) -> None:
    g = generator(seed)
    a, w = grid_values(fmt, 3, k, g), grid_values(fmt, 4, k, g)
    other = saturate(a + torch.randn(3, k, generator=g) * 3 * (torch.rand(3, k, generator=g) < 0.3), fmt)
    w_other = saturate(w + torch.randn(4, k, generator=g) * (torch.rand(4, k, generator=g) < 0.1), fmt)
    low, high, w_low, w_high = torch.minimum(a, other), torch.maximum(a, other), torch.minimum(w, w_other), torch.maximum(w, w_other)
    interval = matmul(operand(Interval(low, high), fmt), operand(Interval(w_low, w_high), fmt), Accumulator.FP32)
    for _ in range(4):
        pick = torch.where(torch.rand(3, k, generator=g) < 0.5, low, high)
        w_pick = torch.where(torch.rand(4, k, generator=g) < 0.5, w_low, w_high)
        assert holds(interval, fp32_sum(pick.float()[:, None] * w_pick.float()[None], "random", g).double())


@pytest.mark.parametrize("fmt", [Format.INT8, Format.E4M3FN, Format.BF16])
def test_an_interval_around_zero_may_hold_the_smallest_subnormal(fmt: Format) -> None:
    ends = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    prepared = operand(Interval(ends[:1], ends[1:]), fmt)
    assert prepared.lowest is not None
    assert float(prepared.lowest) == limits(fmt).min_subnormal


@given(st.floats(2.0**-100, 2.0**100), st.integers(0, 40))
def test_the_lowest_bit_divides_the_value(x: float, drop: int) -> None:
    value = torch.tensor([x], dtype=torch.float64)
    value = (value.view(torch.int64) & -(1 << drop)).view(torch.float64)
    lowest = float(lowest_bit(value))
    assert (float(value) / lowest) % 2 == 1.0  # an odd multiple
    assert math.isinf(float(lowest_bit(torch.zeros(1, dtype=torch.float64))))


# ------------------------------------------------------------------------------------------------------------ elementwise fp32 steps


@given(SEEDS)
def test_scales_in_either_order_or_fused_stay_inside(seed: int) -> None:
    g = generator(seed)
    acc = torch.randn(6, 7, generator=g) * 1e4
    a, w, bias = torch.rand(6, 1, generator=g) + 0.1, torch.rand(7, generator=g) + 0.1, torch.randn(7, generator=g)
    interval = scaled(exactly(acc.double()), exactly(a.double()), w.double())
    shifted = store(Interval(interval.low + bias, interval.high + bias), Format.FP32)
    for product in (acc * a * w, acc * w * a, acc * (a * w).float()):
        if product is not acc * (a * w).float():
            assert holds(interval, product.double())
    assert holds(shifted, (acc * a * w + bias).double())
    assert holds(shifted, ((acc * a).double() * w + bias).float().double())  # the second product fused into the addition


def test_powers_of_two_scale_exactly() -> None:
    acc = torch.arange(-20.0, 20.0, dtype=torch.float64).reshape(5, 8)
    interval = scaled(exactly(acc), exactly(torch.full((5, 1), 0.25, dtype=torch.float64)), torch.full((8,), 2.0, dtype=torch.float64))
    assert torch.equal(interval.low, acc * 0.5)
    assert torch.equal(interval.high, acc * 0.5)


def test_a_scale_that_may_be_more_than_a_power_of_two_rounds_the_product() -> None:
    """Either order: (acc * w) * a is rounded twice, and only a scale known to be a power of two makes one of the roundings exact."""
    acc, w = torch.tensor([[8388607.0]], dtype=torch.float64), torch.tensor([1.0 + 2.0**-22], dtype=torch.float64)
    a = Interval(torch.tensor([[0.25]], dtype=torch.float64), torch.tensor([[0.25 + 2.0**-26]], dtype=torch.float64))
    known = scaled(exactly(acc), exactly(a.low), w)
    unknown = scaled(exactly(acc), a, w)
    assert unknown.low.item() < known.low.item()
    for scale in a.low, a.high:
        either = (acc.float() * w.float()) * scale.float(), (acc.float() * scale.float()) * w.float()
        assert all(unknown.low.item() <= each.item() <= unknown.high.item() for each in either)


@given(SEEDS, st.sampled_from([Format.BF16, Format.FP16, Format.FP32]))
def test_a_store_holds_the_rounded_value_of_everything_inside(seed: int, fmt: Format) -> None:
    g = generator(seed)
    low = torch.randn(50, generator=g, dtype=torch.float64)
    high = low + torch.rand(50, generator=g).double() * 2.0 ** float(torch.randint(-30, 0, (1,), generator=g))
    interval = store(Interval(low, high), fmt)
    for part in (0.0, 0.3, 1.0):
        value = (low + (high - low) * part).clamp(low, high)
        if fmt is Format.FP32:
            assert holds(interval, value)
        assert holds(interval, value.to(torch.float32).to(torch_dtype(fmt)).double() if fmt is Format.FP32 else _rounded(value, fmt))


def _rounded(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Nearest of the two torch neighbours, without a double rounding through float32."""
    near = value.float().to(torch_dtype(fmt))
    candidates = torch.stack([near, torch.nextafter(near, near * 0 - 100), torch.nextafter(near, near * 0 + 100)]).double()
    return candidates.gather(0, (candidates - value).abs().argmin(0, keepdim=True))[0]


@given(st.lists(st.floats(-10, 10), min_size=4, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_products_of_intervals_take_all_four_corners(ends: list[float], s: float, t: float) -> None:
    a, b, c, d = (torch.tensor(v, dtype=torch.float64) for v in ends)
    x, y = Interval(torch.minimum(a, b), torch.maximum(a, b)), Interval(torch.minimum(c, d), torch.maximum(c, d))
    product = times(x, y)
    value = (x.low + (x.high - x.low) * s) * (y.low + (y.high - y.low) * t)
    assert product.low - 1e-12 <= value <= product.high + 1e-12


@pytest.mark.parametrize("activation", list(SIMPLE))
def test_float32_activations_stay_inside_and_use_a_good_part_of_the_bound(activation: Activation) -> None:
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.linspace(-90, 90, 20_001)])
    functional = torch.nn.functional
    evaluations = {
        Activation.SILU: (lambda v: v / (1.0 + torch.exp(-v)), lambda v: v * (1.0 / (1.0 + torch.exp(-v))), functional.silu),
        Activation.SILU_NO_MUL: (functional.silu,),
        Activation.GELU: (functional.gelu, lambda v: v * 0.5 * (1.0 + torch.erf(v * math.sqrt(0.5)))),
        Activation.GELU_NO_MUL: (functional.gelu,),
        Activation.GELU_TANH: (lambda v: functional.gelu(v, approximate="tanh"), _gelu_tanh),
        Activation.GELU_TANH_NO_MUL: (lambda v: functional.gelu(v, approximate="tanh"), _gelu_tanh),
        Activation.RELU2_NO_MUL: (lambda v: functional.relu(v).square(),),
    }[activation]
    interval = store(bounds.activation_interval(activation, exactly(x.double())), Format.FP32)
    centre = function(activation)(x.double())
    used = 0.0
    for evaluate in evaluations:
        got = evaluate(x).double()
        assert holds(interval, got)
        radius = torch.where(got > centre, interval.high - centre, centre - interval.low)
        normal = centre.abs() > 1e-30
        used = max(used, float(((got - centre).abs() / radius)[normal & (radius > 0)].max()))
    assert used > 0.15


def _gelu_tanh(v: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2 / math.pi) * (v + 0.044715 * (v * v * v))
    return 0.5 * v * (1.0 + torch.tanh(inner))


@pytest.mark.parametrize("activation", list(SIMPLE))
def test_infinities_have_the_bounds_that_float32_gives_them(activation: Activation) -> None:
    x = torch.tensor([torch.inf, -torch.inf])
    evaluate = {
        Activation.SILU: lambda v: v / (1.0 + torch.exp(-v)),
        Activation.SILU_NO_MUL: lambda v: v / (1.0 + torch.exp(-v)),
        Activation.RELU2_NO_MUL: lambda v: torch.relu(v).square(),
        Activation.GELU_TANH: _gelu_tanh,
        Activation.GELU_TANH_NO_MUL: _gelu_tanh,
    }.get(activation, lambda v: v * 0.5 * (1.0 + torch.erf(v * math.sqrt(0.5))))
    interval = bounds.activation_interval(activation, exactly(x.double()))
    for end in (interval.low, interval.high):
        assert torch.equal(end.nan_to_num(0.5, torch.inf), evaluate(x).double().nan_to_num(0.5, torch.inf))


def test_a_silu_that_may_be_that_of_minus_infinity_has_no_bound() -> None:
    x = Interval(torch.tensor([-torch.inf, -300.0]).double(), torch.tensor([-200.0, -200.0]).double())
    interval = bounds.activation_interval(Activation.SILU, x)
    assert torch.isnan(interval.low).tolist() == [True, False]
    assert interval.high[1] == 0


def test_nan_of_known_numbers_is_nan_and_of_others_anything() -> None:
    inf, zero = (torch.full((3,), value, dtype=torch.float64) for value in (torch.inf, 0.0))
    gate = Interval(torch.tensor([torch.inf, 1.0, 1.0]).double(), torch.tensor([torch.inf, torch.inf, 2.0]).double())
    known = opened(times(gate, exactly(zero)), gate, exactly(zero))
    assert torch.isnan(known.low).tolist() == torch.isnan(known.high).tolist() == [True, False, False]
    assert known.low[1:].tolist() == [-torch.inf, 0.0]
    assert known.high[1:].tolist() == [torch.inf, 0.0]
    assert torch.equal(opened(times(exactly(inf), exactly(zero))).high, inf)
    silu = bounds.activation_interval(Activation.SILU, exactly(-inf))
    assert torch.isnan(opened(times(silu, exactly(inf)), exactly(-inf), silu, exactly(inf)).low).all()


def test_a_sigmoid_in_half_precision_is_outside() -> None:
    x = torch.linspace(-8, 8, 1001)
    interval = bounds.activation_interval(Activation.SILU, exactly(x.double()))
    assert not holds(interval, (x * torch.sigmoid(x.half()).float()).double())


# ------------------------------------------------------------------------------------------------------------------------ routing


@given(st.integers(2, 60), st.integers(1, 8), st.booleans(), st.floats(0.1, 8), SEEDS)
def test_a_float32_softmax_stays_inside(experts: int, top_k: int, renormalize: bool, spread: float, seed: int) -> None:
    top_k = min(top_k, experts)
    logits = torch.randn(16, experts, generator=generator(seed)) * spread
    exact = torch.softmax(logits.double(), -1).topk(top_k, -1)
    weights = exact.values / exact.values.sum(-1, keepdim=True) if renormalize else exact.values
    got = torch.softmax(logits, -1).gather(1, exact.indices)
    got = got / got.sum(-1, keepdim=True) if renormalize else got
    interval = router_weights(weights, experts, exact=False)
    assert holds(interval, got.double())
    assert ((interval.high - interval.low) <= weights * 2.0**-24 * 2 * 100).all()


def test_given_weights_are_points_and_a_bf16_softmax_is_outside() -> None:
    logits = torch.randn(16, 8, generator=generator(5))
    weights = torch.softmax(logits.double(), -1)
    given_weights = router_weights(weights, 8, exact=True)
    assert torch.equal(given_weights.low, weights.float().double())
    assert given_weights.low is given_weights.high
    order = weights.sort(-1, descending=True)
    assert not holds(router_weights(order.values, 8, exact=False), torch.softmax(logits.bfloat16(), -1).double().gather(1, order.indices))


@given(st.integers(1, 8), st.sampled_from([torch.float32, torch.bfloat16]), SEEDS)
def test_sums_over_slots_in_any_order_stay_inside(slots: int, dtype: torch.dtype, seed: int) -> None:
    g = generator(seed)
    x = (torch.randn(4, slots, 30, generator=g) * torch.exp2(3 * torch.randn(4, slots, 30, generator=g))).to(dtype).float()
    interval = sum_over_slots(exactly(x.double()))
    for how in ("random", "pairwise", "sorted"):
        assert holds(interval, fp32_sum(x.transpose(1, 2), how, g).double())


def test_sums_of_integers_over_slots_have_no_radius() -> None:
    x = torch.randint(-100, 100, (3, 6, 20), generator=generator(6)).double() * 2.0**-5
    interval = sum_over_slots(exactly(x))
    assert torch.equal(interval.low, x.sum(1))
    assert torch.equal(interval.high, x.sum(1))
