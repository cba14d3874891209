"""Cases in which the memory of conversion and quantization is measured: many experts, each larger than anything else. No torch."""

from __future__ import annotations

from functools import cache

from cases.case import MoECase

MANY = 16  # experts from which one code for each weight of all is more than one expert's scratch, 10 to 12 bytes a weight
_SIZE, _WIDE = "e16k1m3h256i128-balanced", "e16k1m3h256i256-balanced"
_SCHEMES = (
    "bf16-none-none-plain-silu-bf16",
    "int8-channel-dyntoken-ct-silu-bf16",
    "int8-tensor-dyntoken-quark-silu-bf16",
    "e4m3fn-channel-dyntoken-ct-silu-bf16",
    "e4m3fn-tensor-static-ct-silu-bf16",
    "e4m3fn-tensor-static-quark-relu2_no_mul-bf16",
    "e4m3fn-tensor-static-vllmfp8-silu-bf16",
    "e4m3fn-tensor-static-modelopt-silu-bf16",
    "e4m3fn-block128-dyngroup128-vllmfp8-silu-bf16",
    "e4m3fn-tensor-dyntensor-online-silu-bf16",
    "e4m3fn-channel-dyntoken-online-silu-bf16",
    "e4m3fn-channel-dyntoken-online-relu2_no_mul-bf16",
    "e4m3fn-block128-dyngroup128-online-silu-bf16",
    "int8-channel-none-online-silu-bf16",
    "int4-group32-none-ct-silu-bf16",
    "uint4-group32-none-ct-silu-bf16",
    "uint4-group32-none-awq-silu-bf16",
    "int4-group32-none-gptq-silu-bf16",
    "e2m1-group16-dyngroup16-ct-silu-bf16",
    "e2m1-group16-dyngroup16-modelopt-silu-bf16",
)
_WIDE_SCHEMES = (
    "e4m3fn-group32-dyngroup32-online-silu-bf16",
    "e2m1-group32-dyngroup32-online-silu-bf16",
    "e4m3fn-group32-dyngroup32-ct-silu-bf16",
    "e4m3fn-group32-dyngroup32-modelopt-silu-bf16",
    "e2m1-group32-none-ct-silu-bf16",
    "e2m1-group32-dyngroup32-quark-silu-bf16",
    "e2m1-group16-none-ct-silu-bf16",
    "e2m1-group16-dyngroup16-online-silu-bf16",
    "int4-group128-dyntoken-ct-silu-bf16",
)


@cache
def memory_cases() -> tuple[MoECase, ...]:
    """One of each way in which weights are merged, quantized or converted while a layer is loaded."""
    narrow = (f"{scheme}-{_SIZE}" for scheme in _SCHEMES)
    return tuple(MoECase.from_id(text) for text in (*narrow, *(f"{scheme}-{_WIDE}" for scheme in _WIDE_SCHEMES)))
