"""Which real numbers round to a value, and how far apart representable values lie there. Exact, in float64.

IEEE 754-2019, 4.3.1 roundTiesToEven. Every edge below is a dyadic number with at most 25 significant bits (fp32), so
float64 holds it exactly.
"""

from __future__ import annotations

import torch

from references.formats import binade


def half_gaps(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the distance from |value| to its neighbours in ``dtype``: (towards zero, away from zero), float64.

    ``values`` is any float tensor; for a value off the grid both are half the spacing of its binade. NaN and inf give NaN.
    """
    info = torch.finfo(dtype)
    magnitude = values.to(torch.float64).abs()
    power = binade(magnitude)
    half = (power * (info.eps / 2)).clamp_min_(info.smallest_normal * info.eps / 2)
    half = half + (magnitude - magnitude)  # NaN where there are no neighbours
    return torch.where((magnitude == power) & (magnitude > info.smallest_normal), half / 2, half), half


def preimage(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Closed hull [lower, upper] of the reals that round to each element, float64.

    values: fp32, bf16 or fp16. The edges themselves round to the neighbour where the significand is odd. An infinity's preimage
    starts at max + half an ulp; a NaN has none (NaN, NaN).
    """
    wide = values.to(torch.float64)
    below, above = half_gaps(wide, values.dtype)
    edge = overflow_edge(values.dtype)
    negative = wide < 0
    lower = wide - torch.where(negative, above, below)
    upper = wide + torch.where(negative, below, above)
    zero = wide == 0
    lower, upper = torch.where(zero, -above, lower), torch.where(zero, above, upper)
    infinite = torch.isinf(wide)
    lower = lower.masked_fill(infinite & negative, -torch.inf).masked_fill(infinite & ~negative, edge)
    upper = upper.masked_fill(infinite & negative, -edge).masked_fill(infinite & ~negative, torch.inf)
    return lower, upper


def overflow_edge(dtype: torch.dtype) -> float:
    """Smallest magnitude that rounds to infinity: max + half an ulp (a tie there goes to the even neighbour, infinity)."""
    largest = torch.finfo(dtype).max
    return largest + float(half_gaps(torch.tensor(largest, dtype=torch.float64), dtype)[1])
