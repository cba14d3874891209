"""Intervals that contain every result an honest kernel may produce, and the error of each step that is not exact.

With products.py, the only place with numeric error terms. u = 2**-24 is fp32's unit roundoff: one correctly rounded fp32 operation moves
a value by at most u relative. An ulp is at most 2u relative. Nothing here is tuned: each constant names the operations it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from references.activations import function_range
from references.formats import binade, limits, round_to, saturate
from references.quantize import Quantized, coded, multiplier, next_power_of_two, quotient, symmetric
from references.scales import expand, group_amax
from references.vocabulary import Activation, ActQuant, Format, Quotient, Rounding, WeightQuant

Expand = Callable[[torch.Tensor], torch.Tensor]

U32 = 2.0**-24
_ULP = 2.0 * U32  # an ulp, relative, at most

# fp32 division x / y: 2 ulp where a compiler emits an approximate division (Triton: div.full.f32, PTX ISA 8.x, "maximum ulp error 2");
# correctly rounded elsewhere.
DIVISION = 2.0 * _ULP
# x / s, x * (1 / s), and x * (qmax / amax) with s = amax / qmax: at most an approximate division, or two roundings; scale apart.
QUOTIENT = DIVISION
# exp in fp32: 2 ulp (CUDA C++ Programming Guide, table of maximum ulp errors, expf; Sleef u10 used by torch on CPUs: 1 ulp).
EXP = 2.0 * _ULP
# exp2(ceil(log2(x))): log2f, 1 ulp of results up to 16 (CUDA C++ Programming Guide), may reach the integer from above.
LOG2 = 16.0 * _ULP
LOG2_BF16 = 2.0**-4  # the logarithm of a scale between 2^-32 and 2^32 is rounded to bf16, before its ceiling is taken
# silu = g / (1 + exp(-g)) or g * (1 / (1 + exp(-g))): exp, the addition, the division, the product.
SILU = EXP + U32 + U32 + U32
# gelu = g/2 * (1 + erf(g * 0.70710678)): argument 2u (constant, product) times max |z erf'(z)| = 0.4840; the addition u * 2; erf: 2 ulp in
# CUDA, but torch's vectorised CPU erf is Abramowitz & Stegun 7.1.26, |error| <= 1.5e-7 before the roundings of its degree-five polynomial
# (five fused steps and one product, of values at most 1).
ERF_ABSOLUTE = 1.5e-7 + 6.0 * U32
GELU_ABSOLUTE = 2.0 * 0.4840 * U32 + ERF_ABSOLUTE + 2.0 * U32  # of 1 + erf, before the factor g/2
# tanh form: inner argument 7u (cube 2, constant and product 2, addition, outer constant and product 2) times max |z sech(z)**2| = 0.4477;
# tanh 2 ulp; the addition.
GELU_TANH_ABSOLUTE = 7.0 * 0.4477 * U32 + 2.0 * U32 * 2.0 + 2.0 * U32
GELU_RELATIVE = 2.0 * U32  # the products by g and by 1/2
_TINY = 2.0**-126  # results below fp32's normal range may be flushed to zero
_SILU_OVERFLOW = 88.73 * 2.0**-128  # exp(-g) overflows beyond g = -88.72, which makes silu 0
# silu to the last bit. From 18 on exp(-g) < 2**-25, also with its error: 1 + exp(-g) rounds to 1 and g / 1, or g times 1 / 1, is g. Up to
# -110 exp(-g) overflows (from 88.73 on), g / inf is -0, and the exact value rounds to -0 in fp32 too. silu(0) = 0 / 2. -inf / inf is NaN.
SILU_IDENTITY_FROM = 18.0
SILU_ZERO_UP_TO = -110.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Closed intervals [low, high], float64, elementwise."""

    low: torch.Tensor
    high: torch.Tensor

    def __getitem__(self, index: torch.Tensor | slice | tuple[slice, slice]) -> Interval:
        return self.ends(lambda end: end[index])

    def ends(self, step: Callable[[torch.Tensor], torch.Tensor]) -> Interval:
        """A monotone step done to both ends; to one where they are the very same tensor."""
        low = step(self.low)
        return Interval(low, low if self.high is self.low else step(self.high))


def exactly(values: torch.Tensor) -> Interval:
    """The intervals that hold one value each."""
    return Interval(values, values)


def store(x: Interval, fmt: Format) -> Interval:
    """A rounding to ``fmt``: monotone, so the ends are rounded. For fp32 the unrounded value is allowed too (fused operations keep it)."""
    low = round_to(x.low, fmt)
    if fmt is Format.FP32:
        return Interval(torch.minimum(x.low, low), torch.maximum(x.high, low if x.high is x.low else round_to(x.high, fmt)))
    return Interval(low, low if x.high is x.low else round_to(x.high, fmt))


def times(x: Interval, y: Interval) -> Interval:
    """The four corners of a product; two where one factor is known, one where both are."""
    if y.low is y.high:
        a, b = x.low * y.low, x.high * y.low
        return Interval(a, a) if x.low is x.high else Interval(torch.minimum(a, b), torch.maximum(a, b))
    if x.low is x.high:
        return times(y, x)
    a, b, c, d = x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high
    return Interval(torch.minimum(torch.minimum(a, b), torch.minimum(c, d)), torch.maximum(torch.maximum(a, b), torch.maximum(c, d)))


def opened(x: Interval, *of: Interval) -> Interval:
    """``x``, made of ``of``: what is NaN stays NaN where each of those is one number, or NaN; else it may be NaN, and any number."""
    doubtful = torch.isnan(x.low) | torch.isnan(x.high)
    if not bool(doubtful.any()):
        return x
    if of:
        doubtful &= torch.stack([~torch.isclose(each.low, each.high, rtol=0, atol=0, equal_nan=True) for each in of]).any(0)
    return Interval(x.low.masked_fill(doubtful, -torch.inf), x.high.masked_fill(doubtful, torch.inf))


def widen(x: Interval, radius_low: torch.Tensor, radius_high: torch.Tensor) -> Interval:
    """[low - radius_low, high + radius_high]. An infinity has no error: that of a rounding to a stored format, it stays what it is."""
    return Interval(
        x.low - radius_low.masked_fill(torch.isinf(x.low), 0.0),
        x.high + radius_high.masked_fill(torch.isinf(x.high), 0.0),
    )


def is_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """True where multiplying and dividing by x is exact."""
    return (binade(x) == x.abs()) & (x != 0)


def ulp32(bound: torch.Tensor) -> torch.Tensor:
    """ulp of fp32 at ``bound`` > 0, as float64; 2**-24 at 0."""
    return (binade(bound) * 2.0**-23).masked_fill_(bound == 0, 2.0**-24)


# --------------------------------------------------------------------------------------------------------------------- quantizers


def _scale_interval(amax: Interval, how: ActQuant) -> Interval:
    """max(amax / qmax, floor) over an interval of amax, monotone. DIVISION widens it where the kernel's division may be approximate,
    except where fp32 holds the quotient exactly."""
    qmax = limits(how.format).qmax
    floor = round_to(torch.tensor(how.scale_floor, dtype=torch.float64), how.scale_store)
    ends = []
    for end, direction in ((amax.low, -1.0), (amax.high, 1.0)):
        ratio = end / qmax
        if how.quotient is Quotient.ANY:
            exact = round_to(ratio, Format.FP32) * qmax == end
            ratio = torch.where(exact, ratio, ratio * (1.0 + direction * DIVISION))
        scale = torch.maximum(round_to(ratio, how.scale_store), floor)
        error = LOG2 if how.scale_store is Format.FP32 else LOG2_BF16
        ends.append(next_power_of_two(scale * (1.0 - error) if direction < 0 else scale) if how.power_of_two else scale)
    return Interval(ends[0], ends[1])


def _any_quotient(x: Interval, scale: Interval) -> Interval:
    """x / scale, scale >= 0 broadcasting; 0 where the scale is 0; widened by QUOTIENT unless the division is by one power of two."""
    zero = scale.high == 0
    top = scale.high.masked_fill(zero, 1.0)
    if scale.low is scale.high:
        bottom = top
        low = (x.low / top).masked_fill_(zero, 0.0)
        high = low if x.low is x.high else (x.high / top).masked_fill_(zero, 0.0)
    else:
        bottom = torch.where(scale.low == 0, scale.high, scale.low).masked_fill(zero, 1.0)
        low = torch.minimum(x.low / top, x.low / bottom).masked_fill_(zero, 0.0)
        high = torch.maximum(x.high / bottom, x.high / top).masked_fill_(zero, 0.0)
    inexact = torch.where((bottom == top) & is_power_of_two(top), 0.0, QUOTIENT)
    return widen(Interval(low, high), inexact * low.abs(), inexact * high.abs())


def _known_quotient(x: Interval, scale: Interval, amax: Interval | None, how: ActQuant, expanded: Expand) -> Interval:
    """The recipe's own quotient, whose every operation rounds once: monotone in x and in the scale, so the ends suffice."""
    small, large = (expanded(end) for end in (scale.low, scale.high))
    by_small = multiplier(scale.low, None if amax is None else amax.low, how)
    by_large = multiplier(scale.high, None if amax is None else amax.high, how)
    factors = (None, None) if by_small is None or by_large is None else (expanded(by_small), expanded(by_large))
    if x.low is x.high and scale.low is scale.high:
        return exactly(quotient(x.low, small, factors[0]))
    low = torch.minimum(quotient(x.low, large, factors[1]), quotient(x.low, small, factors[0]))
    high = torch.maximum(quotient(x.high, small, factors[0]), quotient(x.high, large, factors[1]))
    return Interval(low, high)


def quantize(x: Interval, how: ActQuant, static_scale: torch.Tensor | None) -> tuple[Interval, Interval]:
    """Rows [R, K] quantized: (codes [R, K], scale [R, 1] or [R, groups]). Quantizing is monotone in the quotient.

    A code is in doubt only where the quotient's interval holds a tie. static_scale: [R, 1] float64, exact, for a static quantizer.
    """
    rows, cols = x.low.shape
    amax: Interval | None = None
    if static_scale is None:
        amax = exactly(group_amax(x.low, how.layout))
        if x.low is not x.high:
            nearest = torch.maximum(torch.maximum(x.low, -x.high), torch.zeros_like(x.low))
            amax = Interval(group_amax(nearest, how.layout), group_amax(torch.maximum(x.low.abs(), x.high.abs()), how.layout))
        scale = _scale_interval(amax, how)
    else:
        scale = exactly(static_scale)

    def expanded(one: torch.Tensor) -> torch.Tensor:
        return one if static_scale is not None else expand(one, how.layout, rows, cols)

    if how.quotient is Quotient.ANY:
        ratio = _any_quotient(x, Interval(expanded(scale.low), expanded(scale.high)))
    else:
        ratio = _known_quotient(x, scale, amax, how, expanded)
    low = coded(ratio.low, how)
    high = low if ratio.high is ratio.low else coded(ratio.high, how)
    codes = exactly(low) if torch.equal(low, high) else Interval(low, high)
    if scale.low.dim() == 0:
        scale = Interval(scale.low.expand(rows, 1), scale.high.expand(rows, 1))
    return codes, scale


def weight_code_hull(w: torch.Tensor, quantized: Quantized, how: WeightQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest honest online code of each weight: one unless the recipe does not know the quotient, or w * (1 / scale)."""
    if how.quotient is not Quotient.ANY or how.arithmetic is not Format.FP32:
        return quantized.codes, quantized.codes
    exact = _any_quotient(exactly(w), exactly(quantized.scale))
    ratio = widen(exact, U32 * exact.low.abs(), U32 * exact.high.abs())  # a product after the division
    low, high = (symmetric(saturate(end, how.format, how.rounding), how.format) for end in (ratio.low, ratio.high))
    return (quantized.codes, quantized.codes) if torch.equal(low, high) else (low, high)


def requantized_hull(before: Quantized, after: Quantized, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest honest code of Q(code * s_half / s_max).

    vLLM dequantizes through fp16 (w8a8_utils.py, per_tensor_dequantize): code * s_half is rounded to 11 bits, and on a GPU s_half is too,
    because a zero-dimensional tensor is cast to the other operand's dtype. The hull of the exact product and these two, each divided as a
    kernel divides. fp16's exponent range is not granted: a scale so small that the product underflows is a deviation, and is reported.
    """
    if bool(before.group_scale == after.group_scale):
        return after.codes, after.codes
    scale_fp16 = _eleven_bits(before.group_scale)
    exact = before.codes * before.group_scale
    variants = (exact, _eleven_bits(exact), _eleven_bits(before.codes * scale_fp16))
    ratios = [_any_quotient(exactly(v), exactly(after.group_scale)) for v in variants]
    low = saturate(torch.stack([r.low for r in ratios]).amin(0), fmt, Rounding.HALF_EVEN)
    high = saturate(torch.stack([r.high for r in ratios]).amax(0), fmt, Rounding.HALF_EVEN)
    return (after.codes, after.codes) if torch.equal(low, high) else (low, high)


def _eleven_bits(x: torch.Tensor) -> torch.Tensor:
    """fp16's precision with an unbounded exponent."""
    spacing = (binade(x) * 2.0**-10).clamp_min_(_TINY**2)
    return torch.round(x / spacing).mul_(spacing)


# -------------------------------------------------------------------------------------------------------------- activation, routing


def activation_interval(activation: Activation, x: Interval) -> Interval:
    """act over [low, high] as fp32 code evaluates it: the exact range, widened by the function's own error at each end."""
    low, high = function_range(activation, x.low, x.high)
    farthest = torch.maximum(x.low.abs(), x.high.abs())
    match activation:
        case Activation.SILU | Activation.SILU_NO_MUL:
            errors = [SILU * end.abs() + _SILU_OVERFLOW for end in (low, high)]
            return _where_silu_is_known(x, widen(Interval(low, high), *errors))
        case Activation.GELU | Activation.GELU_NO_MUL:
            errors = [GELU_ABSOLUTE * farthest / 2.0 + GELU_RELATIVE * end.abs() for end in (low, high)]
        case Activation.GELU_TANH | Activation.GELU_TANH_NO_MUL:
            errors = [GELU_TANH_ABSOLUTE * farthest / 2.0 + GELU_RELATIVE * end.abs() for end in (low, high)]
        case _:  # relu2, max and a product: one rounding, that of the store
            return Interval(low, high)
    return widen(Interval(low, high), *errors)


def _where_silu_is_known(x: Interval, otherwise: Interval) -> Interval:
    identity = x.low >= SILU_IDENTITY_FROM
    zero = ((x.high <= SILU_ZERO_UP_TO) & torch.isfinite(x.low)) | ((x.low == 0) & (x.high == 0))
    ends = (
        torch.where(identity, a, torch.where(zero, torch.zeros_like(a), b)) for a, b in ((x.low, otherwise.low), (x.high, otherwise.high))
    )
    return Interval(*ends)


def router_weights(weights: torch.Tensor, experts: int, exact: bool) -> Interval:
    """fp32 router weights [M, k] around their float64 values; heaviest first. ``exact``: given as fp32, so only their one rounding.

    Numerator: the subtraction of the maximum, u * |ln(w / w_max)| in the exponent, and exp. Denominator: the same for its terms (weighted
    by p, |ln| averages to at most ln E) and a chain of ceil(E / 8) + 3 additions (eight lanes or threads, then a tree). One division.
    Renormalising: k - 1 additions, their terms' errors again, one division.
    """
    if exact:
        return exactly(round_to(weights, Format.FP32))
    experts_log = math.log(experts)
    top_k = weights.shape[1]
    numerator = U32 * torch.log(weights[:, :1] / weights.clamp_min(_TINY)) + EXP
    denominator = EXP + U32 * (experts_log + math.ceil(experts / 8) + 3)
    renormalise = EXP + U32 * (experts_log + top_k)
    radius = weights * (numerator + denominator + U32 + renormalise)
    return store(Interval(weights - radius, weights + radius), Format.FP32)


def sum_over_slots(x: Interval, fmt: Format | None = None) -> Interval:
    """Sum over k of [M, k, H], in any order, in fp32 or in ``fmt``, which the addends are of: k - 2 roundings before the output's."""
    slots = x.low.shape[1]
    total, size = Interval(x.low.sum(1), x.high.sum(1)), torch.maximum(x.low.abs(), x.high.abs()).sum(1)
    if fmt is not None:
        u = 2.0 ** -limits(fmt).significand_bits
        error = max(slots - 2, 0) * u * (1.0 + u) ** slots * size
        return widen(total, error, error)
    if slots <= 2:
        return store(total, Format.FP32) if slots == 2 else total
    ulp = ulp32(size * (1.0 + 2.0 * slots * U32))
    ratio = x.low / ulp.unsqueeze(1)
    on_grid = ((x.low == x.high) & (ratio == torch.round(ratio))).all(1)
    error = torch.where(on_grid, torch.zeros_like(ulp), (slots - 1) * ulp / 2.0)
    return widen(total, error, error)
