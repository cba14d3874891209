"""MoE activations in float64, and their exact range over an interval.

silu(x) = x / (1 + exp(-x)); gelu(x) = x * Phi(x) (erf form) or Hendrycks & Gimpel's tanh form (arXiv 1606.08415);
relu2(x) = max(x, 0)**2. Gated: act(gate) * up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from references.vocabulary import Activation

Function = Callable[[torch.Tensor], torch.Tensor]


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), float64."""
    return x * torch.sigmoid(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x * Phi(x) with the error function, float64. erfc keeps the left tail's relative accuracy."""
    tail: torch.Tensor = torch.special.erfc(-x / math.sqrt(2.0))
    return 0.5 * x * tail


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x**3))), float64, written x * sigmoid(2z) for the left tail."""
    z = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return x * torch.sigmoid(2.0 * z)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)**2, float64."""
    return x.clamp_min(0.0).square()


_FUNCTION: dict[Activation, Function] = {
    Activation.SILU: silu,
    Activation.SILU_NO_MUL: silu,
    Activation.GELU: gelu,
    Activation.GELU_NO_MUL: gelu,
    Activation.GELU_TANH: gelu_tanh,
    Activation.RELU2_NO_MUL: relu2,
    Activation.GELU_TANH_NO_MUL: gelu_tanh,
}
SIMPLE = tuple(_FUNCTION)
"""Activations without parameters; the others are in references/gating.py."""

# Where each function has its only interior extremum, a minimum: silu'(x) = 0 at x = -(1 + W(1/e)); the gelus by Newton's method in
# float64, re-derived in tests. relu2 is monotone.
_MINIMUM_AT: dict[Function, float] = {
    silu: -1.2784645427610738,
    gelu: -0.7517915246935645,
    gelu_tanh: -0.7524614220710162,
}


def function(activation: Activation) -> Function:
    """The scalar function of ``activation``, without the gate product."""
    return _FUNCTION[activation]


def activate(activation: Activation, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """act(gate) * up for gated activations, act(up) otherwise; float64.

    Raises:
        ValueError: when ``gate`` is given to a non-gated activation or missing from a gated one.
    """
    if activation.gated != (gate is not None):
        raise ValueError(f"{activation} {'needs a gate' if activation.gated else 'takes no gate'}")
    act = function(activation)
    return act(up) if gate is None else act(gate) * up


def function_range(activation: Activation, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of act over [low, high], elementwise: the end points, and the interior minimum where it lies inside."""
    act = function(activation)
    at_low, at_high = act(low), act(high)
    bottom, top = torch.minimum(at_low, at_high), torch.maximum(at_low, at_high)
    where = _MINIMUM_AT.get(act)
    if where is None:
        return bottom, top
    least = float(act(torch.tensor(where, dtype=torch.float64)))
    return torch.where((low < where) & (where < high), torch.full_like(bottom, least), bottom), top
