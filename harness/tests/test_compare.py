from __future__ import annotations

import math

import pytest
import torch

from harness.compare import Comparison, bits, compare
from harness.preimage import half_gaps, preimage
from harness.verdict import Outcome
from references.formats import round_to, torch_dtype
from references.moe import Answer, Routing
from references.vocabulary import Format

DTYPES = [Format.BF16, Format.FP16, Format.FP32]


def answer_of(expected: torch.Tensor, radius: torch.Tensor | float, output: Format = Format.BF16) -> Answer:
    expected = expected.double()
    routing = Routing(
        topk_ids=torch.zeros(len(expected), 1, dtype=torch.int64), topk_weights=torch.ones(len(expected), 1, dtype=torch.float64)
    )
    return Answer(
        expected=expected,
        low=expected - radius,
        high=expected + radius,
        contributions=expected[:, None],
        routing=routing,
        output=output,
    )


def one(expected: float, actual: float, radius: float = 0.0, output: Format = Format.BF16) -> Comparison:
    return compare(answer_of(torch.tensor([[expected]]), radius, output), torch.tensor([[actual]], dtype=torch_dtype(output)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_in_its_preimage_and_preimages_tile_the_line(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[~torch.isnan(values)]
    order = values.double().argsort(stable=True)
    values = values[order]
    values = values[torch.cat([torch.tensor([True]), values.double().diff() > 0])]  # one zero
    lower, upper = preimage(values)
    assert ((lower <= values.double()) & (values.double() <= upper)).all()
    assert torch.equal(upper[:-1], lower[1:])


@pytest.mark.parametrize("fmt", DTYPES)
def test_edges_of_a_preimage_are_where_rounding_changes(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    values = round_to(torch.randn(2000, generator=generator).double() * torch.logspace(-12, 4, 2000, dtype=torch.float64), fmt)
    actual = values.to(torch_dtype(fmt))
    lower, upper = preimage(actual)
    for edge, outward in ((lower, -math.inf), (upper, math.inf)):
        inside = torch.nextafter(edge, values)
        outside = torch.nextafter(edge, torch.full_like(edge, outward))
        assert torch.equal(round_to(inside, fmt), values)
        assert not (round_to(outside, fmt) == values).any()


def test_half_gaps_at_a_power_of_two_differ() -> None:
    below, above = half_gaps(torch.tensor([1.0]), torch.bfloat16)
    assert (float(below), float(above)) == (2.0**-9, 2.0**-8)


def test_attributes_come_first() -> None:
    answer = answer_of(torch.zeros(2, 3), 0.0)
    assert compare(answer, torch.zeros(2, 4)).attributes == (
        "shape is (2, 4), expected (2, 3)",
        "dtype is torch.float32, expected torch.bfloat16",
    )
    comparison = compare(answer, torch.zeros(2, 3, dtype=torch.float16))
    assert comparison.outcome is Outcome.MISMATCH
    assert comparison.margin is None
    meta = torch.zeros(2, 3, dtype=torch.bfloat16, device="meta")
    assert compare(answer, meta).attributes == ("device is meta, expected cpu",)


def test_zero_radius_demands_the_rounding_of_expected() -> None:
    assert one(1.0 + 2.0**-9, 1.0).margin == 0.0
    wrong = one(1.0, 1.0 + 2.0**-7)
    assert (wrong.outcome, wrong.margin) == (Outcome.MISMATCH, math.inf)


def test_margin_is_the_error_over_the_radius_and_the_half_gap() -> None:
    # bf16 at 1.0078125: half a gap is 2**-8
    comparison = one(1.0, 1.0078125, radius=0.0078125)
    assert comparison.margin == pytest.approx(2**-7 / (2**-7 + 2**-8))
    assert comparison.outcome is Outcome.PASS
    assert one(1.0, 1.0078125, radius=2.0**-10).margin == pytest.approx(2**-7 / (2**-10 + 2**-8))


def test_a_tie_goes_to_the_even_neighbour_only() -> None:
    tie = 1.0 + 2.0**-8  # between 1 (even) and 1 + 2**-7 (odd)
    assert one(tie, 1.0).outcome is Outcome.PASS
    assert one(tie, 1.0 + 2.0**-7).margin == math.inf
    edge = one(1.0, 1.0 + 2.0**-7, radius=2.0**-8)  # the interval only touches the odd neighbour's open edge
    assert edge.outcome is Outcome.MISMATCH
    assert edge.margin is not None
    assert 1 < edge.margin < 1 + 1e-9


def test_nan_and_infinity_positions() -> None:
    assert one(1.0, math.nan, radius=1e9).nan == 1
    assert one(math.nan, math.nan).outcome is Outcome.PASS
    assert one(math.nan, 1.0).margin == math.inf
    overflow = one(1.0, math.inf, radius=10.0, output=Format.FP16)
    assert (overflow.inf, overflow.outcome) == (1, Outcome.MISMATCH)
    assert one(65520.0, math.inf, output=Format.FP16).outcome is Outcome.PASS
    assert one(65519.0, math.inf, output=Format.FP16).outcome is Outcome.MISMATCH
    assert one(65520.0, 65504.0, output=Format.FP16).inf == 1
    assert one(65519.0, math.inf, radius=1.0, output=Format.FP16).outcome is Outcome.PASS


def test_a_second_run_with_other_bits_is_nondeterministic_even_inside_the_interval() -> None:
    answer = answer_of(torch.ones(2, 2), 1.0)
    actual = torch.ones(2, 2, dtype=torch.bfloat16)
    assert compare(answer, actual, repeat=actual.clone()).outcome is Outcome.PASS
    again = actual.clone()
    again[1, 1] = 1.0078125
    comparison = compare(answer, actual, repeat=again)
    assert (comparison.outcome, comparison.changed) == (Outcome.NONDETERMINISTIC, 1)


def test_bits_tells_zero_from_minus_zero_and_equal_nans_apart_from_nothing() -> None:
    zero = torch.zeros(2, 3)
    other = zero.clone()
    other[1, 2] = -0.0
    result = bits(zero, other)
    assert (result.identical, result.differing, result.index) == (False, 1, (1, 2))
    assert (result.expected, result.actual) == ("0 (0x00000000)", "-0 (0x80000000)")
    nan = torch.full((2,), math.nan, dtype=torch.bfloat16)
    assert bits(nan, nan.clone()).identical
    assert bits(zero, zero.double()).attributes == ("dtype is torch.float64, expected torch.float32",)
    codes = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert bits(codes, torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn)).actual == "4 (0x48)"
