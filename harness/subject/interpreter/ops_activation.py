"""Gated activations (csrc/libtorch_stable/activation_kernels.cu).

Inputs [..., 2*d], gate first; outputs [..., d]; float32, float16 or bfloat16.

The kernels compute act(gate) in float32, round it to the tensor's dtype, multiply by up in float32 and round again: two
roundings. CUDA's expf, erff and tanhf differ from the C library's by at most 2 ulp of float32; nothing else differs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

F32 = np.float32


def silu_f32(gate: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) in float32."""
    x = gate.float()
    return x / (1.0 + torch.exp(-x))


def gelu_f32(gate: torch.Tensor) -> torch.Tensor:
    """x * 0.5 * (1 + erf(x * sqrt(1/2))) in float32, left to right."""
    x = gate.float()
    return x * 0.5 * (1.0 + torch.erf(x * float(F32(math.sqrt(0.5)))))


def gelu_tanh_f32(gate: torch.Tensor) -> torch.Tensor:
    """0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) in float32, left to right."""
    x = gate.float()
    beta = float(F32(math.sqrt(2.0) * (2.0 / math.sqrt(math.pi)) * 0.5))
    inner = beta * (x + float(F32(0.044715)) * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def kernel(out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, -1)
        activated = act(gate).to(x.dtype)
        out.copy_((activated.float() * up.float()).to(out.dtype))

    return kernel


def relu_squared(out: torch.Tensor, x: torch.Tensor) -> None:
    """relu(x)^2 in float32, one rounding."""
    positive = torch.clamp(x.float(), min=0.0)
    out.copy_((positive * positive).to(out.dtype))


IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "_C::silu_and_mul": _gated(silu_f32),
    "_C::gelu_and_mul": _gated(gelu_f32),
    "_C::gelu_tanh_and_mul": _gated(gelu_tanh_f32),
    "_C::relu_squared": relu_squared,
}
