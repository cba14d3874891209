"""Machines that err as much as they may: each term of the bound on an accumulator's error is needed."""

from __future__ import annotations

import torch

from references import products
from references.bounds import Interval, exactly
from references.tests.one_matrix import matmul
from references.vocabulary import Accumulator, Format

UNIT = 2.0**-15  # ulp of fp32 at 256
LITTLE = 307 * 2.0**-24  # 0.6 of it, an fp16 number: the sum of the two rounds up
TERMS = 100


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def summed(a: Interval, fmt: Format, accumulator: Accumulator, w: torch.Tensor | None = None) -> Interval:
    ones = torch.ones_like(a.low) if w is None else w
    return matmul(products.operand(a, fmt, accumulator), products.operand(exactly(ones), fmt, accumulator), accumulator)


def one_after_another(start: float, each: float, terms: int = TERMS) -> float:
    total = torch.tensor(start, dtype=torch.float32)
    for _ in range(terms):
        total = total + each
    return float(total)


def test_codes_of_next_to_nothing_err_by_a_unit_each() -> None:
    """Intervals around zero are multiples of fp16's smallest number, and are counted whole."""
    ends = row(256.0, *[LITTLE] * TERMS)
    found = summed(Interval(torch.where(ends == 256, ends, -ends), ends), Format.FP16, Accumulator.FP32)
    up = one_after_another(256.0, LITTLE)
    assert up == 256 + TERMS * UNIT
    assert found.high.item() >= up
    assert found.low.item() <= one_after_another(256.0, -LITTLE)


def test_partial_sums_are_as_large_as_the_largest_codes_make_them() -> None:
    ends = row(256.0, *[LITTLE] * TERMS)
    found = summed(Interval(ends.masked_fill(ends == 256, 0.0), ends), Format.FP16, Accumulator.FP32)
    assert found.high.item() >= one_after_another(256.0, LITTLE)


def test_tiles_of_32_integers_are_rounded_one_by_one() -> None:
    """Above 2**24 a tile of sum 1 is lost."""
    many, tiles = 1056, 40
    w = row(*[127.0] * many, *([1.0] + [0.0] * 31) * tiles)
    a = row(*[127.0] * many, *([1.0] + [0.0] * 31) * tiles)
    found = summed(exactly(a), Format.INT8, Accumulator.INT32, w)
    lost = one_after_another(127.0 * 127.0 * many, 1.0, tiles)
    assert lost == 127 * 127 * many
    assert found.low.item() <= lost


def test_an_accumulator_that_truncates_loses_nearly_a_unit_with_each_addend() -> None:
    little = (1.0 - 2.0**-8) * UNIT  # a bf16 number
    found = summed(exactly(row(256.0, *[little] * TERMS)), Format.BF16, Accumulator.TENSOR_CORE)
    assert found.low.item() <= 256.0


def test_of_two_scales_the_first_product_rounds_only_where_neither_is_a_power_of_two() -> None:
    x = exactly(row(3.0, 5.0, 2.0**23 + 1.0))
    for a_scale, w_scale in ((1.3, 2.0), (0.25, 1.3)):
        found = products.scaled(x, exactly(row(a_scale)), row(w_scale, w_scale, w_scale))
        once = products.scaled(exactly(x.low * w_scale if a_scale == 1.3 else x.low * a_scale), exactly(row(1.3)), None)
        assert torch.equal(found.low, once.low)
        assert torch.equal(found.high, once.high)
