"""Quantizers on numbers: a scale per group, a quotient, a rounding. Every scale multiplies the codes.

scale = max(amax / qmax, floor), in the dtype the recipe names; quotient = x / scale in fp32 (weights: in the recipe's arithmetic dtype);
code = Q(quotient), saturating. Division in fp32 (bf16, fp16) is division in float64 rounded once: 53 >= 2 * 24 + 2 bits make the double
rounding innocuous (Figueroa 1995, "When is double rounding innocuous?").

A kernel may multiply by a reciprocal instead of dividing, which moves a quotient by a few units in the last place; that belongs to the
intervals (references/bounds.py), not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from references.formats import limits, round_to, saturate
from references.scales import expand, group_amax
from references.vocabulary import ActQuant, Format, Layout, Rounding, WeightQuant


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
    """max(amax / qmax, floor) in the recipe's scale dtype; amax float64, any shape."""
    store = how.scale_store if isinstance(how, ActQuant) else how.arithmetic
    scale = round_to(amax / limits(how.format).qmax, store)
    return torch.maximum(scale, round_to(torch.tensor(how.scale_floor, dtype=torch.float64), store))


def quotient(x: torch.Tensor, scale: torch.Tensor, arithmetic: Format = Format.FP32) -> torch.Tensor:
    """x / scale rounded to ``arithmetic``; 0 where the scale is 0 (an all-zero group without a floor)."""
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.where(scale == 0, torch.zeros_like(x), round_to(x / safe, arithmetic))


def quantize_activations(x: torch.Tensor, how: ActQuant, static_scale: float | None = None) -> Quantized:
    """Rows entering a GEMM, x [R, K] float64, quantized as ``how`` says. The TENSOR layout takes its amax over all R rows.

    Raises:
        ValueError: when a static quantizer gets no scale, or a dynamic one gets one.
    """
    if how.dynamic == (static_scale is not None):
        raise ValueError("a static activation quantizer needs static_scale, a dynamic one computes its own")
    fixed = None if static_scale is None else torch.tensor(static_scale, dtype=torch.float64)
    group_scale = dynamic_scale(group_amax(x, how.layout), how) if fixed is None else fixed
    scale = expand(group_scale, how.layout if how.dynamic else Layout.TENSOR, *x.shape)
    return Quantized(codes=saturate(quotient(x, scale), how.format, how.rounding), scale=scale, group_scale=group_scale)


def symmetric(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes clamped to +-qmax: weight quantizers never use INT8's -128."""
    return codes.clamp(-limits(fmt).qmax, limits(fmt).qmax)


def quantize_weights(w: torch.Tensor, how: WeightQuant) -> Quantized:
    """Online quantization of one expert's w13 or w2, w [N, K] float64 holding hidden-dtype values.

    TENSOR takes one amax over the whole matrix, so gate and up share a scale.
    """
    group_scale = dynamic_scale(group_amax(w, how.layout), how)
    scale = expand(group_scale, how.layout, *w.shape)
    codes = symmetric(saturate(quotient(w, scale, how.arithmetic), how.format, how.rounding), how.format)
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
