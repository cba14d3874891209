"""Which roundings really happen, read off the code path that runs. The reference follows what runs.

Sources, vLLM 0.33.0: ``fused_moe/experts/triton_moe.py`` (modular path), ``fused_moe/fused_moe.py`` (legacy functional
entry), ``fused_moe/utils.py::moe_kernel_quantize_input``, ``quantization/online/*.py``, and the ``csrc`` files that
harness/subject/interpreter cites for each operator.
"""

from __future__ import annotations

from cases.case import ActScale, Entry, MoECase, Origin
from harness.backends import Backend, experts_expected
from references.vocabulary import (
    Accumulator,
    Activation,
    ActQuant,
    CheckpointFormat,
    Format,
    Layout,
    Recipe,
    RouterWeight,
    Rounding,
    W13Merge,
    WeightQuant,
)

_FP8_TOKEN_FLOOR = 1.0 / (448.0 * 512.0)  # csrc quantization/w8a8/fp8: min_scaling_factor
_GROUP_AMAX_FLOOR = 1e-10  # eps of per_token_group_quant_*: a floor of the amax, so of the scale once divided by qmax


def _act_quant(case: MoECase) -> ActQuant | None:
    fp8 = case.weight is Format.E4M3FN
    match case.act_scale:
        case ActScale.NONE:
            return None
        case ActScale.STATIC_TENSOR:
            return ActQuant(format=case.weight, layout=Layout.TENSOR, dynamic=False)
        case ActScale.DYNAMIC_TENSOR if fp8:
            return ActQuant(format=case.weight, layout=Layout.TENSOR, dynamic=True)
        case ActScale.DYNAMIC_TENSOR:
            return ActQuant(format=case.weight, layout=Layout.TENSOR, dynamic=True, scale_floor=1e-10, scale_store=case.dtype)
        case ActScale.DYNAMIC_TOKEN if fp8:
            return ActQuant(format=case.weight, layout=Layout.TOKEN, dynamic=True, scale_floor=_FP8_TOKEN_FLOOR)
        case ActScale.DYNAMIC_TOKEN:  # int8_utils._per_token_quant_int8: libdevice.round, amax floored at 1e-10
            return ActQuant(
                format=case.weight, layout=Layout.TOKEN, dynamic=True, rounding=Rounding.HALF_AWAY, scale_floor=1e-10 / 127.0
            )
        case ActScale.DYNAMIC_GROUP128 if fp8:
            return ActQuant(format=case.weight, layout=Layout.GROUP128, dynamic=True, scale_floor=_GROUP_AMAX_FLOOR / 448.0)
        case ActScale.DYNAMIC_GROUP128:  # int8_utils._per_token_group_quant_int8 casts without rounding: truncation
            return ActQuant(
                format=case.weight,
                layout=Layout.GROUP128,
                dynamic=True,
                rounding=Rounding.TOWARD_ZERO,
                scale_floor=_GROUP_AMAX_FLOOR / 127.0,
            )


def _weight_quant(case: MoECase) -> WeightQuant | None:
    if case.origin is not Origin.ONLINE:
        return None
    if case.weight is Format.INT8:  # online/int8.py: scale and quotient in the checkpoint's own dtype
        return WeightQuant(format=case.weight, layout=Layout.CHANNEL, arithmetic=case.dtype)
    floor = _FP8_TOKEN_FLOOR if case.weight_scale is Layout.CHANNEL else 0.0
    return WeightQuant(format=case.weight, layout=case.weight_scale, scale_floor=floor)


def recipe(case: MoECase, entry: Entry, backend: Backend) -> Recipe:
    """The recipe of one pair on one backend."""
    legacy = "fused_experts" in experts_expected(case, entry, backend)
    act = _act_quant(case)
    # TritonExperts computes in bf16 whenever its input arrives quantized, whatever the hidden dtype; the legacy entry does not.
    compute = (case.dtype,) if legacy or act is None or case.dtype is Format.BF16 else (Format.BF16, case.dtype)
    fused_block = (
        not legacy and case.weight is Format.E4M3FN and case.weight_scale is Layout.BLOCK128 and case.activation is Activation.SILU
    )
    if case.router_weight_on_input:
        router_weight = RouterWeight.GEMM1 if legacy else RouterWeight.INPUT
    else:
        router_weight = RouterWeight.GEMM2
    per_tensor_halves = case.weight_scale is Layout.TENSOR and case.activation.gated and case.origin is Origin.PREQUANTIZED
    name = "legacy" if legacy else "modular"
    if fused_block:
        name += "+fused_silu_quant"
    return Recipe(
        name=f"triton-{name}",
        a1=act,
        a2=act,
        compute=compute,
        activation_store=Format.FP32 if fused_block else case.dtype,
        gate_store=None,
        output=case.dtype,
        accumulator=Accumulator.INT32 if case.weight is Format.INT8 and act is not None else Accumulator.FP32,
        router_weight=router_weight,
        router_weight_exact=entry is Entry.FUSED_EXPERTS,
        w13_merge=W13Merge.REQUANTIZE_TO_MAX if per_tensor_halves else W13Merge.AS_STORED,
        weight_quant=_weight_quant(case),
    )
