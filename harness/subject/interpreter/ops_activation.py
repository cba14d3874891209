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


def at_most(x: torch.Tensor, limit: float) -> torch.Tensor:
    """fminf: of NaN and a number the number."""
    return torch.fmin(x, torch.full_like(x, limit))


def at_least(x: torch.Tensor, limit: float) -> torch.Tensor:
    """fmaxf."""
    return torch.fmax(x, torch.full_like(x, limit))


def _gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def kernel(out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, -1)
        activated = act(gate).to(x.dtype)
        out.copy_((activated.float() * up.float()).to(out.dtype))

    return kernel


def relu_squared(out: torch.Tensor, x: torch.Tensor) -> None:
    """relu(x)^2 in float32, one rounding."""
    positive = at_least(x.float(), 0.0)
    out.copy_((positive * positive).to(out.dtype))


def silu_and_mul_with_clamp(out: torch.Tensor, x: torch.Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> None:
    """g * sigmoid(alpha * g) * (u + beta), g = min(gate, limit), u = clamp(up): as silu_and_mul, act(g) rounded before the product."""
    gate, up = x.chunk(2, -1)
    gate = at_most(gate.float(), limit).to(x.dtype).float()
    activated = (gate / (1.0 + torch.exp(-gate * float(F32(alpha))))).to(x.dtype)
    up = at_least(at_most(up.float(), limit), -limit).to(x.dtype).float() + float(F32(beta))
    out.copy_((activated.float() * up).to(out.dtype))


def swigluoai_and_mul(out: torch.Tensor, x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """(g * (u + 1)) / (1 + exp(-alpha * g)) in float32, gate and up in turn, one rounding."""
    gate = at_most(x[..., ::2].float(), limit)
    up = at_least(at_most(x[..., 1::2].float(), limit), -limit)
    out.copy_((gate * (up + 1.0) / (1.0 + torch.exp(-(gate * float(F32(alpha)))))).to(out.dtype))


def situ_and_mul(out: torch.Tensor, x: torch.Tensor, beta: float = 1.0, linear_beta: float = -1.0) -> None:
    """beta tanh(g / beta) sigmoid(g) times up, or linear_beta tanh(up / linear_beta), in float32, one rounding; sigmoid by tanh(g / 2)."""
    gate, up = (part.float() for part in x.chunk(2, -1))
    activated = (beta * 0.5) * torch.tanh(gate * (1.0 / beta)) * (1.0 + torch.tanh(gate * 0.5))
    if linear_beta > 0:
        up = linear_beta * torch.tanh(up * (1.0 / linear_beta))
    out.copy_((activated * up).to(out.dtype))


IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "_C::silu_and_mul": _gated(silu_f32),
    "_C::gelu_and_mul": _gated(gelu_f32),
    "_C::gelu_tanh_and_mul": _gated(gelu_tanh_f32),
    "_C::relu_squared": relu_squared,
    "_C::silu_and_mul_with_clamp": silu_and_mul_with_clamp,
    "_C::swigluoai_and_mul": swigluoai_and_mul,
    "_C::situ_and_mul": situ_and_mul,
}
