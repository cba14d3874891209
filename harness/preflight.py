"""Whether a backend can run here, told without importing torch or vLLM."""

from __future__ import annotations

import importlib.util

from harness.backends import SPECS, Backend
from harness.exits import Misuse, Unavailable
from harness.gpus import visible_gpus
from harness.subject import SubjectUnavailable
from harness.subject.interpreter import libcuda


def why_not(backend: Backend) -> Misuse | None:
    """What keeps vLLM from running on ``backend`` here, and what to do about it; None when nothing that can be seen from outside."""
    if importlib.util.find_spec("vllm") is None:
        return Misuse("vLLM is not installed in this environment: `tox run -e interpreter` makes one that has it")
    if SPECS[backend].needs_gpu:
        missing = f"backend '{backend}' needs an NVIDIA GPU and none is visible: use --backend {Backend.INTERPRETER} on this machine"
        return None if visible_gpus() else Unavailable(missing)
    try:
        libcuda.compiler()
    except SubjectUnavailable as error:
        return Unavailable(str(error))
    return None


def check(backend: Backend, subject: str) -> None:
    """Raises what ``why_not`` says; a fake subject runs everywhere."""
    if subject == "vllm" and (reason := why_not(backend)):
        raise reason
