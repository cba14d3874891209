"""What vLLM refuses of packed and microscaled layers, lane by lane, in its own words.

Read in ``fused_moe/oracle/{int_wna16,w4a8,nvfp4,mxfp4,mxfp8}.py`` (0.33.0) and the methods that call them; heard by building the layers.
Every such layer is refused by the first line that applies, and claimed where none does.
"""

from __future__ import annotations

from collections.abc import Callable

from cases.case import ActScale, Entry, MoECase, Origin
from cases.packed import is_packed
from harness import claims, marlin_shapes
from harness.families import CLASSES, Family, ct_mxfp4, family
from harness.installed import BLACKWELL, compute_capability
from harness.refusals import Refusal
from references.vocabulary import Activation, CheckpointFormat, Format, Layout

_TRITON = ("interpreter", "triton")
_EMULATES_NVFP4 = (*_TRITON, "emulation")
_MXFP4_ON_HOPPER = (*_TRITON, "triton-unfused", "flashinfer-cutlass")
_BLACKWELL_NVFP4 = ("cutlass", "flashinfer-cutlass", "flashinfer-trtllm", "flashinfer-cutedsl")
_ACTIVATIONS = {  # of lanes that do not know every activation, before anything else is asked; others have lines of their own
    ("flashinfer-cutlass", Family.NVFP4): claims.FLASHINFER_CUTLASS,
    ("flashinfer-cutlass", Family.MXFP4): claims.FLASHINFER_CUTLASS,
    ("flashinfer-cutedsl", Family.NVFP4): claims.FLASHINFER_CUTEDSL,
    ("flashinfer-trtllm", Family.NVFP4): claims.FLASHINFER_TRTLLM_NVFP4,
    ("flashinfer-trtllm", Family.MXFP8): claims.FLASHINFER_TRTLLM_FP8,
    ("flashinfer-trtllm", Family.MXFP4): claims.FLASHINFER_TRTLLM_MXFP4,
    ("deep-gemm", Family.MXFP8): claims.DEEP_GEMM,
}

When = Callable[[MoECase, str], bool]


def _blackwell() -> bool:
    return compute_capability() in BLACKWELL


def _nvfp4_cores(lane: str) -> bool:
    """experts/{cutlass,flashinfer_cutlass}_moe.py run on sm120 too, the others on sm100 alone."""
    return _blackwell() or (lane in ("cutlass", "flashinfer-cutlass") and compute_capability() >= 110)


def _whole_scale_tiles(case: MoECase) -> bool:
    """oracle/mxfp4.py, _swizzle_cutlass_mxfp4_scales: 4 groups of 32 columns."""
    return case.w13_rows % 128 == 0 and case.hidden % 128 == 0 and case.intermediate % 128 == 0


def _channel(case: MoECase) -> bool:
    return family(case) is Family.WNA16 and case.weight_scale is Layout.CHANNEL


def _asymmetric_ct(case: MoECase, *weights: Format) -> bool:
    return case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS and case.weight in weights


# the layer loads; its first forward raises
_NOT_UNFUSED = (Activation.GELU_TANH, Activation.SITU)
_UNSAID = r"^AssertionError: ?$"
_NO_KERNEL = "Invalid thread config"

# when it applies, vLLM's words, the reason, whether vLLM gives a reason itself (or this lane, of its own limits)
_LINES: tuple[tuple[When, str, str, bool], ...] = (
    (
        lambda c, lane: c.origin is Origin.ONLINE and family(c) is Family.NVFP4 and (lane == "interpreter" or not _blackwell()),
        r"requires a Blackwell \(SM100\) GPU",
        "online NVFP4 is for SM100",
        True,
    ),
    (
        lambda c, lane: c.checkpoint is CheckpointFormat.GPTQ and c.weight.has_zero_point and lane not in _TRITON,
        "Unsupported quantization config: bits=",
        "GPTQ's own method has symmetric types only; moe_wna16 reads the others",
        True,
    ),
    (
        lambda c, lane: ct_mxfp4(c) and not c.activation.gated,
        "AssertionError|shape '.*' is invalid for input of size",
        "Marlin's and CUTLASS's preparation of compressed-tensors MXFP4 is written for gated layers",
        False,
    ),
    (
        lambda c, lane: ct_mxfp4(c) and _blackwell() and not _whole_scale_tiles(c),
        "shape '.*' is invalid for input of size",
        "CUTLASS's tiles of MXFP4 scales have 128 rows and 4 groups, and neither weights nor scales are padded",
        False,
    ),
    (
        lambda c, lane: ct_mxfp4(c) and lane == "interpreter",
        "gptq_marlin_repack has no CPU implementation",
        "compressed-tensors MXFP4 runs on Marlin whatever is asked for, and Marlin has no CPU stand-in",
        True,
    ),
    (
        lambda c, lane: not ct_mxfp4(c) and lane not in CLASSES[family(c)],
        "moe_backend='.*' is not supported for (WNA16|W4A8|NvF[Pp]4|MXFP4|MXFP8) MoE",
        "the family's oracle has no such backend",
        True,
    ),
    (
        lambda c, lane: lane in _MXFP4_ON_HOPPER and family(c) is Family.MXFP4 and not ct_mxfp4(c) and 0 < compute_capability() < 90,
        "does not support current device",
        "triton_kernels' and FlashInfer's MXFP4 kernels begin with sm90",
        True,
    ),
    (
        lambda c, lane: not ct_mxfp4(c) and c.activation not in _ACTIVATIONS.get((lane, family(c)), claims.EVERY),
        "does not support (MoEActivation|no act_and_mul|current device)",
        "the experts do not know the activation",
        True,
    ),
    # Triton
    (
        lambda c, lane: lane in _TRITON and family(c) is Family.WNA16 and c.activation is Activation.SITU,
        "does not support MoEActivation",
        "Triton's WNA16 experts do not know situ",
        True,
    ),
    (lambda c, lane: lane in _TRITON and _channel(c), "AssertionError", "Triton's WNA16 kernel has group scales only", False),
    (
        lambda c, lane: lane in _TRITON and _asymmetric_ct(c, Format.UINT8),
        "does not support quantization scheme",
        "Triton's WNA16 experts do not take 8 bits with zero points from compressed-tensors",
        True,
    ),
    (
        lambda c, lane: lane in _TRITON and family(c) is Family.MXFP8,
        "does not support current device",
        "Triton's MXFP8 kernels are for ROCm",
        True,
    ),
    (
        lambda c, lane: lane in _TRITON and family(c) is Family.MXFP4 and not ct_mxfp4(c) and c.activation is not Activation.SWIGLUOAI,
        "does not support (MoEActivation|no act_and_mul|activation)",
        "triton_kernels' fused experts know swigluoai only",
        True,
    ),
    # vLLM's emulations
    (
        lambda c, lane: lane in _EMULATES_NVFP4 and family(c) is Family.NVFP4 and c.bias,
        "does not support bias",
        "the emulation of NVFP4 has no biases",
        True,
    ),
    (
        lambda c, lane: lane in _EMULATES_NVFP4 and family(c) is Family.NVFP4 and c.act_scale is ActScale.NONE,
        "does not support quantization scheme",
        "the emulation of NVFP4 quantizes activations",
        True,
    ),
    (
        lambda c, lane: lane == "emulation" and family(c) is Family.WNA16 and c.weight in (Format.INT8, Format.UINT8),
        "does not support quantization scheme|MoeWNA16 checkpoint layout is not supported",
        "the emulation of integers is of 4 bits",
        True,
    ),
    (lambda c, lane: lane == "emulation" and _channel(c), "AssertionError", "the emulation has group scales only", False),
    (
        lambda c, lane: lane == "emulation" and family(c) is Family.MXFP4 and not ct_mxfp4(c),
        "requires amd-quark package",
        "the emulation of MXFP4 needs amd-quark",
        True,
    ),
    # Marlin, Humming
    (
        lambda c, lane: lane == "marlin" and _asymmetric_ct(c, Format.UINT8),
        "does not support quantization scheme|Marlin not supported for this layer",
        "Marlin does not take 8 bits with zero points",
        True,
    ),
    (
        lambda c, lane: lane.startswith("humming") and _asymmetric_ct(c, Format.UINT4, Format.UINT8) and not _uint4_of_32(c),
        "does not support quantization scheme",
        "Humming takes zero points from compressed-tensors with 4 bits in groups of 32 only",
        True,
    ),
    (lambda c, lane: lane.startswith("humming") and _channel(c), "AssertionError", "only Marlin takes channel scales", False),
    (
        lambda c, lane: lane.startswith("humming") and not ct_mxfp4(c) and c.router_weight_on_input,
        _UNSAID,
        "Humming does not weight its input",
        False,
    ),
    (
        lambda c, lane: lane == "marlin" and family(c) is Family.NVFP4 and c.hidden % 64 != 0,
        "unsupported by Marlin tiles",
        "Marlin's tiles need H % 64 == 0; only I is padded",
        False,
    ),
    (
        lambda c, lane: lane == "marlin" and family(c) is Family.MXFP4 and not c.activation.gated,
        "AssertionError",
        "Marlin's preparation of MXFP4 is written for gated layers",
        False,
    ),
    (
        lambda c, lane: marlin_shapes.microscaled(c, lane) and any(rows % 64 for rows, _ in marlin_shapes.shapes(c)),
        r"size_[kn] = \d+ is not divisible by tile_[kn]_size",
        "Marlin's tiles have 64 rows",
        False,
    ),
    (
        lambda c, lane: marlin_shapes.microscaled(c, lane) and c.dtype is Format.FP16,
        _NO_KERNEL,
        "Marlin has microscaled kernels for bf16 only",
        False,
    ),
    (
        lambda c, lane: marlin_shapes.microscaled(c, lane) and not all(marlin_shapes.tiled(*shape) for shape in marlin_shapes.shapes(c)),
        _NO_KERNEL,
        "Marlin has no thread layout for a matrix of that shape",
        False,
    ),
    (
        lambda c, lane: lane == "marlin" and family(c) is Family.WNA16 and not marlin_shapes.fits(c),
        "Marlin not supported for this layer|MoeWNA16 checkpoint layout is not supported",
        "Marlin's WNA16 tiles need H % 128 == 0 and I in whole groups",
        True,
    ),
    (
        lambda c, lane: lane == "emulation" and _words(c) and not marlin_shapes.fits(c),
        "MoeWNA16 checkpoint layout is not supported",
        "AutoGPTQ's and AutoAWQ's methods hand layers that Marlin does not fit to moe_wna16, which the emulation does not read",
        True,
    ),
    (
        lambda c, lane: lane == "triton-unfused" and family(c) is Family.MXFP4 and not ct_mxfp4(c) and c.activation in _NOT_UNFUSED,
        "does not support MoEActivation",
        "triton_kernels' unfused experts do not know gelu_tanh and situ",
        True,
    ),
    (
        lambda c, lane: (
            lane == "triton-unfused"
            and family(c) is Family.MXFP4
            and c.checkpoint is CheckpointFormat.QUARK
            and c.dtype is Format.FP16
            and c.activation.gated
        ),
        _UNSAID,
        "triton_kernels' experts assert bf16 hidden states",
        False,
    ),
    (
        lambda c, lane: lane == "triton-unfused" and family(c) is Family.MXFP4 and not ct_mxfp4(c) and not c.activation.gated,
        "no act_and_mul",
        "triton_kernels' experts are gated",
        True,
    ),
    (
        lambda c, lane: lane == "aiter" and family(c) in (Family.MXFP4, Family.MXFP8) and not ct_mxfp4(c),
        "does not support current device",
        "AITER is for ROCm",
        True,
    ),
    # FlashInfer, CUTLASS, DeepGEMM
    (
        lambda c, lane: lane == "cutlass" and family(c) is Family.W4A8 and c.dtype is not Format.BF16,
        r"does not support torch\.float16 input/output dtype",
        "CUTLASS W4A8 experts take bf16 hidden states",
        True,
    ),
    (
        lambda c, lane: lane == "cutlass" and family(c) is Family.W4A8 and not c.activation.gated,
        "no act_and_mul|does not support current device",
        "CUTLASS W4A8 experts are gated",
        True,
    ),
    (
        lambda c, lane: lane == "cutlass" and family(c) is Family.W4A8 and compute_capability() not in (0, 90),
        "does not support current device|No W4A8 MoE backend supports",
        "CUTLASS W4A8 experts are for sm90",
        True,
    ),
    (
        lambda c, lane: lane == "flashinfer-cutlass" and family(c) is Family.MXFP4 and not ct_mxfp4(c) and compute_capability() >= 100,
        "does not support quantization scheme",
        "FlashInfer's CUTLASS kernels meet MXFP4 weights with 16-bit activations on sm90 only",
        True,
    ),
    (
        lambda c, lane: lane in _BLACKWELL_NVFP4 and family(c) is Family.NVFP4 and c.act_scale is ActScale.NONE,
        "does not support (quantization scheme|current device)",
        "NVFP4 tensor cores take NVFP4 activations",
        True,
    ),
    (
        lambda c, lane: (
            lane in ("cutlass", "flashinfer-cutlass", *_EMULATES_NVFP4) and family(c) is Family.NVFP4 and c.origin is Origin.ONLINE
        ),
        "does not support (quantization scheme|current device)",
        "these kernels do not quantize activations to NVFP4 per token",
        True,
    ),
    (
        lambda c, lane: lane == "flashinfer-trtllm" and family(c) is Family.WNA16,
        "does not support current device|zero points and bias are not supported",
        "FlashInfer's MXINT4 kernels are off unless VLLM_USE_FLASHINFER_MOE_INT4 is set",
        True,
    ),
    (
        lambda c, lane: lane == "flashinfer-trtllm" and family(c) is Family.MXFP4 and not ct_mxfp4(c) and not c.activation.gated,
        "does not support (no act_and_mul|current device)",
        "FlashInfer's TRT-LLM MXFP4 experts are gated",
        True,
    ),
    (
        lambda c, lane: (
            lane == "flashinfer-trtllm"
            and family(c) is Family.MXFP4
            and not ct_mxfp4(c)
            and not (c.bias and c.checkpoint is CheckpointFormat.GPT_OSS)
        ),
        "AssertionError|does not support",
        "making TRT-LLM's MXFP4 layout takes biases for granted, which gpt-oss's method alone hands over",
        False,
    ),
    (
        lambda c, lane: lane == "deep-gemm" and family(c) is Family.MXFP4 and c.act_scale is not ActScale.NONE and not ct_mxfp4(c),
        "does not support (activation=|the deployment)",
        "DeepGEMM's MXFP4 experts do not quantize activations to it",
        True,
    ),
    (
        lambda c, lane: (
            lane == "deep-gemm" and family(c) is Family.MXFP4 and c.activation not in claims.DEEP_GEMM_MXFP4 and not ct_mxfp4(c)
        ),
        "does not support (MoEActivation|no act_and_mul|current device)",
        "DeepGEMM's MXFP4 experts know silu, swiglustep and situ",
        True,
    ),
    (
        lambda c, lane: lane == "flashinfer-cutlass" and _stored_mxfp4(c) and not c.bias and not _blackwell(),
        "AssertionError",
        "making FlashInfer's MXFP4 layout takes biases for granted",
        False,
    ),
    (
        lambda c, lane: lane == "flashinfer-trtllm" and family(c) is Family.WNA16 and (c.weight.has_zero_point or c.bias or _words(c)),
        "zero points and bias are not supported|does not support current device",
        "FlashInfer's TRT-LLM kernels take no zero points and no biases",
        True,
    ),
    (
        lambda c, lane: (
            lane == "flashinfer-trtllm" and family(c) in (Family.WNA16, Family.MXFP4, Family.MXFP8) and not ct_mxfp4(c) and not _blackwell()
        ),
        "does not support|No supported",
        "FlashInfer's TRT-LLM kernels are for SM100",
        True,
    ),
    (
        lambda c, lane: lane in _BLACKWELL_NVFP4 and family(c) is Family.NVFP4 and not _nvfp4_cores(lane),
        "does not support (current device|quantization scheme)",
        "NVFP4 tensor cores are Blackwell's",
        True,
    ),
    (
        lambda c, lane: lane == "deep-gemm" and family(c) is Family.MXFP8 and not _blackwell(),
        "does not support|No supported",
        "DeepGEMM's MXFP8 kernels are for SM100",
        True,
    ),
    (
        lambda c, lane: lane == "deep-gemm" and family(c) is Family.MXFP4 and not ct_mxfp4(c) and compute_capability() < 100,
        "does not support|No supported",
        "DeepGEMM's MXFP4 kernels are Blackwell's",
        True,
    ),
)


def _uint4_of_32(case: MoECase) -> bool:
    return case.weight is Format.UINT4 and case.weight_scale is Layout.GROUP32


def _stored_mxfp4(case: MoECase) -> bool:
    return family(case) is Family.MXFP4 and case.origin is Origin.PREQUANTIZED and not ct_mxfp4(case)


def _words(case: MoECase) -> bool:
    """AutoGPTQ's and AutoAWQ's methods may have biases, whatever the layer has."""
    return case.checkpoint in (CheckpointFormat.GPTQ, CheckpointFormat.AWQ)


def refusal(case: MoECase, lane: str) -> Refusal | None:
    """The declared refusal of a packed case at the layer, None where the lane claims it."""
    for applies, says, reason, reasoned in _LINES:
        if applies(case, lane):
            at_run = says in (_UNSAID, _NO_KERNEL)
            return Refusal(reason=reason, says=says, applies=_at_layer, reasoned=reasoned, at_run=at_run)
    return None


def _at_layer(case: MoECase, entry: Entry) -> bool:
    return entry is Entry.LAYER and is_packed(case)
