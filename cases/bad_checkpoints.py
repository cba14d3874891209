"""Checkpoints that are wrong, and what must become of each: an error that names the tensor, or the reference's answer. No torch."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from cases.axes import ActScale, Origin
from cases.case import MoECase
from cases.packed import is_packed
from cases.shards import cut_cases
from references.vocabulary import Layout


class Bad(StrEnum):
    """Closed. What is wrong; values are what test ids, records and the ledger say."""

    MISSING_SCALE = "missing_scale"
    MISSING_INPUT_SCALE = "missing_input_scale"
    MISSING_EXPERT = "missing_expert"
    GATE_WITHOUT_UP = "gate_without_up"
    EXTRA_TENSOR = "extra_tensor"
    EXTRA_EXPERT = "extra_expert"
    SHORT_WEIGHT = "short_weight"
    LONG_WEIGHT = "long_weight"
    NARROW_WEIGHT = "narrow_weight"
    SHORT_SCALE = "short_scale"
    WEIGHT_DTYPE = "weight_dtype"
    NAN_WEIGHT = "nan_weight"
    NAN_SCALE = "nan_scale"
    INF_SCALE = "inf_scale"
    ZERO_SCALE = "zero_scale"
    NEGATIVE_SCALE = "negative_scale"
    ZERO_EXPERT = "zero_expert"
    UNEQUAL_INPUT_SCALES = "unequal_input_scales"
    UNEQUAL_GLOBAL_SCALES = "unequal_global_scales"
    EMPTY_FILE = "empty_file"
    TRUNCATED_FILE = "truncated_file"
    EMPTY_SHARD = "empty_shard"
    CUT_GROUP = "cut_group"


class Expect(StrEnum):
    """What must become of it."""

    REFUSED = "refused"  # an error that names the tensor or the file: no right answer exists
    ANSWERED = "answered"  # such an error, or the reference's answer
    NOT_FINITE = "not_finite"  # such an error, or no finite number wherever the bad value enters, and the reference's answer elsewhere


EXPECTED: dict[Bad, Expect] = {
    **dict.fromkeys(Bad, Expect.REFUSED),
    **dict.fromkeys((Bad.EXTRA_TENSOR, Bad.EXTRA_EXPERT, Bad.WEIGHT_DTYPE, Bad.ZERO_SCALE, Bad.NEGATIVE_SCALE), Expect.ANSWERED),
    **dict.fromkeys((Bad.ZERO_EXPERT, Bad.UNEQUAL_INPUT_SCALES, Bad.UNEQUAL_GLOBAL_SCALES), Expect.ANSWERED),
    Bad.CUT_GROUP: Expect.ANSWERED,
    **dict.fromkeys((Bad.NAN_WEIGHT, Bad.NAN_SCALE, Bad.INF_SCALE), Expect.NOT_FINITE),
}

CLAIMS: dict[Bad, str] = {
    Bad.MISSING_SCALE: "a checkpoint without the weight scale of one expert's up projection",
    Bad.MISSING_INPUT_SCALE: "a checkpoint without the activation scale of one expert's down projection",
    Bad.MISSING_EXPERT: "a checkpoint without the last expert",
    Bad.GATE_WITHOUT_UP: "a checkpoint in which one expert has a gate projection and no up projection",
    Bad.EXTRA_TENSOR: "a checkpoint with a tensor of a name that no layer has",
    Bad.EXTRA_EXPERT: "a checkpoint with one expert more than the configuration says",
    Bad.SHORT_WEIGHT: "a gate projection with half its rows",
    Bad.LONG_WEIGHT: "a gate projection with twice its rows",
    Bad.NARROW_WEIGHT: "a gate projection with half its columns",
    Bad.SHORT_SCALE: "a down projection's scales with half their rows",
    Bad.WEIGHT_DTYPE: "codes stored as bf16 numbers",
    Bad.NAN_WEIGHT: "a NaN in the first row of a down projection",
    Bad.NAN_SCALE: "a NaN for the first scale of a down projection",
    Bad.INF_SCALE: "an infinity for the first scale of a down projection",
    Bad.ZERO_SCALE: "a zero for the first scale of a down projection",
    Bad.NEGATIVE_SCALE: "a negative first scale of a down projection",
    Bad.ZERO_EXPERT: "an expert whose weights and scales are all zero",
    Bad.UNEQUAL_INPUT_SCALES: "gate and up calibrated apart, gate's activation scale the larger",
    Bad.UNEQUAL_GLOBAL_SCALES: "gate and up quantized apart, gate's global weight scale the larger",
    Bad.EMPTY_FILE: "a shard of no bytes",
    Bad.TRUNCATED_FILE: "a shard that ends before its tensors do",
    Bad.EMPTY_SHARD: "a shard that holds no tensors where the index says otherwise",
    Bad.CUT_GROUP: "a layer of which a tensor parallel rank ends in the middle of a group of scales",
}

FILES = (Bad.EMPTY_FILE, Bad.TRUNCATED_FILE, Bad.EMPTY_SHARD)
_SIZE = "silu-bf16-e4k2m8h128i64-balanced"
_BLOCKS = "silu-bf16-e4k2m8h256i128-balanced"
_LAYERS = (  # one of each loader that differs
    f"bf16-none-none-plain-{_SIZE}",
    f"int8-channel-dyntoken-ct-{_SIZE}",
    f"int8-channel-dyntoken-quark-{_SIZE}",
    f"e4m3fn-channel-dyntoken-ct-{_SIZE}",
    f"e4m3fn-tensor-static-ct-{_SIZE}",
    f"e4m3fn-tensor-static-quark-{_SIZE}",
    f"e4m3fn-tensor-static-vllmfp8-{_SIZE}",
    f"e4m3fn-block128-dyngroup128-vllmfp8-{_BLOCKS}",
    f"e4m3fn-channel-dyntoken-online-{_SIZE}",
    f"e4m3fn-block128-dyngroup128-online-{_BLOCKS}",
    f"int8-channel-none-online-{_SIZE}",
)
_PACKED = (  # the same of words, nibbles and scales of groups
    f"int4-group32-none-ct-{_SIZE}",
    f"uint4-group32-none-ct-{_SIZE}",
    f"int4-group32-none-gptq-{_SIZE}",
    f"uint4-group32-none-awq-{_SIZE}",
    f"e2m1-group16-dyngroup16-ct-{_SIZE}",
    f"e2m1-group16-dyngroup16-modelopt-{_SIZE}",
)


class BadCheckpoint(NamedTuple):
    """A case whose checkpoint is spoiled in one way."""

    bad: Bad
    case: MoECase

    @property
    def expect(self) -> Expect:
        """What must become of it."""
        return EXPECTED[self.bad]


def bad_checkpoints() -> tuple[BadCheckpoint, ...]:
    """Every way of being wrong of every loader; the same at all levels."""
    layers = [MoECase.from_id(text) for text in (*_LAYERS, *_PACKED)]
    cut = tuple(BadCheckpoint(Bad.CUT_GROUP, case) for case in cut_cases())
    return (*(BadCheckpoint(bad, case) for case in layers for bad in Bad if possible(bad, case)), *cut)


def possible(bad: Bad, case: MoECase) -> bool:
    """Whether the case's checkpoint can be wrong in that way."""
    scales = case.origin is Origin.PREQUANTIZED
    match bad:
        case Bad.INF_SCALE if case.weight_scale is Layout.GROUP16:
            return False  # E4M3 has none
        case Bad.MISSING_SCALE | Bad.NAN_SCALE | Bad.INF_SCALE | Bad.ZERO_SCALE | Bad.NEGATIVE_SCALE:
            return scales
        case Bad.SHORT_SCALE:
            return scales and case.weight_scale is not Layout.TENSOR
        case Bad.MISSING_INPUT_SCALE:
            return case.act_scale in (ActScale.STATIC_TENSOR, ActScale.DYNAMIC_GROUP16)
        case Bad.UNEQUAL_INPUT_SCALES:
            return case.act_scale is ActScale.STATIC_TENSOR
        case Bad.UNEQUAL_GLOBAL_SCALES:
            return scales and case.weight_scale is Layout.GROUP16 and case.activation.gated
        case Bad.WEIGHT_DTYPE:
            return scales and not is_packed(case)
        case Bad.NAN_WEIGHT:
            return case.stored.value != "int8" and not is_packed(case)  # neither words nor E2M1 have one
        case Bad.GATE_WITHOUT_UP:
            return case.activation.gated
        case Bad.CUT_GROUP:
            return case in cut_cases()
        case _:
            return True
