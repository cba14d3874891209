"""The recipe of rows packed per expert, as a change to what Triton's modular path does with the same layer.

Sources, vLLM 0.33.0: ``fused_moe/prepare_finalize/batched.py``, ``fused_moe/experts/{fused_batched,batched_deep_gemm}_moe.py``,
``fused_moe/topk_weight_and_reduce.py`` (TopKWeightAndReduceNaiveBatched), ``masked_moe_activation`` and
``persistent_masked_m_silu_mul_quant`` of csrc.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from references.vocabulary import ActQuant, Format, Layout, Recipe, RouterWeight

if TYPE_CHECKING:
    from cases.case import MoECase


def batched(recipe: Recipe, case: MoECase) -> Recipe:
    """Rows are quantized expert by expert; the weight meets the stored result in its dtype, and index_add_ adds in that dtype.

    DeepGEMM's rows of GEMM 2 get their scales from an operator that computes them in bf16.
    """
    if recipe.name.startswith("deep_gemm") and recipe.a2 is not None:
        recipe = replace(recipe, name=f"{recipe.name} batched", a2=replace(recipe.a2, scale_store=Format.BF16))
    weight = recipe.router_weight if recipe.router_weight is RouterWeight.INPUT else RouterWeight.STORED
    return replace(
        recipe,
        name=recipe.name.replace("triton-modular", "triton-batched"),
        a1=_of_each_expert(recipe.a1),
        a2=_of_each_expert(recipe.a2),
        router_weight=weight,
        slots_store=case.dtype,
    )


def _of_each_expert(how: ActQuant | None) -> ActQuant | None:
    if how is None or not how.dynamic or how.layout is not Layout.TENSOR:
        return how  # the same whoever the rows belong to
    return replace(how, per_expert=True)
