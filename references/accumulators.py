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

from typing import TYPE_CHECKING, NamedTuple

import torch

from references.vocabulary import Accumulator

if TYPE_CHECKING:
    from references.bounds import Operand

FP8_FRACTION_BITS = 13
FP8_STEP = 32  # K of one wgmma on 8-bit operands
_CHUNK = 128  # columns that a block takes at least
_EACH_ONE = 1 << 19  # with more products than this they are bounded together
_LEMMA = tuple((p, p**p / (1.0 + p) ** (1.0 + p)) for p in (0.5, 1.0, 2.0))  # C(p) = max over r of (1 - r) * r**p


class Pull(NamedTuple):
    """How far below and above the exact sum the accumulator may end, [M, N], both >= 0."""

    down: torch.Tensor
    up: torch.Tensor


def tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 numbers, as float64, as a tensor core reads them: 11 significant bits, the rest dropped."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(torch.ldexp(mantissa, torch.tensor(11))), exponent - 11)


def _quantum(magnitude: torch.Tensor) -> torch.Tensor:
    """2**(floor(log2(magnitude)) - 13), 0 at 0."""
    exponent = torch.frexp(magnitude)[1].to(torch.float64) - 1.0 - FP8_FRACTION_BITS
    return torch.where(magnitude == 0, 0.0, torch.exp2(exponent))


def truncation(a: Operand, w: Operand) -> Pull:
    """FP8 tensor cores, K ascending, a [M, K], w [N, K]."""
    assert a.lowest is not None
    assert w.lowest is not None
    each_one = a.middle.numel() * w.middle.shape[0] <= _EACH_ONE
    left, right = _Side.of(a.middle, a.radius, a.lowest), _Side.of(w.middle, w.radius, w.lowest)
    low = a.middle.new_zeros(a.middle.shape[0], w.middle.shape[0])  # the exact partial sum is in [low, high]
    high, down, up = low.clone(), low.clone(), low.clone()  # and the accumulator in [low - down, high + up]
    least = torch.full_like(low, torch.inf)  # and is a multiple of this
    for start in range(0, a.middle.shape[1], FP8_STEP):
        x, y = left.columns(start), right.columns(start)
        middle, spread = x.middle @ y.middle.T, x.magnitude @ y.magnitude.T - x.middle.abs() @ y.middle.abs().T
        if each_one:
            largest = (x.magnitude[:, None] * y.magnitude).amax(2)
        else:
            largest = x.magnitude.amax(1, keepdim=True) * y.magnitude.amax(1)
        quantum = _quantum(torch.maximum(torch.maximum(down - low, high + up), largest))
        carried = (quantum - least).clamp_min(0.0)
        finest = x.lowest.amin(1, keepdim=True) * y.lowest.amin(1)
        positive, negative = _lost_one_by_one(x, y, quantum) if each_one else _lost(x, y, quantum)
        below = positive.masked_fill(finest >= quantum, 0.0) + torch.minimum(carried, (high + up).clamp_min(0.0))
        above = negative.masked_fill(finest >= quantum, 0.0) + torch.minimum(carried, (down - low).clamp_min(0.0))
        down, up, low, high = down + below, up + above, low + middle - spread, high + middle + spread
        least = torch.minimum(least, finest)
        kept = (_quantum(torch.maximum(down - low, high + up)) - least).clamp_min(0.0)
        down, up = down + torch.where(high + up > 0, kept, 0.0), up + torch.where(low - down < 0, kept, 0.0)
    return Pull(down, up)


def truncation_in_any_order(a: Operand, w: Operand) -> Pull:
    """FP8 tensor cores, each step 32 columns, steps divided among warps in any way, their results added in fp32.

    No partial sum of steps with results t exceeds (sum |t| + |sum t|) / 2.
    """
    assert a.lowest is not None
    assert w.lowest is not None
    x, y = _Side.of(a.middle, a.radius, a.lowest), _Side.of(w.middle, w.radius, w.lowest)
    middles, spreads = _chunks(x, y, FP8_STEP)
    most = ((middles.abs() + spreads).sum(0) + middles.sum(0).abs() + spreads.sum(0)) / 2.0
    largest = x.magnitude.amax(1, keepdim=True) * y.magnitude.amax(1)
    each_one = a.middle.numel() * w.middle.shape[0] <= _EACH_ONE
    finest = x.lowest.amin(1, keepdim=True) * y.lowest.amin(1)
    steps = -(-a.middle.shape[1] // FP8_STEP)
    pull = Pull(torch.zeros_like(most), torch.zeros_like(most))
    for _ in range(2):  # the accumulator carries its own error
        quantum = _quantum(torch.maximum(most + torch.maximum(*pull), largest))
        lost = _lost_one_by_one(x, y, quantum) if each_one else _lost(x, y, quantum)
        carried = 3.0 * steps * (quantum - finest).clamp_min(0.0)  # into a step, out of it, and into the sum of the warps' results
        pull = Pull(*(each.masked_fill(finest >= quantum, 0.0) + carried for each in lost))
    return pull


def _chunks(x: _Side, y: _Side, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of chunks of K: middles and spreads, each [chunks, M, N]."""
    middles, spreads = [], []
    for start in range(0, x.middle.shape[1], columns):
        k = (slice(None), slice(start, start + columns))
        middles.append(x.middle[k] @ y.middle[k].T)
        spreads.append(x.magnitude[k] @ y.magnitude[k].T - x.middle[k].abs() @ y.middle[k].abs().T)
    return torch.stack(middles), torch.stack(spreads)


class Slices(NamedTuple):
    """K divided among at most ``blocks`` thread blocks of 128 or more columns each, whose results are added one after another.

    parts: sum of the results' magnitudes; sums: of the magnitudes of their sums, from either end of K, two or more at a time; [M, N].
    """

    parts: torch.Tensor
    sums: torch.Tensor
    blocks: int


def slices(a: Operand, w: Operand) -> Slices | None:
    """Bounds of what is stored on the way, a [M, K], w [N, K]; None where one block has all of K."""
    middles, spreads = _chunks(_Side.of(a.middle, a.radius, a.middle), _Side.of(w.middle, w.radius, w.middle), _CHUNK)
    if len(middles) == 1:
        return None
    prefix = middles.cumsum(0)
    backward = torch.cat([(prefix[-1] - prefix[:-2]).flip(0), prefix[-1:]])
    sums = torch.maximum(prefix[1:].abs(), backward.abs()) + spreads.sum(0)
    return Slices((middles.abs() + spreads).sum(0), sums.sum(0), len(middles))


class _Side(NamedTuple):
    """One operand, [rows, K]. may_be_positive, may_be_negative: 1.0 or 0.0; vague: 1.0 where nothing is known of the low bits."""

    middle: torch.Tensor
    magnitude: torch.Tensor
    lowest: torch.Tensor
    may_be_positive: torch.Tensor
    may_be_negative: torch.Tensor
    vague: torch.Tensor

    @classmethod
    def of(cls, middle: torch.Tensor, radius: torch.Tensor | None, lowest: torch.Tensor) -> _Side:
        spread = torch.zeros_like(middle) if radius is None else radius
        magnitude = middle.abs() + spread
        vague = (lowest < magnitude * 2.0**-10).to(middle.dtype)
        return cls(middle, magnitude, lowest, (middle + spread > 0).to(middle.dtype), (middle - spread < 0).to(middle.dtype), vague)

    def columns(self, start: int) -> _Side:
        return _Side(*(each[:, start : start + FP8_STEP] for each in self))

    def signed(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight * self.may_be_positive, weight * self.may_be_negative


def _lost_one_by_one(x: _Side, y: _Side, quantum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What truncating each product takes away at most, over the positive and over the negative ones."""
    lowest = (x.lowest[:, None] * y.lowest).nan_to_num(nan=torch.inf)  # 0 * inf: the product is 0
    lost = torch.minimum(x.magnitude[:, None] * y.magnitude, (quantum[:, :, None] - lowest).clamp_min(0.0))
    same = torch.maximum(x.may_be_positive[:, None] * y.may_be_positive, x.may_be_negative[:, None] * y.may_be_negative)
    other = torch.maximum(x.may_be_positive[:, None] * y.may_be_negative, x.may_be_negative[:, None] * y.may_be_positive)
    return (lost * same).sum(2), (lost * other).sum(2)


def _lost(x: _Side, y: _Side, quantum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as matrix products, by q - l <= C(p) * q * (q / l)**p (references/bounds.py) for p = 1/2, 1 and 2; a vague one loses q."""
    known = [side.lowest.masked_fill(side.vague > 0, torch.inf) for side in (x, y)]
    best = [torch.full_like(quantum, torch.inf)] * 2
    for power, constant in _LEMMA:
        factor = constant * quantum ** (1.0 + power)
        for sign, total in enumerate(_by_sign(x, y, known[0] ** -power, known[1] ** -power)):
            best[sign] = torch.minimum(best[sign], factor * total)
    some = [(side.magnitude > 0).to(quantum.dtype) for side in (x, y)]
    vague = [a + b for a, b in zip(_by_sign(x, y, x.vague, some[1]), _by_sign(x, y, some[0], y.vague), strict=True)]
    return best[0] + quantum * vague[0], best[1] + quantum * vague[1]


def _by_sign(x: _Side, y: _Side, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over k of left * right where the product may be positive, and where it may be negative."""
    (a, b), (c, d) = x.signed(left), y.signed(right)
    return a @ c.T + b @ d.T, a @ d.T + b @ c.T


def truncates(accumulator: Accumulator) -> bool:
    """Whether every addition may lose a whole unit in the last place instead of half of one."""
    return accumulator in (Accumulator.TENSOR_CORE, Accumulator.TENSOR_CORE_FP8, Accumulator.TENSOR_CORE_FP8_ANY)
