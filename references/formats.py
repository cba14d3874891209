"""Number formats: which reals exist in each, and which one a value becomes.

Sources: FP8 (E4M3FN, E5M2): Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1, E4M3 with no infinities and
S.1111.111 as its only NaN; OCP 8-bit Floating Point Specification 1.0. IEEE 754-2019 binary16 and binary32; bfloat16 as binary32's
upper half. INT8 is two's complement.

Everything here is float64 arithmetic on bit patterns and integers; no torch cast decides a value (casts only repack exact values).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from references.vocabulary import Format, Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatInfo:
    """Limits of a format.

    max, min: largest and smallest finite value (INT8: 127 and -128).
    qmax: the value amax is mapped to when a scale is computed.
    min_subnormal: smallest positive value, the spacing around zero.
    min_exponent: exponent of the smallest normal value, 2**min_exponent.
    significand_bits: including the implicit bit (INT8: 8, |code| <= 128).
    """

    max: float
    min: float
    qmax: float
    min_subnormal: float
    min_exponent: int
    significand_bits: int


def _floating(maximum: float, min_exponent: int, significand_bits: int) -> FormatInfo:
    return FormatInfo(
        max=maximum,
        min=-maximum,
        qmax=maximum,
        min_subnormal=2.0 ** (min_exponent - significand_bits + 1),
        min_exponent=min_exponent,
        significand_bits=significand_bits,
    )


_INFO = {
    Format.INT8: FormatInfo(max=127.0, min=-128.0, qmax=127.0, min_subnormal=1.0, min_exponent=0, significand_bits=8),
    Format.E4M3FN: _floating(448.0, -6, 4),
    Format.E5M2: _floating(57344.0, -14, 3),
    Format.FP16: _floating(65504.0, -14, 11),
    Format.BF16: _floating(float(2**8 - 1) * 2.0**120, -126, 8),
    Format.FP32: _floating(float(2**24 - 1) * 2.0**104, -126, 24),
}

_DTYPE = {
    Format.INT8: torch.int8,
    Format.E4M3FN: torch.float8_e4m3fn,
    Format.E5M2: torch.float8_e5m2,
    Format.FP16: torch.float16,
    Format.BF16: torch.bfloat16,
    Format.FP32: torch.float32,
}


def limits(fmt: Format) -> FormatInfo:
    """Limits of ``fmt``."""
    return _INFO[fmt]


def torch_dtype(fmt: Format) -> torch.dtype:
    """The torch dtype whose bytes are codes of ``fmt``."""
    return _DTYPE[fmt]


@cache
def table(fmt: Format) -> torch.Tensor:
    """[256] float64: the value of every 8-bit code, from the specification. NaN and inf included.

    Raises:
        ValueError: for a format that is not 8 bits wide.
    """
    if fmt is Format.INT8:
        return torch.tensor([float(code if code < 128 else code - 256) for code in range(256)], dtype=torch.float64)
    if fmt not in (Format.E4M3FN, Format.E5M2):
        raise ValueError(f"{fmt} is not an 8-bit format")
    mantissa_bits = limits(fmt).significand_bits - 1
    exponent_bits = 7 - mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    top = 2**exponent_bits - 1
    values = []
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent = (code >> mantissa_bits) & top
        mantissa = code & (2**mantissa_bits - 1)
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        elif fmt is Format.E4M3FN and exponent == top and mantissa == 7:
            value = float("nan")
        elif fmt is Format.E5M2 and exponent == top:
            value = float("inf") if mantissa == 0 else float("nan")
        else:
            value = (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)
        values.append(sign * value)
    return torch.tensor(values, dtype=torch.float64)


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Values of ``codes`` (the format's torch dtype), float64, same shape.

    Raises:
        ValueError: when the tensor's dtype is not the format's.
    """
    if codes.dtype is not torch_dtype(fmt):
        raise ValueError(f"codes of {fmt} must be {torch_dtype(fmt)}, got {codes.dtype}")
    if codes.element_size() == 1:
        return table(fmt)[codes.contiguous().view(torch.uint8).to(torch.int64)]
    return codes.to(torch.float64)  # widening: exact


def _keep_bits(values: torch.Tensor, bits: int, rounding: Rounding) -> torch.Tensor:
    """Round float64 to ``bits`` significand bits with unbounded exponent. Carries move into the exponent, as they should."""
    drop = 53 - bits
    half, mask = 1 << (drop - 1), -(1 << drop)
    pattern = values.contiguous().view(torch.int64)
    match rounding:
        case Rounding.HALF_EVEN:
            pattern = pattern + (half - 1) + ((pattern >> drop) & 1)
        case Rounding.HALF_AWAY:
            pattern = pattern + half
        case Rounding.TOWARD_ZERO:
            pass
    return (pattern & mask).view(torch.float64)


def _integer(values: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    match rounding:
        case Rounding.HALF_EVEN:
            return torch.round(values)
        case Rounding.HALF_AWAY:
            whole = torch.trunc(values)  # not floor(|x| + 1/2): the sum itself may round up
            return whole + torch.where((values - whole).abs() >= 0.5, torch.sign(values), torch.zeros_like(values))
        case Rounding.TOWARD_ZERO:
            return torch.trunc(values)


def round_to(values: torch.Tensor, fmt: Format, rounding: Rounding = Rounding.HALF_EVEN) -> torch.Tensor:
    """``values`` (float64) on the grid of ``fmt``, float64. Not saturating.

    Overflow beyond the largest finite value gives what a cast gives: an infinity, NaN for E4M3FN (which has no infinity); INT8 values are
    left outside [-128, 127]. Monotone in ``values``. NaN stays NaN.
    """
    if fmt is Format.INT8:
        return _integer(values, rounding)
    if fmt is Format.FP32 and rounding is Rounding.HALF_EVEN:
        return values.to(torch.float32).to(torch.float64)  # IEEE conversion, the same rounding, faster
    info = limits(fmt)
    normal = _keep_bits(values, info.significand_bits, rounding)
    tiny = _integer(values / info.min_subnormal, rounding) * info.min_subnormal
    rounded = torch.where(values.abs() < 2.0**info.min_exponent, tiny, normal)
    beyond = float("nan") if fmt is Format.E4M3FN else float("inf")
    rounded = torch.where(rounded.abs() > info.max, torch.copysign(torch.full_like(rounded, beyond), values), rounded)
    return torch.where(torch.isnan(values), values, rounded)


def saturate(values: torch.Tensor, fmt: Format, rounding: Rounding = Rounding.HALF_EVEN) -> torch.Tensor:
    """``values`` (float64) clamped to the finite range of ``fmt`` and put on its grid, float64: what a quantizer stores."""
    info = limits(fmt)
    return round_to(values.clamp(info.min, info.max), fmt, rounding)


def encode(values: torch.Tensor, fmt: Format, rounding: Rounding = Rounding.HALF_EVEN) -> torch.Tensor:
    """``values`` (float64) as codes in the format's torch dtype; 8-bit formats saturate at their finite range, wider ones overflow.

    NaN has no INT8 code and becomes 0.
    """
    eight_bits = fmt in (Format.INT8, Format.E4M3FN, Format.E5M2)
    rounded = saturate(values, fmt, rounding) if eight_bits else round_to(values, fmt, rounding)
    if fmt is Format.INT8:
        rounded = torch.nan_to_num(rounded, nan=0.0)
    return rounded.to(torch_dtype(fmt))
