"""The layer in float64: contract types (the reference itself is written beside them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from references.vocabulary import Format, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One weight matrix as the checkpoint holds it. decoded(codes) * scale is the weight."""

    codes: torch.Tensor  # [N, K] in the format's torch dtype
    format: Format
    layout: Layout
    scale: torch.Tensor | None = None  # f32; TENSOR [], CHANNEL [N, 1], BLOCK128 [ceil(N/128), ceil(K/128)]
    input_scale: torch.Tensor | None = None  # f32 [], static activation scale
    bias: torch.Tensor | None = None  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """gate and up are w1 and w3 [I, H]; gate is None for non-gated layers. down is w2 [H, I]."""

    gate: Projection | None
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """topk_ids [M, k] int64, topk_weights [M, k] float64, in descending order of weight."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the reference says. All float64 on the CPU.

    expected [M, H]: the recipe on numbers, *before* the last rounding to ``output``; contributions [M, k, H] sum to it.
    low, high [M, H]: the recipe on intervals, before the last rounding; low <= expected <= high.
    output: the dtype of the last rounding. An actual value is honest when round(low) <= actual <= round(high).
    gain_bias: relative bias the recipe itself allows (0 for unbiased accumulators).
    """

    expected: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    contributions: torch.Tensor
    routing: Routing
    output: Format
    gain_bias: float = 0.0
