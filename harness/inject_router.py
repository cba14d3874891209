"""Where lanes that weight twice multiply the router weight in a second time: prepare has multiplied the input by it already.

Source: vLLM 0.33.0, ``fused_moe/prepare_finalize/no_dp_ep.py`` and, of ``fused_moe/experts``: ``marlin_moe.py`` (``mul_topk_weights`` of
GEMM 1, which meets the stored result), ``gpt_oss_triton_kernels_moe.py`` (``OAITritonExperts.apply`` says False to its kernel, which
weights GEMM 2's sums; ``UnfusedOAITritonExperts.apply`` weights GEMM 1's), ``cutlass_moe.py`` (``moe_unpermute`` weights what it adds).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from references.loading import LoadedExpert, for_router
from references.vocabulary import RouterWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.inject import Inputs

_ON_OUTPUT = {"cutlass": RouterWeight.SUM, "cutlass w4a8": RouterWeight.SUM, "triton_kernels": RouterWeight.GEMM2}
_ON_INPUT = {"marlin": RouterWeight.FIRST_STORED, "triton_kernels unfused": RouterWeight.GEMM1}


def twice_on_output(inputs: Inputs) -> Inputs:
    """``inputs`` as the lane runs them that weights its input and its output; the very same where no lane is known to."""
    return _again(inputs, _ON_OUTPUT)


def twice_on_input(inputs: Inputs) -> Inputs:
    """``inputs`` as the lane runs them that weights its input and GEMM 1; the very same where no lane is known to.

    Where Marlin is told to weight, it multiplies NVFP4's global scale into the fp32 weight instead of the sums.
    """
    again = _again(inputs, _ON_INPUT)
    if again.recipe.router_weight_again is not RouterWeight.FIRST_STORED:
        return again
    return replace(again, loaded=tuple(_scaled_by_the_weight(expert) for expert in inputs.loaded))


def _again(inputs: Inputs, places: Mapping[str, RouterWeight]) -> Inputs:
    if inputs.recipe.router_weight is not RouterWeight.INPUT or inputs.recipe.name not in places:
        return inputs
    return replace(inputs, recipe=replace(inputs.recipe, router_weight_again=places[inputs.recipe.name]))


def _scaled_by_the_weight(expert: LoadedExpert) -> LoadedExpert:
    w13, factor = for_router(expert.w13)
    return replace(expert, w13=w13, first_router_factor=factor)
