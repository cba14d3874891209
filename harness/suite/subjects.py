"""Opening the subject a run asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.allocator import keep_freed_memory
from harness.backends import SPECS, Backend
from harness.exits import Misuse
from harness.garbage import pass_over_what_lives

if TYPE_CHECKING:
    from harness.faults import Fault
    from harness.pairs import Pair
    from harness.subject import Subject

VLLM = "vllm"
FAKE = "fake"


def parse(spec: str) -> str:
    """``spec``, if it is ``vllm``, ``fake`` or ``fake:FAULT``. Only the last imports torch, with the faults. Raises Misuse."""
    kind, colon, name = spec.partition(":")
    if colon and kind == FAKE:
        _fault(name)
    elif colon or kind not in (VLLM, FAKE):
        raise Misuse(f"unknown subject '{spec}'; say {VLLM}, {FAKE} or {FAKE}:FAULT")
    return spec


def why_not(spec: str, pair: Pair, backend: Backend) -> str | None:
    """Why the subject's fault cannot show in the pair; None when it must, and when there is no fault."""
    _, colon, name = spec.partition(":")
    if not colon:
        return None
    from harness import faults
    from harness.recipes import recipe

    return faults.why_not(_fault(name), pair.case, recipe(pair.case, pair.entry, backend))


def _fault(name: str) -> Fault:
    from harness.faults import Fault

    if name not in Fault.__members__:
        raise Misuse(f"unknown fault '{name}'; the faults are {', '.join(Fault.__members__)}")
    return Fault[name]


def open_subject(spec: str, backend: Backend, *, on_cpu: bool = False) -> Subject:
    """``on_cpu``: on the interpreter platform, whatever the backend. ``vllm``, or ``fake[:FAULT]``. Imports vLLM, or nothing of it.

    Raises:
        SubjectUnavailable: vLLM is missing, not recognised, or cannot be driven in this process.
        Misuse: ``spec`` is neither, or names an unknown fault.
    """
    _, colon, name = parse(spec).partition(":")
    keep_freed_memory()
    if spec == VLLM:
        from harness.subject.vllm_layer import VllmSubject

        lane = SPECS[backend]
        gpu = lane.needs_gpu and not on_cpu
        subject = VllmSubject(lane.moe_backend, device="cuda" if gpu else "cpu", interpreter=not gpu)
        pass_over_what_lives()
        return subject
    from harness.subject.fake import RefusingFake

    return RefusingFake(_fault(name) if colon else None, backend)
