"""Recipes of vLLM's experts on triton_kernels, as changes to what Triton's modular path does with the same layer in the hidden dtype.

Sources, vLLM 0.33.0: ``fused_moe/experts/gpt_oss_triton_kernels_moe.py``, ``third_party/triton_kernels/{matmul_ogs,routing}.py``,
``matmul_ogs_details/{_matmul_ogs,_reduce_grouped}.py``, ``swiglu_details/_swiglu.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from references.vocabulary import Format, Recipe

if TYPE_CHECKING:
    from cases.case import MoECase

UNFUSED = "UnfusedOAITritonExperts"
OAI = frozenset({"OAITritonMxfp4ExpertsMonolithic", "OAITritonExperts", UNFUSED})


def oai(recipe: Recipe, case: MoECase, classes: frozenset[str]) -> Recipe:
    """Weights are multiplied out, exactly, in bf16; bias and router weight meet fp32 sums, whose results are stored and added in fp32.

    The fused experts apply swigluoai to GEMM 1's fp32 sums. The monolithic ones route by themselves, and renormalize; the others are given
    router weights, which they round to bf16.
    """
    unfused = UNFUSED in classes
    return replace(
        recipe,
        name="triton_kernels unfused" if unfused else "triton_kernels",
        weight_store=Format.BF16,
        first_stored=unfused,
        router_weight_store=Format.BF16 if unfused or not case.renormalize else None,
    )
