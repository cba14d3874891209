"""Ways of handing the same scales to the functional entry: other shapes, other strides, the same numbers.

What lies between and behind the elements of a strided view is a number that no scale has, so that a kernel that ignores strides shows.
"""

from __future__ import annotations

from enum import StrEnum

import torch

_BETWEEN = 3.0 * 2.0**-10  # no power of two, so nothing a lattice holds; small, so that fp16 outputs stay finite


class View(StrEnum):
    """How one scale tensor is handed over."""

    E = "[E]"
    E_1 = "[E, 1]"
    E_1_1 = "[E, 1, 1]"
    E_N = "[E, N]"
    E_N_1 = "[E, N, 1]"
    STRIDED = "every second element of a buffer"
    TRANSPOSED = "the transpose of a buffer"
    EXPANDED = "one element expanded, stride 0"
    SCALAR = "[]"
    ONE = "[1]"
    ONE_ONE = "[1, 1]"


def view(scale: torch.Tensor, how: View) -> torch.Tensor:
    """``scale`` as ``how`` says.

    Weights' scales: [E] per tensor, [E, N, 1] per channel, [E, R, C] per block; activations' [1].

    Raises:
        ValueError: the numbers cannot be seen that way.
    """
    experts = scale.shape[0]
    match how:
        case View.E | View.E_1 | View.E_1_1:
            return scale.reshape(experts, *[1] * (str(how).count(",")))
        case View.E_N:
            return scale.reshape(experts, -1)
        case View.E_N_1:
            return scale.reshape(experts, -1, 1)
        case View.STRIDED:
            buffer = torch.full((*scale.shape, 2), _BETWEEN, dtype=scale.dtype, device=scale.device)
            buffer[..., 0] = scale
            return buffer[..., 0]
        case View.TRANSPOSED:
            if scale.dim() < 2 or scale.shape[1] == 1:
                raise ValueError(f"a scale of shape {list(scale.shape)} has nothing to transpose")
            first, second = (0, 1) if scale.shape[-1] == 1 else (1, 2)
            return scale.transpose(first, second).contiguous().transpose(first, second)
        case View.EXPANDED:
            if not bool((scale == scale.flatten()[0]).all()):
                raise ValueError("only equal scales can be one element expanded")
            buffer = torch.full((scale.numel() + 1,), _BETWEEN, dtype=scale.dtype, device=scale.device)
            buffer[0] = scale.flatten()[0]
            return buffer[0].expand(scale.shape)
        case View.SCALAR | View.ONE | View.ONE_ONE:
            return scale.reshape({View.SCALAR: (), View.ONE: (1,), View.ONE_ONE: (1, 1)}[how])
