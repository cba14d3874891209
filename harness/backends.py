"""Backends: the single source of the lanes. What each forces, what must have run, what it claims and what vLLM refuses by design.

Hardware never changes what is collected: a lane that cannot run here ends UNAVAILABLE; a combination that vLLM refuses by design is
declared with the words vLLM says, and is expected to be refused. Every scheme is claimed or declared refused, never both (tested);
shapes and options may be refused inside a claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cases.case import Entry, MoECase, Origin
from cases.packed import is_packed
from harness import claims, families, refusals_batched, refusals_cuda, refusals_flashinfer, refusals_packed
from harness.architectures import ARCHITECTURES, Architecture
from harness.claims import (
    AITER,
    BLOCK,
    CHANNEL_TOKEN,
    CT,
    DEEP_GEMM,
    EVERY,
    FLASHINFER_CUTLASS,
    FLASHINFER_TRTLLM,
    FLASHINFER_TRTLLM_FP8,
    FLOATS,
    GATED,
    HALVES,
    MODELOPT,
    ONLINE,
    QUARK,
    TENSOR_DYNAMIC,
    TENSOR_STATIC,
    VLLM_FP8,
    Claim,
    claim,
)
from harness.installed import BLACKWELL, compute_capability
from harness.refusals import (
    BY_THE_METHOD,
    CT_FP8_DYNAMIC_TENSOR,
    FUSED_SILU_FP32,
    Refusal,
    fp8,
    fused_silu_quantizer,
    not_supported,
    only_for,
    quark_int8_static,
)
from references.vocabulary import Activation, Format, Layout


class UnknownBackend(ValueError):
    """The message lists the backends that exist."""


class Backend(StrEnum):
    """Closed. ``interpreter`` is the triton backend without a GPU, through Triton's interpreter."""

    INTERPRETER = "interpreter"
    TRITON = "triton"
    BATCHED_TRITON = "batched-triton"
    CUTLASS = "cutlass"
    MARLIN = "marlin"
    HUMMING = "humming"  # weight-only: activations stay in the hidden dtype
    HUMMING_A8 = "humming-a8"  # activations quantized per token, through VLLM_HUMMING_INPUT_QUANT_CONFIG
    DEEP_GEMM = "deep-gemm"
    FLASHINFER_CUTLASS = "flashinfer-cutlass"
    FLASHINFER_TRTLLM = "flashinfer-trtllm"
    FLASHINFER_CUTEDSL = "flashinfer-cutedsl"
    TRITON_UNFUSED = "triton-unfused"  # gpt-oss MXFP4
    AITER = "aiter"
    EMULATION = "emulation"

    @classmethod
    def parse(cls, text: str) -> Backend:
        """Raises UnknownBackend."""
        try:
            return cls(text)
        except ValueError:
            raise UnknownBackend(f"unknown backend '{text}'; the backends are {', '.join(cls)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """One lane.

    moe_backend: vLLM's ``KernelConfig.moe_backend``; environment: set before vLLM is imported; expert_classes: which classes count as
    having run, per entry: an entry that is no key does not exist on this backend. modules: of each tuple one must be importable.
    unquantized: (activations, dtypes) it runs unquantized.
    """

    moe_backend: str
    expert_classes: dict[Entry, frozenset[str]]
    architectures: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    unquantized: tuple[frozenset[Activation], frozenset[Format]] = (frozenset(), frozenset())
    refusals: tuple[Refusal, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, ...], ...] = ()
    needs_gpu: bool = True


_TRITON_REFUSALS = (*BY_THE_METHOD, CT_FP8_DYNAMIC_TENSOR, FUSED_SILU_FP32)
_TRITON_CLASSES = {Entry.LAYER: frozenset({"TritonExperts"}), Entry.FUSED_EXPERTS: frozenset({"fused_experts"})}
_BF16 = frozenset({Format.BF16})
_BATCHED_CLASSES = {Entry.BATCHED: frozenset({"BatchedTritonExperts"})}


def _elsewhere(moe_backend: str, experts: str, architectures: tuple[str, ...], modules: tuple[tuple[str, ...], ...] = ()) -> BackendSpec:
    """A backend for formats the cases do not have yet: everything they have is refused."""
    return BackendSpec(
        moe_backend=moe_backend,
        expert_classes={Entry.LAYER: frozenset({experts})},
        architectures=architectures,
        modules=modules,
        refusals=(*BY_THE_METHOD, *only_for((), moe_backend)),
    )


_HUMMING_CLASSES = {Entry.LAYER: frozenset({"HummingIndexedExperts", "HummingGroupedExperts"})}
_CUDA = ("sm80", "sm89", "sm90", "sm100", "sm120")

SPECS: dict[Backend, BackendSpec] = {
    Backend.INTERPRETER: BackendSpec(
        moe_backend="triton",
        expert_classes=_TRITON_CLASSES | _BATCHED_CLASSES,
        architectures=("cpu",),
        claims=claims.TRITON,
        unquantized=(EVERY, FLOATS),
        refusals=(*_TRITON_REFUSALS, *refusals_batched.BATCHED_TRITON),
        needs_gpu=False,
    ),
    Backend.TRITON: BackendSpec(
        moe_backend="triton",
        expert_classes=_TRITON_CLASSES,
        architectures=_CUDA,
        claims=claims.TRITON,
        unquantized=(EVERY, FLOATS),
        refusals=_TRITON_REFUSALS,
    ),
    Backend.BATCHED_TRITON: BackendSpec(
        moe_backend="batched_triton",
        expert_classes={Entry.LAYER: frozenset({"BatchedTritonExperts"})} | _BATCHED_CLASSES,
        architectures=_CUDA,
        unquantized=(EVERY, FLOATS),
        refusals=(*BY_THE_METHOD, *only_for(("unquantized",), "batched_triton"), *refusals_batched.BATCHED_TRITON),
    ),
    Backend.CUTLASS: BackendSpec(
        moe_backend="cutlass",
        expert_classes={Entry.LAYER: frozenset({"CutlassExpertsFp8"})},
        architectures=("sm90", "sm100", "sm120"),
        claims=(claim(CT, TENSOR_STATIC, CHANNEL_TOKEN, activations=GATED), claim(ONLINE, CHANNEL_TOKEN, activations=GATED)),
        refusals=refusals_cuda.CUTLASS,
    ),
    Backend.MARLIN: BackendSpec(
        moe_backend="marlin",
        expert_classes={Entry.LAYER: frozenset({"MarlinExperts"})},
        architectures=_CUDA,
        claims=(
            claim(CT, TENSOR_STATIC, TENSOR_DYNAMIC, CHANNEL_TOKEN, BLOCK),
            claim(QUARK, TENSOR_STATIC, TENSOR_DYNAMIC, CHANNEL_TOKEN, BLOCK),
            claim(VLLM_FP8, TENSOR_STATIC, TENSOR_DYNAMIC, BLOCK),
            claim(MODELOPT, TENSOR_STATIC),
            claim(ONLINE, TENSOR_DYNAMIC, BLOCK),
        ),
        unquantized=(EVERY, FLOATS),
        refusals=refusals_cuda.MARLIN,
    ),
    Backend.HUMMING: BackendSpec(
        moe_backend="humming",
        expert_classes=_HUMMING_CLASSES,
        architectures=_CUDA,
        modules=(("humming",),),
        claims=claims.HUMMING,
        unquantized=(EVERY, FLOATS),
        refusals=refusals_cuda.HUMMING,
    ),
    Backend.HUMMING_A8: BackendSpec(
        moe_backend="humming",
        expert_classes=_HUMMING_CLASSES,
        architectures=("sm89", "sm90", "sm100", "sm120"),
        modules=(("humming",),),
        environment=(("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"dtype": "float8e4m3", "allow_fallback": true}'),),
        claims=claims.HUMMING,
        unquantized=(EVERY, FLOATS),
        refusals=refusals_cuda.HUMMING_A8,
    ),
    Backend.DEEP_GEMM: BackendSpec(
        moe_backend="deep_gemm",
        expert_classes={Entry.LAYER: frozenset({"DeepGemmExperts"}), Entry.BATCHED: frozenset({"BatchedDeepGemmExperts"})},
        architectures=("sm90", "sm100", "sm120"),
        modules=(("deep_gemm", "vllm.third_party.deep_gemm"),),
        claims=tuple(claim(which, BLOCK, activations=DEEP_GEMM, dtypes=_BF16) for which in (CT, QUARK, VLLM_FP8, ONLINE)),
        refusals=(*refusals_cuda.DEEP_GEMM, *refusals_batched.BATCHED_DEEP_GEMM),
    ),
    Backend.FLASHINFER_CUTLASS: BackendSpec(
        moe_backend="flashinfer_cutlass",
        expert_classes={Entry.LAYER: frozenset({"FlashInferExperts"})},
        architectures=("sm90", "sm100", "sm120"),
        modules=(("flashinfer",),),
        claims=(
            claim(CT, TENSOR_STATIC, BLOCK, activations=FLASHINFER_CUTLASS),
            claim(QUARK, TENSOR_STATIC, BLOCK, activations=FLASHINFER_CUTLASS),
            claim(VLLM_FP8, TENSOR_STATIC, BLOCK, activations=FLASHINFER_CUTLASS),
            claim(MODELOPT, TENSOR_STATIC, activations=FLASHINFER_CUTLASS),
            claim(ONLINE, BLOCK, activations=FLASHINFER_CUTLASS),
        ),
        unquantized=(FLASHINFER_CUTLASS, FLOATS),
        refusals=refusals_flashinfer.FLASHINFER_CUTLASS,
    ),
    Backend.FLASHINFER_TRTLLM: BackendSpec(
        moe_backend="flashinfer_trtllm",
        expert_classes={
            Entry.LAYER: frozenset(
                {"TrtLlmFp8ExpertsMonolithic", "TrtLlmFp8ExpertsModular", "TrtLlmBf16ExpertsMonolithic", "TrtLlmBf16ExpertsModular"}
            )
        },
        architectures=("sm100",),
        modules=(("flashinfer",),),
        claims=(
            *(claim(which, TENSOR_STATIC, activations=FLASHINFER_TRTLLM, dtypes=_BF16) for which in (CT, QUARK, VLLM_FP8, MODELOPT)),
            *(claim(which, BLOCK, activations=FLASHINFER_TRTLLM_FP8, dtypes=_BF16) for which in (CT, QUARK, VLLM_FP8, ONLINE)),
        ),
        unquantized=(FLASHINFER_TRTLLM, _BF16),
        refusals=refusals_flashinfer.FLASHINFER_TRTLLM,
    ),
    Backend.FLASHINFER_CUTEDSL: _elsewhere("flashinfer_cutedsl", "FlashInferCuteDSLExperts", ("sm100",), (("flashinfer",),)),
    Backend.TRITON_UNFUSED: _elsewhere(
        "triton_unfused", "UnfusedOAITritonExperts", ("sm90", "sm100"), (("triton_kernels", "vllm.third_party.triton_kernels"),)
    ),
    Backend.AITER: BackendSpec(
        moe_backend="aiter",
        expert_classes={
            Entry.LAYER: frozenset({"AiterUnquantizedExperts", "AiterFp8BlockExperts", "AiterFp8TensorExperts", "AiterFp8ChannelExperts"})
        },
        architectures=("gfx942", "gfx950"),
        modules=(("aiter",),),
        claims=(
            claim(CT, TENSOR_STATIC, CHANNEL_TOKEN, BLOCK, activations=AITER),
            *(claim(which, TENSOR_STATIC, TENSOR_DYNAMIC, CHANNEL_TOKEN, BLOCK, activations=AITER) for which in (QUARK, VLLM_FP8, ONLINE)),
            claim(MODELOPT, TENSOR_STATIC, activations=AITER),
        ),
        unquantized=(AITER, HALVES),
        refusals=refusals_flashinfer.AITER,
    ),
    Backend.EMULATION: _elsewhere("emulation", "Nvfp4QuantizationEmulationTritonExperts", _CUDA),
}

_FEW_TOKENS = 8
_QUANTIZED_ONLY = frozenset((Backend.MARLIN, Backend.HUMMING, Backend.HUMMING_A8))


def runs_default(case: MoECase, backend: Backend) -> bool:
    """Whether vLLM, by design, takes its own choice where ``backend`` was forced: Marlin and Humming are quantization-only and leave
    unquantized layers to the default (oracle/unquantized.py)."""
    return backend in _QUANTIZED_ONLY and case.origin is Origin.UNQUANTIZED


def falls_back(case: MoECase, entry: Entry, backend: Backend) -> bool:
    """Whether vLLM, by design, runs Triton's experts: CUTLASS's leave 8 tokens to them on Blackwell (experts/triton_cutlass_moe.py)."""
    few = backend is Backend.CUTLASS and entry is Entry.LAYER and not is_packed(case) and case.tokens <= _FEW_TOKENS
    return few and compute_capability() >= 100


def experts_expected(case: MoECase, entry: Entry, backend: Backend) -> frozenset[str]:
    """Class names of which one must have run on this machine's GPU, or the one asked for."""
    if entry is Entry.LAYER and quark_int8_static(case):
        return frozenset({"fused_experts"})
    if entry is Entry.LAYER and is_packed(case):
        return families.experts(case, backend)
    if runs_default(case, backend):
        return _default(case)
    return SPECS[Backend.TRITON if falls_back(case, entry, backend) else backend].expert_classes[entry]


def _default(case: MoECase) -> frozenset[str]:
    """Of an unquantized layer: on Blackwell the first of FlashInfer's TRT-LLM and CUTLASS kernels that takes it; swigluoai: Triton's."""
    preferred = (Backend.FLASHINFER_TRTLLM, Backend.FLASHINFER_CUTLASS) if compute_capability() >= 100 else ()
    for backend in preferred if case.activation is not Activation.SWIGLUOAI else ():
        if declared_refusal(case, Entry.LAYER, backend) is None:
            return SPECS[backend].expert_classes[Entry.LAYER]
    return SPECS[Backend.TRITON].expert_classes[Entry.LAYER]


def has_entry(entry: Entry, backend: Backend) -> bool:
    """Whether the backend can be entered there: the functional entry is Triton's own."""
    return entry in SPECS[backend].expert_classes


def claimed(case: MoECase, entry: Entry, backend: Backend) -> bool:
    """Whether the backend says it runs the pair."""
    spec = SPECS[backend]
    if entry is Entry.BATCHED:
        return has_entry(entry, backend) and declared_refusal(case, entry, backend) is None
    if entry is Entry.FUSED_EXPERTS:
        return has_entry(entry, backend)
    if quark_int8_static(case):
        return True
    if is_packed(case):
        return refusals_packed.refusal(case, backend) is None
    if case.origin is Origin.UNQUANTIZED:
        return case.activation in spec.unquantized[0] and case.dtype in spec.unquantized[1]
    if case.dtype is Format.FP32 and fused_silu_quantizer(case):
        return False
    return any(claim.covers(case) for claim in spec.claims)


def declared_refusal(case: MoECase, entry: Entry, backend: Backend) -> Refusal | None:
    """The first declared refusal that applies on this machine's GPU, or the one asked for; None when the backend claims the case."""
    if entry is Entry.LAYER and quark_int8_static(case):
        return None
    if entry is Entry.LAYER and is_packed(case):
        return refusals_packed.refusal(case, backend)
    here = ARCHITECTURES.get(f"sm{compute_capability()}")
    every = (*SPECS[backend].refusals, *(() if here is None else refusals_on(backend, here)))
    return next((r for r in every if r.applies(case, entry)), None)


def refusals_on(backend: Backend, architecture: Architecture) -> tuple[Refusal, ...]:
    """What is refused on one architecture and not on another, of layers that are not packed; of those refusals_packed.py says it.

    Read in the ``_supports_current_device`` and ``_supports_quant_scheme`` methods of ``fused_moe/experts/*.py``.
    """
    spec = SPECS[backend]
    falls_back = backend is Backend.HUMMING_A8  # to 16-bit activations, where they cannot be quantized
    if spec.needs_gpu and architecture.name not in spec.architectures and not falls_back:
        no_device = f"{backend} has no kernels for {architecture.name}"
        return (not_supported(lambda c: not runs_default(c, backend), no_device, "current device"),)
    match backend:
        case Backend.MARLIN | Backend.HUMMING | Backend.HUMMING_A8 if architecture.number in BLACKWELL:
            return refusals_flashinfer.DEFAULT_ON_SM100
        case Backend.TRITON | Backend.INTERPRETER if architecture.number < 89:
            return (not_supported(fp8, "Triton's FP8 kernels need FP8 tensor cores, sm89", "quantization scheme"),)
        case Backend.FLASHINFER_CUTLASS if architecture.number != 90:
            blocks = "FlashInfer's CUTLASS kernels have block scales on sm90 only"
            return (not_supported(lambda c: fp8(c) and c.weight_scale is Layout.BLOCK128, blocks, "quantization scheme"),)
    return ()
