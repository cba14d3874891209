"""Backends: the single source of what each lane forces, what must have run, and what vLLM refuses by design.

Hardware never changes what is collected: a lane that cannot run here ends UNAVAILABLE, a combination that vLLM
refuses by design is declared below with the words vLLM says, and is expected to be refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from cases.case import ActScale, Entry, MoECase
from references.vocabulary import Activation, CheckpointFormat, Format, Layout


class UnknownBackend(ValueError):
    """The message lists the backends that exist."""


class Backend(StrEnum):
    """Closed. ``interpreter`` is the triton backend without a GPU, through Triton's interpreter."""

    INTERPRETER = "interpreter"
    TRITON = "triton"

    @classmethod
    def parse(cls, text: str) -> Backend:
        """Raises UnknownBackend."""
        try:
            return cls(text)
        except ValueError:
            raise UnknownBackend(f"unknown backend '{text}'; the backends are {', '.join(cls)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A combination vLLM refuses by design; ``says`` is a pattern its reason must match."""

    reason: str
    says: str
    applies: Callable[[MoECase, Entry], bool]

    def matches(self, detail: str) -> bool:
        """Whether vLLM's own words are the declared ones."""
        return re.search(self.says, detail, re.DOTALL) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """moe_backend: vLLM's value; expert_classes: what counts as having run, by entry."""

    moe_backend: str
    expert_classes: dict[Entry, frozenset[str]]
    needs_gpu: bool
    architectures: tuple[str, ...]
    refusals: tuple[Refusal, ...]


def _quark_int8_static_is_legacy(case: MoECase) -> bool:
    """Quark INT8 with static activations has no experts class: its method calls the legacy function itself."""
    return case.checkpoint is CheckpointFormat.QUARK and case.weight is Format.INT8 and case.act_scale is ActScale.STATIC_TENSOR


def experts_expected(case: MoECase, entry: Entry, backend: Backend) -> frozenset[str]:
    """Class names of which one must have run."""
    if entry is Entry.LAYER and _quark_int8_static_is_legacy(case):
        return frozenset({"fused_experts"})
    return SPECS[backend].expert_classes[entry]


def _quark_layer(case: MoECase, entry: Entry, weight: Format) -> bool:
    return entry is Entry.LAYER and case.checkpoint is CheckpointFormat.QUARK and case.weight is weight


_QUARK_FP8 = {
    (Layout.TENSOR, ActScale.STATIC_TENSOR),
    (Layout.TENSOR, ActScale.DYNAMIC_TENSOR),
    (Layout.CHANNEL, ActScale.DYNAMIC_TOKEN),
    (Layout.BLOCK128, ActScale.DYNAMIC_GROUP128),
}

_TRITON_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        reason="Quark FP8 takes per-tensor, per-channel with per-token, and per-block scales only",
        says="only per-tensor, per-channel and per-block scales",
        applies=lambda case, entry: _quark_layer(case, entry, Format.E4M3FN) and (case.weight_scale, case.act_scale) not in _QUARK_FP8,
    ),
    Refusal(
        reason="Quark INT8 has no dynamic per-tensor scheme",
        says="Unsupported FusedMoe scheme",
        applies=lambda case, entry: _quark_layer(case, entry, Format.INT8) and case.act_scale is ActScale.DYNAMIC_TENSOR,
    ),
    Refusal(
        reason="the fused SiLU and block quantization operator takes fp16 and bf16 only",
        says="Input must be FP16 or BF16",
        applies=lambda case, entry: (
            entry is Entry.LAYER
            and case.weight is Format.E4M3FN
            and case.weight_scale is Layout.BLOCK128
            and case.activation is Activation.SILU
            and case.dtype is Format.FP32
        ),
    ),
)

_TRITON_CLASSES = {Entry.LAYER: frozenset({"TritonExperts"}), Entry.FUSED_EXPERTS: frozenset({"fused_experts"})}

SPECS: dict[Backend, BackendSpec] = {
    Backend.INTERPRETER: BackendSpec(
        moe_backend="triton",
        expert_classes=_TRITON_CLASSES,
        needs_gpu=False,
        architectures=("cpu",),
        refusals=_TRITON_REFUSALS,
    ),
    Backend.TRITON: BackendSpec(
        moe_backend="triton",
        expert_classes=_TRITON_CLASSES,
        needs_gpu=True,
        architectures=("sm80", "sm89", "sm90", "sm100", "sm120"),
        refusals=_TRITON_REFUSALS,
    ),
}


def declared_refusal(case: MoECase, entry: Entry, backend: Backend) -> Refusal | None:
    """The first declared refusal that applies, or None when the backend claims the case."""
    return next((r for r in SPECS[backend].refusals if r.applies(case, entry)), None)
