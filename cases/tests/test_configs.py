from __future__ import annotations

import json
from typing import Any

import pytest

from cases.case import Level, MoECase
from cases.configs import quantization_config
from cases.generate import cases
from references.vocabulary import CheckpointFormat


def config(scheme: str) -> dict[str, Any]:
    found = quantization_config(MoECase.from_id(f"{scheme}-silu-bf16-e4k2m8h128i128-balanced"))
    assert found is not None
    return found


def test_files_that_say_nothing_have_no_config_and_the_others_are_json() -> None:
    for case in cases(Level.SMOKE):
        found = quantization_config(case)
        assert (found is None) is (case.checkpoint in (CheckpointFormat.PLAIN, CheckpointFormat.RAW))
        assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("scheme", "format_name", "weights", "inputs"),
    [
        ("int8-channel-dyntoken-ct", "int-quantized", {"type": "int", "strategy": "channel"}, {"strategy": "token", "dynamic": True}),
        ("e4m3fn-tensor-static-ct", "float-quantized", {"type": "float", "strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
        (
            "e4m3fn-block128-dyngroup128-ct",
            "float-quantized",
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
    ],
)
def test_compressed_tensors(scheme: str, format_name: str, weights: dict[str, Any], inputs: dict[str, Any]) -> None:
    found = config(scheme)
    group = found["config_groups"]["group_0"]
    assert found["format"] == format_name
    assert weights.items() <= group["weights"].items()
    assert inputs.items() <= group["input_activations"].items()


@pytest.mark.parametrize(
    ("scheme", "weight", "inputs"),
    [
        ("int8-channel-static-quark", {"dtype": "int8", "qscheme": "per_channel"}, {"qscheme": "per_tensor", "is_dynamic": False}),
        ("int8-tensor-dyntoken-quark", {"dtype": "int8", "qscheme": "per_tensor"}, {"qscheme": "per_channel", "is_dynamic": True}),
        (
            "e4m3fn-block128-dyngroup128-quark",
            {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]},
            {"qscheme": "per_group", "group_size": 128, "is_dynamic": True},
        ),
    ],
)
def test_quark(scheme: str, weight: dict[str, Any], inputs: dict[str, Any]) -> None:
    found = config(scheme)["global_quant_config"]
    assert weight.items() <= found["weight"].items()
    assert inputs.items() <= found["input_tensors"].items()


def test_vllm_fp8() -> None:
    assert config("e4m3fn-tensor-static-vllmfp8") == {"quant_method": "fp8", "activation_scheme": "static"}
    assert config("e4m3fn-tensor-dyntensor-vllmfp8") == {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert config("e4m3fn-block128-dyngroup128-vllmfp8") == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
