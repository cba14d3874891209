"""What the experts classes of the batched entry refuse, in vLLM's words: ``_supports_quant_scheme`` of
``fused_moe/experts/fused_batched_moe.py`` (0.33.0)."""

from __future__ import annotations

from cases.case import ActScale, Entry, MoECase
from harness.refusals import Refusal
from references.vocabulary import Format, Layout

_TOKEN, _STATIC, _TENSOR = ActScale.DYNAMIC_TOKEN, ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR
_SCHEMES = {
    *((Layout.TENSOR, scale) for scale in (_TOKEN, _STATIC, _TENSOR)),
    (Layout.CHANNEL, _TOKEN),
    (Layout.BLOCK128, ActScale.DYNAMIC_GROUP128),
}


def _applies(case: MoECase, entry: Entry) -> bool:
    if entry is not Entry.BATCHED or not case.quantized:
        return False
    return case.weight is not Format.E4M3FN or (case.weight_scale, case.act_scale) not in _SCHEMES


BATCHED_TRITON: tuple[Refusal, ...] = (
    Refusal(
        reason="batched Triton experts take FP8 per-tensor, per-channel with per-token, and block scales",
        says="BatchedTritonExperts: kernel does not support quantization scheme",
        applies=_applies,
    ),
)
