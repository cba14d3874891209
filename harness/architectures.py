"""GPU architectures that the interpreter platform can answer as. No torch: options are checked before it may be imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from harness.exits import Misuse

VARIABLE = "MOEDIFF_ARCHITECTURE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One GPU as vLLM and its kernel packages ask about it.

    Sizes per multiprocessor and block: CUDA programming guide, "Compute Capabilities". The rest: NVIDIA's data sheets; they steer launch
    heuristics only.
    """

    name: str
    device: str  # a GPU of that architecture
    capability: tuple[int, int]
    multiprocessors: int
    threads: int  # per multiprocessor
    shared_memory: int  # KiB a block may opt in to
    l2: int  # MiB
    bandwidth: float  # GB/s
    fp16_tops: float  # dense tensor cores
    deep_gemm: bool  # whether DeepGEMM runs there: platforms/cuda.py, support_deep_gemm

    @property
    def number(self) -> int:
        """90 for sm90."""
        major, minor = self.capability
        return 10 * major + minor


_KNOWN = (
    # name, device, capability, multiprocessors, threads, shared KiB, L2 MiB, GB/s, TFLOP/s, DeepGEMM
    ("sm80", "A100", (8, 0), 108, 2048, 163, 40, 2039.0, 312.0, False),
    ("sm89", "L40S", (8, 9), 142, 1536, 99, 96, 864.0, 362.0, False),
    ("sm90", "H100", (9, 0), 132, 2048, 227, 50, 3350.0, 989.0, True),
    ("sm100", "B200", (10, 0), 148, 2048, 227, 126, 8000.0, 2250.0, True),
    ("sm120", "RTX PRO 6000", (12, 0), 188, 1536, 99, 128, 1792.0, 504.0, True),
)

ARCHITECTURES = {
    name: Architecture(
        name=name,
        device=device,
        capability=capability,
        multiprocessors=multiprocessors,
        threads=threads,
        shared_memory=shared,
        l2=l2,
        bandwidth=bandwidth,
        fp16_tops=tops,
        deep_gemm=deep_gemm,
    )
    for name, device, capability, multiprocessors, threads, shared, l2, bandwidth, tops, deep_gemm in _KNOWN
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


@contextmanager
def answering_as(name: str) -> Iterator[None]:
    """While entered, ``requested`` is the architecture of that name; "": as it was."""
    before = os.environ.get(VARIABLE)
    if name:
        os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
