"""What a record says about where it was made. Read from package metadata and the system: nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from harness.gpus import cores

# Which recipe vLLM picks depends on what else is installed, so the kernel packages are listed with it.
PACKAGES = (
    "vllm",
    "torch",
    "triton",
    "numpy",
    "compressed-tensors",
    "humming-kernels",
    "flashinfer-python",
    "deep-gemm",
    "nvidia-cutlass-dsl",
    "moediff",
)
WITHOUT_VLLM = ("torch", "numpy", "moediff")  # what a fake subject is made of


def version(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu_names() -> tuple[str, ...]:
    """Model names from the driver's listing, in its order; empty without a driver."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("Model:")]
    return tuple(line.partition(":")[2].strip() for line in lines)


def commit() -> str:
    """Commit of this source tree, with "+changes" where it differs; "" where it is not a checkout."""
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
    if not (root / ".git").exists():
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git here
        return ""


@cache
def cpu() -> str:
    """The processor's own name where Linux gives one, else the machine type."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def child_environ() -> dict[str, str]:
    """The environment of a Python that must find this package as this process does, installed or not."""
    root = Path(__file__).parent.parent
    if root.name == "site-packages":
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}


def environment(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions, machine and commit, as strings; a package that is not installed is left out."""
    versions = {package: found for package in packages if (found := version(package)) is not None}
    machine = {"python": platform.python_version(), "cpu": cpu(), "cores": str(cores()), "gpus": ", ".join(gpu_names())}
    lanes = {name: os.environ[name] for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    return {**versions, **machine, **lanes, "commit": commit()}
