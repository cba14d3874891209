"""Which cases exist. Each rule says what is wrong with which value; a rule of vLLM names the file it was read in (0.33.0).

A checkpoint that can be written but that vLLM refuses is a case: the capability table declares the refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cases import gating, packed
from cases.axes import ActScale, Data, Entry, InvalidCase, Origin, Routing
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from cases.case import MoECase

_PER_TENSOR_OR_TOKEN = (ActScale.STATIC_TENSOR, ActScale.DYNAMIC_TENSOR, ActScale.DYNAMIC_TOKEN)
_ONLINE_SCHEMES = {  # quantization/online/{fp8,int8}.py: the weight's layout fixes how activations are scaled
    (Format.E4M3FN, Layout.TENSOR): ActScale.DYNAMIC_TENSOR,
    (Format.E4M3FN, Layout.CHANNEL): ActScale.DYNAMIC_TOKEN,
    (Format.E4M3FN, Layout.BLOCK128): ActScale.DYNAMIC_GROUP128,
    (Format.INT8, Layout.CHANNEL): ActScale.NONE,
    **packed.ONLINE,
}
_LARGEST = 2**20  # of each size
_ELEMENTS = 2**33  # of a tensor or a checkpoint; offsets past 2^31 are asked for
_SEEDS = 2**63
_MODELOPT_FP8 = (Format.E4M3FN, Layout.TENSOR, ActScale.STATIC_TENSOR)


def check(case: MoECase) -> None:
    """Raises InvalidCase with the first broken rule."""
    for problem in _problems(case):
        raise InvalidCase(problem)


def entry_takes(case: MoECase, entry: Entry) -> bool:
    """Whether a door exists for the case: who can read its checkpoint, in its hidden dtype.

    Hidden dtypes are those of each config's ``get_supported_act_dtypes``; the functional entry takes tensors, so
    anything already quantized, and anything unquantized, may come in by it.
    """
    if entry is Entry.BATCHED:
        tensors = case.origin is not Origin.ONLINE and not packed.is_packed(case) and not case.activation.interleaved
        return tensors and not (case.weight_only or case.data is Data.LATTICE or _int8_blocks(case))
    if entry is Entry.FUSED_EXPERTS:
        return case.origin is not Origin.ONLINE and not packed.is_packed(case) and not gating.with_parameters(case)
    if case.checkpoint is CheckpointFormat.RAW:
        return False
    takes_fp32 = case.origin is Origin.UNQUANTIZED or case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS
    return takes_fp32 or case.dtype is not Format.FP32


def _int8_blocks(case: MoECase) -> bool:
    return case.weight is Format.INT8 and case.weight_scale is Layout.BLOCK128


def _problems(case: MoECase) -> Iterator[str]:
    yield from _sizes(case)
    if not case.dtype.is_float16_or_wider:
        yield f"hidden dtype must be fp32, bf16 or fp16, got {case.dtype}"
    yield from {Origin.UNQUANTIZED: _unquantized, Origin.ONLINE: _online, Origin.PREQUANTIZED: _prequantized}[case.origin](case)
    yield from gating.problems(case)
    if packed.is_packed(case) and case.data is Data.LATTICE:
        yield f"the lattice is not laid out for {case.weight} {case.weight_scale}"
    if gating.with_parameters(case) and case.data is Data.LATTICE:
        yield f"the lattice is not laid out for {case.activation} with limits"
    if case.router_weight_on_input and case.top_k != 1:
        yield f"router weight on input needs top_k == 1, got {case.top_k}"
    if case.routing is Routing.ONE_EACH and case.experts == case.top_k and case.tokens > 1:
        yield f"one_each routing needs top_k < experts: with top_k == experts == {case.experts} the last expert gets every token"


def _sizes(case: MoECase) -> Iterator[str]:
    for name in ("experts", "top_k", "tokens", "hidden", "intermediate"):
        value = getattr(case, name)
        if value < 1:
            yield f"{name} must be at least 1, got {value}"
        if value > _LARGEST:
            yield f"{name} must be at most {_LARGEST}, got {value}"
    for what, elements in (
        ("weights", len(case.projections) * case.experts * case.hidden * case.intermediate),
        ("hidden states", case.tokens * case.hidden),
        ("router logits", case.tokens * case.experts),
        ("intermediate", case.tokens * case.top_k * case.w13_rows),
        ("output of each expert", case.tokens * case.top_k * case.hidden),
    ):
        if elements > _ELEMENTS:
            yield f"the {what} must have at most {_ELEMENTS} elements, got {elements}"
    if case.top_k > case.experts:
        yield f"top_k must be at most experts, got top_k {case.top_k} of {case.experts} experts"
    if case.seed < 0:
        yield f"seed must be at least 0, got {case.seed}"
    if case.seed >= _SEEDS:
        yield f"seed must be at most {_SEEDS - 1}, got {case.seed}"


def _unquantized(case: MoECase) -> Iterator[str]:
    if case.weight is not case.dtype:
        yield f"unquantized weights have the hidden dtype {case.dtype}, got {case.weight}"
    if case.weight_scale is not Layout.NONE or case.act_scale is not ActScale.NONE:
        yield f"unquantized layers have no scales, got weight scale {case.weight_scale} and activation scale {case.act_scale}"
    if case.checkpoint is not CheckpointFormat.PLAIN:
        yield f"unquantized weights come from a plain checkpoint, got {case.checkpoint}"


def _online(case: MoECase) -> Iterator[str]:
    if case.checkpoint is not CheckpointFormat.PLAIN:
        yield f"online quantization reads a plain checkpoint, got {case.checkpoint}"
    if case.dtype is Format.FP32:
        yield "online quantization takes bf16 or fp16 weights, got fp32"
    act_scale = _ONLINE_SCHEMES.get((case.weight, case.weight_scale))
    if act_scale is None:
        known = ", ".join(f"{weight} {layout}" for weight, layout in _ONLINE_SCHEMES)
        yield f"online quantization knows {known}; got {case.weight} {case.weight_scale}"
    elif act_scale is not case.act_scale:
        yield f"online {case.weight} {case.weight_scale} runs with activation scale {act_scale}, got {case.act_scale}"
    if packed.is_packed(case):
        yield from packed.sizes(case)


def _prequantized(case: MoECase) -> Iterator[str]:
    if packed.is_packed(case):
        yield from packed.problems(case)
        return
    stored, weight, layout, act_scale = case.checkpoint, case.weight, case.weight_scale, case.act_scale
    if weight not in (Format.INT8, Format.E4M3FN):
        yield f"pre-quantized weights are int8 or e4m3fn, got {weight}"
    if stored is CheckpointFormat.PLAIN:
        yield "a plain checkpoint holds no codes: pre-quantized weights need ct, quark, vllmfp8 or raw"
    if layout not in (Layout.TENSOR, Layout.CHANNEL, Layout.BLOCK128):
        yield f"weight scales are per tensor, channel or block128, got {layout}"
    if layout is Layout.BLOCK128:
        yield from _block(case)
    elif act_scale is ActScale.NONE:
        if stored is not CheckpointFormat.RAW or weight is not Format.INT8:
            yield f"weight-only exists as int8 through the direct entry (raw) only, got {weight} in {stored}"
    elif act_scale not in _PER_TENSOR_OR_TOKEN:
        yield f"activation scale {act_scale} goes with block128 weights, got weight scale {layout}"
    if stored is CheckpointFormat.MODELOPT and (weight, layout, act_scale) != _MODELOPT_FP8:
        yield f"modelopt fp8 is per tensor with static activations, got {weight} {layout} {act_scale}"
    if stored in (CheckpointFormat.GPTQ, CheckpointFormat.AWQ, CheckpointFormat.GPT_OSS):
        yield f"{stored} checkpoints hold no {weight} weights with weight scale {layout}"
    if stored is CheckpointFormat.VLLM_FP8:
        if weight is not Format.E4M3FN:
            yield f"vllmfp8 checkpoints hold e4m3fn weights, got {weight}"
        if layout is Layout.CHANNEL:  # quantization/fp8.py: per tensor, or weight_block_size
            yield "vllmfp8 checkpoints scale weights per tensor or per block128, got channel"
        if act_scale is ActScale.DYNAMIC_TOKEN:  # activation_scheme: static or dynamic, and dynamic means per tensor
            yield "vllmfp8 checkpoints say static or dynamic (per tensor) activations, got dyntoken"


def _block(case: MoECase) -> Iterator[str]:
    if case.act_scale is not ActScale.DYNAMIC_GROUP128:
        yield f"block128 weights go with activation scale dyngroup128, got {case.act_scale}"
    # fp8_utils.py validate_fp8_block_shape_moe for I; per_token_group_quant_{fp8,int8} for both
    for name, size in (("H", case.hidden), ("I", case.intermediate)):
        if size % 128:
            yield f"block 128x128 needs {name} % 128 == 0 in a pre-quantized checkpoint, got {size}"
    if case.weight is Format.INT8 and case.checkpoint is not CheckpointFormat.RAW:
        yield f"int8 block128 exists through the direct entry (raw) only, got {case.checkpoint}"
