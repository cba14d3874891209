"""The closed list of named faults, and which case can show which.

Two uses of one list: inject.py puts a fault into the fake subject, to prove that every case can fail; fit.py fits the same faults to a real
mismatch, to name its cause. Whether a fault applies is declared here from the case alone, with a reason where it does not; what a run
showed never enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from functools import lru_cache

import torch

from cases.axes import Origin
from cases.batch import make_batch
from cases.case import MoECase
from cases.checkpoint import make_checkpoint
from cases.packed import INTEGERS, is_packed, scale_format
from cases.roles import zero_expert
from harness.expected import experts
from harness.inject_humming import lost
from references.loading import load
from references.moe import Routing
from references.routing import route
from references.vocabulary import ActQuant, CheckpointFormat, Format, Layout, Recipe, Rounding

SMALLEST_GAIN = 0.008  # a factor nearer to 1 than this is not asked of any case
TILE = 32  # columns of the tails that are dropped


class Fault(Enum):
    """What can be wrong. Values are sentences; names are what signatures and the command line say."""

    ZERO_OUTPUT = "the output is all zeros"
    LAST_EXPERT_DROPPED = "the last expert contributes nothing"
    TOPK_SLOT_DROPPED = "the last of a token's k experts is not added"
    STALE_ROW = "the last token's row holds the first token's result"
    TAIL_COLUMNS_DROPPED = "the last tile of output columns is never written"
    W13_TAIL_K_DROPPED = "GEMM 1 leaves out the last tile of the hidden dimension"
    W2_TAIL_K_DROPPED = "GEMM 2 leaves out the last tile of the intermediate dimension"
    EXPERT_IDS_SHIFTED = "tokens go to the expert after the one they are routed to"
    W13_SCALE_NOT_APPLIED = "w13_scale is not multiplied in"
    W2_SCALE_NOT_APPLIED = "w2_scale is not multiplied in"
    A1_SCALE_NOT_APPLIED = "the scale of the quantized hidden states is not multiplied in"
    A2_SCALE_NOT_APPLIED = "the scale of the quantized intermediate is not multiplied in"
    W13_SCALE_APPLIED_TWICE = "w13_scale is multiplied in twice"
    W2_SCALE_APPLIED_TWICE = "w2_scale is multiplied in twice"
    A1_SCALE_APPLIED_TWICE = "the scale of the quantized hidden states is multiplied in twice"
    A2_SCALE_APPLIED_TWICE = "the scale of the quantized intermediate is multiplied in twice"
    W13_INVERSE_SCALE = "w13 is divided by its scale"
    W2_INVERSE_SCALE = "w2 is divided by its scale"
    W_SCALE_FLAT_INDEX = "expert e is scaled by flat element e of the [E, N, 1] scale buffers of w13 and of w2 (vllm#58532)"
    W13_SCALE_FLAT_INDEX = "expert e is scaled by flat element e of the [E, N, 1] buffer of w13_scale"
    W2_SCALE_FLAT_INDEX = "expert e is scaled by flat element e of the [E, N, 1] buffer of w2_scale"
    W13_SCALE_OF_NEIGHBOUR_EXPERT = "w13 of expert e is scaled by expert e + 1's scales"
    W2_SCALE_OF_NEIGHBOUR_EXPERT = "w2 of expert e is scaled by expert e + 1's scales"
    W13_SCALE_TRANSPOSED = "the block scales of w13 are read column-major"
    W2_SCALE_TRANSPOSED = "the block scales of w2 are read column-major"
    BLOCK_OFF_BY_ONE = "a block of columns takes the weight scale of the block before it"
    W13_CHANNEL_ROLLED = "an output channel of w13 takes the scale of the channel before it"
    W2_CHANNEL_ROLLED = "an output channel of w2 takes the scale of the channel before it"
    W13_SCALES_IN_ORDER_OF_CHANNELS = "group scales of w13 lie as Marlin lays out those of whole channels, and are read as groups'"
    W13_SCALES_IN_ORDER_OF_GROUPS = "channel scales of w13 lie as Marlin lays out those of groups, and are read as channels'"
    SMALL_SCALES_FLUSHED = "E8M0 weight scales below 2^-14, the smallest normal number of fp16, are zero"
    ROUNDED_AT_A_QUARTER = "results of fp16 GEMMs are rounded at a quarter of their value and multiplied by 4: two bits less below 2^-12"
    ZERO_POINTS_IGNORED = "the middle of the code range stands for every zero point"
    ZERO_POINTS_AS_STORED = "zero points of symmetric GPTQ codes of four bits are subtracted as stored: 7, and 8 is meant"
    NIBBLES_SWAPPED = "the two four-bit codes of each byte are exchanged"
    GATE_UP_SWAPPED = "gate and up (w1 and w3) are exchanged"
    GATE_SCALE_FOR_UP = "the up half is scaled by the gate half's scales"
    UP_SCALE_FOR_GATE = "the gate half is scaled by the up half's scales"
    MAX_SCALE_WITHOUT_REQUANT = "both halves are scaled by the larger of the two scales, their codes as they were"
    A_SCALE_OF_TOKEN_ZERO = "every token is scaled by the first token's activation scale"
    A1_A2_SWAPPED = "the static scales of hidden states and intermediate are exchanged"
    DYNAMIC_SCALE_PER_TENSOR = "one dynamic activation scale for all tokens instead of one per token or group"
    ROUNDING_TRUNCATES = "activations are truncated to codes instead of rounded"
    ACTIVATIONS_NOT_QUANTIZED = "activations enter the GEMMs in the hidden dtype"
    ROUTER_WEIGHT_DROPPED = "the router weight is not multiplied in"
    ROUTER_WEIGHT_TWICE = "the router weight is multiplied in once more"
    ROUTER_WEIGHT_TWICE_ON_INPUT = "the router weight is multiplied into the input, and into it once more"
    RENORMALIZE_FLIPPED = "router weights are renormalized when they should not be, or the reverse"
    BIAS_DROPPED = "no bias is added"
    W13_BIAS_DROPPED = "the bias of w13 is not added"
    W2_BIAS_DROPPED = "the bias of w2 is not added"
    BIAS_SCALED = "biases are multiplied by the weight scale"
    BIAS_NOT_PERMUTED = "biases are read in Marlin's order, in which they are not stored"
    BIAS_READ_AS_16_BITS = "biases are stored in float32, and read as 16-bit numbers in Marlin's order"
    WRONG_ACTIVATION = "another activation function"
    LIMITS_IGNORED = "gate and up are not clamped"
    UP_PLUS_ONE = "act(gate) is multiplied by up + 1 (swigluoai's product)"
    EXPERT_GAIN_1_008 = "one expert's contribution is 1.008 times what it should be"
    CHANNEL_GAIN_1_05 = "one output channel of one expert is 1.05 times what it should be"


Rule = Callable[[MoECase, Recipe], str | None]


def why_not(fault: Fault, case: MoECase, recipe: Recipe) -> str | None:
    """Why ``fault`` cannot show in this case, run by this recipe; None when it must be caught there."""
    return next((reason for rule in _RULES[fault] if (reason := rule(case, recipe)) is not None), None)


def applicable(fault: Fault, case: MoECase, recipe: Recipe) -> bool:
    """Whether the pair must catch ``fault``."""
    return why_not(fault, case, recipe) is None


def _needs(holds: Callable[[MoECase], bool], reason: str) -> Rule:
    return lambda case, recipe: None if holds(case) else reason


def _quantizer(holds: Callable[[ActQuant], bool], reason: str) -> Rule:
    """Of the activation quantizer that runs."""
    return lambda case, recipe: None if recipe.a1 is None or holds(recipe.a1) else reason


def _grid(case: MoECase, projection: str) -> tuple[int, int]:
    """Scale blocks of the merged w13 (halves padded to whole blocks) or of w2."""
    rows, columns = case.shape("down_proj" if projection == "w2" else "up_proj")
    if case.weight_scale.width is not None and not _block(case):
        return rows, columns // case.weight_scale.width
    halves = 2 if projection == "w13" and case.activation.gated else 1
    return halves * -(-rows // 128), -(-columns // 128)


def _symmetric_gptq(case: MoECase) -> bool:
    return case.checkpoint is CheckpointFormat.GPTQ and case.weight is Format.INT4


def _block(case: MoECase) -> bool:
    return case.weight_scale is Layout.BLOCK128


def _halves_differ(case: MoECase) -> bool:
    return not (case.origin is Origin.ONLINE and case.weight_scale is Layout.TENSOR)


def _live(case: MoECase) -> torch.Tensor:
    """[M, k] bool: slots whose expert has weights."""
    zero = zero_expert(case)
    ids = _routing(case).topk_ids
    return torch.ones_like(ids, dtype=torch.bool) if zero is None else ids != zero


def _later_token_live(case: MoECase) -> bool:
    return bool(_live(case)[1:].any())


def _rows_differ(case: MoECase) -> bool:
    grouped = case.weight_scale is Layout.BLOCK128 and max(case.hidden, case.intermediate) > 128
    return int(_live(case).sum()) > 1 or grouped


def _static_scales_differ(case: MoECase) -> bool:
    """Not by a power of two, which floating-point codes do not see."""
    tensors = make_checkpoint(case).tensors
    first, second = (max(float(t) for name, t in tensors.items() if name.endswith(f"{p}_proj.input_scale")) for p in ("up", "down"))
    return case.weight is Format.INT8 or math.frexp(first / second)[0] != 0.5


_batch = lru_cache(maxsize=8)(make_batch)  # read only here


@lru_cache(maxsize=64)
def _routing(case: MoECase, *, given: bool = False, flipped: bool = False) -> Routing:
    batch = _batch(case)
    if given and batch.topk_ids is not None and batch.topk_weights is not None:
        return Routing(topk_ids=batch.topk_ids, topk_weights=batch.topk_weights.double())
    return route(batch.router_logits, case.top_k, case.renormalize != flipped)


def _router_weights(case: MoECase, recipe: Recipe) -> str | None:
    moved = (1 - _routing(case, given=recipe.router_weight_exact).topk_weights).abs().mean()
    return None if float(moved) >= SMALLEST_GAIN else "router weights are within 0.8 % of 1 on average"


def _renormalizing(case: MoECase, recipe: Recipe) -> str | None:
    if recipe.router_weight_exact and _batch(case).topk_weights is not None:
        return "router weights are given, not computed"
    moved = (_routing(case, flipped=True).topk_weights / _routing(case).topk_weights - 1).abs().mean()
    return None if float(moved) >= SMALLEST_GAIN else "renormalizing moves router weights by less than 0.8 % on average"


def _marlin(case: MoECase, recipe: Recipe) -> str | None:
    return None if recipe.name == "marlin" else "only Marlin's kernels have an order of their own"


def _one_group_of_w2_and_more_of_w13(case: MoECase) -> bool:
    width = case.weight_scale.width
    return is_packed(case) and case.weight in INTEGERS and width is not None and case.intermediate <= width < case.hidden


def _one_group_of_w13_and_more_of_w2(case: MoECase) -> bool:
    width = case.weight_scale.width
    return is_packed(case) and case.weight in INTEGERS and width is not None and case.hidden <= width < case.intermediate


def _humming_mx(case: MoECase, recipe: Recipe) -> bool:
    fp16 = recipe.name.startswith("humming") and case.dtype is Format.FP16
    return fp16 and is_packed(case) and scale_format(case) is Format.E8M0


def _quartered(case: MoECase, recipe: Recipe) -> str | None:
    mxfp4 = _humming_mx(case, recipe) and case.weight is Format.E2M1
    return None if mxfp4 else "only Humming's fp16 kernels round results of MXFP4 weights at a quarter"


def _flushed(case: MoECase, recipe: Recipe) -> str | None:
    if not _humming_mx(case, recipe):
        return "only Humming keeps E8M0 scales in fp16's exponents, for fp16 layers"
    loaded = load(experts(case, make_checkpoint(case)), recipe)
    used = [loaded[e] for e in _routing(case).topk_ids.unique().tolist()]
    gone = lost([matrix for expert in used for matrix in (expert.w13, expert.w2)])
    return None if gone >= SMALLEST_GAIN else "scales below 2^-14 are less than 0.8 % of every row of weights in use"


def _last_slot_matters(case: MoECase) -> bool:
    return case.bias or bool(_live(case)[:, -1].any())


_QUANTIZED = _needs(lambda case: case.quantized, "weights are not quantized")
_CHANNEL = _needs(lambda case: case.quantized and case.weight_scale is Layout.CHANNEL, "weight scales are not per channel")
_ROWS = _needs(
    lambda case: case.quantized and case.weight_scale not in (Layout.NONE, Layout.TENSOR, Layout.BLOCK128),
    "rows have no scales of their own",
)
_GATED = _needs(lambda case: case.activation.gated, "the layer is not gated")
_HALVES = _needs(_halves_differ, "online per-tensor quantization gives gate and up one scale")
_SEVERAL_EXPERTS = _needs(lambda case: case.experts > 1, "there is one expert")
_SEVERAL_TOKENS = _needs(lambda case: case.tokens > 1, "there is one token")
_BIAS = _needs(lambda case: case.bias, "there is no bias")
_A2_REACHED = "a dynamic a2 scale arises between the GEMMs, where no input reaches it"


_A_PER_ROW = _quantizer(lambda how: how.layout in (Layout.TOKEN, Layout.GROUP128), "activation scales are not per token or group")


def _quantizes(case: MoECase, recipe: Recipe) -> str | None:
    return None if recipe.a1 is not None else "activations are not quantized"


def _a_quantized(case: MoECase, recipe: Recipe) -> str | None:
    if recipe.a1 is not None and recipe.a1.microscaled:
        return "NVFP4 rows are multiplied out before the GEMM, which sees no scales of theirs"
    return _quantizes(case, recipe)


_RULES: dict[Fault, tuple[Rule, ...]] = {
    Fault.ZERO_OUTPUT: (),
    Fault.LAST_EXPERT_DROPPED: (),  # the last expert always has a token, and weights
    Fault.TOPK_SLOT_DROPPED: (
        _needs(lambda case: case.top_k > 1, "dropping the only expert is ZERO_OUTPUT"),
        _needs(_last_slot_matters, "the last slot of every token is the all-zero expert"),
    ),
    Fault.STALE_ROW: (_SEVERAL_TOKENS,),
    Fault.TAIL_COLUMNS_DROPPED: (),
    Fault.W13_TAIL_K_DROPPED: (),
    Fault.W2_TAIL_K_DROPPED: (),
    Fault.EXPERT_IDS_SHIFTED: (_SEVERAL_EXPERTS,),
    Fault.W13_SCALE_NOT_APPLIED: (_QUANTIZED,),
    Fault.W2_SCALE_NOT_APPLIED: (_QUANTIZED,),
    Fault.A1_SCALE_NOT_APPLIED: (_a_quantized,),
    Fault.A2_SCALE_NOT_APPLIED: (_a_quantized, _quantizer(lambda how: not how.dynamic, _A2_REACHED)),
    Fault.W13_SCALE_APPLIED_TWICE: (_QUANTIZED,),
    Fault.W2_SCALE_APPLIED_TWICE: (_QUANTIZED,),
    Fault.A1_SCALE_APPLIED_TWICE: (_a_quantized,),
    Fault.A2_SCALE_APPLIED_TWICE: (_a_quantized, _quantizer(lambda how: not how.dynamic, _A2_REACHED)),
    Fault.W13_INVERSE_SCALE: (_QUANTIZED,),
    Fault.W2_INVERSE_SCALE: (_QUANTIZED,),
    Fault.W_SCALE_FLAT_INDEX: (_CHANNEL,),
    Fault.W13_SCALE_FLAT_INDEX: (_CHANNEL,),
    Fault.W2_SCALE_FLAT_INDEX: (_CHANNEL,),
    Fault.W13_SCALE_OF_NEIGHBOUR_EXPERT: (_QUANTIZED, _SEVERAL_EXPERTS),
    Fault.W2_SCALE_OF_NEIGHBOUR_EXPERT: (_QUANTIZED, _SEVERAL_EXPERTS),
    Fault.W13_SCALE_TRANSPOSED: (_needs(lambda case: _block(case) and min(_grid(case, "w13")) > 1, "w13 has no two-dimensional scales"),),
    Fault.W2_SCALE_TRANSPOSED: (_needs(lambda case: _block(case) and min(_grid(case, "w2")) > 1, "w2 has no two-dimensional scales"),),
    Fault.BLOCK_OFF_BY_ONE: (
        _needs(
            lambda case: case.weight_scale.width is not None and max(_grid(case, "w13")[1], _grid(case, "w2")[1]) > 1,
            "no row has two scale blocks",
        ),
    ),
    Fault.W13_CHANNEL_ROLLED: (_ROWS,),
    Fault.W2_CHANNEL_ROLLED: (_ROWS,),
    Fault.W13_SCALES_IN_ORDER_OF_CHANNELS: (
        _marlin,
        _needs(_one_group_of_w2_and_more_of_w13, "not WNA16 with one group of w2's columns and several of w13's"),
    ),
    Fault.W13_SCALES_IN_ORDER_OF_GROUPS: (
        _marlin,
        _needs(_one_group_of_w13_and_more_of_w2, "not WNA16 with one group of w13's columns and several of w2's"),
    ),
    Fault.SMALL_SCALES_FLUSHED: (_flushed,),
    Fault.ROUNDED_AT_A_QUARTER: (_quartered, _needs(lambda case: not case.bias, "biases are far above 2^-12, and round results once more")),
    Fault.ZERO_POINTS_IGNORED: (_needs(lambda case: case.weight.has_zero_point, "codes have no zero points"),),
    Fault.ZERO_POINTS_AS_STORED: (_needs(_symmetric_gptq, "no GPTQ checkpoint of symmetric four-bit codes"),),
    Fault.NIBBLES_SWAPPED: (_needs(lambda case: case.weight in (Format.INT4, Format.UINT4, Format.E2M1), "codes have 8 bits or more"),),
    Fault.GATE_UP_SWAPPED: (_GATED,),
    Fault.GATE_SCALE_FOR_UP: (_GATED, _QUANTIZED, _HALVES),
    Fault.UP_SCALE_FOR_GATE: (_GATED, _QUANTIZED, _HALVES),
    Fault.MAX_SCALE_WITHOUT_REQUANT: (
        _GATED,
        _needs(
            lambda case: case.origin is Origin.PREQUANTIZED and case.weight_scale is Layout.TENSOR,
            "the checkpoint holds no two per-tensor scales for w13",
        ),
    ),
    Fault.A_SCALE_OF_TOKEN_ZERO: (
        _a_quantized,
        _A_PER_ROW,
        _needs(_later_token_live, "no token after the first reaches an expert with weights"),
    ),
    Fault.A1_A2_SWAPPED: (
        _a_quantized,
        _quantizer(lambda how: not how.dynamic, "activation scales are not static"),
        _needs(_static_scales_differ, "the two scales are a power of two apart, which FP8 codes do not see"),
    ),
    Fault.DYNAMIC_SCALE_PER_TENSOR: (
        _a_quantized,
        _A_PER_ROW,
        _needs(_rows_differ, "one row reaches an expert with weights: its scale is the tensor's"),
    ),
    Fault.ROUNDING_TRUNCATES: (
        _a_quantized,
        _quantizer(lambda how: how.rounding is not Rounding.TOWARD_ZERO, "this quantizer does truncate"),
    ),
    Fault.ACTIVATIONS_NOT_QUANTIZED: (_quantizes,),
    Fault.ROUTER_WEIGHT_DROPPED: (_router_weights,),
    Fault.ROUTER_WEIGHT_TWICE: (_router_weights,),
    Fault.ROUTER_WEIGHT_TWICE_ON_INPUT: (
        _needs(lambda case: case.router_weight_on_input, "the router weight is not multiplied into the input"),
        _router_weights,
    ),
    Fault.RENORMALIZE_FLIPPED: (_renormalizing,),
    Fault.BIAS_DROPPED: (_BIAS,),
    Fault.W13_BIAS_DROPPED: (_BIAS,),
    Fault.W2_BIAS_DROPPED: (_BIAS,),
    Fault.BIAS_SCALED: (_BIAS, _QUANTIZED),
    Fault.BIAS_NOT_PERMUTED: (_BIAS, _marlin),
    Fault.BIAS_READ_AS_16_BITS: (_BIAS, _marlin),
    Fault.WRONG_ACTIVATION: (),
    Fault.LIMITS_IGNORED: (_needs(lambda case: case.tight, "the activation has no limits that many values cross"),),
    Fault.UP_PLUS_ONE: (_GATED, _needs(lambda case: not case.tight, "up is clamped to less than one more than it is")),
    Fault.EXPERT_GAIN_1_008: (),
    Fault.CHANNEL_GAIN_1_05: (),
}
