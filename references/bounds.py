"""Intervals that contain every result an honest kernel may produce, and the error of each step that is not exact.

The only place with numeric error terms. u = 2**-24 is fp32's unit roundoff: one correctly rounded fp32 operation moves a value by at most
u relative. An ulp is at most 2u relative. Nothing here is tuned: each constant names the operations it stands for.

The accumulator model (any order, any tree of round-to-nearest fp32 additions). Let the addends p_k be fp32 numbers, l_k the lowest set
bit of p_k, B a bound on every partial sum's magnitude and U = ulp(B). Give a value x with lowest set bit l the potential
max(0, U - l). An exact addition z = x + y has l(z) >= min(l(x), l(y)), so its potential is at most the larger of its operands'. An inexact
one rounds to a multiple of V = ulp(z) <= U, errs by at most V/2, and one operand had l <= V/2: the potential drops by at least V/2. Hence

    |error| <= sum_k max(0, U - l_k),

which is 0 when every addend is a multiple of U (integers below 2**24, lattices, most FP8 products) and never needs the order. It is
evaluated through max(0, 1 - r) <= C(q) / r**q with r = l/U and C(q) = max over r of (1 - r) r**q: a matrix product, because
l(a * w) = l(a) * l(w). q = 1 is close for typical products, q = 1/2 bears a few tiny ones; the smaller counts, as does the classical
(n - 1) * U / 2 for n addends. A partial sum lies between minus the sum of the negative addends and the sum of the positive ones, so
B = (sum|p| + |sum p|) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from references.accumulators import truncates, truncation, truncation_in_any_order
from references.activations import function_range
from references.formats import limits, round_to, saturate
from references.quantize import Quantized, multiplier, next_power_of_two, quotient, symmetric
from references.scales import expand, group_amax
from references.vocabulary import Accumulator, Activation, ActQuant, Format, Quotient, Rounding, WeightQuant

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
# -110 exp(-g) overflows (from 88.73 on), g / inf is -0, and the exact value rounds to -0 in fp32 too. silu(0) = 0 / 2.
SILU_IDENTITY_FROM = 18.0
SILU_ZERO_UP_TO = -110.0

_LEMMA_HALF = 2.0 / (3.0 * math.sqrt(3.0))  # C(1/2)
_LEMMA_ONE = 0.25  # C(1)
_INT8_TILE = 32  # tl.dot's smallest K for 8-bit operands: at most ceil(K / 32) int32 tiles are added in fp32


@dataclass(frozen=True, slots=True)
class Interval:
    """Closed intervals [low, high], float64, elementwise."""

    low: torch.Tensor
    high: torch.Tensor

    def __getitem__(self, index: torch.Tensor | slice | tuple[slice, slice]) -> Interval:
        if self.low is self.high:
            part = self.low[index]
            return Interval(part, part)
        return Interval(self.low[index], self.high[index])


def exactly(values: torch.Tensor) -> Interval:
    """The intervals that hold one value each."""
    return Interval(values, values)


def store(x: Interval, fmt: Format) -> Interval:
    """A rounding to ``fmt``: monotone, so the ends are rounded. For fp32 the unrounded value is allowed too (fused operations keep it)."""
    if fmt is Format.FP32:
        return Interval(torch.minimum(x.low, round_to(x.low, fmt)), torch.maximum(x.high, round_to(x.high, fmt)))
    low = round_to(x.low, fmt)
    return Interval(low, low if x.high is x.low else round_to(x.high, fmt))


def times(x: Interval, y: Interval) -> Interval:
    """The four corners of a product."""
    a, b, c, d = x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high
    return Interval(torch.minimum(torch.minimum(a, b), torch.minimum(c, d)), torch.maximum(torch.maximum(a, b), torch.maximum(c, d)))


def widen(x: Interval, radius_low: torch.Tensor, radius_high: torch.Tensor) -> Interval:
    """[low - radius_low, high + radius_high]."""
    return Interval(x.low - radius_low, x.high + radius_high)


def is_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """True where multiplying and dividing by x is exact."""
    return torch.frexp(x)[0].abs() == 0.5


# ---------------------------------------------------------------------------------------------------------------- products over K


def lowest_bit(x: torch.Tensor) -> torch.Tensor:
    """Value of the lowest set bit of each float64; inf for 0, whose product contributes nothing. Subnormal float64 not supported."""
    pattern = x.contiguous().view(torch.int64)
    mantissa = (pattern & ((1 << 52) - 1)) | (1 << 52)
    exponent = (pattern & (0x7FF << 52)).view(torch.float64)
    lowest = (mantissa & -mantissa).to(torch.float64) * exponent * 2.0**-52
    return torch.where(x == 0, torch.full_like(lowest, math.inf), lowest)


def _spacing(magnitude: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Distance between neighbours of ``fmt`` at ``magnitude``: what any code in a wider interval is a multiple of."""
    info = limits(fmt)
    exponent = torch.frexp(magnitude)[1].to(torch.float64) - info.significand_bits
    return torch.exp2(exponent).clamp_min(info.min_subnormal).masked_fill(magnitude == 0, info.min_subnormal)


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a matrix product, [rows, K] float64: values middle +- radius on the grid of ``format``; radius None when exact.

    lowest: every possible value is a multiple of it, inf where the value is 0; None for the INT32 accumulator, which does not ask.
    """

    middle: torch.Tensor
    radius: torch.Tensor | None
    magnitude: torch.Tensor
    lowest: torch.Tensor | None
    format: Format

    def __getitem__(self, index: torch.Tensor | slice | tuple[slice, slice]) -> Operand:
        radius = None if self.radius is None else self.radius[index]
        lowest = None if self.lowest is None else self.lowest[index]
        return Operand(self.middle[index], radius, self.magnitude[index], lowest, self.format)


def operand(x: Interval, fmt: Format, accumulator: Accumulator) -> Operand:
    """``x`` prepared for products; both ends lie on the grid of ``fmt``."""
    lowest = None if accumulator is Accumulator.INT32 else lowest_bit(x.low)
    if x.low is x.high:
        return Operand(x.low, None, x.low.abs(), lowest, fmt)
    middle, radius = (x.low + x.high) / 2.0, (x.high - x.low) / 2.0
    magnitude = torch.maximum(x.low.abs(), x.high.abs())
    smallest = torch.maximum(torch.maximum(x.low, -x.high), torch.zeros_like(middle))
    lowest = None if lowest is None else torch.where(radius == 0, lowest, _spacing(smallest, fmt))
    return Operand(middle, radius, magnitude, lowest, fmt)


def _magnitude_ulp(bound: torch.Tensor) -> torch.Tensor:
    """ulp of fp32 at ``bound``, as float64."""
    return torch.exp2(torch.frexp(bound)[1].to(torch.float64) - 24.0)


def _accumulation_error(a: Operand, w: Operand, total: torch.Tensor, size: torch.Tensor, accumulator: Accumulator) -> torch.Tensor:
    """Bound on the error of accumulating sum_k a[m, k] * w[n, k]; ``size`` = sum of |products|, ``total`` = |sum| at most."""
    terms = a.middle.shape[1]
    if accumulator is Accumulator.INT32:  # tile sums are exact integers, so fp32 additions of them are exact below 2**24
        partial = (size + total) / 2.0
        tiles = -(-terms // _INT8_TILE)
        return torch.where(partial < 2.0**24, torch.zeros_like(partial), (tiles - 1) * _magnitude_ulp(partial) / 2.0)
    assert a.lowest is not None
    assert w.lowest is not None
    least = a.lowest.amin(1, keepdim=True) * w.lowest.amin(1)
    partial = (size + total) / 2.0 * (1.0 + 2.0 * terms * U32)  # computed partial sums carry the error themselves
    ulp = _magnitude_ulp(partial)
    classical = terms * ulp if truncates(accumulator) else (terms - 1) * ulp / 2.0
    if truncates(accumulator) or limits(a.format).significand_bits + limits(w.format).significand_bits <= 24:  # products are fp32 numbers
        root_a, root_w = a.lowest.rsqrt(), w.lowest.rsqrt()
        whole = torch.zeros_like(partial[:, :1])
        if a.radius is not None:  # intervals around zero are multiples of next to nothing: counted whole, they do not drown their row
            far = a.lowest * w.lowest.masked_fill(torch.isinf(w.lowest), 0.0).amax() < ulp.amin(1, keepdim=True) / 64.0
            whole = far.sum(1, keepdim=True)
            root_a = root_a.masked_fill(far, 0.0)
        half = _LEMMA_HALF * ulp.pow(1.5) * (root_a @ root_w.T)
        one = _LEMMA_ONE * ulp.square() * (root_a.square() @ root_w.square().T)
        lemma = whole * ulp + torch.minimum(half, one)
        error = torch.minimum(classical, lemma)
    else:
        error = classical + U32 * size  # and one rounding per product where it is not fused into the addition
    return torch.where(least >= ulp, torch.zeros_like(error), error)


def matmul(a: Operand, w: Operand, accumulator: Accumulator) -> Interval:
    """Intervals of the accumulator after sum_k a[m, k] * w[n, k], [M, N]."""
    centre = a.middle @ w.middle.T
    size = a.magnitude @ w.magnitude.T
    spread = torch.zeros_like(centre)
    if a.radius is not None:
        spread = spread + a.radius @ w.magnitude.T
    if w.radius is not None:
        spread = spread + a.middle.abs() @ w.radius.T
    if accumulator in (Accumulator.TENSOR_CORE_FP8, Accumulator.TENSOR_CORE_FP8_ANY):
        pull = truncation(a, w) if accumulator is Accumulator.TENSOR_CORE_FP8 else truncation_in_any_order(a, w)
        return Interval(centre - spread - pull.down, centre + spread + pull.up)
    radius = spread + _accumulation_error(a, w, centre.abs() + spread, size, accumulator)
    return Interval(centre - radius, centre + radius)


def scaled(x: Interval, a_scale: Interval | None, w_scale: torch.Tensor | None) -> Interval:
    """An accumulator times the activation scale [M, 1] times the weight scale [N], in either order, each product rounded to fp32."""
    if a_scale is not None and w_scale is not None:
        x = times(x, a_scale)  # scales are not negative, and [M, 1] broadcasts
        inexact = (~is_power_of_two(a_scale.low)).to(torch.float64) * (~is_power_of_two(w_scale)).to(torch.float64) * U32
        x = widen(x, inexact * x.low.abs(), inexact * x.high.abs())
        x = Interval(x.low * w_scale, x.high * w_scale)
    elif a_scale is not None:
        x = times(x, a_scale)
    elif w_scale is not None:
        x = Interval(x.low * w_scale, x.high * w_scale)
    else:
        return x
    return store(x, Format.FP32)


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
        ends.append(next_power_of_two(scale * (1.0 - LOG2) if direction < 0 else scale) if how.power_of_two else scale)
    return Interval(ends[0], ends[1])


def _any_quotient(x: Interval, scale: Interval) -> Interval:
    """x / scale, scale >= 0 broadcasting; 0 where the scale is 0; widened by QUOTIENT unless the division is by one power of two."""
    zero = scale.high == 0
    bottom = torch.where(scale.low == 0, scale.high, scale.low).masked_fill(zero, 1.0)
    top = scale.high.masked_fill(zero, 1.0)
    low = torch.where(x.low >= 0, x.low / top, x.low / bottom).masked_fill(zero, 0.0)
    high = torch.where(x.high >= 0, x.high / bottom, x.high / top).masked_fill(zero, 0.0)
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
    low = torch.where(x.low >= 0, quotient(x.low, large, factors[1]), quotient(x.low, small, factors[0]))
    high = torch.where(x.high >= 0, quotient(x.high, small, factors[0]), quotient(x.high, large, factors[1]))
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
    low = saturate(ratio.low, how.format, how.rounding)
    high = low if ratio.high is ratio.low else saturate(ratio.high, how.format, how.rounding)
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
    exponent = torch.frexp(x)[1]
    return torch.ldexp(torch.round(torch.ldexp(x, 11 - exponent)), exponent - 11)


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
    zero = (x.high <= SILU_ZERO_UP_TO) | ((x.low == 0) & (x.high == 0))
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
    ulp = _magnitude_ulp(size * (1.0 + 2.0 * slots * U32))
    ratio = x.low / ulp.unsqueeze(1)
    on_grid = ((x.low == x.high) & (ratio == torch.round(ratio))).all(1)
    error = torch.where(on_grid, torch.zeros_like(ulp), (slots - 1) * ulp / 2.0)
    return widen(total, error, error)
