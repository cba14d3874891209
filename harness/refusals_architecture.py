"""What vLLM refuses on one GPU architecture and not on another, in its own words; and which kernels it takes there by default.

Read in the ``_supports_current_device`` and ``_supports_quant_scheme`` methods of ``fused_moe/experts/*.py`` and in
``oracle/unquantized.py`` (0.33.0), and heard on the interpreter platform answering as each architecture.
"""

from __future__ import annotations

from cases.case import Entry, MoECase
from cases.packed import is_packed
from harness import refusals_packed
from harness.architectures import Architecture, requested
from harness.backends import SPECS, Backend, declared_refusal, experts_expected, runs_default
from harness.refusals import Refusal, fp8, not_supported, quark_int8_static
from references.vocabulary import Layout


def declared(case: MoECase, entry: Entry, backend: Backend) -> tuple[Refusal, ...]:
    """What vLLM is expected to refuse in this process: the table's word, and the architecture's where one was asked for."""
    asked = requested()
    if asked is not None and entry is Entry.LAYER:
        return refusals(case, backend, asked)
    refusal = declared_refusal(case, entry, backend)
    return () if refusal is None else (refusal,)


def refusals(case: MoECase, backend: Backend, architecture: Architecture) -> tuple[Refusal, ...]:
    """Every declared refusal of the layer entry that applies there; vLLM gives the first reason it finds."""
    if quark_int8_static(case):
        return ()
    if is_packed(case):  # what they say of architectures is in refusals_packed.py, by compute_capability()
        packed = refusals_packed.refusal(case, backend)
        return () if packed is None else (packed,)
    every = (*SPECS[backend].refusals, *_there(backend, architecture))
    return tuple(refusal for refusal in every if refusal.applies(case, Entry.LAYER))


def _there(backend: Backend, architecture: Architecture) -> tuple[Refusal, ...]:
    spec = SPECS[backend]
    falls_back = backend is Backend.HUMMING_A8  # to 16-bit activations, where they cannot be quantized
    if spec.needs_gpu and architecture.name not in spec.architectures and not falls_back:
        no_device = f"{backend} has no kernels for {architecture.name}"
        return (not_supported(lambda c: not runs_default(c, backend), no_device, "current device"),)
    match backend:
        case Backend.TRITON | Backend.INTERPRETER if architecture.number < 89:
            return (not_supported(fp8, "Triton's FP8 kernels need FP8 tensor cores, sm89", "quantization scheme"),)
        case Backend.FLASHINFER_CUTLASS if architecture.number != 90:
            blocks = "FlashInfer's CUTLASS kernels have block scales on sm90 only"
            return (not_supported(lambda c: fp8(c) and c.weight_scale is Layout.BLOCK128, blocks, "quantization scheme"),)
    return ()


def classes(case: MoECase, backend: Backend, architecture: Architecture) -> frozenset[str]:
    """Class names of which one must have been chosen.

    Where Marlin and Humming leave an unquantized layer to the default, that is the first of FlashInfer's TRT-LLM and CUTLASS
    kernels and Triton's that takes it; on Hopper, Triton's.
    """
    if not runs_default(case, backend) or architecture.number == 90:
        return experts_expected(case, Entry.LAYER, backend)
    for default in (Backend.FLASHINFER_TRTLLM, Backend.FLASHINFER_CUTLASS):
        spec = SPECS[default]
        activations, dtypes = spec.unquantized
        if architecture.name in spec.architectures and case.activation in activations and case.dtype in dtypes:
            return spec.expert_classes[Entry.LAYER]
    return SPECS[Backend.TRITON].expert_classes[Entry.LAYER]
