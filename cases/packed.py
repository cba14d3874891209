"""Formats whose weights share a scale per group of columns, or whose codes are packed: who writes them, and what a scale is.

Read in vLLM 0.33.0: ``compressed_tensors_moe.py`` and its methods, ``quark/quark_moe.py``, ``modelopt.py``, ``auto_gptq.py``,
``auto_awq.py``, ``moe_wna16.py``, ``mxfp4.py``, ``online/{mxfp4,mxfp8,nvfp4}.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cases.axes import ActScale, Origin
from references.vocabulary import CheckpointFormat, Format, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cases.case import MoECase

_CT, _GPTQ, _AWQ = CheckpointFormat.COMPRESSED_TENSORS, CheckpointFormat.GPTQ, CheckpointFormat.AWQ
_QUARK, _MODELOPT, _GPT_OSS = CheckpointFormat.QUARK, CheckpointFormat.MODELOPT, CheckpointFormat.GPT_OSS
_NONE, _TOKEN = ActScale.NONE, ActScale.DYNAMIC_TOKEN
GROUPS = (Layout.GROUP16, Layout.GROUP32, Layout.GROUP64, Layout.GROUP128)
INTEGER_GROUPS = (Layout.GROUP32, Layout.GROUP64, Layout.GROUP128)
INTEGERS = (Format.INT4, Format.UINT4, Format.INT8, Format.UINT8)
W4A8_MULTIPLE = 256  # compressed_tensors_moe_w4a8_fp8.py: CUTLASS reorders tiles of 256

SCHEMES: dict[tuple[Format, Layout, ActScale], frozenset[CheckpointFormat]] = {
    **{(Format.INT4, group, _NONE): frozenset({_CT, _GPTQ}) for group in INTEGER_GROUPS},
    **{(Format.UINT4, group, _NONE): frozenset({_CT, _GPTQ, _AWQ}) for group in INTEGER_GROUPS},
    **{(Format.INT8, group, _NONE): frozenset({_CT, _GPTQ}) for group in INTEGER_GROUPS},
    **{(Format.UINT8, group, _NONE): frozenset({_CT, _GPTQ}) for group in INTEGER_GROUPS},
    (Format.INT4, Layout.CHANNEL, _NONE): frozenset({_CT}),
    (Format.UINT4, Layout.CHANNEL, _NONE): frozenset({_CT}),
    (Format.INT8, Layout.CHANNEL, _NONE): frozenset({_CT, CheckpointFormat.RAW}),
    (Format.INT4, Layout.GROUP128, _TOKEN): frozenset({_CT}),  # FP8 activations
    (Format.E2M1, Layout.GROUP16, ActScale.DYNAMIC_GROUP16): frozenset({_CT, _MODELOPT}),
    (Format.E2M1, Layout.GROUP16, _NONE): frozenset({_CT, _MODELOPT}),
    (Format.E2M1, Layout.GROUP32, ActScale.DYNAMIC_GROUP32): frozenset({_CT, _QUARK}),
    (Format.E2M1, Layout.GROUP32, _NONE): frozenset({_CT, _QUARK, _GPT_OSS}),
    (Format.E4M3FN, Layout.GROUP32, ActScale.DYNAMIC_GROUP32): frozenset({_CT, _MODELOPT}),
}
"""Pre-quantized (weight, weight scale, activation scale) -> the files that hold it."""

ONLINE = {
    (Format.E2M1, Layout.GROUP32): ActScale.DYNAMIC_GROUP32,
    (Format.E4M3FN, Layout.GROUP32): ActScale.DYNAMIC_GROUP32,
    (Format.E2M1, Layout.GROUP16): ActScale.DYNAMIC_GROUP16,
}
"""Quantized while loading -> what the online method declares of activations."""


def is_packed(case: MoECase) -> bool:
    """Whether the case is one of these; per-channel INT8 in a raw file is not."""
    return (
        case.weight in (Format.INT4, Format.UINT4, Format.UINT8, Format.E2M1)
        or case.weight_scale in GROUPS
        or (case.checkpoint is _CT and case.weight is Format.INT8 and case.act_scale is ActScale.NONE)
    )


def weight_only_words(case: MoECase) -> bool:
    """Whether codes lie in int32 words (vLLM's WNA16 layers, and W4A8)."""
    return is_packed(case) and case.weight in INTEGERS


def scale_format(case: MoECase) -> Format:
    """The format of the weight scales on disk."""
    if case.weight in INTEGERS:
        return case.dtype
    return Format.E4M3FN if case.weight_scale is Layout.GROUP16 else Format.E8M0


def problems(case: MoECase) -> Iterator[str]:
    """Broken rules of a pre-quantized case of these formats."""
    scheme = (case.weight, case.weight_scale, case.act_scale)
    files = SCHEMES.get(scheme)
    if files is None:
        yield f"no checkpoint holds {case.weight} weights with weight scale {case.weight_scale} and activation scale {case.act_scale}"
    elif case.checkpoint not in files:
        yield f"{case.weight} {case.weight_scale} {case.act_scale} is held by {', '.join(sorted(files))} checkpoints, got {case.checkpoint}"
    yield from _hidden_dtype(case)
    yield from sizes(case)
    if case.checkpoint is _AWQ and not case.weight.has_zero_point:
        yield f"awq checkpoints have zero points, got {case.weight}"


def _hidden_dtype(case: MoECase) -> Iterator[str]:
    if case.dtype is Format.FP32:
        yield "packed and microscaled formats take bf16 or fp16 hidden states, got fp32"
    if case.checkpoint is _GPT_OSS and case.dtype is not Format.BF16:  # mxfp4.py, get_supported_act_dtypes
        yield f"gptoss checkpoints take bf16 hidden states, got {case.dtype}"


def sizes(case: MoECase) -> Iterator[str]:
    """Whole groups, whole words, whole tiles."""
    width = case.weight_scale.width
    multiple = W4A8_MULTIPLE if case.act_scale is _TOKEN else width or 8
    for name, size in (("H", case.hidden), ("I", case.intermediate)):
        if size % multiple:
            yield f"{case.weight} {case.weight_scale} needs {name} % {multiple} == 0, got {size}"


def rounded(case_width: Layout, act_scale: ActScale, size: int) -> int:
    """``size`` rounded up to what ``sizes`` asks."""
    multiple = W4A8_MULTIPLE if case_width is Layout.GROUP128 and act_scale is _TOKEN else case_width.width or 8
    return -(-size // multiple) * multiple


def gate_and_up_share(case: MoECase) -> bool:
    """Whether vLLM keeps one global scale, and one global activation scale, for gate and up (NVFP4: it takes gate's)."""
    return case.weight_scale is Layout.GROUP16 and case.origin is Origin.PREQUANTIZED
