"""Doors that vLLM keeps shut. A level holds one or two pairs of each (boundaries.py), not one for every size.

Reasons are short: vLLM's own words are in the capability table (harness/refusals.py) and in known_issues.toml.
"""

from __future__ import annotations

from cases.case import ActScale, Entry, MoECase, Origin
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

DOORS = (Entry.LAYER, Entry.FUSED_EXPERTS)  # every case of a level through those that take it; BATCHED has pairs of its own

_QUARK_FP8 = {
    (Layout.TENSOR, ActScale.STATIC_TENSOR),
    (Layout.TENSOR, ActScale.DYNAMIC_TENSOR),
    (Layout.CHANNEL, ActScale.DYNAMIC_TOKEN),
    (Layout.BLOCK128, ActScale.DYNAMIC_GROUP128),
}


def closed(case: MoECase, entry: Entry) -> str | None:
    """Why vLLM does not run this pair, or None when it does."""
    match entry:
        case Entry.LAYER:
            return _layer(case)
        case Entry.FUSED_EXPERTS:
            return _functional(case)
        case Entry.BATCHED:
            return "batched experts have no place for biases and drop them" if case.bias else None


def _layer(case: MoECase) -> str | None:
    quark = case.checkpoint is CheckpointFormat.QUARK
    if quark and case.weight is Format.INT8 and case.act_scale is ActScale.STATIC_TENSOR:
        return "Quark INT8 with static activations asks None.is_monolithic"
    if quark and case.weight is Format.INT8 and case.act_scale is ActScale.DYNAMIC_TENSOR:
        return "Quark INT8 has no dynamic per-tensor scheme"
    if quark and case.weight is Format.E4M3FN and (case.weight_scale, case.act_scale) not in _QUARK_FP8:
        return "Quark FP8 knows per-tensor, per-channel with per-token, and per-block only"
    if case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS and case.weight is Format.E4M3FN and case.bias:
        return "compressed-tensors FP8 has no place for biases and drops them"
    if case.checkpoint is CheckpointFormat.MODELOPT and case.weight is Format.E4M3FN and case.bias:
        return "ModelOpt FP8 has no place for biases and drops them"
    fused = case.weight_scale is Layout.BLOCK128 and case.weight is Format.E4M3FN and case.activation is Activation.SILU
    if fused and case.dtype is Format.FP32:
        return "the fused SiLU and block quantization operator takes fp16 and bf16 only"
    return None


def _functional(case: MoECase) -> str | None:
    int8_dynamic = case.weight is Format.INT8 and case.act_scale is ActScale.DYNAMIC_TENSOR
    if int8_dynamic and case.origin is Origin.PREQUANTIZED and case.dtype is not Format.FP32:
        return "the dynamic per-tensor INT8 scale has the hidden dtype, and the operator takes fp32"
    return None
