"""quantization_config of the packed and microscaled formats, as config.json holds it. Plain dictionaries: no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cases import packed
from cases.axes import ActScale
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from cases.case import MoECase

_BITS = {Format.INT4: 4, Format.UINT4: 4, Format.E2M1: 4}


def quantization_config(case: MoECase) -> dict[str, Any]:
    """What stands beside the tensors."""
    match case.checkpoint:
        case CheckpointFormat.COMPRESSED_TENSORS:
            return _compressed_tensors(case)
        case CheckpointFormat.QUARK:
            return _quark(case)
        case CheckpointFormat.GPTQ:
            return {
                "quant_method": "gptq",
                "bits": _BITS.get(case.weight, 8),
                "group_size": case.weight_scale.width or -1,
                "desc_act": False,
                "sym": not case.weight.has_zero_point,
                "checkpoint_format": "gptq",
            }
        case CheckpointFormat.AWQ:
            width = case.weight_scale.width
            return {"quant_method": "awq", "bits": 4, "group_size": width, "zero_point": True, "version": "gemm"}
        case CheckpointFormat.MODELOPT:
            return modelopt(case)
        case _:
            return {"quant_method": "mxfp4", "modules_to_not_convert": []}


def modelopt(case: MoECase) -> dict[str, Any]:
    """ModelOpt's, FP8 included."""
    algorithm = {
        (Layout.TENSOR, ActScale.STATIC_TENSOR): "FP8",
        (Layout.GROUP16, ActScale.DYNAMIC_GROUP16): "NVFP4",
        (Layout.GROUP16, ActScale.NONE): "W4A16_NVFP4",
        (Layout.GROUP32, ActScale.DYNAMIC_GROUP32): "MXFP8",
    }[case.weight_scale, case.act_scale]
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": []}
    if case.weight_scale.width is not None:
        quantization["group_size"] = case.weight_scale.width
    return {"quant_method": "modelopt", "quantization": quantization}


def _compressed_tensors(case: MoECase) -> dict[str, Any]:
    integers = case.weight in packed.INTEGERS
    weights: dict[str, Any] = {
        "num_bits": _BITS.get(case.weight, 8),
        "type": "int" if integers else "float",
        "symmetric": not case.weight.has_zero_point,
        "strategy": "channel" if case.weight_scale is Layout.CHANNEL else "group",
        "dynamic": False,
    }
    if case.weight_scale.width is not None:
        weights["group_size"] = case.weight_scale.width
    if case.weight_scale is Layout.GROUP16:
        weights |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    elif not integers:
        weights["scale_dtype"] = "torch.uint8"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": _activations(case, weights),
        "output_activations": None,
        "format": _format(case),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _format(case),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
        "kv_cache_scheme": None,
    }


def _activations(case: MoECase, weights: dict[str, Any]) -> dict[str, Any] | None:
    match case.act_scale:
        case ActScale.NONE:
            return None
        case ActScale.DYNAMIC_TOKEN:  # W4A8: FP8 activations
            return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        case ActScale.DYNAMIC_GROUP16:
            return weights | {"dynamic": "local"}
        case _:
            return weights | {"dynamic": True}


def _format(case: MoECase) -> str:
    if case.weight in packed.INTEGERS:
        return "pack-quantized"
    if case.weight is Format.E4M3FN:
        return "mxfp8-quantized"
    return "nvfp4-pack-quantized" if case.weight_scale is Layout.GROUP16 else "mxfp4-pack-quantized"


def _quark(case: MoECase) -> dict[str, Any]:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0", "is_dynamic": False}
    inputs = None if case.act_scale is ActScale.NONE else weight | {"is_dynamic": True}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "exclude": [],
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None},
    }
