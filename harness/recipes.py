"""Which roundings really happen, read off the code path that runs. The reference follows what runs.

Sources, vLLM 0.33.0: ``fused_moe/experts/triton_moe.py`` (modular path), ``fused_moe/fused_moe.py`` (legacy functional
entry), ``fused_moe/utils.py::moe_kernel_quantize_input``, ``quantization/online/*.py``, and the ``csrc`` files that
harness/subject/interpreter cites for each operator.
"""

from __future__ import annotations

from dataclasses import replace

from cases.case import ActScale, Entry, MoECase, Origin
from cases.gating import swiglu
from cases.packed import is_packed
from harness.architectures import requested
from harness.backends import SPECS, Backend, declared_refusal, experts_expected, falls_back, runs_default
from harness.installed import ue8m0_scales
from harness.recipes_batched import batched
from harness.recipes_cuda import ALL_FP32, FP8_TOKEN_FLOOR, UE8M0_FLOOR, for_backend
from harness.recipes_packed import packed, runs_known
from harness.refusals import quark_int8_static
from references.vocabulary import (
    Accumulator,
    Activation,
    ActQuant,
    Format,
    Layout,
    Quotient,
    Recipe,
    Rounding,
    RouterWeight,
    W13Merge,
    WeightQuant,
)

_KNOWN = {  # experts of layers that are not packed; recipes_packed.py says which of the others
    *("fused_experts", "TritonExperts", "BatchedTritonExperts", "CutlassExpertsFp8", "MarlinExperts", "HummingIndexedExperts"),
    *("DeepGemmExperts", "BatchedDeepGemmExperts"),
}
_BLOCK_CAST_AMAX_FLOOR = 1e-4  # utils/deep_gemm.py::per_block_cast_to_fp8
# Of static scales' operators. fp8/common.cuh: fmaxf(-448, fminf(x, 448)), and fminf passes NaN over; PTX ISA: cvt to an integer makes it 0
_OF_NAN = {Format.E4M3FN: 448.0, Format.INT8: 0.0}
_GROUP_AMAX_FLOOR = 1e-10  # eps of per_token_group_quant_*: a floor of the amax, so of the scale once divided by qmax


def _runs_weight_only(case: MoECase, entry: Entry) -> bool:
    """oracle/int8.py::make_int8_moe_quant_config: no stored activation scale and not per-token means W8A16, whatever was asked.

    quark_moe.py takes "per-token" from the *weight's* granularity, so per-tensor INT8 weights never quantize activations.
    """
    dynamic = case.act_scale in (ActScale.DYNAMIC_TENSOR, ActScale.DYNAMIC_TOKEN)
    return entry is Entry.LAYER and case.weight is Format.INT8 and case.weight_scale is Layout.TENSOR and dynamic


def _quotient(case: MoECase) -> Quotient:
    """How the operators of harness/subject/interpreter/ops_quant.py, and Triton's quantizer there, form x over its scale."""
    fp8 = case.weight is Format.E4M3FN
    match case.act_scale:
        case ActScale.DYNAMIC_GROUP128:
            return Quotient.RECIPROCAL
        case ActScale.DYNAMIC_TOKEN:
            return Quotient.DIVIDE if fp8 else Quotient.AMAX_RATIO
        case _:
            return Quotient.RECIPROCAL if fp8 else Quotient.DIVIDE


def _act_quant(case: MoECase, entry: Entry, backend: Backend) -> ActQuant | None:
    how = _act_scheme(case, entry)
    tritons_own = case.weight is Format.INT8 and case.act_scale is ActScale.DYNAMIC_TOKEN
    if how is None or (SPECS[backend].needs_gpu and tritons_own):  # Quotient.ANY: Triton's division on a GPU is approximate
        return how
    return replace(how, quotient=_quotient(case))  # the compiled operators' bits are those of the stand-ins (subject/fidelity.py)


def _act_scheme(case: MoECase, entry: Entry) -> ActQuant | None:
    if _runs_weight_only(case, entry) or is_packed(case):
        return None
    fp8 = case.weight is Format.E4M3FN
    match case.act_scale:
        case ActScale.NONE | ActScale.DYNAMIC_GROUP16 | ActScale.DYNAMIC_GROUP32:
            return None
        case ActScale.STATIC_TENSOR:
            return ActQuant(format=case.weight, layout=Layout.TENSOR, dynamic=False, of_nan=_OF_NAN[case.weight])
        case ActScale.DYNAMIC_TENSOR if fp8:
            return ActQuant(format=case.weight, layout=Layout.TENSOR, dynamic=True)
        case ActScale.DYNAMIC_TENSOR:
            return ActQuant(format=case.weight, layout=Layout.TENSOR, dynamic=True, scale_floor=1e-10, scale_store=case.dtype)
        case ActScale.DYNAMIC_TOKEN if fp8:
            return ActQuant(format=case.weight, layout=Layout.TOKEN, dynamic=True, scale_floor=FP8_TOKEN_FLOOR)
        case ActScale.DYNAMIC_TOKEN:  # int8_utils._per_token_quant_int8: libdevice.round, amax floored at 1e-10
            return ActQuant(format=case.weight, layout=Layout.TOKEN, dynamic=True, rounding=Rounding.HALF_AWAY, scale_floor=1e-10 / 127.0)
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


def _weight_quant(case: MoECase, backend: Backend) -> WeightQuant | None:
    if case.origin is not Origin.ONLINE or is_packed(case):
        return None
    if case.weight is Format.INT8:  # online/int8.py: scale and quotient in the checkpoint's own dtype
        return WeightQuant(format=case.weight, layout=Layout.CHANNEL, arithmetic=case.dtype, quotient=Quotient.DIVIDE)
    floors = {Layout.TENSOR: 0.0, Layout.CHANNEL: FP8_TOKEN_FLOOR, Layout.BLOCK128: _BLOCK_CAST_AMAX_FLOOR / 448.0}
    quotient = Quotient.DIVIDE if case.weight_scale is Layout.CHANNEL else Quotient.RECIPROCAL
    if case.weight_scale is Layout.BLOCK128 and SPECS[backend].needs_gpu:
        quotient = Quotient.ANY  # torch.compile makes one Triton kernel of it, where 1 / scale is approximate
    return WeightQuant(
        format=case.weight,
        layout=case.weight_scale,
        scale_floor=floors[case.weight_scale],
        quotient=quotient,
        scale_by_reciprocal=case.weight_scale is Layout.BLOCK128
        and SPECS[backend].needs_gpu,  # amax / 448.0; the others divide by a tensor
    )


def written(case: MoECase, entry: Entry, backend: Backend) -> bool:
    """Whether a recipe is written for what runs, or nothing runs."""
    if declared_refusal(case, entry, backend) is not None:
        return True
    runs = experts_expected(case, entry, backend)
    return runs_known(runs) if entry is Entry.LAYER and is_packed(case) else bool(runs & _KNOWN)


def recipe(case: MoECase, entry: Entry, backend: Backend) -> Recipe:
    """The recipe of one pair on one backend."""
    triton = _triton(case, entry, backend)
    if is_packed(case):
        return packed(triton, case, backend, experts_expected(case, entry, backend))
    if entry is Entry.BATCHED:
        return batched(for_backend(triton, case, backend), case)
    if entry is Entry.FUSED_EXPERTS or quark_int8_static(case) or runs_default(case, backend) or falls_back(case, entry, backend):
        return triton
    return for_backend(triton, case, backend)


def _accumulator(case: MoECase, act: ActQuant | None, backend: Backend) -> Accumulator:
    if case.weight is Format.INT8 and act is not None:
        return Accumulator.INT32
    if not SPECS[backend].needs_gpu:
        return Accumulator.FP32
    # Triton multiplies FP8 tiles of fewer than 64 rows as fp16, which errs less: contained
    return Accumulator.TENSOR_CORE_FP8 if act is not None else Accumulator.TENSOR_CORE


def _int8_blocks(case: MoECase) -> bool:
    """fused_moe.py, get_default_config: BLOCK_SIZE_K is 128 for FP8, and for others up to 64 tokens; 64 for more."""
    return case.weight is Format.INT8 and case.weight_scale is Layout.BLOCK128


def _triton(case: MoECase, entry: Entry, backend: Backend) -> Recipe:
    legacy = "fused_experts" in experts_expected(case, entry, backend)
    act = _act_quant(case, entry, backend)
    # TritonExperts computes in bf16 whenever its input arrives quantized, whatever the hidden dtype; the legacy entry does not.
    through_bf16 = not legacy and act is not None and case.dtype is not Format.BF16
    on_gpu = SPECS[backend].needs_gpu or requested() is not None
    ue8m0 = on_gpu and case.weight_scale is Layout.BLOCK128 and case.weight is Format.E4M3FN and ue8m0_scales()
    if ue8m0 and act is not None:
        act = replace(act, power_of_two=True, scale_floor=UE8M0_FLOOR)
    fused = not legacy and case.weight is Format.E4M3FN and case.weight_scale is Layout.BLOCK128 and case.activation is Activation.SILU
    fused = fused and not ue8m0 and not case.tight and entry is not Entry.BATCHED
    on_input = RouterWeight.GEMM1 if legacy else RouterWeight.INPUT
    per_tensor_halves = case.weight_scale is Layout.TENSOR and case.activation.gated and case.origin is Origin.PREQUANTIZED
    return Recipe(
        name=f"triton-{'legacy' if legacy else 'modular'}{'+fused_silu_quant' if fused else ''}{'+ue8m0' if ue8m0 else ''}",
        a1=act,
        # csrc silu_and_mul_per_block_quant: fp32 from the accumulator's store to the code, its own floor
        a2=replace(act, scale_floor=FP8_TOKEN_FLOOR, quotient=Quotient.DIVIDE) if fused and act is not None else act,
        compute=(Format.BF16, case.dtype) if through_bf16 else (case.dtype,),
        activation_store=Format.FP32 if fused else case.dtype,
        gate_store=case.dtype if case.activation.gated and not fused and case.activation not in ALL_FP32 else None,
        swiglu=swiglu(case),
        output=case.dtype,
        accumulator=_accumulator(case, act, backend),
        router_weight=on_input if case.router_weight_on_input else RouterWeight.GEMM2,
        router_weight_exact=entry is not Entry.LAYER,
        w13_merge=W13Merge.REQUANTIZE_TO_MAX if per_tensor_halves else W13Merge.AS_STORED,
        weight_quant=_weight_quant(case, backend),
        scaled_tile=64 if _int8_blocks(case) and case.tokens > 64 else None,
    )
