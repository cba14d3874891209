"""Whether a backend can run here, told without importing torch or vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
        return _missing_module(backend) if visible_gpus() else Unavailable(missing)
    try:
        libcuda.compiler()
    except SubjectUnavailable as error:
        return Unavailable(str(error))
    return None


def _missing_module(backend: Backend) -> Unavailable | None:
    for names in SPECS[backend].modules:
        if not any(_importable(name) for name in names):
            return Unavailable(f"backend '{backend}' needs the Python module {' or '.join(names)}, which is not installed here")
    return None


def _importable(name: str) -> bool:
    """Looks where a submodule would be, instead of importing the package above it."""
    package, *below = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not below:
        return spec is not None
    return any(
        Path(where, *below).exists() or Path(where, *below).with_suffix(".py").exists() for where in spec.submodule_search_locations or ()
    )


def check(backend: Backend, subject: str) -> None:
    """Raises what ``why_not`` says; a fake subject runs everywhere."""
    if subject == "vllm" and (reason := why_not(backend)):
        raise reason
