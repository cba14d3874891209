"""Quantizers on numbers: a scale per group, a quotient, a rounding. Every scale multiplies the codes.

scale = max(amax / qmax, floor), in the dtype the recipe names; quotient by division, by a reciprocal or by qmax / amax, as the recipe
names, in fp32 (weights: in the recipe's arithmetic dtype); code = Q(quotient), saturating. Where the recipe does not know the quotient
(ANY), numbers divide and the intervals (references/bounds.py) hold the others.

An operation in fp32 (bf16, fp16) is the operation in float64 rounded once: 53 >= 2 * 24 + 2 bits make the double rounding innocuous
(Figueroa 1995, "When is double rounding innocuous?").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from references.formats import binade, limits, round_to, saturate
from references.scales import expand, group_amax
from references.vocabulary import ActQuant, Format, Quotient, Rounding, WeightQuant


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """value ~= codes * scale.

    codes: [R, K] float64, values on the format's grid.
    scale: float64, broadcasts against ``codes``.
    group_scale: the same scale in the layout's own shape.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    group_scale: torch.Tensor


def dynamic_scale(amax: torch.Tensor, how: ActQuant | WeightQuant) -> torch.Tensor:
    """max(amax / qmax, floor) in the recipe's scale dtype, or the power of two not below it; amax float64, any shape."""
    store = how.scale_store if isinstance(how, ActQuant) else how.arithmetic
    qmax = limits(how.format).qmax
    if isinstance(how, WeightQuant) and how.scale_by_reciprocal:
        scale = round_to(amax * round_to(torch.tensor(1.0 / qmax, dtype=torch.float64), store), store)
    else:
        scale = round_to(amax / qmax, store)
    scale = torch.maximum(scale, round_to(torch.tensor(how.scale_floor, dtype=torch.float64), store))
    return next_power_of_two(scale) if how.power_of_two else scale


def next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below x > 0, float64; 0 stays 0. UE8M0's rounding of a scale (OCP MX 1.0, section 5.4)."""
    power = binade(x)
    return torch.where(power == x, power, 2.0 * power)


def multiplier(scale: torch.Tensor, amax: torch.Tensor | None, how: ActQuant | WeightQuant) -> torch.Tensor | None:
    """What x is multiplied by, in the quotient's arithmetic; None when it is divided by the scale. Zero scales give infinity."""
    arithmetic = how.arithmetic if isinstance(how, WeightQuant) else Format.FP32
    match how.quotient:
        case Quotient.DIVIDE | Quotient.ANY:
            return None
        case Quotient.RECIPROCAL:
            return round_to(1.0 / scale, arithmetic)
        case Quotient.AMAX_RATIO:
            if amax is None:
                raise ValueError("a static scale has no amax: its quotient is a division or a product by the reciprocal")
            qmax = limits(how.format).qmax
            return round_to(qmax / amax.clamp_min(how.scale_floor * qmax), arithmetic)


def quotient(x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, arithmetic: Format = Format.FP32) -> torch.Tensor:
    """x / scale, or x * factor, rounded to ``arithmetic``; 0 where the scale is 0 (an all-zero group without a floor)."""
    zero = scale == 0
    ratio = x / scale.masked_fill(zero, 1.0) if factor is None else x * factor.masked_fill(zero, 1.0)
    return round_to(ratio, arithmetic).masked_fill(zero, 0.0)


def quantize_activations(x: torch.Tensor, how: ActQuant, static_scale: float | torch.Tensor | None = None) -> Quantized:
    """Rows entering a GEMM, x [R, K] float64, quantized as ``how`` says. The TENSOR layout takes its amax over all R rows.

    static_scale: one for all rows, or [R, 1] float64.

    Raises:
        ValueError: when a static quantizer gets no scale, or a dynamic one gets one.
    """
    if how.dynamic == (static_scale is not None):
        raise ValueError("a static activation quantizer needs static_scale, a dynamic one computes its own")
    if static_scale is None:
        amax = group_amax(x, how.layout)
        group_scale = dynamic_scale(amax, how)
        scale = expand(group_scale, how.layout, *x.shape)
        factor = multiplier(group_scale, amax, how)
        factor = None if factor is None else expand(factor, how.layout, *x.shape)
    else:
        group_scale = torch.as_tensor(static_scale, dtype=torch.float64)
        scale = group_scale.reshape(-1, 1)
        factor = multiplier(scale, None, how)
    return Quantized(codes=coded(quotient(x, scale, factor), how), scale=scale, group_scale=group_scale)


def coded(ratio: torch.Tensor, how: ActQuant) -> torch.Tensor:
    """The codes of quotients, both float64."""
    codes = saturate(ratio, how.format, how.rounding)
    return codes if how.of_nan is None else torch.where(torch.isnan(codes), how.of_nan, codes)


def symmetric(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes clamped to +-qmax: weight quantizers never use INT8's -128."""
    return codes.clamp(-limits(fmt).qmax, limits(fmt).qmax)


def quantize_weights(w: torch.Tensor, how: WeightQuant) -> Quantized:
    """Online quantization of one expert's w13 or w2, w [N, K] float64 holding hidden-dtype values.

    TENSOR takes one amax over the whole matrix, so gate and up share a scale.
    """
    amax = group_amax(w, how.layout)
    group_scale = dynamic_scale(amax, how)
    scale = expand(group_scale, how.layout, *w.shape)
    factor = multiplier(group_scale, amax, how)
    factor = None if factor is None else expand(factor, how.layout, *w.shape)
    codes = symmetric(saturate(quotient(w, scale, factor, how.arithmetic), how.format, how.rounding), how.format)
    return Quantized(codes=codes, scale=scale, group_scale=group_scale)


def requantize_to_max(gate: Quantized, up: Quantized, fmt: Format) -> tuple[Quantized, Quantized]:
    """Both halves of a per-tensor w13 on the larger of their two scales: code' = Q(code * s_half / s_max).

    The half that already has the larger scale keeps its codes; the other loses precision, which is what merging means.
    """
    largest = torch.maximum(gate.group_scale, up.group_scale)

    def onto_largest(half: Quantized) -> Quantized:
        codes = saturate(half.codes * half.scale / largest, fmt, Rounding.HALF_EVEN)
        return Quantized(codes=codes, scale=largest.reshape(1, 1), group_scale=largest)

    return onto_largest(gate), onto_largest(up)
