"""What the CUDA backends refuse, in the order in which vLLM looks. Limits of a kernel's shapes are refusals too: vLLM says them late, when
loading or running, and not as a reason (``reasoned=False``)."""

from __future__ import annotations

from cases.case import ActScale, MoECase, Origin
from harness import claims
from harness.installed import compute_capability
from harness.refusals import (
    BY_THE_METHOD,
    CT_FP8_DYNAMIC_TENSOR,
    GATED_ONLY,
    Refusal,
    at_layer,
    fp8,
    int8,
    no_kernels_for,
    not_supported,
    only_for,
    refuses_fp32,
    scheme,
)
from references.vocabulary import CheckpointFormat, Format, Layout


def _marlin_hidden(case: MoECase) -> int:
    """H as the layer holds it: online block quantization rounds it up to whole blocks."""
    online_blocks = case.origin is Origin.ONLINE and case.weight_scale is Layout.BLOCK128
    return -(-case.hidden // 128) * 128 if online_blocks else case.hidden


CUTLASS: tuple[Refusal, ...] = (
    *BY_THE_METHOD,
    *only_for(("FP8",), "cutlass"),
    Refusal(
        reason="only compressed-tensors and online per-channel FP8 allow vLLM's CUTLASS kernels",
        says="vLLM CUTLASS FP8 MoE backend is disabled",
        applies=at_layer(
            lambda c: (
                fp8(c)
                and c.checkpoint is not CheckpointFormat.COMPRESSED_TENSORS
                and not (c.origin is Origin.ONLINE and c.weight_scale is Layout.CHANNEL)
            )
        ),
    ),
    not_supported(lambda c: fp8(c) and compute_capability() >= 110, "CUTLASS's grouped FP8 GEMM is for sm90 and sm100", "current device"),
    not_supported(lambda c: fp8(c) and not c.activation.gated, "CUTLASS experts are gated", GATED_ONLY),
    not_supported(lambda c: fp8(c) and c.weight_scale is Layout.BLOCK128, "CUTLASS experts have no block scales", "quantization scheme"),
    CT_FP8_DYNAMIC_TENSOR,
    refuses_fp32("AssertionError: Invalid output dtype"),
    Refusal(
        reason="moe_permute moves rows of 16 bytes",
        says="hidden dim align to 16B",
        applies=at_layer(lambda c: fp8(c) and c.hidden % 16 != 0),
        reasoned=False,
    ),
)

MARLIN: tuple[Refusal, ...] = (
    *BY_THE_METHOD,
    no_kernels_for(int8, "Int8", "marlin"),
    Refusal(
        reason="online per-channel FP8 has no Marlin path",
        says="not supported with the MARLIN backend",
        applies=at_layer(lambda c: fp8(c) and c.origin is Origin.ONLINE and c.weight_scale is Layout.CHANNEL),
    ),
    Refusal(
        reason="Marlin's tiles need H % 64 == 0; only I is padded",
        says=r"size_[kn] = \d+ is not divisible by tile_[kn]_size",
        applies=at_layer(lambda c: fp8(c) and _marlin_hidden(c) % 64 != 0),
        reasoned=False,
    ),
    Refusal(
        reason="Marlin has no thread layout for a 64 x 64 matrix",
        says="Invalid thread config",
        applies=at_layer(lambda c: fp8(c) and _marlin_hidden(c) % 128 != 0 and -(-c.intermediate // 64) % 2 != 0),
        reasoned=False,
    ),
    refuses_fp32("UnboundLocalError: .*target_exponent"),
)

DEEP_GEMM: tuple[Refusal, ...] = (
    *BY_THE_METHOD,
    *only_for(("FP8",), "deep_gemm"),
    not_supported(lambda c: fp8(c) and not c.activation.gated, "DeepGEMM experts are gated", GATED_ONLY),
    not_supported(
        lambda c: fp8(c) and c.activation not in claims.DEEP_GEMM,
        "DeepGEMM knows silu, swigluoai_uninterleave, swiglustep",
        "MoEActivation",
    ),
    not_supported(lambda c: fp8(c) and c.weight_scale is not Layout.BLOCK128, "DeepGEMM needs block scales", "quantization scheme"),
    Refusal(
        reason="DeepGEMM's grouped GEMM writes bf16 only",
        says=r"d\.scalar_type\(\) == .*BFloat16",
        applies=at_layer(lambda c: fp8(c) and c.dtype is not Format.BF16),
        reasoned=False,
    ),
)

HUMMING: tuple[Refusal, ...] = (
    *BY_THE_METHOD,
    not_supported(
        lambda c: (
            (fp8(c) and scheme(c) == (Layout.TENSOR, ActScale.DYNAMIC_TENSOR) and c.checkpoint is not CheckpointFormat.COMPRESSED_TENSORS)
            or (int8(c) and c.weight_scale is Layout.TENSOR)
        ),
        "Humming takes no per-tensor weights with dynamic activations",
        "quantization scheme",
    ),
    refuses_fp32("AssertionError"),
    Refusal(
        reason="Humming does not weight its input",
        says=r"^AssertionError: ?$",
        applies=at_layer(lambda c: c.origin is not Origin.UNQUANTIZED and c.router_weight_on_input),
        reasoned=False,
    ),
    Refusal(
        reason="Humming unpacks INT8 rows 32 columns at a time",
        says=r"^AssertionError: ?$",
        applies=at_layer(lambda c: int8(c) and (c.hidden % 32 != 0 or c.intermediate % 32 != 0)),
        reasoned=False,
    ),
)

HUMMING_A8: tuple[Refusal, ...] = (
    *HUMMING,
    Refusal(
        reason="Humming reads rows of quantized activations 16 bytes at a time",
        says=r"^AssertionError: ?$",
        applies=at_layer(lambda c: fp8(c) and c.weight_scale is not Layout.BLOCK128 and (c.hidden % 16 != 0 or c.intermediate % 16 != 0)),
        reasoned=False,
    ),
)
