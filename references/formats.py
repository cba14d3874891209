"""Number formats: which reals exist in each, and which one a value becomes.

Sources: FP8 (E4M3FN, E5M2): Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1, E4M3 with no infinities and
S.1111.111 as its only NaN; OCP 8-bit Floating Point Specification 1.0. IEEE 754-2019 binary16 and binary32; bfloat16 as binary32's
upper half. INT8 and INT4 are two's complement, UINT8 and UINT4 plain binary. OCP Microscaling Formats (MX) Specification 1.0: E2M1 (no
infinities, no NaN), E8M0 (2**(code - 127), 0xFF is NaN). Codes of fewer than 8 bits lie one to a byte here; references/packing.py packs.

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
    Format.INT4: FormatInfo(max=7.0, min=-8.0, qmax=7.0, min_subnormal=1.0, min_exponent=0, significand_bits=4),
    Format.UINT4: FormatInfo(max=15.0, min=0.0, qmax=15.0, min_subnormal=1.0, min_exponent=0, significand_bits=4),
    Format.UINT8: FormatInfo(max=255.0, min=0.0, qmax=255.0, min_subnormal=1.0, min_exponent=0, significand_bits=8),
    Format.E2M1: _floating(6.0, 0, 2),
    Format.FP16: _floating(65504.0, -14, 11),
    Format.BF16: _floating(float(2**8 - 1) * 2.0**120, -126, 8),
    Format.FP32: _floating(float(2**24 - 1) * 2.0**104, -126, 24),
}

_DTYPE = {
    Format.INT8: torch.int8,
    Format.E4M3FN: torch.float8_e4m3fn,
    Format.E5M2: torch.float8_e5m2,
    Format.INT4: torch.int8,
    Format.UINT4: torch.uint8,
    Format.UINT8: torch.uint8,
    Format.E2M1: torch.uint8,
    Format.E8M0: torch.uint8,
    Format.FP16: torch.float16,
    Format.BF16: torch.bfloat16,
    Format.FP32: torch.float32,
}


_INTEGERS = {Format.INT8: 8, Format.INT4: 4, Format.UINT4: 4, Format.UINT8: 8}
_SIGNED = (Format.INT8, Format.INT4)


def limits(fmt: Format) -> FormatInfo:
    """Limits of ``fmt``; E8M0, in which nothing is rounded here, has none."""
    return _INFO[fmt]


def torch_dtype(fmt: Format) -> torch.dtype:
    """The torch dtype whose bytes are codes of ``fmt``."""
    return _DTYPE[fmt]


@cache
def table(fmt: Format) -> torch.Tensor:
    """[256] or, for four bits, [16] float64: the value of every code, from the specification. NaN and inf included.

    Raises:
        ValueError: for a format that is wider than 8 bits.
    """
    if fmt in _INTEGERS:
        codes = torch.arange(2 ** _INTEGERS[fmt], dtype=torch.float64)
        return torch.where(codes < codes.numel() / 2, codes, codes - codes.numel()) if fmt in _SIGNED else codes
    if fmt is Format.E8M0:
        return torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64)
    if fmt not in (Format.E4M3FN, Format.E5M2, Format.E2M1):
        raise ValueError(f"{fmt} is not a format of 8 bits or fewer")
    mantissa_bits = limits(fmt).significand_bits - 1
    exponent_bits = (3 if fmt is Format.E2M1 else 7) - mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    top = 2**exponent_bits - 1
    values = []
    for code in range(2 ** (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
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
    """Values of ``codes`` (the format's torch dtype), float64, same shape. A zero point is not part of a code's value.

    Raises:
        ValueError: when the tensor's dtype is not the format's, or a four-bit code has more bits set.
    """
    if codes.dtype is not torch_dtype(fmt):
        raise ValueError(f"codes of {fmt} must be {torch_dtype(fmt)}, got {codes.dtype}")
    if codes.element_size() > 1 or fmt in _SIGNED:
        return codes.to(torch.float64)  # widening: exact
    values = table(fmt)
    index = codes.contiguous().view(torch.uint8).flatten().to(torch.int32)
    if values.numel() < 256 and index.numel() and int(index.max()) >= values.numel():
        raise ValueError(f"{int(index.max())} is no code of {fmt}, which has {values.numel()}")
    return values.index_select(0, index).view(codes.shape)


_EXPONENT = 0x7FF << 52


def binade(values: torch.Tensor) -> torch.Tensor:
    """2**floor(log2(|x|)) of each float64; 0 for 0 and for float64's subnormals, inf for infinities and NaN."""
    return (values.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)


def _integer(values: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    match rounding:
        case Rounding.HALF_EVEN:
            return torch.round(values)
        case Rounding.HALF_AWAY:
            whole = torch.trunc(values)  # not floor(|x| + 1/2): the sum itself may round up
            return whole + torch.trunc(2.0 * (values - whole)).nan_to_num(0.0)
        case Rounding.TOWARD_ZERO:
            return torch.trunc(values)


def spacing(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Distance between the neighbours of ``fmt`` in the binade of each float64, a power of two, with an unbounded exponent."""
    return (binade(values) * 2.0 ** (1 - limits(fmt).significand_bits)).clamp_min_(limits(fmt).min_subnormal)


def _on_grid(values: torch.Tensor, fmt: Format, rounding: Rounding) -> torch.Tensor:
    """Finite ``values`` as whole multiples of the spacing there: dividing by a power of two and multiplying by it are exact."""
    apart = spacing(values, fmt)
    return _integer(values / apart, rounding).mul_(apart)


def round_to(values: torch.Tensor, fmt: Format, rounding: Rounding = Rounding.HALF_EVEN) -> torch.Tensor:
    """``values`` (float64) on the grid of ``fmt``, float64. Not saturating.

    Overflow beyond the largest finite value gives what a cast gives: an infinity, NaN for E4M3FN (which has no infinity), the largest
    value for E2M1 (which has neither); integers are left outside their format's range. Monotone in ``values``. NaN stays NaN.
    """
    if fmt in _INTEGERS:
        return _integer(values, rounding)
    if fmt is Format.FP32 and rounding is Rounding.HALF_EVEN:
        return values.to(torch.float32).to(torch.float64)  # IEEE conversion, the same rounding, faster
    info = limits(fmt)
    rounded = _on_grid(values, fmt, rounding)
    if not rounded.numel() or float(rounded.abs().amax()) <= info.max:  # a NaN is not
        return rounded
    beyond = {Format.E4M3FN: float("nan"), Format.E2M1: info.max}.get(fmt, float("inf"))
    over = ~(rounded.abs() <= info.max)  # also where an infinity made it a NaN
    rounded = torch.where(over, torch.copysign(torch.full_like(rounded, beyond), values), rounded)
    return torch.where(torch.isnan(values), values, rounded)


def saturate(values: torch.Tensor, fmt: Format, rounding: Rounding = Rounding.HALF_EVEN) -> torch.Tensor:
    """``values`` (float64) clamped to the finite range of ``fmt`` and put on its grid, float64: what a quantizer stores."""
    info = limits(fmt)
    clamped = values.clamp(info.min, info.max)
    return _integer(clamped, rounding) if fmt in _INTEGERS else _on_grid(clamped, fmt, rounding)


def encode(values: torch.Tensor, fmt: Format, rounding: Rounding = Rounding.HALF_EVEN) -> torch.Tensor:
    """``values`` (float64) as codes in the format's torch dtype; formats of 8 bits or fewer saturate at their finite range, wider overflow.

    NaN has no code in an integer format or E2M1, and becomes 0 there.
    """
    narrow = fmt in _INTEGERS or fmt in (Format.E4M3FN, Format.E5M2, Format.E2M1)
    rounded = saturate(values, fmt, rounding) if narrow else round_to(values, fmt, rounding)
    if fmt in _INTEGERS or fmt is Format.E2M1:
        rounded = torch.nan_to_num(rounded, nan=0.0)
    if fmt is Format.E2M1:
        magnitude = torch.searchsorted(table(fmt)[:8], rounded.abs().contiguous())
        return (magnitude + 8 * torch.signbit(rounded)).to(torch.uint8)
    return rounded.to(torch_dtype(fmt))
