"""What a backend says it runs: combinations of checkpoint, scheme, activation and hidden dtype."""

from __future__ import annotations

from dataclasses import dataclass

from cases.case import ActScale, MoECase
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

Scheme = tuple[Format, Layout, ActScale]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Cases a backend says it runs: every combination of these. Unquantized cases are claimed by ``unquantized``."""

    checkpoints: frozenset[CheckpointFormat]  # PLAIN: online quantization
    schemes: frozenset[Scheme]
    activations: frozenset[Activation]
    dtypes: frozenset[Format]

    def covers(self, case: MoECase) -> bool:
        """Whether the case is one of the combinations."""
        return (
            case.checkpoint in self.checkpoints
            and (case.weight, case.weight_scale, case.act_scale) in self.schemes
            and case.activation in self.activations
            and case.dtype in self.dtypes
        )


EVERY = frozenset(Activation)
GATED = frozenset(activation for activation in Activation if activation.gated)
_OAI = frozenset((Activation.SWIGLUOAI, Activation.SWIGLUOAI_UNINTERLEAVE))
# what ``_supports_activation`` of the experts takes, experts/*.py
DEEP_GEMM = frozenset((Activation.SILU, Activation.SWIGLUOAI_UNINTERLEAVE, Activation.SWIGLUSTEP))
DEEP_GEMM_MXFP4 = frozenset((Activation.SILU, Activation.SWIGLUSTEP, Activation.SITU))
FLASHINFER_CUTLASS = _OAI | {Activation.SILU, Activation.GELU_TANH, Activation.RELU2_NO_MUL}
FLASHINFER_CUTEDSL = _OAI | {Activation.SILU, Activation.RELU2_NO_MUL, Activation.SITU}
FLASHINFER_TRTLLM = frozenset((Activation.SILU, Activation.RELU2_NO_MUL))
FLASHINFER_TRTLLM_FP8 = FLASHINFER_TRTLLM | {Activation.SWIGLUOAI_UNINTERLEAVE}
FLASHINFER_TRTLLM_MXFP4 = frozenset((Activation.SILU, Activation.SWIGLUOAI, Activation.SITU))
FLASHINFER_TRTLLM_NVFP4 = FLASHINFER_TRTLLM_FP8 | {Activation.GELU, Activation.GELU_TANH, Activation.SITU}
AITER = _OAI | {Activation.SILU, Activation.GELU, Activation.SITU}
FLOATS = frozenset((Format.FP32, Format.BF16, Format.FP16))
HALVES = frozenset((Format.BF16, Format.FP16))
CT = frozenset((CheckpointFormat.COMPRESSED_TENSORS,))
QUARK = frozenset((CheckpointFormat.QUARK,))
VLLM_FP8 = frozenset((CheckpointFormat.VLLM_FP8,))
MODELOPT = frozenset((CheckpointFormat.MODELOPT,))
ONLINE = frozenset((CheckpointFormat.PLAIN,))

TENSOR_STATIC: Scheme = (Format.E4M3FN, Layout.TENSOR, ActScale.STATIC_TENSOR)
TENSOR_DYNAMIC: Scheme = (Format.E4M3FN, Layout.TENSOR, ActScale.DYNAMIC_TENSOR)
CHANNEL_TOKEN: Scheme = (Format.E4M3FN, Layout.CHANNEL, ActScale.DYNAMIC_TOKEN)
BLOCK: Scheme = (Format.E4M3FN, Layout.BLOCK128, ActScale.DYNAMIC_GROUP128)
INT8_CHANNEL_TOKEN: Scheme = (Format.INT8, Layout.CHANNEL, ActScale.DYNAMIC_TOKEN)
INT8_TENSOR_TOKEN: Scheme = (Format.INT8, Layout.TENSOR, ActScale.DYNAMIC_TOKEN)
INT8_WEIGHT_ONLY: Scheme = (Format.INT8, Layout.CHANNEL, ActScale.NONE)


def claim(
    checkpoints: frozenset[CheckpointFormat],
    *schemes: Scheme,
    activations: frozenset[Activation] = EVERY,
    dtypes: frozenset[Format] = HALVES,
) -> Claim:
    """A claim; every activation and bf16 or fp16 hidden states unless said otherwise."""
    return Claim(checkpoints=checkpoints, schemes=frozenset(schemes), activations=activations, dtypes=dtypes)


TRITON = (
    claim(CT, TENSOR_STATIC, CHANNEL_TOKEN, BLOCK, INT8_CHANNEL_TOKEN, dtypes=FLOATS),
    claim(QUARK, TENSOR_STATIC, TENSOR_DYNAMIC, CHANNEL_TOKEN, BLOCK, INT8_CHANNEL_TOKEN, INT8_TENSOR_TOKEN),
    claim(VLLM_FP8, TENSOR_STATIC, TENSOR_DYNAMIC, BLOCK),
    claim(MODELOPT, TENSOR_STATIC),
    claim(ONLINE, TENSOR_DYNAMIC, CHANNEL_TOKEN, BLOCK, INT8_WEIGHT_ONLY),
)
HUMMING = (  # weight-only: what a checkpoint says of activations is read and not used
    claim(CT, TENSOR_STATIC, TENSOR_DYNAMIC, CHANNEL_TOKEN, BLOCK, INT8_CHANNEL_TOKEN),
    claim(QUARK, TENSOR_STATIC, CHANNEL_TOKEN, BLOCK, INT8_CHANNEL_TOKEN),
    claim(VLLM_FP8, TENSOR_STATIC, BLOCK),
    claim(MODELOPT, TENSOR_STATIC),
    claim(ONLINE, CHANNEL_TOKEN, BLOCK, INT8_WEIGHT_ONLY),
)
