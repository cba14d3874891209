"""Codes and scales on intervals against float32 quantizers of three kinds; each check shown able to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references import bounds
from references.bounds import Interval, exactly, quantize
from references.formats import limits, saturate, torch_dtype
from references.quantize import Quantized, quantize_activations, quantize_weights, requantize_to_max
from references.tests.test_bounds import SEEDS, generator, holds
from references.vocabulary import ActQuant, Format, Layout, Quotient, Rounding, WeightQuant

QUANTIZERS = [
    ActQuant(format=fmt, layout=layout, dynamic=True, rounding=rounding, scale_floor=1e-10)
    for fmt, layout, rounding in [
        (Format.INT8, Layout.TOKEN, Rounding.HALF_AWAY),
        (Format.INT8, Layout.TENSOR, Rounding.HALF_EVEN),
        (Format.INT8, Layout.GROUP128, Rounding.TOWARD_ZERO),
        (Format.E4M3FN, Layout.TOKEN, Rounding.HALF_EVEN),
        (Format.E4M3FN, Layout.GROUP128, Rounding.HALF_EVEN),
        (Format.E5M2, Layout.TENSOR, Rounding.HALF_EVEN),
    ]
]


def float32_codes(x: torch.Tensor, how: ActQuant, quotient: Quotient) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and per-element scale as three kinds of kernel compute them, in float32 only."""
    rows = x.shape[0]
    amax = x.abs().amax(1, keepdim=True)
    if how.layout is Layout.TENSOR:
        amax = x.abs().max().expand(rows, 1)
    if how.layout is Layout.GROUP128:
        amax = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in torch.split(x, 128, 1)], 1)
    qmax = limits(how.format).qmax
    scale = (amax / qmax).clamp_min(how.scale_floor)
    by_ratio = x * (torch.full_like(amax, qmax) / amax.clamp_min(1e-10))  # qmax / tensor would be a reciprocal and a product
    ratio = {Quotient.DIVIDE: x / scale, Quotient.RECIPROCAL: x * (1 / scale), Quotient.AMAX_RATIO: by_ratio}[quotient]
    ratio = ratio.clamp(limits(how.format).min, limits(how.format).max)
    if how.format is not Format.INT8:
        return ratio.to(torch_dtype(how.format)).double(), scale
    if how.rounding is Rounding.HALF_AWAY:
        return (torch.sign(ratio) * torch.floor(ratio.abs() + 0.5)).double(), scale
    return (ratio.round() if how.rounding is Rounding.HALF_EVEN else ratio.trunc()).double(), scale


def per_element(scale: Interval, cols: int) -> Interval:
    low, high = (end.repeat_interleave(128, 1)[:, :cols] if end.shape[1] > 1 else end for end in (scale.low, scale.high))
    return Interval(low, high)


@settings(max_examples=40)
@given(st.sampled_from(QUANTIZERS), st.sampled_from([Quotient.DIVIDE, Quotient.RECIPROCAL, Quotient.AMAX_RATIO]), SEEDS)
def test_known_rows_have_exactly_the_codes_of_their_quotient(how: ActQuant, quotient: Quotient, seed: int) -> None:
    x = torch.randn(5, 200, generator=generator(seed)).bfloat16().float()
    got, got_scale = float32_codes(x, how, quotient)
    codes, scale = quantize(exactly(x.double()), replace(how, quotient=quotient), None)
    assert torch.equal(codes.low, got)
    assert codes.low is codes.high
    assert torch.equal(per_element(scale, 200).low.expand(5, 200), got_scale.double().expand(5, 200))
    assert scale.low is scale.high or torch.equal(scale.low, scale.high)
    codes, scale = quantize(exactly(x.double()), replace(how, quotient=Quotient.ANY), None)
    assert holds(codes, got)
    assert holds(per_element(scale, 200), got_scale.double())


def test_the_quotients_differ_on_structural_ties() -> None:
    """x = 63, amax = 126: x * 127 / amax is the tie 63.5; division and reciprocal of the rounded scale see different sides somewhere."""
    x = torch.arange(1.0, 128.0).unsqueeze(1) * torch.tensor([[1.0, 0.5, 0.25, 0.75]])
    how = QUANTIZERS[1]
    how = replace(how, layout=Layout.TOKEN)
    codes = [quantize(exactly(x.double()), replace(how, quotient=q), None)[0].low for q in (Quotient.DIVIDE, Quotient.RECIPROCAL)]
    assert not torch.equal(*codes)
    hull, _ = quantize(exactly(x.double()), how, None)
    assert all(holds(hull, one) for one in codes)


@settings(max_examples=40)
@given(
    st.sampled_from(QUANTIZERS),
    st.sampled_from([Quotient.DIVIDE, Quotient.RECIPROCAL, Quotient.AMAX_RATIO]),
    st.booleans(),
    st.floats(-24, -6),
    SEEDS,
)
def test_rows_known_to_an_interval_hold_every_rows_codes(
    how: ActQuant, quotient: Quotient, told: bool, log_width: float, seed: int
) -> None:
    g = generator(seed)
    low = torch.randn(4, 150, generator=g)
    high = low + torch.rand(4, 150, generator=g) * 2.0**log_width
    how = replace(how, quotient=quotient if told else Quotient.ANY)
    codes, scale = quantize(Interval(low.double(), high.double()), how, None)
    for part in (0.0, 0.5, 1.0):
        got, got_scale = float32_codes((low + (high - low) * part).clamp(low, high), how, quotient)
        assert holds(codes, got)
        assert holds(per_element(scale, 150), got_scale.double())


def test_a_power_of_two_scale_never_widens_even_on_ties() -> None:
    ties = torch.tensor([[127.0, 0.5, 1.5, 2.5, -3.5, 100.5]], dtype=torch.float64) * 0.25
    for how in QUANTIZERS[:3]:
        codes, scale = quantize(exactly(ties), how, None)
        assert torch.equal(codes.low, codes.high)
        assert scale.low.flatten().tolist() == scale.high.flatten().tolist() == [0.25]


def test_a_tie_under_another_scale_takes_both_codes() -> None:
    """Divided, 0.3 * 10.5 / 0.3 is the tie 10.5; through a reciprocal it may fall on either side."""
    scale = torch.tensor([[0.3]]).double()
    static = ActQuant(format=Format.INT8, layout=Layout.TENSOR, dynamic=False)
    codes, _ = quantize(exactly(scale * torch.tensor([[10.5, 10.25]], dtype=torch.float64)), static, scale)
    assert codes.low.tolist() == [[10.0, 10.0]]
    assert codes.high.tolist() == [[11.0, 10.0]]


def test_nan_takes_the_code_that_the_recipe_says_and_what_has_no_bound_any() -> None:
    scale, nan = torch.tensor([[2.0]]).double(), torch.nan
    x = Interval(torch.tensor([[nan, -torch.inf, 3.0]]).double(), torch.tensor([[nan, torch.inf, 3.0]]).double())
    how = ActQuant(format=Format.E4M3FN, layout=Layout.TENSOR, dynamic=False, of_nan=448.0)
    codes, _ = quantize(x, how, scale)
    assert codes.low.tolist() == [[448.0, -448.0, 1.5]]
    assert codes.high.tolist() == [[448.0, 448.0, 1.5]]
    assert quantize_activations(x.low, how, scale).codes.tolist() == codes.low.tolist()
    assert torch.isnan(quantize(x, replace(how, of_nan=None), scale)[0].low).tolist() == [[True, False, False]]


@pytest.mark.parametrize("layout", [Layout.TENSOR, Layout.CHANNEL, Layout.BLOCK128])
@pytest.mark.parametrize("quotient", [Quotient.DIVIDE, Quotient.RECIPROCAL])
def test_online_weights_have_exactly_the_codes_of_their_quotient(layout: Layout, quotient: Quotient) -> None:
    w = torch.randn(256, 256, generator=generator(0)).bfloat16()
    how = WeightQuant(format=Format.E4M3FN, layout=layout, scale_floor=1e-6, quotient=quotient)
    quantized = quantize_weights(w.double(), how)
    scale = quantized.scale.float()
    ratio = w.float() / scale if quotient is Quotient.DIVIDE else w.float() * (1.0 / scale)
    got = ratio.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert torch.equal(quantized.codes, got)
    assert bounds.weight_code_hull(w.double(), quantized, how) == (quantized.codes, quantized.codes)
    low, high = bounds.weight_code_hull(w.double(), quantized, replace(how, quotient=Quotient.ANY))
    assert ((low <= got) & (got <= high)).all()
    assert 0 < float((low != high).double().mean()) < 0.01


@pytest.mark.parametrize("fmt", [Format.INT8, Format.E4M3FN])
@pytest.mark.parametrize("scale_in_fp16", [False, True])
def test_requantization_through_fp16_is_inside(fmt: Format, scale_in_fp16: bool) -> None:
    g = generator(7)
    codes = saturate(torch.randn(128, 128, generator=g).double() * 60, fmt)
    small, large = (torch.tensor(v).double() for v in (0.0123, 0.0371))
    before = Quantized(codes=codes, scale=small.reshape(1, 1), group_scale=small)
    after, _ = requantize_to_max(before, Quantized(codes=codes, scale=large.reshape(1, 1), group_scale=large), fmt)
    low, high = bounds.requantized_hull(before, after, fmt)
    factor = small.half() if scale_in_fp16 else small.float()
    dequantized = (codes.float() * factor.float()).half()
    ratio = dequantized.float() / large.float()
    got = ratio.round().double() if fmt is Format.INT8 else ratio.to(torch.float8_e4m3fn).double()
    assert ((low <= got) & (got <= high)).all()
    assert float((low != high).double().mean()) < 0.05


def test_a_scale_that_underflows_in_fp16_is_outside() -> None:
    """vLLM's dequantization through fp16 loses tensors whose scale is tiny; the hull does not excuse it."""
    codes = torch.arange(-127.0, 128.0, dtype=torch.float64).reshape(1, -1)
    small, large = (torch.tensor(v, dtype=torch.float64) for v in (2.0**-31, 2.0**-30))
    before = Quantized(codes=codes, scale=small.reshape(1, 1), group_scale=small)
    after, _ = requantize_to_max(before, Quantized(codes=codes, scale=large.reshape(1, 1), group_scale=large), Format.INT8)
    low, _ = bounds.requantized_hull(before, after, Format.INT8)
    got = ((codes.float() * small.float()).half().float() / large.float()).round().double()
    assert (got > low).any() or (got == 0).all()
    assert not torch.equal(got, after.codes)
    assert ((got < low) | (got > bounds.requantized_hull(before, after, Format.INT8)[1])).any()


def test_a_scale_that_may_be_a_power_of_two_or_less_divides_inexactly() -> None:
    three, scale = exactly(torch.tensor([[3.0]]).double()), Interval(torch.tensor([[0.7]]).double(), torch.tensor([[1.0]]).double())
    ratio = bounds._any_quotient(three, scale)
    assert ratio.high.item() > 3.0 / 0.7 * (1.0 + bounds.QUOTIENT / 2.0)
    exact = bounds._any_quotient(three, exactly(torch.tensor([[0.5]]).double()))
    assert exact.low.item() == exact.high.item() == 6.0


def test_halves_are_merged_with_the_scale_of_eleven_bits_too() -> None:
    """torch casts a zero-dimensional scale to the codes' fp16 on a GPU, before the product."""
    codes, seen = torch.arange(-127.0, 128.0, dtype=torch.float64), 0
    large = torch.tensor(0.0131, dtype=torch.float64)
    for step in range(200):
        small = torch.tensor(0.01 + step * 1e-5, dtype=torch.float64)
        before = Quantized(codes=codes.reshape(1, -1), scale=small.reshape(1, 1), group_scale=small)
        after, _ = requantize_to_max(before, Quantized(codes=before.codes, scale=large.reshape(1, 1), group_scale=large), Format.INT8)
        low, high = bounds.requantized_hull(before, after, Format.INT8)
        by_scale = [
            saturate(each.double() / large, Format.INT8, Rounding.HALF_EVEN)
            for each in (codes.half() * small.half(), (codes * small).half())
        ]
        assert bool(((low <= by_scale[0]) & (by_scale[0] <= high)).all())
        seen += int((by_scale[0] != by_scale[1]).sum())
    assert seen > 0
