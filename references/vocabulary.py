"""The closed vocabulary shared by every room: formats, scale layouts, activations, recipes.

No torch here: cases are enumerated in processes that must not import it.

Tensor names are the field's: ``w13`` (gate rows first, up rows after), ``w2``, ``w13_scale``, ``w2_scale``,
``topk_weights``, ``topk_ids``. E experts, H hidden, I intermediate, M tokens, k top-k.
Every scale here *multiplies* the decoded codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Format(StrEnum):
    """A number format. Values are the field's names."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    E4M3FN = "e4m3fn"
    E5M2 = "e5m2"
    INT4 = "int4"
    UINT4 = "uint4"  # with a zero point: value = (code - zero point) * scale
    UINT8 = "uint8"  # the same
    E2M1 = "e2m1"
    E8M0 = "e8m0"  # powers of two, of scales only

    @property
    def is_float16_or_wider(self) -> bool:
        """True for the dtypes a hidden state may have."""
        return self in (Format.FP32, Format.BF16, Format.FP16)

    @property
    def has_zero_point(self) -> bool:
        """True for asymmetric codes."""
        return self in (Format.UINT4, Format.UINT8)


class Layout(StrEnum):
    """Which elements share one scale."""

    NONE = "none"  # unquantized
    TENSOR = "tensor"  # one scale per (expert, projection); for activations one for all rows
    CHANNEL = "channel"  # weights: one per output row, [N, 1]
    TOKEN = "token"  # activations: one per row, [M, 1]
    BLOCK128 = "block128"  # weights: one per 128x128 block, [ceil(N/128), ceil(K/128)]
    GROUP16 = "group16"  # one per 16 contiguous columns of a row, [rows, ceil(K/16)]: NVFP4
    GROUP32 = "group32"  # the same of 32: MXFP4, MXFP8, INT4
    GROUP64 = "group64"
    GROUP128 = "group128"  # the same of 128; activations of block128 weights

    @property
    def width(self) -> int | None:
        """Columns that share a scale: 16 to 128 for groups, 128 for blocks, None where all of K does."""
        return _WIDTH.get(self)


_WIDTH = {Layout.BLOCK128: 128, Layout.GROUP16: 16, Layout.GROUP32: 32, Layout.GROUP64: 64, Layout.GROUP128: 128}


class Activation(StrEnum):
    """MoE activations; ``*_no_mul`` have no up half (vLLM's own suffix)."""

    SILU = "silu"
    GELU = "gelu"  # erf form
    GELU_TANH = "gelu_tanh"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    SWIGLUOAI = "swigluoai"  # gate and up rows in turn
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SITU = "situ"

    @property
    def gated(self) -> bool:
        """True when w13 holds gate and up rows (2*I), False when it holds I rows."""
        return not self.value.endswith("_no_mul")

    @property
    def interleaved(self) -> bool:
        """True when the rows of w13 are gate 0, up 0, gate 1, up 1, ..."""
        return self is Activation.SWIGLUOAI


@dataclass(frozen=True, slots=True, kw_only=True)
class Swiglu:
    """What a model's configuration adds to act(gate) * up; references/gating.py says which activation uses what.

    limit: clamps gate (or act(gate)) from above and up on both sides. alpha: gate * sigmoid(alpha * gate). beta: added to up.
    situ, linear: gate and up softly clipped, situ * tanh(gate / situ), linear * tanh(up / linear).
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    situ: float | None = None
    linear: float | None = None
    up_store: Format | None = None  # the shaped up is rounded to this before the product; None: it stays in fp32


class CheckpointFormat(StrEnum):
    """How tensors are named and shaped on disk."""

    PLAIN = "plain"  # no quantization_config: hidden-dtype weights (unquantized or online)
    COMPRESSED_TENSORS = "ct"
    QUARK = "quark"
    VLLM_FP8 = "vllmfp8"  # vLLM's own fp8 checkpoints: weight_scale, weight_scale_inv for blocks
    MODELOPT = "modelopt"
    GPTQ = "gptq"
    AWQ = "awq"
    GPT_OSS = "gptoss"  # all experts of a projection in one tensor, gate and up rows interleaved
    RAW = "raw"  # codes and scales with no config: only the direct fused_experts entry reads it


class Rounding(StrEnum):
    """Ties of a quantizer."""

    HALF_EVEN = "half_even"
    HALF_AWAY = "half_away"
    TOWARD_ZERO = "toward_zero"  # not ties: truncation, vLLM's INT8 group quantizer


class Quotient(StrEnum):
    """How x over its scale is computed; structural ties (x and amax share few bits) fall differently. Each operation rounds once."""

    DIVIDE = "divide"  # x / scale
    RECIPROCAL = "reciprocal"  # x * (1 / scale)
    AMAX_RATIO = "amax_ratio"  # x * (qmax / amax), dynamic scales only
    ANY = "any"  # not known, or approximate division: the hull of them


class Accumulator(StrEnum):
    """How a lane adds products; the error model of each is in references/bounds.py and references/accumulators.py."""

    FP32 = "fp32"  # any order of fp32 additions
    INT32 = "int32"  # exact per tile, tiles added in fp32
    TENSOR_CORE = "tensor_core"  # fp16, bf16 or TF32 operands: 24 bits, truncated; fp32 operands lose their low 13 bits
    TENSOR_CORE_FP8 = "tensor_core_fp8"  # Hopper's FP8 operands, K ascending: 14 bits, truncated
    TENSOR_CORE_FP8_ANY = "tensor_core_fp8_any"  # the same, K divided among warps in a way that is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ActQuant:
    """How the rows entering one GEMM are quantized: value ~= code * scale.

    Dynamic: ``scale = max(amax / qmax, scale_floor)`` over the layout's group, in fp32.
    Static: the scale comes from the checkpoint.
    """

    format: Format
    layout: Layout  # TENSOR | TOKEN | GROUP128
    dynamic: bool
    rounding: Rounding = Rounding.HALF_EVEN
    scale_floor: float = 0.0
    scale_store: Format = Format.FP32  # dtype in which a dynamic scale is divided and kept
    quotient: Quotient = Quotient.ANY
    power_of_two: bool = False  # a dynamic scale is raised to the next power of two (UE8M0)
    store: Format | None = None  # codes times scale are rounded to this before they enter the GEMM (NVFP4, emulated)
    per_expert: bool = False  # the rows of each expert are quantized by themselves: a dynamic scale per tensor is one per expert
    of_nan: float | None = None  # the code of NaN; None: NaN stays

    @property
    def microscaled(self) -> bool:
        """True for NVFP4: dynamic scales of groups under a static global one."""
        return self.layout is Layout.GROUP16

    @property
    def takes_static(self) -> bool:
        """Whether the checkpoint holds a scale for it."""
        return self.microscaled or not self.dynamic


class RouterWeight(StrEnum):
    """Where the router weight is multiplied in."""

    GEMM2 = "gemm2"  # fp32 accumulator of GEMM 2, before its rounding
    GEMM1 = "gemm1"  # fp32 accumulator of GEMM 1, before its rounding (router weight on input, legacy entry)
    FIRST_STORED = "first_stored"  # GEMM 1's stored result times the weight rounded to the same dtype, product rounded to it
    INPUT = "input"  # hidden states times the weight rounded to the hidden dtype, product rounded to it (modular path)
    STORED = "stored"  # GEMM 2's stored result times the weight rounded to the same dtype, product rounded to it
    SUM = "sum"  # GEMM 2's stored result times the fp32 weight, inside the fp32 sum over k


class Epilogue(StrEnum):
    """What happens between a GEMM's sums and its stored result."""

    FP32 = "fp32"  # scales, bias and router weight in fp32, then one rounding
    BIAS_STORED = "bias_stored"  # scales in fp32, a rounding, the bias added to the rounded result, a rounding
    CHANNEL_STORED = "channel_stored"  # a rounding, the rounded result times the weight scale plus the bias at once, a rounding
    CHANNEL_THEN_BIAS = "channel_then_bias"  # BIAS_STORED, but a scale shared by all of K multiplies the rounded result, and a rounding


class GlobalScale(StrEnum):
    """Where NVFP4's scale of all groups of an expert is multiplied in."""

    GROUPS = "groups"  # times the group's scale, in fp32, before that multiplies the codes
    SUMS = "sums"  # into fp32 sums
    ROUTER = "router"  # GEMM 1: into fp32 sums; GEMM 2: into the fp32 router weight, which is then rounded


class W13Merge(StrEnum):
    """What loading does to the two per-tensor scales of a gated w13."""

    AS_STORED = "as_stored"
    REQUANTIZE_TO_MAX = "requantize_to_max"  # both halves requantized to max(gate, up); lossy, vLLM documents it


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightQuant:
    """Online quantization of hidden-dtype weights: scale = max(amax / qmax, floor) over the layout's group."""

    format: Format
    layout: Layout  # TENSOR (whole w13 of an expert together) | CHANNEL | BLOCK128
    rounding: Rounding = Rounding.HALF_EVEN
    scale_floor: float = 0.0
    arithmetic: Format = Format.FP32  # dtype in which scale and quotient are computed
    quotient: Quotient = Quotient.ANY
    power_of_two: bool = False  # the scale is raised to the next power of two (UE8M0)
    scale_by_reciprocal: bool = False  # the scale is amax * (1 / qmax): what torch makes of tensor / number on CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that is rounded on the way from hidden states to output, in order. Recorded with each verdict."""

    name: str
    a1: ActQuant | None  # before GEMM 1; None: activations stay in the hidden dtype
    a2: ActQuant | None  # before GEMM 2
    compute: tuple[Format, ...]  # each GEMM's fp32 accumulator is rounded to these in turn (e.g. bf16, then fp16)
    activation_store: Format  # dtype of act(g)*u before a2
    output: Format
    accumulator: Accumulator
    stored_share: float = 1.0  # a faulty layer's: results are rounded at this share of their value, a power of two, and made whole after
    swiglu: Swiglu | None = None  # limits, slopes and offsets of the activation
    gate_store: Format | None = None  # act(g) is rounded to this before it multiplies u; None: act(g)*u rounds once
    router_weight: RouterWeight = RouterWeight.GEMM2
    router_weight_again: RouterWeight | None = None  # a faulty layer's: after the input, once more there
    router_weight_exact: bool = False  # the fp32 router weights are given (direct entry), not computed by vLLM's router
    w13_merge: W13Merge = W13Merge.AS_STORED
    static_scale_max: bool = True  # per-expert static input scales collapse to their maximum
    weight_quant: WeightQuant | None = None  # online only
    weight_requant: WeightQuant | None = None  # the weights, as loaded or as quantized online, are quantized once more for the kernel
    weight_scale_store: Format | None = None  # weight scales are rounded to this when the kernel's layout is made
    weight_store: Format | None = None  # codes times scale are rounded to this before they enter the GEMM; None: scales multiply sums
    weight_store_one_group: bool = True  # also where all of K shares one scale; False: that scale multiplies sums
    split_store: Format | None = None  # K may be divided among blocks, which add their results in this format; None: in fp32
    scaled_tile: int | None = None  # columns of K whose sum is multiplied by group scales at once; None: a whole group
    epilogue: Epilogue = Epilogue.FP32
    global_scale: GlobalScale = GlobalScale.GROUPS
    weight_scale_fp8: bool = False  # group scales become E4M3 numbers under one fp32 scale per row, which multiplies sums
    first_stored: bool = True  # False: the activation is part of GEMM 1, which stores nothing before it
    router_weight_store: Format | None = None  # router weights are rounded to this before they multiply anything
    slots_store: Format | None = None  # the k contributions are added in this format, in any order; None: in fp32
