"""Which of vLLM's oracles decides on a packed or microscaled layer, and the experts that run it, lane by lane.

Read in ``fused_moe/oracle/{int_wna16,w4a8,nvfp4,mxfp4,mxfp8}.py`` (0.33.0) and the methods that call them.
"""

from __future__ import annotations

from enum import StrEnum

from cases.case import ActScale, MoECase
from cases.packed import INTEGERS
from references.vocabulary import CheckpointFormat, Format, Layout


class Family(StrEnum):
    """Which oracle decides; values are what vLLM calls the layers."""

    WNA16 = "WNA16"
    W4A8 = "W4A8"
    NVFP4 = "NvFp4"
    MXFP4 = "MXFP4"
    MXFP8 = "MXFP8"


def family(case: MoECase) -> Family:
    """The oracle of a packed case."""
    if case.weight in INTEGERS:
        return Family.WNA16 if case.act_scale is ActScale.NONE else Family.W4A8
    if case.weight is Format.E4M3FN:
        return Family.MXFP8
    return Family.NVFP4 if case.weight_scale is Layout.GROUP16 else Family.MXFP4


_HUMMING = frozenset({"HummingIndexedExperts", "HummingGroupedExperts"})
_WEIGHT_ONLY = {"marlin": frozenset({"MarlinExperts"}), "humming": _HUMMING, "humming-a8": _HUMMING}


def _triton(*experts: str) -> dict[str, frozenset[str]]:
    return dict.fromkeys(("interpreter", "triton"), frozenset(experts))


# lane -> what runs there; a lane that is not named has no kernels for the family
CLASSES: dict[Family, dict[str, frozenset[str]]] = {
    Family.WNA16: {
        **_triton("TritonWNA16Experts"),
        **_WEIGHT_ONLY,
        "flashinfer-trtllm": frozenset({"TrtLlmMxint4ExpertsMonolithic"}),
        "emulation": frozenset({"Int4EmulationTritonExperts"}),
    },
    Family.W4A8: {"cutlass": frozenset({"CutlassExpertsW4A8Fp8"}), "humming": _HUMMING, "humming-a8": _HUMMING},
    Family.NVFP4: {
        **_triton("Nvfp4QuantizationEmulationTritonExperts"),
        **_WEIGHT_ONLY,
        "cutlass": frozenset({"CutlassExpertsFp4"}),
        "flashinfer-cutlass": frozenset({"FlashInferExperts"}),
        "flashinfer-trtllm": frozenset({"TrtLlmNvFp4ExpertsMonolithic", "TrtLlmNvFp4ExpertsModular"}),
        "flashinfer-cutedsl": frozenset({"FlashInferCuteDSLExperts"}),
        "emulation": frozenset({"Nvfp4QuantizationEmulationTritonExperts"}),
    },
    Family.MXFP4: {
        **_triton("OAITritonMxfp4ExpertsMonolithic", "OAITritonExperts"),
        **_WEIGHT_ONLY,
        "triton-unfused": frozenset({"UnfusedOAITritonExperts"}),
        "deep-gemm": frozenset({"DeepGemmFP4Experts"}),
        "flashinfer-cutlass": frozenset({"FlashInferExperts"}),
        "flashinfer-trtllm": frozenset({"TrtLlmMxfp4ExpertsMonolithic", "TrtLlmMxfp4ExpertsModular"}),
        "aiter": frozenset({"AiterMxfp4Experts", "AiterW4A16ExpertsMonolithic", "AiterW4A4ExpertsMonolithic"}),
        "emulation": frozenset({"OCP_MXQuantizationEmulationTritonExperts"}),
    },
    Family.MXFP8: {
        **_triton("Mxfp8NativeTritonExperts"),
        **_WEIGHT_ONLY,
        "deep-gemm": frozenset({"DeepGemmExperts"}),
        "flashinfer-trtllm": frozenset({"TrtLlmFp8ExpertsMonolithic", "TrtLlmFp8ExpertsModular"}),
        "aiter": frozenset({"AiterMxfp8Experts"}),
    },
}
_CT_MXFP4 = frozenset({"MarlinExperts", "CutlassExpertsMxfp4"})


def ct_mxfp4(case: MoECase) -> bool:
    """CompressedTensorsW4A4Mxfp4MoEMethod looks at the device only: Marlin, or CUTLASS on SM100, whatever backend was asked for."""
    return case.checkpoint is CheckpointFormat.COMPRESSED_TENSORS and family(case) is Family.MXFP4


def experts(case: MoECase, lane: str) -> frozenset[str]:
    """Class names of which one must run a packed case."""
    if ct_mxfp4(case) and lane in ("marlin", "cutlass"):
        return _CT_MXFP4
    return CLASSES[family(case)].get(lane, frozenset({"none"}))
