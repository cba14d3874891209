"""What is installed and what GPU is here, told without importing torch or vLLM: recipes depend on it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from harness.architectures import requested

BLACKWELL = (100, 103)  # compute capabilities of vLLM's device family 100
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")


@functools.cache
def importable(name: str) -> bool:
    """Looks where a submodule would be, instead of importing the package above it."""
    package, *below = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not below:
        return spec is not None
    return any(
        Path(where, *below).exists() or Path(where, *below).with_suffix(".py").exists() for where in spec.submodule_search_locations or ()
    )


def compute_capability() -> int:
    """90 for the first GPU of a Hopper machine, or where the interpreter platform answers as one; 0 where no GPU answers."""
    if asked := requested():
        return asked.number
    return 0 if os.environ.get("MOEDIFF_LANE") == "interpreter" else _compute_capability()


@functools.cache
def _compute_capability() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    first = listed.stdout.split()
    return int(first[0].replace(".", "")) if listed.returncode == 0 and first else 0


def ue8m0_scales() -> bool:
    """Whether vLLM gives group-128 FP8 activations power-of-two scales, whatever backend runs: utils/deep_gemm.py, is_deep_gemm_e8m0_used.

    It does where DeepGEMM is importable, on Hopper and later, unless one of two variables says no.
    """
    allowed = all(os.environ.get(name, "1") not in ("0", "false", "False") for name in ("VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0"))
    return allowed and compute_capability() >= 90 and any(importable(name) for name in DEEP_GEMM)
