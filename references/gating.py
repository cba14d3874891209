"""Gated activations with parameters: clamped, tilted and softly clipped products, in float64 and on intervals.

    swigluoai, swigluoai_uninterleave: g' = min(g, limit), u' = clamp(u, limit); g' * sigmoid(alpha * g') * (u' + beta)
    silu with a limit: the same with alpha 1 and beta 0
    swiglustep: min(silu(g), limit) * clamp(u, limit)
    situ: situ * tanh(g / situ) * sigmoid(g) * (linear * tanh(u / linear), or u)

Sources, vLLM 0.33.0: ``layers/activation.py``, ``fused_moe/activation.py``; the compiled operators' order and roundings from the machine
code of its wheel (sm_90): with a limit act(g') is rounded to the tensor's dtype before the product, u' + beta is one fp32 addition;
swigluoai and situ are fp32 throughout. DeepGEMM's fused quantizer on Hopper also rounds u' + beta: ``quantization/utils/fp8_utils.py``,
_silu_mul_per_token_group_quant_fp8_colmajor.
"""

from __future__ import annotations

from functools import cache

import torch

from references.activations import function_range, silu
from references.bounds import SILU, U32, Interval, store, times, widen
from references.formats import round_to
from references.vocabulary import Activation, Format, Swiglu

CLAMPED_BEFORE = (Activation.SILU, Activation.SWIGLUOAI, Activation.SWIGLUOAI_UNINTERLEAVE)
_TINY = 89.0 * 2.0**-127  # exp overflows, or its result is flushed, where silu is at most this
# tanh in fp32: 2 ulp (CUDA C++ Programming Guide, tanhf; torch's is Sleef u10, 1 ulp); its argument: a reciprocal, a product.
_TANH = 4.0 * U32
_SOFT = _TANH + 3.0 * U32  # beta * tanh(x / beta), relative: |x tanh'(x)| <= |tanh(x)|
_HALF_SIGMOID = (_TANH + 2.0 * U32) / 2.0  # (1 + tanh(x / 2)) / 2, absolute


def has_parameters(activation: Activation, swiglu: Swiglu | None) -> bool:
    """Whether the product is one of these."""
    return activation.gated and (swiglu is not None or activation in (Activation.SWIGLUOAI, Activation.SWIGLUSTEP, Activation.SITU))


def _act(activation: Activation, swiglu: Swiglu, gate: torch.Tensor) -> torch.Tensor:
    """act(gate), gate float64 and already clamped."""
    if activation is Activation.SITU:
        return _situ(gate, swiglu.situ or 1.0)
    value = silu(swiglu.alpha * gate) / swiglu.alpha
    return value if activation in CLAMPED_BEFORE or swiglu.limit is None else value.clamp_max(swiglu.limit)


def _situ(gate: torch.Tensor, beta: float) -> torch.Tensor:
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate)


def _clamped_gate(activation: Activation, swiglu: Swiglu, gate: torch.Tensor) -> torch.Tensor:
    return gate.clamp_max(swiglu.limit) if activation in CLAMPED_BEFORE and swiglu.limit is not None else gate


def _shaped_up(swiglu: Swiglu, up: torch.Tensor) -> torch.Tensor:
    up = up if swiglu.limit is None else up.clamp(-swiglu.limit, swiglu.limit)
    up = up if swiglu.linear is None else swiglu.linear * torch.tanh(up / swiglu.linear)
    return up + swiglu.beta


def gated(activation: Activation, swiglu: Swiglu, gate: torch.Tensor, up: torch.Tensor, gate_store: Format | None) -> torch.Tensor:
    """The product, float64; act(gate) rounded to ``gate_store`` first where there is one."""
    act, shaped = _act(activation, swiglu, _clamped_gate(activation, swiglu, gate)), _shaped_up(swiglu, up)
    act = act if gate_store is None else round_to(act, gate_store)
    return act * (shaped if swiglu.up_store is None else round_to(shaped, swiglu.up_store))


def gated_interval(activation: Activation, swiglu: Swiglu, gate: Interval, up: Interval, gate_store: Format | None) -> Interval:
    """The product on intervals, before the rounding that stores it."""
    low, high = (_clamped_gate(activation, swiglu, end) for end in (gate.low, gate.high))
    farthest = torch.maximum(low.abs(), high.abs())
    if activation is Activation.SITU:
        act = _situ_interval(low, high, farthest, swiglu.situ or 1.0)
    else:
        bottom, top = function_range(Activation.SILU, swiglu.alpha * low, swiglu.alpha * high)
        bottom, top = bottom / swiglu.alpha, top / swiglu.alpha
        relative = SILU + (2.0 + 2.0 * farthest * swiglu.alpha) * U32  # alpha, alpha * g and the product by g are rounded too
        act = widen(Interval(bottom, top), *(relative * end.abs() + _TINY for end in (bottom, top)))
        if activation is Activation.SWIGLUSTEP and swiglu.limit is not None:
            act = Interval(act.low.clamp_max(swiglu.limit), act.high.clamp_max(swiglu.limit))
    act = store(act, gate_store or Format.FP32)
    ends = [_shaped_up(swiglu, end) for end in (up.low, up.high)]
    shaped = Interval(*ends)
    if swiglu.linear is not None:
        shaped = widen(shaped, *(_SOFT * end.abs() for end in ends))
    shaped = store(shaped, Format.FP32)
    shaped = shaped if swiglu.up_store is None else store(shaped, swiglu.up_store)
    return store(times(act, shaped), Format.FP32)


def _situ_interval(low: torch.Tensor, high: torch.Tensor, farthest: torch.Tensor, beta: float) -> Interval:
    at_low, at_high = _situ(low, beta), _situ(high, beta)
    bottom, top = torch.minimum(at_low, at_high), torch.maximum(at_low, at_high)
    where = situ_minimum(beta)
    least = float(_situ(torch.tensor(where, dtype=torch.float64), beta))
    bottom = torch.where((low < where) & (where < high), torch.full_like(bottom, least), bottom)
    error = farthest.clamp_max(beta) * (1.0 + _SOFT) * _HALF_SIGMOID
    return widen(Interval(bottom, top), *(error + (_SOFT + 2.0 * U32) * end.abs() for end in (bottom, top)))


@cache
def situ_minimum(beta: float) -> float:
    """Where situ has its only minimum: the zero of its derivative sech(x/b)**2 s + b tanh(x/b) s (1 - s), s = sigmoid(x), by bisection."""
    left, right = -30.0, 0.0
    for _ in range(200):
        x = torch.tensor((left + right) / 2.0, dtype=torch.float64)
        slope = (1.0 - torch.tanh(x / beta) ** 2) + beta * torch.tanh(x / beta) * torch.sigmoid(-x)
        left, right = (float(x), right) if slope < 0 else (left, float(x))
    return (left + right) / 2.0
