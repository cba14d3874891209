"""Recipes of the packed and microscaled formats, by the experts that run them.

Sources, vLLM 0.33.0: ``fused_moe/fused_moe.py`` (``fused_moe_kernel_gptq_awq``),
``experts/{triton,nvfp4_emulation,marlin,cutlass}_moe.py``,
``experts/int4_emulation_moe.py``, ``nvfp4_emulation_utils.py``, ``marlin_utils_fp4.py``, ``oracle/{int_wna16,w4a8,mxfp4}.py`` and, of csrc,
``marlin_moe_wna16/{marlin_template.h,ops.cu}``, ``marlin/dequant.h``, ``cutlass_w4a8/*``; humming-kernels 0.1.19: ``config/config.py``,
``transform.py``, ``arith/{mainloop,epilogue}_arith.cuh``, ``datatype/dequant_single.cuh``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cases.case import ActScale, Origin
from harness import marlin_shapes
from harness.backends import SPECS, Backend
from harness.families import Family, family
from harness.recipes_cuda import ALL_FP32, FP8_TOKEN_FLOOR, HUMMING_SCALE_FLOOR, placed, split
from harness.recipes_oai import OAI, oai
from references.vocabulary import (
    Accumulator,
    ActQuant,
    Epilogue,
    Format,
    GlobalScale,
    Layout,
    Quotient,
    Recipe,
    RouterWeight,
    WeightQuant,
)

if TYPE_CHECKING:
    from cases.case import MoECase

_KNOWN = {
    "TritonWNA16Experts",
    "Nvfp4QuantizationEmulationTritonExperts",
    "Int4EmulationTritonExperts",
    "MarlinExperts",
    "HummingIndexedExperts",
    "CutlassExpertsW4A8Fp8",
    *OAI,
}


def runs_known(classes: frozenset[str]) -> bool:
    """Whether a recipe is written for the experts of which one runs."""
    return bool(classes & _KNOWN)


def packed(unquantized: Recipe, case: MoECase, backend: Backend, classes: frozenset[str]) -> Recipe:
    """``unquantized``: what Triton's modular path does with the same layer in the hidden dtype; ``classes``: of which one runs."""
    recipe = replace(unquantized, weight_quant=_online(case))
    if "MarlinExperts" in classes:
        return _marlin(recipe, case)
    if "HummingIndexedExperts" in classes:
        return _humming(recipe, case, backend)
    if "CutlassExpertsW4A8Fp8" in classes:
        return _cutlass_w4a8(recipe, case)
    if classes & OAI:
        return oai(recipe, case, classes)
    if "Int4EmulationTritonExperts" in classes:
        return replace(recipe, name="int4-emulation", weight_scale_store=Format.BF16, weight_store=Format.BF16)
    if "Nvfp4QuantizationEmulationTritonExperts" in classes:
        return _nvfp4(recipe, case, Quotient.ANY if SPECS[backend].needs_gpu else Quotient.DIVIDE)
    return replace(recipe, name="triton-wna16", weight_store=case.dtype)


def _online(case: MoECase) -> WeightQuant | None:
    if case.origin is not Origin.ONLINE:
        return None
    return WeightQuant(format=case.weight, layout=case.weight_scale, power_of_two=True)


def _nvfp4(recipe: Recipe, case: MoECase, quotient: Quotient) -> Recipe:
    """Rows become the values that NVFP4 gives them, in the hidden dtype. Triton divides approximately on a GPU."""
    act = None
    if case.act_scale is ActScale.DYNAMIC_GROUP16:
        act = ActQuant(
            format=Format.E2M1, layout=Layout.GROUP16, dynamic=True, scale_store=Format.E4M3FN, store=case.dtype, quotient=quotient
        )
    return replace(recipe, name="nvfp4-emulation", a1=act, a2=act, weight_store=case.dtype)


def _weight_only(recipe: Recipe, case: MoECase, name: str) -> Recipe:
    """Codes less zero points are exact in 16 bits, and so is their product with E4M3 and E8M0 scales; 16-bit scales make one rounding."""
    return replace(recipe, name=name, compute=(case.dtype,), activation_store=case.dtype, weight_store=case.dtype)


def _marlin(recipe: Recipe, case: MoECase) -> Recipe:
    """A scale of all of K multiplies sums, in fp32 for 8 bits, once stored for 4; w2's K is padded to whole 64s.
    One group of 32 becomes two.
    Bias and router weight meet the stored result, in its dtype. NVFP4's global scale meets fp32 sums, or the fp32 router weight."""
    weighted = recipe.router_weight is not RouterWeight.INPUT
    words = family(case) is Family.WNA16
    return placed(
        replace(
            _weight_only(recipe, case, "marlin"),
            gate_store=case.dtype if case.activation.gated and case.activation not in ALL_FP32 else None,
            weight_store_one_group=not words or case.weight_scale is Layout.GROUP32,
            epilogue=Epilogue.CHANNEL_THEN_BIAS if words and case.weight in (Format.INT4, Format.UINT4) else Epilogue.BIAS_STORED,
            global_scale=GlobalScale.ROUTER if weighted else GlobalScale.SUMS,
        ),
        RouterWeight.STORED,
    )


def _humming(recipe: Recipe, case: MoECase, backend: Backend) -> Recipe:
    """16-bit activations wherever scales are grouped and Humming may choose; W4A8 has FP8 ones by name, and 8-bit integers cannot meet the
    FP8 ones that humming-a8 asks for, but INT8 ones. Sums of groups of 8-bit products are scaled and added in fp32. moe_wna16's layers
    never hear what is asked for: ``oracle/int_wna16.py`` hands the conversion an empty ``HummingInputSchema``."""
    weight_only = replace(
        _weight_only(recipe, case, "humming"),
        gate_store=None,
        epilogue=Epilogue.BIAS_STORED,
        global_scale=GlobalScale.SUMS,
        split_store=split(case, 4),
    )
    int8 = backend is Backend.HUMMING_A8 and case.weight is Format.INT8 and not marlin_shapes.moe_wna16(case)
    if family(case) is not Family.W4A8 and not int8:
        return placed(weight_only, RouterWeight.SUM)
    act = ActQuant(
        format=Format.INT8 if int8 else Format.E4M3FN,
        layout=Layout.TOKEN,
        dynamic=True,
        scale_floor=HUMMING_SCALE_FLOOR,
        quotient=Quotient.RECIPROCAL,
    )
    quantized = replace(
        weight_only,
        name="humming w4a8" if not int8 else "humming-a8",
        a1=act,
        a2=act,
        activation_store=Format.FP32,
        accumulator=Accumulator.INT32 if int8 else Accumulator.TENSOR_CORE_FP8_ANY,
        weight_store=None,
        split_store=split(case, 3),
    )
    return placed(quantized, RouterWeight.SUM)


def _cutlass_w4a8(recipe: Recipe, case: MoECase) -> Recipe:
    """Codes times E4M3 group scales are E4M3 again, looked up; rows are FP8 per token, by the compiled operator both times."""
    act = ActQuant(format=Format.E4M3FN, layout=Layout.TOKEN, dynamic=True, scale_floor=FP8_TOKEN_FLOOR, quotient=Quotient.DIVIDE)
    return placed(
        replace(
            recipe,
            name="cutlass w4a8",
            a1=act,
            a2=act,
            compute=(case.dtype,),
            activation_store=case.dtype,
            accumulator=Accumulator.TENSOR_CORE_FP8,
            weight_store=Format.E4M3FN,
            weight_scale_fp8=True,
        ),
        RouterWeight.SUM,
    )
