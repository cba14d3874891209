"""NVFP4 rows: E2M1 codes, an E4M3 scale per 16 columns under one fp32 global scale; on numbers and on intervals.

As vLLM's emulation computes them (``nvfp4_emulation_utils.py``, 0.33.0), each step one fp32 operation, g the reciprocal of the checkpoint's
global multiplier:

    scale = E4M3(min(g * (amax * (1/6)), 448)), code = E2M1(clamp(x * (g / scale), -6, 6)), value = code * (scale / g),

value rounded to the format in which it enters the GEMM. An all-zero group has scale 0 and values 0. Where the recipe does not know how
quotients are formed (Triton on a GPU divides approximately), both of g / scale and scale / g are within references/bounds.py's DIVISION.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from references.bounds import DIVISION
from references.formats import round_to, saturate
from references.scales import expand, group_amax
from references.vocabulary import Format, Layout, Quotient

if TYPE_CHECKING:
    from references.vocabulary import ActQuant

_SIXTH = float(torch.tensor(1.0 / 6.0, dtype=torch.float32))
_LARGEST = 6.0


def fp32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to fp32."""
    return round_to(x, Format.FP32)


def inverse(multiplier: torch.Tensor) -> torch.Tensor:
    """g, [R, 1], of the checkpoint's multiplier [R, 1]."""
    return fp32(1.0 / multiplier)


def group_scale(amax: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """E4M3 scales [R, G] of amax [R, G]; monotone in amax."""
    return saturate(fp32(g * fp32(amax * _SIXTH)), Format.E4M3FN)


def codes_and_values(
    x: torch.Tensor, scale: torch.Tensor, g: torch.Tensor, store: Format, slip: tuple[float, float] = (0.0, 0.0)
) -> torch.Tensor:
    """Values [R, K] entering the GEMM for rows x [R, K] under scales [R, G]; monotone in x. slip: relative errors of the two quotients."""
    rows, cols = x.shape
    wide = expand(scale, Layout.GROUP16, rows, cols)
    zero = wide == 0
    factor = fp32(g / wide.masked_fill(zero, 1.0) * (1.0 + slip[0]))
    codes = saturate(fp32(x * factor).clamp(-_LARGEST, _LARGEST), Format.E2M1)
    return round_to(fp32(codes * fp32(wide / g * (1.0 + slip[1]))), store).masked_fill(zero, 0.0)


def nvfp4(x: torch.Tensor, multiplier: torch.Tensor, how: ActQuant) -> torch.Tensor:
    """Rows x [R, K] float64 as they enter the GEMM. multiplier: [R, 1] float64, the checkpoint's global activation scale."""
    assert how.store is not None
    g = inverse(multiplier)
    return codes_and_values(x, group_scale(group_amax(x, Layout.GROUP16), g), g, how.store)


def nvfp4_hull(low: torch.Tensor, high: torch.Tensor, multiplier: torch.Tensor, how: ActQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest such values of rows in [low, high]: over every scale that the group's amax allows, and every quotient that
    the recipe does; one tensor twice where they are one."""
    assert how.store is not None
    if low is high and how.quotient is not Quotient.ANY:
        only = nvfp4(low, multiplier, how)
        return only, only
    g = inverse(multiplier)
    errors = (-DIVISION, DIVISION) if how.quotient is Quotient.ANY else (0.0,)
    nearest = torch.maximum(torch.maximum(low, -high), torch.zeros_like(low))
    least = group_scale(group_amax(nearest, Layout.GROUP16), g)
    most = group_scale(group_amax(torch.maximum(low.abs(), high.abs()), Layout.GROUP16), g)
    bottom, top = torch.full_like(low, torch.inf), torch.full_like(low, -torch.inf)
    scale = least
    while True:  # E4M3 steps from the least scale to the most, nearly always none or one
        for slip in product(errors, errors):
            ends = [codes_and_values(end, scale, g, how.store, slip) for end in (low, high)]
            bottom, top = torch.minimum(bottom, ends[0]), torch.maximum(top, ends[1])
        if bool((scale >= most).all()):
            return bottom, top
        scale = torch.minimum(_next(scale), most)


def _next(scale: torch.Tensor) -> torch.Tensor:
    """The E4M3 number above each, float64; 448 stays."""
    pattern = (scale.to(torch.float8_e4m3fn).view(torch.uint8) + 1).clamp_max(0x7E)
    return pattern.view(torch.float8_e4m3fn).to(torch.float64)
