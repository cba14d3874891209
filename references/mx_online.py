"""Online MXFP8 and MXFP4: weights in groups of 32 columns under one E8M0 scale, as vLLM 0.33.0 chooses it.

OCP Microscaling Formats 1.0 leaves the scale to the implementation. vLLM's (``utils/mxfp8_utils.py``, ``utils/mxfp4_utils.py``):

    MXFP8: scale = 2**ceil(log2(amax / 448)), the smallest that saturates nothing
    MXFP4: scale = 2**(e - 2) for amax in [2**e, 1.75 * 2**e), 2**(e - 1) from there on: half of what rounds beyond 6 saturates

Both divide by the scale exactly, round half to even, and saturate. amax is floored at fp32's smallest normal, 2**-126.
"""

from __future__ import annotations

import torch

from references.formats import saturate
from references.vocabulary import Format

WIDTH = 32
_SMALLEST_NORMAL = 2.0**-126
_BIAS = 127


def quantize(weights: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes' values [N, K] and scales [N, K / 32], float64; weights: [N, K] float64.

    Raises:
        ValueError: for columns that are no whole groups, or another format.
    """
    rows, columns = weights.shape
    if columns % WIDTH:
        raise ValueError(f"MX scales are shared by {WIDTH} columns: K must be a multiple, got {columns}")
    groups = weights.reshape(rows, -1, WIDTH)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1).clamp_min(_SMALLEST_NORMAL))  # amax = mantissa * 2**exponent, in [0.5, 1)
    match fmt:
        case Format.E4M3FN:  # 448 = 0.875 * 2**9
            power = exponent - 9 + (mantissa > 0.875).int()
        case Format.E2M1:
            power = exponent - 1 - 2 + (mantissa >= 0.875).int()
        case _:
            raise ValueError(f"online MX weights are e4m3fn or e2m1, not {fmt}")
    scale = torch.exp2(power.clamp(-_BIAS, _BIAS).double())
    return saturate(groups / scale.unsqueeze(-1), fmt).reshape(rows, columns), scale
