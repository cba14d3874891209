"""What vLLM refuses by design, in vLLM's own words. In the order in which vLLM looks: the method's constructor, then the backend's oracle.

Read in ``quantization/{fp8,online/fp8}.py``, ``quantization/quark/quark_moe.py``, ``compressed_tensors_moe_w8a8_{fp8,int8}.py``,
``fused_moe/oracle/{unquantized,fp8,int8}.py`` and the ``_supports_*`` methods of ``fused_moe/experts/*.py`` (0.33.0), and heard by building
the layers: an oracle needs no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from cases.case import ActScale, Entry, MoECase, Origin
from cases.packed import is_packed
from harness.installed import ue8m0_scales
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

Applies = Callable[[MoECase, Entry], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A combination vLLM refuses by design; ``says`` is a pattern its reason must match."""

    reason: str
    says: str
    applies: Applies
    reasoned: bool = True  # False: an assertion, or an error of the code below, stands where a reason should
    at_run: bool = False  # the layer loads; its first forward raises

    def matches(self, detail: str) -> bool:
        """Whether vLLM's own words are the declared ones; the pattern itself is what the fake says."""
        return detail == self.says or re.search(self.says, detail, re.DOTALL) is not None


def unquantized(case: MoECase) -> bool:
    """Decided by oracle/unquantized.py."""
    return case.origin is Origin.UNQUANTIZED


def fp8(case: MoECase) -> bool:
    """Decided by oracle/fp8.py."""
    return case.weight is Format.E4M3FN and not is_packed(case)


def int8(case: MoECase) -> bool:
    """Decided by oracle/int8.py."""
    return case.weight is Format.INT8 and not quark_int8_static(case) and not is_packed(case)


def quark_int8_static(case: MoECase) -> bool:
    """Decided by nobody: the method has no experts class and calls the legacy function itself, whatever backend was asked for."""
    return case.checkpoint is CheckpointFormat.QUARK and case.weight is Format.INT8 and case.act_scale is ActScale.STATIC_TENSOR


def ct(case: MoECase) -> bool:
    """A compressed-tensors checkpoint."""
    return case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS


def scheme(case: MoECase) -> tuple[Layout, ActScale]:
    """How weights and activations are scaled."""
    return case.weight_scale, case.act_scale


def fused_silu_quantizer(case: MoECase) -> bool:
    """TritonExperts runs silu_and_mul_per_block_quant, which it does not where block scales of activations are powers of two."""
    block = case.weight is Format.E4M3FN and case.weight_scale is Layout.BLOCK128
    return block and case.activation is Activation.SILU and not ue8m0_scales()


def at_layer(applies: Callable[[MoECase], bool]) -> Applies:
    """The condition, of the layer entry only."""
    return lambda case, entry: entry is Entry.LAYER and applies(case)


HALF = "hidden states must be bf16 or fp16"
GATED_ONLY = "no act_and_mul MLP layer"

_QUARK_FP8 = {
    (Layout.TENSOR, ActScale.STATIC_TENSOR),
    (Layout.TENSOR, ActScale.DYNAMIC_TENSOR),
    (Layout.CHANNEL, ActScale.DYNAMIC_TOKEN),
    (Layout.BLOCK128, ActScale.DYNAMIC_GROUP128),
}

_CT_FP8_MIXED = {
    (Layout.TENSOR, ActScale.DYNAMIC_TOKEN),
    (Layout.CHANNEL, ActScale.STATIC_TENSOR),
    (Layout.CHANNEL, ActScale.DYNAMIC_TENSOR),
}

BY_THE_METHOD: tuple[Refusal, ...] = (
    Refusal(
        reason="Quark FP8 takes per-tensor, per-channel with per-token, and per-block scales only",
        says="only per-tensor, per-channel and per-block scales",
        applies=at_layer(lambda c: c.checkpoint is CheckpointFormat.QUARK and fp8(c) and scheme(c) not in _QUARK_FP8),
    ),
    Refusal(
        reason="Quark INT8 has no dynamic per-tensor scheme",
        says="Unsupported FusedMoe scheme",
        applies=at_layer(lambda c: c.checkpoint is CheckpointFormat.QUARK and int8(c) and c.act_scale is ActScale.DYNAMIC_TENSOR),
    ),
    Refusal(
        reason="compressed-tensors INT8 takes per-channel with per-token scales only",
        says="Unsupported FusedMoe scheme|we require channelwise, dynamic per token",
        applies=at_layer(lambda c: ct(c) and int8(c) and scheme(c) != (Layout.CHANNEL, ActScale.DYNAMIC_TOKEN)),
    ),
    Refusal(
        reason="compressed-tensors FP8 takes per-tensor with per-tensor, per-channel with dynamic per-token, and block scales",
        says="AssertionError",
        applies=at_layer(lambda c: ct(c) and fp8(c) and scheme(c) in _CT_FP8_MIXED),
        reasoned=False,
    ),
)
"""Said before a backend is looked at; the same on every lane."""

CT_FP8_DYNAMIC_TENSOR = Refusal(
    reason="compressed-tensors FP8 with dynamic per-tensor activations asks for group-128 activations, which per-tensor weights have not",
    says="does not support quantization scheme",
    applies=at_layer(lambda c: ct(c) and fp8(c) and scheme(c) == (Layout.TENSOR, ActScale.DYNAMIC_TENSOR)),
)

FUSED_SILU_FP32 = Refusal(
    reason="the fused SiLU and block quantization operator takes fp16 and bf16 only",
    says="Input must be FP16 or BF16",
    applies=at_layer(lambda c: fused_silu_quantizer(c) and c.dtype is Format.FP32),
    at_run=True,
)


def no_kernels_for(oracle: Callable[[MoECase], bool], called: str, moe_backend: str) -> Refusal:
    """The oracle's table has no such backend. ``called``: vLLM's name of the layers it decides."""
    return Refusal(
        reason=f"moe_backend {moe_backend} has no kernels for {called} layers",
        says=f"moe_backend='{moe_backend}' is not supported for {called} MoE",
        applies=at_layer(oracle),
    )


def not_supported(applies: Callable[[MoECase], bool], reason: str, what: str) -> Refusal:
    """The experts class says no; ``what``: pattern of the property it names."""
    return Refusal(reason=reason, says=f"kernel does not support {what}", applies=at_layer(applies))


def refuses_fp32(says: str) -> Refusal:
    """Quantized layers whose hidden states are fp32; ``says``: what fails then."""
    return Refusal(
        reason=HALF,
        says=says,
        applies=at_layer(lambda c: c.dtype is Format.FP32 and c.origin is not Origin.UNQUANTIZED),
        reasoned=False,
    )


def only_for(oracle_names: tuple[str, ...], moe_backend: str) -> tuple[Refusal, ...]:
    """Refusals of every layer whose oracle has no such backend; ``oracle_names``: those that have it."""
    oracles = {"unquantized": unquantized, "FP8": fp8, "Int8": int8}
    return tuple(no_kernels_for(oracle, name, moe_backend) for name, oracle in oracles.items() if name not in oracle_names)
