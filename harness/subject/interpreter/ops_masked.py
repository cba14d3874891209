"""Activations of rows packed per expert (csrc/libtorch_stable/activation_kernels.cu, masked_moe_activation).

Input [E, T, 2*d] or [T, 2*d] (without a gate d), output [E, T, d] or [T, d]: only the first rows of each expert, as counted, are read and
written. The arithmetic of each is that of the operator for whole tensors; those without a gate round once from float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.subject.interpreter.ops_activation import IMPLEMENTATIONS as WHOLE
from harness.subject.interpreter.ops_activation import at_least, at_most, gelu_f32, gelu_tanh_f32, relu_squared, silu_f32

if TYPE_CHECKING:
    from collections.abc import Callable

_GATED = {"silu": "_C::silu_and_mul", "gelu": "_C::gelu_and_mul", "gelu_tanh": "_C::gelu_tanh_and_mul"}
_CLAMPED = ("silu_with_clamp", "swigluoai_uninterleave")
_UNGATED = {"silu_no_mul": silu_f32, "gelu_no_mul": gelu_f32, "gelu_tanh_no_mul": gelu_tanh_f32}


def swiglustep(out: torch.Tensor, x: torch.Tensor, limit: float) -> None:
    """min(silu(gate), limit) * clamp(up) in float32, one rounding."""
    gate, up = x.chunk(2, -1)
    out.copy_((at_most(silu_f32(gate), limit) * at_least(at_most(up.float(), limit), -limit)).to(out.dtype))


def masked_moe_activation(
    out: torch.Tensor,
    x: torch.Tensor,
    valid_token_counts: torch.Tensor,
    activation: str,
    clamp_limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    situ_beta: float = 1.0,
    situ_linear_beta: float = -1.0,
) -> None:
    """Raises RuntimeError for an activation that the operator does not know."""

    def apply(out: torch.Tensor, x: torch.Tensor) -> None:
        if activation in _GATED:
            WHOLE[_GATED[activation]](out, x)
        elif activation in _CLAMPED:
            WHOLE["_C::silu_and_mul_with_clamp"](out, x, clamp_limit, alpha, beta)
        elif activation in _UNGATED:
            out.copy_(_UNGATED[activation](x).to(out.dtype))
        elif activation == "relu2_no_mul":
            relu_squared(out, x)
        elif activation == "swigluoai":
            WHOLE["_C::swigluoai_and_mul"](out, x, alpha, clamp_limit)
        elif activation == "situ":
            WHOLE["_C::situ_and_mul"](out, x, situ_beta, situ_linear_beta)
        elif activation == "swiglustep":
            swiglustep(out, x, clamp_limit)
        else:
            raise RuntimeError(f"Unsupported masked MoE activation: {activation}")

    batched = x if x.dim() == 3 else x.unsqueeze(0)
    for number, count in enumerate(valid_token_counts.tolist()):
        rows = max(0, min(count, batched.shape[1]))
        if rows:
            apply(out.view(batched.shape[0], *out.shape[-2:])[number, :rows], batched[number, :rows])


IMPLEMENTATIONS: dict[str, Callable[..., object]] = {"_C::masked_moe_activation": masked_moe_activation}
