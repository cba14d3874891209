from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references.formats import decode, encode, limits, round_to, table, torch_dtype
from references.vocabulary import Format, Rounding

NUMPY = {
    Format.INT8: np.dtype(np.int8),
    Format.E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    Format.E5M2: np.dtype(ml_dtypes.float8_e5m2),
    Format.FP16: np.dtype(np.float16),
    Format.BF16: np.dtype(ml_dtypes.bfloat16),
    Format.FP32: np.dtype(np.float32),
    Format.INT4: np.dtype(ml_dtypes.int4),
    Format.UINT4: np.dtype(ml_dtypes.uint4),
    Format.UINT8: np.dtype(np.uint8),
    Format.E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
    Format.E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
}
FOUR_BITS = (Format.INT4, Format.UINT4, Format.E2M1)
INTEGERS = (Format.INT8, Format.INT4, Format.UINT4, Format.UINT8)
NARROW = (Format.INT8, Format.E4M3FN, Format.E5M2, *FOUR_BITS, Format.UINT8)
FLOATS = tuple(fmt for fmt in Format if fmt not in INTEGERS and fmt is not Format.E8M0)
ROUNDED = (*INTEGERS, *(fmt for fmt in FLOATS if fmt is not Format.FP32))
Decode = Callable[[torch.Tensor, Format], torch.Tensor]
Rounder = Callable[[torch.Tensor, Format], torch.Tensor]


def widened(codes: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return codes.astype(np.float64)


def every_code(fmt: Format) -> np.ndarray:
    width = NUMPY[fmt].itemsize
    if fmt is Format.INT4:  # two's complement, sign-extended in its byte
        return np.arange(-8, 8, dtype=np.int8).view(NUMPY[fmt])
    count = 16 if fmt in FOUR_BITS else 256 ** min(width, 2)
    return np.arange(count, dtype=f"uint{8 * width}").view(NUMPY[fmt])


def as_torch(codes: np.ndarray, fmt: Format) -> torch.Tensor:
    width = NUMPY[fmt].itemsize
    return torch.from_numpy(codes.view(f"int{8 * width}").copy()).view(torch_dtype(fmt))


def same(actual: torch.Tensor, expected: np.ndarray) -> None:
    values = widened(expected)
    np.testing.assert_array_equal(actual.numpy(), values)
    signs = np.signbit(values) & ~np.isnan(values)
    assert (np.signbit(actual.numpy()) & ~np.isnan(actual.numpy()) == signs).all()


def check_decode(fmt: Format, decoder: Decode) -> None:
    codes = every_code(fmt)
    same(decoder(as_torch(codes, fmt), fmt), codes)


def neighbourhoods(fmt: Format) -> np.ndarray:
    """Every representable value, every midpoint, and both with the smallest float32 nudge either way; float32, both signs."""
    values = np.unique(widened(every_code(fmt)))
    values = values[np.isfinite(values)]
    middles = (values[1:] + values[:-1]) / 2
    top = values[-1] * np.array([1.0, 1.01, 1.03, 1.0625, 1.07, 1.2, 4.0])
    with np.errstate(over="ignore"):
        points = np.concatenate([values, middles, top, -top]).astype(np.float32)
    return np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])


def check_rounding(fmt: Format, rounder: Rounder) -> None:
    points = neighbourhoods(fmt)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = points.astype(NUMPY[fmt]) if fmt not in INTEGERS else np.rint(points)
    same(rounder(torch.from_numpy(points).double(), fmt), expected)


@pytest.mark.parametrize("fmt", [*NARROW, Format.E8M0, Format.FP16, Format.BF16])
def test_every_code_decodes_as_in_ml_dtypes(fmt: Format) -> None:
    check_decode(fmt, decode)


@pytest.mark.parametrize("fmt", [*NARROW, Format.E8M0])
def test_one_wrong_code_fails_the_decode_check(fmt: Format) -> None:
    for code in range(len(table(fmt))):
        wrong = table(fmt).clone()
        wrong[code] = 2.0 * torch.nan_to_num(wrong[code], nan=1.0, posinf=1.0, neginf=1.0) or 0.5

        def faulty(codes: torch.Tensor, _: Format, wrong: torch.Tensor = wrong) -> torch.Tensor:
            return wrong[codes.view(torch.uint8).long() % len(wrong)]

        with pytest.raises(AssertionError):
            check_decode(fmt, faulty)


@pytest.mark.parametrize("fmt", ROUNDED)
def test_rounding_half_even_is_the_cast_of_ml_dtypes(fmt: Format) -> None:
    check_rounding(fmt, round_to)


def test_rounding_to_fp32_is_numpys_cast() -> None:
    g = np.random.default_rng(0)
    near = np.float32(g.standard_normal(20000) * 2.0 ** g.integers(-140, 120, 20000)).astype(np.float64)
    after = np.nextafter(near.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    middle = (near + after) / 2
    points = np.concatenate([near, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), [3.5e38, -3.5e38]])
    with np.errstate(over="ignore"):
        same(round_to(torch.from_numpy(points), Format.FP32), points.astype(np.float32))


@pytest.mark.parametrize("fmt", ROUNDED)
@pytest.mark.parametrize("fault", ["away", "truncate", "next", "no_subnormals"])
def test_a_wrong_rounding_fails_the_rounding_check(fmt: Format, fault: str) -> None:
    if fault == "no_subnormals" and fmt in INTEGERS:
        return

    def faulty(values: torch.Tensor, fmt: Format) -> torch.Tensor:
        rounded = round_to(values, fmt, {"away": Rounding.HALF_AWAY, "truncate": Rounding.TOWARD_ZERO}.get(fault, Rounding.HALF_EVEN))
        if fault == "next":
            rounded = torch.where(rounded == limits(fmt).max, rounded * 0.5, rounded)
        if fault == "no_subnormals":
            rounded = torch.where(rounded.abs() < 2.0 ** limits(fmt).min_exponent, torch.zeros_like(rounded), rounded)
        return rounded

    with pytest.raises(AssertionError):
        check_rounding(fmt, faulty)


@pytest.mark.parametrize("fmt", NARROW)
@pytest.mark.parametrize("rounding", list(Rounding))
def test_every_rounding_agrees_with_a_search_of_the_table(fmt: Format, rounding: Rounding) -> None:
    grid = sorted({float(v) for v in table(fmt) if torch.isfinite(v)})
    points = [p for p in neighbourhoods(fmt).astype(float).tolist() if grid[0] <= p <= grid[-1]]
    expected = []
    for point in points:
        below, above = max(v for v in grid if v <= point), min(v for v in grid if v >= point)
        inner, outer = (below, above) if abs(below) <= abs(above) else (above, below)
        if rounding is Rounding.TOWARD_ZERO or below == above:
            expected.append(inner)
        elif abs(point - below) != abs(point - above):
            expected.append(below if abs(point - below) < abs(point - above) else above)
        elif rounding is Rounding.HALF_AWAY:
            expected.append(outer)
        else:
            spacing = above - below
            expected.append(below if round(below / spacing) % 2 == 0 else above)
    assert round_to(torch.tensor(points, dtype=torch.float64), fmt, rounding).tolist() == expected


@pytest.mark.parametrize("fmt", NARROW)
def test_encode_inverts_decode_on_every_finite_code_and_saturates(fmt: Format) -> None:
    codes = as_torch(every_code(fmt), fmt)
    finite = torch.isfinite(decode(codes, fmt))
    assert torch.equal(encode(decode(codes, fmt), fmt).view(torch.uint8)[finite], codes.view(torch.uint8)[finite])
    far = decode(encode(torch.tensor([1e9, -1e9], dtype=torch.float64), fmt), fmt)
    assert far.tolist() == [limits(fmt).max, limits(fmt).min]


def test_encode_of_wide_formats_overflows_like_a_cast() -> None:
    assert encode(torch.tensor([7e4, -7e4], dtype=torch.float64), Format.FP16).tolist() == [float("inf"), float("-inf")]


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.sampled_from([*ROUNDED, Format.FP32]), st.sampled_from(list(Rounding)))
def test_rounding_is_monotone_and_idempotent(a: float, b: float, fmt: Format, rounding: Rounding) -> None:
    low, high = round_to(torch.tensor([min(a, b), max(a, b)], dtype=torch.float64), fmt, rounding)
    if not (torch.isnan(low) or torch.isnan(high)):  # E4M3FN overflows to NaN
        assert low <= high
        assert torch.equal(round_to(torch.stack([low, high]), fmt, rounding), torch.stack([low, high]))


def test_decode_refuses_another_formats_codes() -> None:
    with pytest.raises(ValueError, match=r"codes of e4m3fn must be torch\.float8_e4m3fn, got torch\.int8"):
        decode(torch.zeros(1, dtype=torch.int8), Format.E4M3FN)
    with pytest.raises(ValueError, match="16 is no code of e2m1, which has 16"):
        decode(torch.tensor([16], dtype=torch.uint8), Format.E2M1)
