"""Parameters of the activations that have any, as a model's configuration gives them, and which cases may have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cases.axes import Origin
from references.vocabulary import Activation, CheckpointFormat, Format, Swiglu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cases.case import MoECase

_FLOAT_1_702 = 1.7020000219345093  # the operator takes a float32
_GPT_OSS = Swiglu(limit=7.0, alpha=_FLOAT_1_702, beta=1.0)
_WIDE = {
    Activation.SWIGLUOAI: _GPT_OSS,  # built into the operator
    Activation.SWIGLUOAI_UNINTERLEAVE: _GPT_OSS,
    Activation.SWIGLUSTEP: Swiglu(limit=7.0),  # built in
    Activation.SITU: Swiglu(situ=4.0, linear=25.0),
}
_TIGHT = {
    Activation.SILU: Swiglu(limit=1.5),
    Activation.SWIGLUOAI_UNINTERLEAVE: Swiglu(limit=1.5, alpha=1.25, beta=0.5),
    Activation.SITU: Swiglu(situ=1.5, linear=2.5),
}
BUILT_IN = (Activation.SWIGLUOAI, Activation.SWIGLUSTEP)
"""Activations whose parameters vLLM's experts do not take from the model."""


def swiglu(case: MoECase) -> Swiglu | None:
    """None for activations without parameters."""
    return (_TIGHT if case.tight else _WIDE).get(case.activation)


def with_parameters(case: MoECase) -> bool:
    """Whether vLLM's functional entry, which takes none, cannot say what the case says."""
    return swiglu(case) is not None or case.activation is Activation.GELU_TANH_NO_MUL


def problems(case: MoECase) -> Iterator[str]:
    """Broken rules."""
    if case.tight and case.activation not in _TIGHT:
        yield f"small limits exist for {', '.join(_TIGHT)}, got {case.activation}"
    if case.activation.interleaved and case.checkpoint is not CheckpointFormat.GPT_OSS:
        if case.origin is Origin.PREQUANTIZED:
            yield f"interleaved gate and up rows are in plain and gptoss checkpoints, got {case.checkpoint}"
        if case.bias:  # routed_experts.py, load_weights: a stacked tensor's name has no suffix
            yield "a layer reads stacked gate_up_proj tensors without biases"
    if case.checkpoint is CheckpointFormat.GPT_OSS and case.activation is not Activation.SWIGLUOAI:
        yield f"gptoss checkpoints are of swigluoai layers, got {case.activation}"
    if case.activation is Activation.SWIGLUOAI and case.dtype is Format.FP32 and case.quantized:
        yield "swigluoai with quantized weights takes bf16 or fp16 hidden states, got fp32"
