"""GPU architectures that the interpreter platform can answer as. No torch: options are checked before it may be imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from harness.exits import Misuse

VARIABLE = "MOEDIFF_ARCHITECTURE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One GPU as vLLM and its kernel packages ask about it. Sizes: CUDA programming guide, "Compute Capabilities"."""

    name: str
    device: str  # a GPU of that architecture
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # bytes a block may opt in to
    deep_gemm: bool  # whether DeepGEMM runs there: platforms/cuda.py, support_deep_gemm

    @property
    def number(self) -> int:
        """90 for sm90."""
        major, minor = self.capability
        return 10 * major + minor


def _kib(size: int) -> int:
    return size * 1024


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture(name="sm80", device="A100", capability=(8, 0), multiprocessors=108, shared_memory=_kib(163), deep_gemm=False),
        Architecture(name="sm89", device="L40S", capability=(8, 9), multiprocessors=142, shared_memory=_kib(99), deep_gemm=False),
        Architecture(name="sm90", device="H100", capability=(9, 0), multiprocessors=132, shared_memory=_kib(227), deep_gemm=True),
        Architecture(name="sm100", device="B200", capability=(10, 0), multiprocessors=148, shared_memory=_kib(227), deep_gemm=True),
        Architecture(name="sm120", device="RTX PRO 6000", capability=(12, 0), multiprocessors=188, shared_memory=_kib(99), deep_gemm=True),
    )
}


def parse(text: str) -> Architecture:
    """Raises Misuse with the names there are."""
    try:
        return ARCHITECTURES[text]
    except KeyError:
        raise Misuse(f"unknown architecture '{text}'; the interpreter platform answers as {', '.join(ARCHITECTURES)}") from None


def requested(environ: Mapping[str, str] = os.environ) -> Architecture | None:
    """What ``MOEDIFF_ARCHITECTURE`` names; None when it is unset: the lane's own answers. Raises Misuse."""
    text = environ.get(VARIABLE, "")
    return parse(text) if text else None
