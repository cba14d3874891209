"""Whether a backend can run here, told without importing torch or vLLM."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

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
        these = ", ".join(SPECS[backend].architectures)
        seen = f"needs an NVIDIA GPU ({these}) and none is visible"
        if not any(name.startswith("sm") for name in SPECS[backend].architectures):
            seen = f"needs a GPU that is not NVIDIA's ({these}), and this harness drives no other"
        if not visible_gpus():
            return Unavailable(f"backend '{backend}' {seen}: use --backend {Backend.INTERPRETER} on this machine")
        return _wrong_architecture(backend) or _missing_module(backend) or _missing_compiler(backend)
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


def _missing_compiler(backend: Backend) -> Unavailable | None:
    """vLLM turns FlashInfer off where it can neither load nor compile its kernels (utils/flashinfer.py), and refuses everything then."""
    compiled = importable("flashinfer_cubin") or os.environ.get("VLLM_HAS_FLASHINFER_CUBIN", "0") != "0"
    if compiled or ("flashinfer",) not in SPECS[backend].modules:
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc") or any(Path(home, "bin", "nvcc").exists() for home in homes if home)
    if nvcc and shutil.which("ninja"):
        return None
    return Unavailable(
        f"backend '{backend}' needs the Python module flashinfer_cubin, or nvcc and ninja to compile its kernels; neither is here"
    )


def check(backend: Backend, subject: str) -> None:
    """Raises what ``why_not`` says; a fake subject runs everywhere."""
    if subject == "vllm" and (reason := why_not(backend)):
        raise reason
