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
_CHUNK = 1 << 22  # products looked at at once


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
    rows = max(1, _CHUNK // max(1, w.middle.numel()))
    parts = [_truncation(a[first : first + rows], w) for first in range(0, a.middle.shape[0], rows)]
    return Pull(torch.cat([part.down for part in parts]), torch.cat([part.up for part in parts]))


def _truncation(a: Operand, w: Operand) -> Pull:
    assert a.lowest is not None
    assert w.lowest is not None
    low = a.middle.new_zeros(a.middle.shape[0], w.middle.shape[0])  # the exact partial sum is in [low, high]
    high, down, up = low.clone(), low.clone(), low.clone()  # and the accumulator in [low - down, high + up]
    least = torch.full_like(low, torch.inf)  # and is a multiple of this
    for start in range(0, a.middle.shape[1], FP8_STEP):
        k = (slice(None), slice(start, start + FP8_STEP))
        left, right = a[k], w[k]
        middle = left.middle[:, None] * right.middle
        magnitude = left.magnitude[:, None] * right.magnitude
        lowest = (a.lowest[k][:, None] * w.lowest[k]).nan_to_num(nan=torch.inf)  # 0 * inf: the product is 0
        quantum = _quantum(torch.maximum(torch.maximum(down - low, high + up), magnitude.amax(2)))
        lost = torch.minimum(magnitude, (quantum[:, :, None] - lowest).clamp_min(0.0))
        spread = magnitude - middle.abs()
        first, last = middle - spread, middle + spread
        carried = (quantum - least).clamp_min(0.0)
        down = down + torch.where(last > 0, lost, 0.0).sum(2) + torch.minimum(carried, (high + up).clamp_min(0.0))
        up = up + torch.where(first < 0, lost, 0.0).sum(2) + torch.minimum(carried, (down - low).clamp_min(0.0))
        low, high = low + first.sum(2), high + last.sum(2)
        least = torch.minimum(least, lowest.amin(2))
        kept = (_quantum(torch.maximum(down - low, high + up)) - least).clamp_min(0.0)
        down, up = down + torch.where(high + up > 0, kept, 0.0), up + torch.where(low - down < 0, kept, 0.0)
    return Pull(down, up)


def truncates(accumulator: Accumulator) -> bool:
    """Whether every addition may lose a whole unit in the last place instead of half of one."""
    return accumulator in (Accumulator.TENSOR_CORE, Accumulator.TENSOR_CORE_FP8)
