"""What the experts classes of the batched entry refuse, in vLLM's words: ``_supports_quant_scheme`` of
``fused_moe/experts/{fused_batched,batched_deep_gemm}_moe.py`` (0.33.0)."""

from __future__ import annotations

from cases.case import ActScale, Entry, MoECase
from harness.installed import compute_capability
from harness.refusals import Refusal
from references.vocabulary import Activation, Format, Layout

_TOKEN, _STATIC, _TENSOR = ActScale.DYNAMIC_TOKEN, ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR
_SCHEMES = {
    *((Layout.TENSOR, scale) for scale in (_TOKEN, _STATIC, _TENSOR)),
    (Layout.CHANNEL, _TOKEN),
    (Layout.BLOCK128, ActScale.DYNAMIC_GROUP128),
}


def _applies(case: MoECase, entry: Entry) -> bool:
    if entry is not Entry.BATCHED or not case.quantized:
        return False
    cores = not 0 < compute_capability() < 89  # FP8 tensor cores
    return case.weight is not Format.E4M3FN or (case.weight_scale, case.act_scale) not in _SCHEMES or not cores


def _not_deep_gemm(case: MoECase, entry: Entry) -> bool:
    block = case.weight is Format.E4M3FN and case.weight_scale is Layout.BLOCK128
    return entry is Entry.BATCHED and not (block and case.activation is Activation.SILU)


BATCHED_DEEP_GEMM: tuple[Refusal, ...] = (
    Refusal(
        reason="batched DeepGEMM experts take FP8 block scales, and silu",
        says="BatchedDeepGemmExperts: kernel does not support (no act_and_mul|MoEActivation|quantization scheme)",
        applies=_not_deep_gemm,
    ),
    Refusal(
        reason="DeepGEMM's grouped GEMM writes bf16 only",
        says=r"d\.scalar_type\(\) == .*BFloat16",
        applies=lambda case, entry: entry is Entry.BATCHED and case.dtype is not Format.BF16,
        reasoned=False,
    ),
)

BATCHED_TRITON: tuple[Refusal, ...] = (
    Refusal(
        reason="batched Triton experts take FP8 per-tensor, per-channel with per-token, and block scales, from sm89 on",
        says="BatchedTritonExperts: kernel does not support quantization scheme",
        applies=_applies,
    ),
)
