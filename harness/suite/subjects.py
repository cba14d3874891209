"""Opening the subject a run asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.backends import SPECS, Backend
from harness.exits import Misuse

if TYPE_CHECKING:
    from harness.subject import Subject

VLLM = "vllm"
FAKE = "fake"


def open_subject(spec: str, backend: Backend) -> Subject:
    """``vllm``, or ``fake[:FAULT]``. Imports vLLM, or nothing of it.

    Raises:
        SubjectUnavailable: vLLM is missing, not recognised, or cannot be driven in this process.
        Misuse: ``spec`` is neither, or names an unknown fault.
    """
    kind, _, fault = spec.partition(":")
    if kind == VLLM and not fault:
        from harness.subject.vllm_layer import VllmSubject

        lane = SPECS[backend]
        return VllmSubject(lane.moe_backend, device="cuda" if lane.needs_gpu else "cpu", interpreter=not lane.needs_gpu)
    if kind == FAKE:
        from harness.faults import Fault
        from harness.subject.fake import FakeSubject

        if fault and fault not in Fault.__members__:
            raise Misuse(f"unknown fault '{fault}'; the faults are {', '.join(Fault.__members__)}")
        return FakeSubject(Fault[fault] if fault else None, backend)
    raise Misuse(f"unknown subject '{spec}'; say {VLLM}, {FAKE} or {FAKE}:FAULT")
