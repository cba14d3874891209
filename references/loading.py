"""What loading makes of an expert: one w13 and one w2, quantized online or requantized where the recipe says so.

Codes are float64 values on the format's grid. Where a kernel's quotient may fall on either side of a tie, ``low`` and ``high`` hold the
two codes and ``codes`` the one the format's definition gives; everywhere else they are the same tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from references import mx_online
from references.bounds import requantized_hull, weight_code_hull
from references.formats import decode, round_to
from references.kernel_layout import for_kernel
from references.quantize import Quantized, quantize_weights, requantize_to_max
from references.scales import GROUP, expand, groups, over_columns
from references.vocabulary import ActQuant, Format, GlobalScale, Layout, Recipe, W13Merge, WeightQuant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from references.moe import Expert, Projection


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix as the GEMM reads it: value = codes * scale * outer.

    codes, low, high: [N, K] float64; low <= codes <= high, the very same tensor when nothing is in doubt. Zero points are subtracted.
    scale: [N, G] float64, G = 1 or ceil(K / width); None when there is none.
    bias: [N] float64 or None.
    store: the format in which codes * scale, a product in fp32, enter the GEMM; None: the scale multiplies sums.
    width: columns that share a scale, where G > 1.
    outer: [N, 1] float64, multiplies sums whatever becomes of the scale; None when there is none.
    """

    codes: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    format: Format
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    store: Format | None = None
    width: int = GROUP
    outer: torch.Tensor | None = None

    @cached_property
    def values(self) -> torch.Tensor:
        """codes * scale * outer, [N, K] float64."""
        return self._read if self.outer is None else self._read * self.outer

    @cached_property
    def _read(self) -> torch.Tensor:
        return self._scaled(self.codes)

    def multiplied_out(self) -> Matrix:
        """The same weights with ``outer`` alone left to multiply sums; itself when nothing is stored."""
        if self.store is None or self.scale is None:
            assert self.outer is None
            return self
        low, high = (self._read if end is self.codes else self._scaled(end) for end in (self.low, self.high))
        return Matrix(codes=self._read, low=low, high=high, format=self.store, scale=self.outer, bias=self.bias)

    def _scaled(self, codes: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            return codes
        product = codes * over_columns(self.scale, self.width, codes.shape[-1])
        return product if self.store is None else round_to(round_to(product, Format.FP32), self.store)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedExpert:
    """w13 [2*I or I, H] (gate rows first) and w2 [H, I]; static activation scales before each GEMM, None when dynamic.

    router_factor, first_router_factor: multiply the fp32 router weights of the expert, before they are rounded; the first where they meet
    GEMM 1's stored result.
    """

    w13: Matrix
    w2: Matrix
    a1_scale: float | None
    a2_scale: float | None
    router_factor: float = 1.0
    first_router_factor: float = 1.0


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one shape and kind as one, every tensor with a leading dimension E."""
    first = matrices[0]
    codes = torch.stack([matrix.codes for matrix in matrices])
    exact = all(matrix.low is matrix.codes and matrix.high is matrix.codes for matrix in matrices)

    def together(of: Callable[[Matrix], torch.Tensor | None]) -> torch.Tensor | None:
        parts = [part for part in map(of, matrices) if part is not None]
        return torch.stack(parts) if parts else None

    return replace(
        first,
        codes=codes,
        low=codes if exact else torch.stack([matrix.low for matrix in matrices]),
        high=codes if exact else torch.stack([matrix.high for matrix in matrices]),
        scale=together(lambda matrix: matrix.scale),
        bias=together(lambda matrix: matrix.bias),
        outer=together(lambda matrix: matrix.outer),
    )


def _row_scale(scale: torch.Tensor, layout: Layout, rows: int, cols: int) -> torch.Tensor:
    """A layout's scale as [rows, G]."""
    if layout is Layout.BLOCK128:
        return scale.to(torch.float64).repeat_interleave(GROUP, 0)[:rows].reshape(rows, groups(cols))
    if layout.width is not None:
        return scale.to(torch.float64).reshape(rows, groups(cols, layout.width))
    return expand(scale, layout, rows, cols).expand(rows, 1)


def _stored(projection: Projection, recipe: Recipe) -> Matrix:
    codes = decode(projection.codes, projection.format)
    width = projection.layout.width or GROUP
    if projection.zero_point is not None:
        codes = codes - over_columns(decode(projection.zero_point, projection.format), width, codes.shape[1])
    scale = None if projection.scale is None else _row_scale(projection.scale, projection.layout, *codes.shape)
    whole = None if projection.global_scale is None else projection.global_scale.to(torch.float64)
    outer = None
    if scale is not None and whole is not None and recipe.global_scale is GlobalScale.GROUPS:
        scale = round_to(scale * whole, Format.FP32)
    elif whole is not None:
        outer = whole.expand(codes.shape[0], 1)
    bias = None if projection.bias is None else projection.bias.to(torch.float64)
    return Matrix(codes=codes, low=codes, high=codes, format=projection.format, scale=scale, bias=bias, width=width, outer=outer)


def _stack(parts: Sequence[Matrix]) -> Matrix:
    if len(parts) == 1:
        return parts[0]
    codes = torch.cat([part.codes for part in parts])
    exact = all(part.low is part.codes and part.high is part.codes for part in parts)
    scales = [part.scale for part in parts if part.scale is not None]
    outers = [part.outer for part in parts if part.outer is not None]
    biases = [part.bias for part in parts if part.bias is not None]
    return Matrix(
        codes=codes,
        low=codes if exact else torch.cat([part.low for part in parts]),
        high=codes if exact else torch.cat([part.high for part in parts]),
        format=parts[0].format,
        scale=torch.cat(scales) if scales else None,
        bias=torch.cat(biases) if biases else None,
        width=parts[0].width,
        outer=torch.cat(outers) if outers else None,
    )


def _online(weights: Matrix, how: WeightQuant) -> Matrix:
    if how.layout is Layout.GROUP32:
        codes, scale = mx_online.quantize(weights.codes, how.format)
        return replace(weights, codes=codes, low=codes, high=codes, format=how.format, scale=scale, width=mx_online.WIDTH)
    quantized = quantize_weights(weights.codes, how)
    low, high = weight_code_hull(weights.codes, quantized, how)
    scale = _row_scale(quantized.group_scale, how.layout, *weights.codes.shape)
    width = how.layout.width or GROUP
    return Matrix(codes=quantized.codes, low=low, high=high, format=how.format, scale=scale, bias=weights.bias, width=width)


def _requantized(gate: Matrix, up: Matrix) -> list[Matrix]:
    halves = [_per_tensor(gate), _per_tensor(up)]
    merged = requantize_to_max(halves[0], halves[1], gate.format)
    out = []
    for matrix, before, after in zip((gate, up), halves, merged, strict=True):
        low, high = requantized_hull(before, after, matrix.format)
        scale = after.scale.expand(matrix.codes.shape[0], 1)
        out.append(Matrix(codes=after.codes, low=low, high=high, format=matrix.format, scale=scale, bias=matrix.bias))
    return out


def _per_tensor(matrix: Matrix) -> Quantized:
    if matrix.scale is None or matrix.scale.shape[1] != 1 or not bool((matrix.scale == matrix.scale[0]).all()):
        raise ValueError("requantization to the larger scale is defined for per-tensor scales only")
    scale = matrix.scale[0, 0]
    return Quantized(codes=matrix.codes, scale=scale.reshape(1, 1), group_scale=scale)


def _w13(expert: Expert, recipe: Recipe) -> Matrix:
    halves = [_stored(half, recipe) for half in (expert.gate, expert.up) if half is not None]
    how = recipe.weight_quant
    if how is not None and how.layout is Layout.BLOCK128:
        return _stack([_online(half, how) for half in halves])  # halves are padded to whole blocks: none spans gate and up
    if how is not None:
        return _online(_stack(halves), how)
    if recipe.w13_merge is W13Merge.REQUANTIZE_TO_MAX and len(halves) == 2:
        halves = _requantized(*halves)
    return _stack(halves)


def _static_scales(name: str, how: ActQuant | None, groups_of: Sequence[Sequence[Projection | None]], collapse: bool) -> list[float | None]:
    """Per expert: the largest input_scale among its projections, or among all experts when the recipe collapses them."""
    if how is None or not how.takes_static:
        return [None] * len(groups_of)
    scales: list[float] = []
    for expert, projections in enumerate(groups_of):
        stored = [float(p.input_scale) for p in projections if p is not None and p.input_scale is not None]
        if not stored:
            raise ValueError(f"the recipe quantizes activations statically but expert {expert} has no {name} input_scale")
        scales.append(max(stored))
    return [max(scales)] * len(scales) if collapse else list(scales)


def load(experts: Sequence[Expert], recipe: Recipe) -> tuple[LoadedExpert, ...]:
    """Every expert as the recipe's loading leaves it.

    Raises:
        ValueError: when a static activation scale is missing, or per-tensor merging meets another layout.
    """
    first = _static_scales("w13", recipe.a1, [(e.gate, e.up) for e in experts], recipe.static_scale_max)
    second = _static_scales("w2", recipe.a2, [(e.down,) for e in experts], recipe.static_scale_max)
    out = []
    for index, expert in enumerate(experts):
        down = _stored(expert.down, recipe)
        w2 = down if recipe.weight_quant is None else _online(down, recipe.weight_quant)
        w2, factor = for_router(w2) if recipe.global_scale is GlobalScale.ROUTER else (w2, 1.0)
        w13, w2 = for_kernel(_w13(expert, recipe), recipe), for_kernel(w2, recipe)
        out.append(LoadedExpert(w13=w13, w2=w2, a1_scale=first[index], a2_scale=second[index], router_factor=factor))
    return tuple(out)


def for_router(matrix: Matrix) -> tuple[Matrix, float]:
    """GlobalScale.ROUTER: the global scale but for its power of two, which rounds nothing; all rows have the same."""
    if matrix.outer is None:
        return matrix, 1.0
    mantissa, exponent = torch.frexp(matrix.outer)
    return replace(matrix, outer=torch.ldexp(torch.ones_like(mantissa), exponent)), float(mantissa[0])
