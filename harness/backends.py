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
from references.vocabulary import CheckpointFormat, Format


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


_TRITON_REFUSALS: tuple[Refusal, ...] = ()

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
