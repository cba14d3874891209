"""Products over K of routed rows with their experts' matrices, on intervals, and the error an accumulator may make.

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
from dataclasses import dataclass
from types import EllipsisType

import torch

from references.accumulators import truncates, truncation, truncation_in_any_order
from references.bounds import U32, Interval, is_power_of_two, store, times, ulp32, widen
from references.formats import limits, spacing
from references.vocabulary import Accumulator, Format

_LEMMA_HALF = 2.0 / (3.0 * math.sqrt(3.0))  # C(1/2)
_LEMMA_ONE = 0.25  # C(1)
_INT8_TILE = 32  # tl.dot's smallest K for 8-bit operands: at most ceil(K / 32) int32 tiles are added in fp32
_FRACTION_BITS = 52


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows in the order of their experts, against matrices stacked [E, N, K].

    owner: [R] int64, ascending: which matrix of the stack a row meets. spans: the rows that meet each, none of them empty.
    """

    owner: torch.Tensor
    spans: tuple[slice, ...]

    @classmethod
    def of(cls, counts: list[int]) -> Routed:
        """The first ``counts[0]`` rows meet the first matrix, and so on; no count is 0."""
        ends = [sum(counts[: e + 1]) for e in range(len(counts))]
        spans = tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))
        return cls(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), spans)

    def each(self, of_matrix: torch.Tensor) -> torch.Tensor:
        """[E, ...] -> [R, ...]: every row's own."""
        return of_matrix[self.owner]

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Every row of ``left`` [R, K] times its matrix of ``right`` [E, N, K]: [R, N]."""
        out = left.new_empty(left.shape[0], right.shape[1])
        for rows, matrix in zip(self.spans, right, strict=True):
            torch.mm(left[rows], matrix.T, out=out[rows])
        return out


def lowest_bit(x: torch.Tensor) -> torch.Tensor:
    """Value of the lowest set bit of each float64; inf for 0, whose product contributes nothing. Subnormal float64 not supported."""
    pattern = x.contiguous().view(torch.int64)
    mantissa = (pattern & ((1 << _FRACTION_BITS) - 1)).bitwise_or_(1 << _FRACTION_BITS)
    exponent = (pattern & (0x7FF << _FRACTION_BITS)).view(torch.float64)
    lowest = (mantissa & -mantissa).to(torch.float64).mul_(exponent).mul_(2.0**-_FRACTION_BITS)
    return lowest.masked_fill_(x == 0, math.inf)


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a matrix product, rows [R, K] or matrices [E, N, K], float64: values middle +- radius on the grid of ``format``; radius
    None when exact.

    lowest: every possible value is a multiple of it, inf where the value is 0; None for the INT32 accumulator, which does not ask.
    """

    middle: torch.Tensor
    radius: torch.Tensor | None
    magnitude: torch.Tensor
    lowest: torch.Tensor | None
    format: Format

    def __getitem__(self, index: tuple[EllipsisType, slice]) -> Operand:
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
    smallest = torch.maximum(x.low, -x.high).clamp_min_(0.0)
    # any code in a wider interval is a multiple of the distance between neighbours at its smallest magnitude
    lowest = None if lowest is None else torch.where(radius == 0, lowest, spacing(smallest, fmt))
    return Operand(middle, radius, magnitude, lowest, fmt)


def _accumulation_error(
    a: Operand, w: Operand, total: torch.Tensor, size: torch.Tensor, accumulator: Accumulator, routed: Routed
) -> torch.Tensor:
    """Bound on the error of accumulating sum_k a[m, k] * w[n, k]; ``size`` = sum of |products|, ``total`` = |sum| at most."""
    terms = a.middle.shape[1]
    if accumulator is Accumulator.INT32:  # tile sums are exact integers, so fp32 additions of them are exact below 2**24
        partial = (size + total) / 2.0
        tiles = -(-terms // _INT8_TILE)
        return torch.where(partial < 2.0**24, torch.zeros_like(partial), (tiles - 1) * ulp32(partial) / 2.0)
    assert a.lowest is not None
    assert w.lowest is not None
    least = a.lowest.amin(1, keepdim=True) * routed.each(w.lowest.amin(2))
    partial = (size + total) / 2.0 * (1.0 + 2.0 * terms * U32)  # computed partial sums carry the error themselves
    ulp = ulp32(partial)
    classical = terms * ulp if truncates(accumulator) else (terms - 1) * ulp / 2.0
    if truncates(accumulator) or limits(a.format).significand_bits + limits(w.format).significand_bits <= 24:  # products are fp32 numbers
        root_a, root_w = a.lowest.rsqrt(), w.lowest.rsqrt()
        lemma: torch.Tensor | None = None
        if a.radius is not None:  # intervals around zero are multiples of next to nothing: counted whole, they do not drown their row
            most = w.lowest.masked_fill(torch.isinf(w.lowest), 0.0).amax((1, 2))
            far = a.lowest * routed.each(most).unsqueeze(1) < ulp.amin(1, keepdim=True) / 64.0
            lemma = far.sum(1, keepdim=True) * ulp
            root_a = root_a.masked_fill(far, 0.0)
        half = _LEMMA_HALF * ulp.pow(1.5) * routed.product(root_a, root_w)
        one = _LEMMA_ONE * ulp.square() * routed.product(root_a.square(), root_w.square())
        few = torch.minimum(half, one)
        error = torch.minimum(classical, few if lemma is None else lemma + few)
    else:
        error = classical + U32 * size  # and one rounding per product where it is not fused into the addition
    return error.masked_fill_(least >= ulp, 0.0)


def matmul(a: Operand, w: Operand, accumulator: Accumulator, routed: Routed) -> Interval:
    """Intervals of the accumulator after sum_k a[m, k] * w[n, k], [R, N]; a [R, K], w [E, N, K]."""
    centre = routed.product(a.middle, w.middle)
    spread: torch.Tensor | None = None
    if a.radius is not None:
        spread = routed.product(a.radius, w.magnitude)
    if w.radius is not None:
        apart = routed.product(a.middle.abs(), w.radius)
        spread = apart if spread is None else spread + apart
    low, high = (centre, centre) if spread is None else (centre - spread, centre + spread)
    if accumulator in (Accumulator.TENSOR_CORE_FP8, Accumulator.TENSOR_CORE_FP8_ANY):
        pull = truncation(a, w, routed) if accumulator is Accumulator.TENSOR_CORE_FP8 else truncation_in_any_order(a, w, routed)
        return Interval(low - pull.down, high + pull.up)
    size = routed.product(a.magnitude, w.magnitude)
    total = centre.abs() if spread is None else centre.abs() + spread
    radius = _accumulation_error(a, w, total, size, accumulator, routed)
    radius = radius if spread is None else spread + radius
    return Interval(centre - radius, centre + radius)


def _by_scale(x: Interval, scale: Interval) -> Interval:
    """x times a scale [R, 1], which is not negative: two corners for each end."""
    if scale.low is scale.high:
        return times(x, scale)
    return Interval(torch.minimum(x.low * scale.low, x.low * scale.high), torch.maximum(x.high * scale.low, x.high * scale.high))


def scaled(x: Interval, a_scale: Interval | None, w_scale: torch.Tensor | None) -> Interval:
    """An accumulator times the activation scale [R, 1] times the weight scale [R, N], in either order, each product rounded to fp32."""
    if a_scale is not None and w_scale is not None:
        x = _by_scale(x, a_scale)
        a_exact = is_power_of_two(a_scale.low) & (a_scale.low == a_scale.high)  # an interval holds other numbers than its ends
        inexact = (~a_exact).to(torch.float64) * (~is_power_of_two(w_scale)).to(torch.float64) * U32
        x = widen(x, inexact * x.low.abs(), inexact * x.high.abs())
        x = Interval(x.low * w_scale, x.high * w_scale)
    elif a_scale is not None:
        x = _by_scale(x, a_scale)
    elif w_scale is not None:
        x = Interval(x.low * w_scale, x.high * w_scale)
    else:
        return x
    return store(x, Format.FP32)
