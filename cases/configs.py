"""quantization_config of each checkpoint format, as config.json holds it. Plain dictionaries: no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cases import configs_packed, packed
from cases.axes import ActScale, Origin
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from cases.case import MoECase

_BLOCK = [128, 128]


def quantization_config(case: MoECase) -> dict[str, Any] | None:
    """None for plain and raw checkpoints, which say nothing."""
    if case.origin is Origin.PREQUANTIZED and packed.is_packed(case):
        return configs_packed.quantization_config(case)
    match case.checkpoint:
        case CheckpointFormat.COMPRESSED_TENSORS:
            return _compressed_tensors(case)
        case CheckpointFormat.QUARK:
            return _quark(case)
        case CheckpointFormat.VLLM_FP8:
            return _vllm_fp8(case)
        case CheckpointFormat.MODELOPT:
            return configs_packed.modelopt(case)
        case _:
            return None


def _dynamic(case: MoECase) -> bool:
    return case.act_scale is not ActScale.STATIC_TENSOR


def _compressed_tensors(case: MoECase) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "int" if case.weight is Format.INT8 else "float", "symmetric": True}
    weights: dict[str, Any] = kind | {"strategy": "block" if case.weight_scale is Layout.BLOCK128 else case.weight_scale.value}
    if case.weight_scale is Layout.BLOCK128:
        weights["block_structure"] = _BLOCK
    strategy = {ActScale.DYNAMIC_TOKEN: "token", ActScale.DYNAMIC_GROUP128: "group"}.get(case.act_scale, "tensor")
    inputs: dict[str, Any] = kind | {"strategy": strategy, "dynamic": _dynamic(case)}
    if strategy == "group":
        inputs["group_size"] = 128
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if case.weight is Format.INT8 else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
        "kv_cache_scheme": None,
    }


def _quark(case: MoECase) -> dict[str, Any]:
    kind = {"dtype": "int8" if case.weight is Format.INT8 else "fp8_e4m3", "symmetric": True}
    scheme = {Layout.TENSOR: "per_tensor", Layout.CHANNEL: "per_channel", Layout.BLOCK128: "per_block"}[case.weight_scale]
    weight: dict[str, Any] = kind | {"qscheme": scheme, "is_dynamic": False}
    if case.weight_scale is Layout.CHANNEL:
        weight["ch_axis"] = 0
    if case.weight_scale is Layout.BLOCK128:
        weight["block_size"] = _BLOCK
    # Quark calls one scale per token "per_channel" of the activation
    scheme = {ActScale.DYNAMIC_TOKEN: "per_channel", ActScale.DYNAMIC_GROUP128: "per_group"}.get(case.act_scale, "per_tensor")
    inputs: dict[str, Any] = kind | {"qscheme": scheme, "is_dynamic": _dynamic(case)}
    if case.act_scale is ActScale.DYNAMIC_GROUP128:
        inputs["group_size"] = 128
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "exclude": [],
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None},
    }


def _vllm_fp8(case: MoECase) -> dict[str, Any]:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic" if _dynamic(case) else "static"}
    if case.weight_scale is Layout.BLOCK128:
        config["weight_block_size"] = _BLOCK
    return config
