"""Recipes of the packed and microscaled formats on Triton's kernels and on vLLM's emulations, which are Triton's kernels too.

Sources, vLLM 0.33.0: ``fused_moe/fused_moe.py`` (``fused_moe_kernel_gptq_awq``), ``experts/triton_moe.py`` (``TritonWNA16Experts``),
``experts/nvfp4_emulation_moe.py`` and ``nvfp4_emulation_utils.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cases.case import ActScale
from references.vocabulary import ActQuant, Format, Layout, Recipe

if TYPE_CHECKING:
    from cases.case import MoECase


def on_triton(unquantized: Recipe, case: MoECase) -> Recipe:
    """``unquantized``: what Triton's modular path does with the same layer in the hidden dtype. Weights are multiplied out to it first."""
    if case.weight_scale is Layout.GROUP16:
        return _nvfp4(unquantized, case)
    return replace(unquantized, name="triton-wna16", weight_store=case.dtype)


def _nvfp4(recipe: Recipe, case: MoECase) -> Recipe:
    """Rows become the values that NVFP4 gives them, in the hidden dtype."""
    act = None
    if case.act_scale is ActScale.DYNAMIC_GROUP16:
        act = ActQuant(format=Format.E2M1, layout=Layout.GROUP16, dynamic=True, scale_store=Format.E4M3FN, store=case.dtype)
    return replace(recipe, name="nvfp4-emulation", a1=act, a2=act, weight_store=case.dtype)
