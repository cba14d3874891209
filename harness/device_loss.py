"""When the device, not the pair, is what failed: memory ran out, or an error ended the CUDA context. Plain text in, a verdict out."""

from __future__ import annotations

import re

from harness.verdict import LOST, OUT_OF_MEMORY, Outcome, Verdict

_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)
_RAISED = (Outcome.LOAD_ERROR, Outcome.RUN_ERROR, Outcome.UNSUPPORTED)


def may_concern_device(verdict: Verdict) -> bool:
    """Whether vLLM raised: then the device is tried. A refusal that matches any text may hide an error of the device."""
    return verdict.outcome in _RAISED and bool(verdict.detail)


def out_of_memory(detail: str) -> bool:
    """Whether an exception's text says that device memory ran out, whichever library raised it."""
    return _MEMORY.search(detail) is not None


def verdict(detail: str, stage: str, lost: str | None) -> Verdict | None:
    """RUN_ERROR for what was raised at ``stage``, when it was the device's; None when it was not.

    lost: what the device answered when it was tried afterwards; None: it works.
    """
    first = detail.strip().partition("\n")[0]
    claim = f"the pair runs; {first} was raised at stage '{stage}'"
    if out_of_memory(detail) and lost is None:
        return Verdict(outcome=Outcome.RUN_ERROR, claim=claim, detail=detail, signature=f"{OUT_OF_MEMORY}@{stage}")
    if lost is None:
        return None
    claim += f", and the CUDA context of this process was lost: {lost.strip().partition(chr(10))[0]}"
    return Verdict(outcome=Outcome.RUN_ERROR, claim=claim, detail=detail, signature=f"{LOST}@{stage}")
