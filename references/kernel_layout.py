"""What making a kernel's own layout does to a loaded matrix: a second quantization, rounded scales, weights multiplied out, TF32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from references.accumulators import tf32
from references.formats import round_to, saturate
from references.quantize import dynamic_scale, quantize_weights, symmetric
from references.scales import GROUP, group_amax, groups, over_columns
from references.vocabulary import Accumulator, Format, Layout, Quotient, Recipe, WeightQuant

if TYPE_CHECKING:
    from collections.abc import Callable

    from references.loading import Matrix

FP8_SCALE_FLOOR = 1.0 / (448.0 * 512.0)  # csrc quantization/w8a8/fp8: min_scaling_factor


def for_kernel(matrix: Matrix, recipe: Recipe) -> Matrix:
    """``matrix`` as the kernel's own layout holds it."""
    if recipe.weight_requant is not None and matrix.scale is not None:
        matrix = _quantized_again(matrix, recipe.weight_requant)
    if recipe.weight_scale_store is not None and matrix.scale is not None:
        matrix = replace(matrix, scale=round_to(matrix.scale, recipe.weight_scale_store))
    if recipe.weight_scale_fp8 and matrix.scale is not None:
        matrix = _fp8_of_row(matrix, matrix.scale)
    if recipe.weight_store is not None and matrix.scale is not None and (recipe.weight_store_one_group or matrix.scale.shape[1] > 1):
        matrix = replace(matrix, store=recipe.weight_store)
    if recipe.accumulator is Accumulator.TENSOR_CORE and matrix.format is Format.FP32:
        matrix = _mapped(matrix, tf32)
    return matrix


def _fp8_of_row(matrix: Matrix, scale: torch.Tensor) -> Matrix:
    """quant_utils.py, convert_bf16_scales_to_fp8: E4M3 of the scale over 1 / 448 of its row's largest, and of an eighth of that.

    input_quant_fp8.py, QuantFP8.forward_native: torch operations on the GPU, where tensor / number multiplies by 1 / number.
    """
    how = WeightQuant(
        format=Format.E4M3FN,
        layout=Layout.CHANNEL,
        scale_floor=FP8_SCALE_FLOOR,
        quotient=Quotient.RECIPROCAL,
        scale_by_reciprocal=True,
    )
    quantized = quantize_weights(scale, how)
    return replace(matrix, scale=round_to(quantized.codes / 8.0, Format.E4M3FN), outer=quantized.scale * 8.0)


def _mapped(matrix: Matrix, step: Callable[[torch.Tensor], torch.Tensor]) -> Matrix:
    """``step``, which is monotone, over the codes and both ends."""
    codes = step(matrix.codes)
    exact = matrix.low is matrix.codes and matrix.high is matrix.codes
    return replace(matrix, codes=codes, low=codes if exact else step(matrix.low), high=codes if exact else step(matrix.high))


def _quantized_again(matrix: Matrix, how: WeightQuant) -> Matrix:
    """fp8_utils.py, requant_weight_ue8m0_inplace: fp32(code * scale), then a power-of-two block scale, by which dividing is exact.

    Raises:
        NotImplementedError: for any other layout or scale; no kernel asks for one.
    """
    if how.layout is not Layout.BLOCK128 or not how.power_of_two:
        raise NotImplementedError("a second quantization is known for 128 x 128 blocks and power-of-two scales only")
    assert matrix.scale is not None
    before = over_columns(matrix.scale, GROUP, matrix.codes.shape[1])
    quantized = quantize_weights(round_to(matrix.codes * before, Format.FP32), how)
    scale = quantized.scale[:, ::GROUP][:, : groups(matrix.codes.shape[1])]
    changed = replace(matrix, codes=quantized.codes, low=quantized.codes, high=quantized.codes, scale=scale)
    if matrix.low is matrix.codes and matrix.high is matrix.codes:
        return changed
    ends = [round_to(end * before, Format.FP32) for end in (matrix.low, matrix.high)]
    same = all(torch.equal(dynamic_scale(group_amax(end, how.layout), how), quantized.group_scale) for end in ends)
    if not same:
        raise NotImplementedError("codes in doubt change the block's largest value; the scale would be in doubt too")
    low, high = (symmetric(saturate(end / quantized.scale, how.format, how.rounding), how.format) for end in ends)
    return replace(changed, low=low, high=high)
