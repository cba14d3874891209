"""Recipes of the backends that are not Triton's fused kernel, each as a change to what Triton's modular path does with the same layer.

Sources, vLLM 0.33.0: ``fused_moe/experts/{cutlass,marlin,fused_humming,deep_gemm,fused_batched}_moe.py``,
``moe_permute_unpermute_kernel.inl`` and ``marlin_template.h`` of csrc, ``marlin_utils_fp8.py``, ``fp8_utils.py``, ``utils/deep_gemm.py``;
humming-kernels 0.1.19: ``schema/{compressed_tensors,fp8}.py``, ``arith/{mainloop,epilogue}_arith.cuh``, ``kernel/process_input/*.cuh``.
"""

from __future__ import annotations

from dataclasses import replace

from cases.case import MoECase
from harness.backends import Backend
from harness.installed import compute_capability
from references.vocabulary import (
    Accumulator,
    Activation,
    ActQuant,
    Epilogue,
    Format,
    Layout,
    Quotient,
    Recipe,
    Rounding,
    RouterWeight,
    WeightQuant,
)

# act(g) is rounded before the product everywhere else: csrc activation_kernels.cu
ALL_FP32 = (Activation.SWIGLUOAI, Activation.SWIGLUSTEP, Activation.SITU)
HUMMING_SCALE_FLOOR = 1e-30
FP8_TOKEN_FLOOR = 1.0 / (448.0 * 512.0)  # csrc quantization/w8a8/fp8: min_scaling_factor
_K_BLOCK = 128  # columns of K that Humming's blocks take at once (tune/sm90.py; layers are padded to whole ones)
_UE8M0_AMAX_FLOOR = 1e-4  # utils/deep_gemm.py, per_block_cast_to_fp8
_GROUP_AMAX_FLOOR = 1e-10  # of fp8_utils.py's own kernel
UE8M0_FLOOR = 1e-10  # of the scale itself, before it is raised: csrc per_token_group_quant.cu, and fp8_utils.py's kernel for Blackwell


def for_backend(recipe: Recipe, case: MoECase, backend: Backend) -> Recipe:
    """``recipe``: of Triton's modular path for the case. Weighting on the input is alike everywhere, and stays."""
    match backend:
        case Backend.CUTLASS:
            return placed(_cutlass(recipe, case), RouterWeight.SUM)
        case Backend.MARLIN:
            return placed(_marlin(recipe, case), RouterWeight.STORED)
        case Backend.HUMMING:
            return placed(_humming(recipe, case), RouterWeight.SUM)
        case Backend.HUMMING_A8:
            return placed(_humming_a8(recipe, case), RouterWeight.SUM)
        case Backend.DEEP_GEMM:
            return placed(_deep_gemm(recipe, case), RouterWeight.SUM)
        case _:
            return recipe


def placed(recipe: Recipe, placement: RouterWeight) -> Recipe:
    """Where the router weight is multiplied in, unless that is the input."""
    return recipe if recipe.router_weight is RouterWeight.INPUT else replace(recipe, router_weight=placement)


def _cutlass(recipe: Recipe, case: MoECase) -> Recipe:
    """run_cutlass_moe_fp8: both GEMMs store in the hidden dtype; moe_unpermute weights and adds in fp32."""
    return replace(recipe, name="cutlass", compute=(case.dtype,))


def _weight_only(recipe: Recipe, case: MoECase, name: str) -> Recipe:
    """Activations stay in the hidden dtype, to which scales are rounded; block scales are multiplied out before the tensor cores."""
    block = case.weight_scale is Layout.BLOCK128
    return replace(
        recipe,
        name=name,
        a1=None,
        a2=None,
        compute=(case.dtype,),
        activation_store=case.dtype,
        accumulator=Accumulator.TENSOR_CORE,
        weight_scale_store=case.dtype,
        weight_store=case.dtype if block else None,
    )


def _marlin(recipe: Recipe, case: MoECase) -> Recipe:
    """Every scale is rounded to the hidden dtype; one that is shared by all of K multiplies fp32 sums, also where it is a block's; bias and
    router weight meet the stored result, in its dtype."""
    gate_store = case.dtype if case.activation.gated and case.activation not in ALL_FP32 else None
    return replace(_weight_only(recipe, case, "marlin"), gate_store=gate_store, epilogue=Epilogue.BIAS_STORED, weight_store_one_group=False)


def split(case: MoECase, at_once: int) -> Format | None:
    """Format in which parts of a sum over K are added where K is divided among thread blocks; None where it is not.

    Stream-K (scheduler.cuh): each takes ``at_once`` K blocks, its number of pipeline stages, wherever a tile ends. So a tile is divided
    unless its K blocks divide that number.
    """
    whole = all(at_once % -(-columns // _K_BLOCK) == 0 for columns in (case.hidden, case.intermediate))
    return None if whole else case.dtype


def _humming(recipe: Recipe, case: MoECase) -> Recipe:
    """Per-tensor scales multiply sums in fp32, channel scales the stored result; act(g) * u is one expression in fp32."""
    tensor, channel = case.weight_scale is Layout.TENSOR, case.weight_scale is Layout.CHANNEL
    return replace(
        _weight_only(recipe, case, "humming"),
        gate_store=None,
        weight_scale_store=None if tensor else case.dtype,
        epilogue=Epilogue.CHANNEL_STORED if channel else Epilogue.BIAS_STORED,
        split_store=split(case, 4),
    )


def _humming_a8(recipe: Recipe, case: MoECase) -> Recipe:
    """Rows are quantized per token, those of GEMM 2 from the fp32 activation. Block scales: Humming prefers weight-only, and does that."""
    if case.weight_scale is Layout.BLOCK128:
        return replace(_humming(recipe, case), name="humming-a8 (weight-only)")
    act = ActQuant(
        format=case.weight,
        layout=Layout.TOKEN,
        dynamic=True,
        rounding=Rounding.HALF_EVEN,
        scale_floor=HUMMING_SCALE_FLOOR,
        quotient=Quotient.RECIPROCAL,
    )
    return replace(
        _humming(recipe, case),
        name="humming-a8",
        a1=act,
        a2=act,
        activation_store=Format.FP32,
        accumulator=Accumulator.INT32 if case.weight is Format.INT8 else Accumulator.TENSOR_CORE_FP8_ANY,
        split_store=split(case, 3),
    )


def _deep_gemm(recipe: Recipe, case: MoECase) -> Recipe:
    """Power-of-two scales, for rows and for the weights, which are quantized once more to have them; an fp32 accumulator takes each 128 of
    K from the tensor cores. On Hopper the fused quantizer stores act(g), u' + beta and their product, as the C++ operators do; on Blackwell
    only the product. swiglustep is not fused: its product is stored, then quantized."""
    if recipe.a1 is None:
        return recipe  # refused
    first = replace(recipe.a1, power_of_two=True, quotient=Quotient.ANY, scale_floor=UE8M0_FLOOR)
    stepped, blackwell = case.activation is Activation.SWIGLUSTEP, compute_capability() >= 100
    stored = None if stepped or blackwell else case.dtype
    swiglu = recipe.swiglu if recipe.swiglu is None or stored is None else replace(recipe.swiglu, up_store=stored)
    floor = UE8M0_FLOOR if blackwell or stepped else _GROUP_AMAX_FLOOR / 448.0
    return replace(
        recipe,
        name="deep_gemm ue8m0",
        a1=first,
        a2=replace(first, scale_floor=floor),
        compute=(case.dtype,),
        gate_store=stored,
        swiglu=swiglu,
        activation_store=case.dtype,
        weight_requant=WeightQuant(
            format=Format.E4M3FN,
            layout=Layout.BLOCK128,
            scale_floor=_UE8M0_AMAX_FLOOR / 448.0,
            quotient=Quotient.RECIPROCAL,
            power_of_two=True,
            scale_by_reciprocal=True,
        ),
    )
