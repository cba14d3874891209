"""How tensor cores add. One machine step takes the accumulator and a fixed number of products, aligns all of them to the largest
exponent among them, truncates each toward zero to a fixed number of fraction bits, adds exactly, and truncates the result toward zero.

Measured on one H200 (compute capability 9.0) with lattice probes through Triton 3.6, vLLM's CUTLASS kernel and mma.sync: a big addend, n
copies of 2**-j beside it in the same step, in a later one or in the accumulator, then the big addend taken away again; what is left is
what survived. Results, alike for both signs and all tile shapes:

- FP8 (wgmma e4m3): 2**-13 survives next to 1, 2**-14 does not, however many there are and wherever they are: 13 fraction bits, and the
  accumulator keeps no more. Triton multiplies FP8 tiles of fewer than 64 rows as fp16 instead, which is the next line.
- fp16 and bf16: eight copies of 2**-25 survive together, a final result of 2**24 + 1 becomes 2**24: at least 25 fraction bits inside a
  step, 24 bits kept, truncated.
- fp32 operands (TF32): the low 13 bits of each operand are dropped (2049.99 becomes 2048), then as above.

Published measurements agree: DeepSeek-V3 (arXiv 2412.19437, section 3.5.2) and SageAttention 2 (arXiv 2411.10958, section 3.3) for FP8,
Fasi et al., "Numerical behavior of NVIDIA tensor cores" (PeerJ CS 2021) for truncation.

The bound. Truncating a value with lowest set bit l to a multiple of q errs by at most q - l, always toward zero, by no more than the
value itself, and not at all when l >= q. So a step with quantum q errs by at most the sum of min(|p|, max(0, q - l)) over its products:
positive products pull the result down, negative ones up. The accumulator is a multiple of the quantum of the step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from references.formats import binade
from references.vocabulary import Accumulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from references.products import Operand, Routed

FP8_FRACTION_BITS = 13
FP8_STEP = 32  # K of one wgmma on 8-bit operands
_CHUNK = 128  # columns that a block takes at least
_EACH_ONE = 1 << 19  # an expert's products, where they are more than this, are bounded together
_AT_ONCE = 1 << 15  # products looked at together: what fits a core's cache
_LEMMA = tuple((p, p**p / (1.0 + p) ** (1.0 + p)) for p in (0.5, 1.0, 2.0))  # C(p) = max over r of (1 - r) * r**p


class Pull(NamedTuple):
    """How far below and above the exact sum the accumulator may end, [R, N], both >= 0."""

    down: torch.Tensor
    up: torch.Tensor


def tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 numbers, as float64, as a tensor core reads them: 11 significant bits, the rest dropped."""
    return (x.contiguous().view(torch.int64) & -(1 << 42)).view(torch.float64)


def _quantum(magnitude: torch.Tensor) -> torch.Tensor:
    """2**(floor(log2(magnitude)) - 13), 0 at 0."""
    return binade(magnitude) * 2.0**-FP8_FRACTION_BITS


def truncation(a: Operand, w: Operand, routed: Routed) -> Pull:
    """FP8 tensor cores, K ascending, a [R, K], w [E, N, K].

    Sums of products of FP8 codes, and of what is lost of them, have few bits: float64 holds them exactly, in any order.
    """
    experts = _experts(a, w, routed)
    middles, spreads = _chunks(a, w, FP8_STEP, routed)
    lows, highs = (middles - spreads).cumsum(0), (middles + spreads).cumsum(0)
    low = high = torch.zeros_like(middles[0])  # the exact partial sum is in [low, high]
    down, up = low, low  # and the accumulator in [low - down, high + up]
    least = torch.full_like(low, torch.inf)  # and is a multiple of this
    for step in range(len(middles)):
        k = slice(step * FP8_STEP, (step + 1) * FP8_STEP)
        here = [expert.products(k) for expert in experts]
        largest = torch.cat([products.largest() for products in here])
        quantum = _quantum(torch.maximum(torch.maximum(down - low, high + up), largest))
        carried = (quantum - least).clamp_min_(0.0)
        finest = _finest(a, w, k, routed)
        positive, negative = _each(products.lost(quantum[rows]) for products, rows in zip(here, routed.spans, strict=True))
        coarse = finest < quantum
        below = positive * coarse + torch.minimum(carried, (high + up).clamp_min_(0.0))
        above = negative * coarse + torch.minimum(carried, (down - low).clamp_min_(0.0))
        down, up, low, high = down + below, up + above, lows[step], highs[step]
        least = torch.minimum(least, finest)
        bottom, top = down - low, high + up
        kept = (_quantum(torch.maximum(bottom, top)) - least).clamp_min_(0.0)
        down, up = down + kept * (top > 0), up + kept * (bottom > 0)
    return Pull(down, up)


def truncation_in_any_order(a: Operand, w: Operand, routed: Routed) -> Pull:
    """FP8 tensor cores, each step 32 columns, steps divided among warps in any way, their results added in fp32.

    No partial sum of steps with results t exceeds (sum |t| + |sum t|) / 2.
    """
    experts = _experts(a, w, routed)
    middles, spreads = _chunks(a, w, FP8_STEP, routed)
    most = ((middles.abs() + spreads).sum(0) + middles.sum(0).abs() + spreads.sum(0)) / 2.0
    largest = a.magnitude.amax(1, keepdim=True) * routed.each(w.magnitude.amax(2))
    finest = _finest(a, w, slice(None), routed)
    pull = Pull(torch.zeros_like(most), torch.zeros_like(most))
    for _ in range(2):  # the accumulator carries its own error
        quantum = _quantum(torch.maximum(most + torch.maximum(*pull), largest))
        lost = _each(expert.lost(quantum[rows]) for expert, rows in zip(experts, routed.spans, strict=True))
        carried = 3.0 * len(middles) * (quantum - finest).clamp_min(0.0)  # into a step, out of it, and into the sum of the warps' results
        pull = Pull(*(each.masked_fill(finest >= quantum, 0.0) + carried for each in lost))
    return pull


def _finest(a: Operand, w: Operand, k: slice, routed: Routed) -> torch.Tensor:
    """What every product of columns ``k`` is a multiple of, [R, N]."""
    assert a.lowest is not None
    assert w.lowest is not None
    return a.lowest[:, k].amin(1, keepdim=True) * routed.each(w.lowest[:, :, k].amin(2))


def _each(of_experts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every expert's rows, one below the other."""
    first, second = zip(*of_experts, strict=True)
    return torch.cat(first), torch.cat(second)


def _chunks(a: Operand, w: Operand, columns: int, routed: Routed) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of chunks of K: middles and spreads, each [chunks, R, N]."""
    middles, spreads = [], []
    for start in range(0, a.middle.shape[1], columns):
        k = (..., slice(start, start + columns))
        middles.append(routed.product(a.middle[k], w.middle[k]))
        if a.radius is not None or w.radius is not None:
            farthest = routed.product(a.magnitude[k], w.magnitude[k])
            spreads.append(farthest - routed.product(a.middle[k].abs(), w.middle[k].abs()))
    middle = torch.stack(middles)
    return middle, torch.stack(spreads) if spreads else torch.zeros_like(middle)


class Slices(NamedTuple):
    """K divided among at most ``blocks`` thread blocks of 128 or more columns each, whose results are added one after another.

    parts: sum of the results' magnitudes; sums: of the magnitudes of their sums, from either end of K, two or more at a time; [R, N].
    """

    parts: torch.Tensor
    sums: torch.Tensor
    blocks: int


def slices(a: Operand, w: Operand, routed: Routed) -> Slices | None:
    """Bounds of what is stored on the way, a [R, K], w [E, N, K]; None where one block has all of K."""
    middles, spreads = _chunks(a, w, _CHUNK, routed)
    if len(middles) == 1:
        return None
    prefix = middles.cumsum(0)
    backward = torch.cat([(prefix[-1] - prefix[:-2]).flip(0), prefix[-1:]])
    sums = torch.maximum(prefix[1:].abs(), backward.abs()) + spreads.sum(0)
    return Slices((middles.abs() + spreads).sum(0), sums.sum(0), len(middles))


@dataclass(frozen=True, slots=True)
class _Side:
    """One operand. sign: 1.0 or -1.0, 0.0 where the value is 0 or may have either sign."""

    magnitude: torch.Tensor
    lowest: torch.Tensor
    sign: torch.Tensor

    @classmethod
    def of(cls, x: Operand) -> _Side:
        assert x.lowest is not None
        sign = torch.sign(x.middle)
        if x.radius is not None:
            sign = torch.sign(torch.sign(x.middle - x.radius) + torch.sign(x.middle + x.radius))
        return cls(x.magnitude, x.lowest, sign)

    def each(self, step: Callable[[torch.Tensor], torch.Tensor]) -> _Side:
        return _Side(step(self.magnitude), step(self.lowest), step(self.sign))

    def either(self) -> bool:
        """Whether a value may have either sign."""
        return bool(((self.sign == 0) & (self.magnitude > 0)).any())

    def signs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """1.0 where the value may be positive, and where it may be negative."""
        some = self.magnitude > 0
        return (some & (self.sign >= 0)).to(self.sign.dtype), (some & (self.sign <= 0)).to(self.sign.dtype)


class _OneByOne(NamedTuple):
    """Products looked at one by one, of x [K, M, 1] and y [K, 1, N]. either: some may have either sign."""

    x: _Side
    y: _Side
    either: bool
    sizes: torch.Tensor  # [K, M, N]

    def largest(self) -> torch.Tensor:
        return self.sizes.amax(0)

    def lost(self, quantum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What truncating the products to ``quantum`` [M, N] takes away at most, over the positive and over the negative ones."""
        lost = (quantum - self.x.lowest * self.y.lowest).clamp_min_(0.0)
        torch.minimum(lost, self.sizes, out=lost)
        total = lost.sum(0)
        signed = lost.mul_(self.x.sign * self.y.sign)
        difference = signed.sum(0)
        known = signed.abs_().sum(0) if self.either else total  # of products whose sign is known; the others count on both sides
        return total - (known - difference) / 2.0, total - (known + difference) / 2.0


class _Together(NamedTuple):
    """Products bounded together, of x [M, K] and y [N, K]."""

    x: _Side
    y: _Side

    def largest(self) -> torch.Tensor:
        return self.x.magnitude.amax(1, keepdim=True) * self.y.magnitude.amax(1)

    def lost(self, quantum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As one by one, by q - l <= C(p) * q * (q / l)**p (references/products.py) for p = 1/2, 1 and 2; a vague one, of whose low bits
        nothing is known, loses q."""
        sides = (self.x, self.y)
        vague = [(side.lowest < side.magnitude * 2.0**-10).to(quantum.dtype) for side in sides]
        known = [side.lowest.masked_fill(each > 0, torch.inf) for side, each in zip(sides, vague, strict=True)]
        some = [(side.magnitude > 0).to(quantum.dtype) for side in sides]
        (a, b), (c, d) = (side.signs() for side in sides)

        def by_sign(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Sums over k of left * right where the product may be positive, and where it may be negative."""
            plus, minus, up, down = left * a, left * b, (right * c).T, (right * d).T
            return plus @ up + minus @ down, plus @ down + minus @ up

        best = [torch.full_like(quantum, torch.inf)] * 2
        for power, constant in _LEMMA:
            factor = constant * quantum ** (1.0 + power)
            totals = by_sign(known[0] ** -power, known[1] ** -power)
            best = [torch.minimum(least, factor * total) for least, total in zip(best, totals, strict=True)]
        whole = [one + other for one, other in zip(by_sign(vague[0], some[1]), by_sign(some[0], vague[1]), strict=True)]
        return best[0] + quantum * whole[0], best[1] + quantum * whole[1]


@dataclass(frozen=True, slots=True)
class _Expert:
    """One expert's rows x and matrix y, as _OneByOne or _Together has them."""

    x: _Side
    y: _Side
    one_by_one: bool
    either: bool

    def products(self, k: slice) -> _OneByOne | _Together:
        if not self.one_by_one:
            return _Together(self.x.each(itemgetter((slice(None), k))), self.y.each(itemgetter((slice(None), k))))
        x, y = self.x.each(itemgetter(k)), self.y.each(itemgetter(k))
        return _OneByOne(x, y, self.either, x.magnitude * y.magnitude)

    def lost(self, quantum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Over all of K, a part of it at a time."""
        if not self.one_by_one:
            return self.products(slice(None)).lost(quantum)
        positive, negative = torch.zeros_like(quantum), torch.zeros_like(quantum)
        width = max(1, _AT_ONCE // quantum.numel())
        for start in range(0, len(self.x.sign), width):
            above, below = self.products(slice(start, start + width)).lost(quantum)
            positive, negative = positive + above, negative + below
        return positive, negative


def _experts(a: Operand, w: Operand, routed: Routed) -> list[_Expert]:
    left, right = _Side.of(a), _Side.of(w)
    either = (a.radius is not None and left.either()) or (w.radius is not None and right.either())
    experts = []
    for e, rows in enumerate(routed.spans):
        x, y = left.each(itemgetter(rows)), right.each(itemgetter(e))
        one_by_one = x.sign.numel() * y.sign.shape[0] <= _EACH_ONE
        if one_by_one:
            x, y = x.each(lambda each: each.T.contiguous().unsqueeze(2)), y.each(lambda each: each.T.contiguous().unsqueeze(1))
        experts.append(_Expert(x, y, one_by_one, either))
    return experts


def truncates(accumulator: Accumulator) -> bool:
    """Whether every addition may lose a whole unit in the last place instead of half of one."""
    return accumulator in (Accumulator.TENSOR_CORE, Accumulator.TENSOR_CORE_FP8, Accumulator.TENSOR_CORE_FP8_ANY)
