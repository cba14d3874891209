"""Whether a backend can run here, told without importing torch or vLLM."""

from __future__ import annotations

import importlib.util

from harness.backends import SPECS, Backend
from harness.exits import Misuse, Unavailable, not_installed
from harness.gpus import visible_gpus
from harness.installed import compute_capability, importable
from harness.subject import SubjectUnavailable
from harness.subject.interpreter import libcuda

MODULES = ("torch", "numpy", "packaging", "rich", "jinja2", "xdist", "pytest_timeout")  # what `moediff run` needs besides its subject


def require(*modules: str) -> None:
    """Raises Misuse for the first that is not installed: a run that lacks its template engine would find out at its end."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise not_installed(name)


def has_vllm() -> bool:
    """Whether a vLLM is installed here."""
    return importlib.util.find_spec("vllm") is not None


def why_not(backend: Backend) -> Misuse | None:
    """What keeps vLLM from running on ``backend`` here, and what to do about it; None when nothing that can be seen from outside."""
    if not has_vllm():
        return Misuse("vLLM is not installed in this environment: `tox run -e interpreter` makes one that has it")
    if SPECS[backend].needs_gpu:
        missing = f"backend '{backend}' needs an NVIDIA GPU and none is visible: use --backend {Backend.INTERPRETER} on this machine"
        return (_wrong_architecture(backend) or _missing_module(backend)) if visible_gpus() else Unavailable(missing)
    try:
        libcuda.require()
    except SubjectUnavailable as error:
        return Unavailable(str(error))
    return None


def _wrong_architecture(backend: Backend) -> Unavailable | None:
    here, wanted = f"sm{compute_capability()}", SPECS[backend].architectures
    if here in wanted:
        return None
    return Unavailable(f"backend '{backend}' runs on {', '.join(wanted)}, and the GPU here is {here}")


def _missing_module(backend: Backend) -> Unavailable | None:
    for names in SPECS[backend].modules:
        if not any(importable(name) for name in names):
            return Unavailable(f"backend '{backend}' needs the Python module {' or '.join(names)}, which is not installed here")
    return None


def check(backend: Backend, subject: str) -> None:
    """Raises what ``why_not`` says; a fake subject runs everywhere."""
    if subject == "vllm" and (reason := why_not(backend)):
        raise reason
