"""What FlashInfer's and AITER's experts refuse. Read in ``fused_moe/experts/{flashinfer_cutlass,trtllm_fp8,trtllm_bf16,rocm_aiter}_moe.py``
(0.33.0); FlashInfer's were heard on the interpreter platform too, AITER's cannot be: its device is asked for first."""

from __future__ import annotations

from cases.case import MoECase, Origin
from harness import claims
from harness.claims import BLOCK, CHANNEL_TOKEN, TENSOR_DYNAMIC, TENSOR_STATIC, Scheme
from harness.refusals import (
    BY_THE_METHOD,
    CT_FP8_DYNAMIC_TENSOR,
    GATED_ONLY,
    HALF,
    Refusal,
    at_layer,
    fp8,
    int8,
    not_supported,
    only_for,
    refuses_fp32,
    scheme,
)
from references.vocabulary import Activation, Format

_SCHEME = "quantization scheme"


def _is(case: MoECase, *schemes: Scheme) -> bool:
    return fp8(case) and (case.weight, *scheme(case)) in schemes


FLASHINFER_CUTLASS: tuple[Refusal, ...] = (
    *BY_THE_METHOD,
    *only_for(("unquantized", "FP8"), "flashinfer_cutlass"),
    not_supported(
        lambda c: not int8(c) and c.activation not in claims.FLASHINFER_CUTLASS,
        "FlashInfer's CUTLASS kernels know silu, gelu_tanh, both swigluoai and relu2",
        "MoEActivation",
    ),
    not_supported(
        lambda c: fp8(c) and not _is(c, TENSOR_STATIC, BLOCK),
        "FlashInfer's CUTLASS kernels take static per-tensor and block scales",
        _SCHEME,
    ),
    refuses_fp32("."),
)


def _taken(case: MoECase) -> bool:
    """oracle/unquantized.py asks TRT-LLM's experts for the activation and the routing, not for dtype and sizes."""
    return case.origin is Origin.UNQUANTIZED and case.activation in claims.FLASHINFER_TRTLLM and case.renormalize


DEFAULT_ON_SM100: tuple[Refusal, ...] = (
    Refusal(
        reason="FlashInfer's TRT-LLM kernels take bf16 layers; where vLLM chooses by itself on sm100, it does not look",
        says="requires bfloat16 weights",
        applies=at_layer(lambda c: _taken(c) and c.dtype is not Format.BF16),
    ),
    Refusal(
        reason="TRT-LLM's layout of bf16 weights has blocks of 128 bytes of a row; where vLLM chooses by itself on sm100, it does not look",
        says="shape '.*' is invalid for input of size",
        applies=at_layer(lambda c: _taken(c) and c.hidden % 64 != 0),
        reasoned=False,
    ),
)


def _trtllm_activations(case: MoECase) -> frozenset[Activation]:
    """Of an FP8 layer the modular experts are asked last, whatever its scheme, and say what is said."""
    return claims.FLASHINFER_TRTLLM if case.origin is Origin.UNQUANTIZED else claims.FLASHINFER_TRTLLM_FP8


FLASHINFER_TRTLLM: tuple[Refusal, ...] = (
    *BY_THE_METHOD,
    *only_for(("unquantized", "FP8"), "flashinfer_trtllm"),
    not_supported(
        lambda c: not int8(c) and c.activation not in _trtllm_activations(c),
        "FlashInfer's TRT-LLM kernels know silu and relu2, of FP8 swigluoai_uninterleave too",
        "(MoEActivation|no act_and_mul)",
    ),
    not_supported(
        lambda c: fp8(c) and not _is(c, TENSOR_STATIC, BLOCK),
        "FlashInfer's TRT-LLM kernels take static per-tensor and block scales",
        _SCHEME,
    ),
    not_supported(
        lambda c: _is(c, TENSOR_STATIC) and (c.tight or c.activation is Activation.SWIGLUOAI_UNINTERLEAVE),
        "FlashInfer's TRT-LLM per-tensor kernels have no limits, slopes and offsets",
        _SCHEME,
    ),
    not_supported(
        lambda c: _is(c, TENSOR_STATIC) and not c.renormalize,
        "FlashInfer's TRT-LLM per-tensor kernels route themselves, and renormalize",
        _SCHEME,
    ),
    not_supported(
        lambda c: c.origin is Origin.UNQUANTIZED and not c.renormalize,
        "FlashInfer's TRT-LLM bf16 kernels of one rank route themselves, and renormalize",
        "parallel config",
    ),
    *DEFAULT_ON_SM100,
    Refusal(
        reason="TRT-LLM's layout of per-tensor FP8 weights has 32 rows at a time",
        says="must be multiples of 32",
        applies=at_layer(lambda c: _is(c, TENSOR_STATIC) and c.hidden % 32 != 0),
        reasoned=False,
    ),
    Refusal(
        reason="FlashInfer's TRT-LLM kernels take bf16 hidden states",
        says=".",
        applies=at_layer(lambda c: fp8(c) and c.dtype is not Format.BF16),
        reasoned=False,
    ),
)

AITER: tuple[Refusal, ...] = (
    *BY_THE_METHOD,
    *only_for(("unquantized", "FP8"), "aiter"),
    not_supported(lambda c: not int8(c) and not c.activation.gated, "AITER's experts are gated", GATED_ONLY),
    not_supported(
        lambda c: not int8(c) and c.activation not in claims.AITER,
        "AITER's experts know silu, gelu, situ and both swigluoai",
        "MoEActivation",
    ),
    CT_FP8_DYNAMIC_TENSOR,
    not_supported(
        lambda c: fp8(c) and not _is(c, TENSOR_STATIC, TENSOR_DYNAMIC, CHANNEL_TOKEN, BLOCK),
        "AITER's kernels take per-tensor with per-tensor, per-channel with per-token, and block scales",
        _SCHEME,
    ),
    Refusal(reason=HALF, says=".", applies=at_layer(lambda c: not int8(c) and c.dtype is Format.FP32), reasoned=False),
)
