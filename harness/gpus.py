"""Which GPUs are here and how workers share them. No torch: this runs before it may be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness.backends import SPECS, Backend

_PROC = Path("/proc/driver/nvidia/gpus")
WORKERS_ON_GPU = "MOEDIFF_WORKERS_ON_GPU"  # how many processes share this worker's GPU
_WORKER_GIB = 3  # a context takes 0.6 GiB, seen on an H200; a smoke case a few MiB; the rest is room
_SLOTS = 8  # workers on one GPU at most: each holds a CUDA context of its own, and the reference needs a core


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES may hold: its own entries where it is set, else the index of every GPU of the machine."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return tuple(name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
        return tuple(listed.stdout.split()) if listed.returncode == 0 else ()
    return tuple(str(index) for index, _ in enumerate(_PROC.iterdir())) if _PROC.is_dir() else ()


def gpu_gib() -> int:
    """Memory of the smallest GPU, in GiB; 0 where none says."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return min((int(mib) // 1024 for mib in listed.stdout.split() if mib.isdecimal()), default=0)


def default_backend(gpus: tuple[str, ...]) -> Backend:
    """The lane of this machine."""
    return Backend.TRITON if gpus else Backend.INTERPRETER


def worker_count(backend: Backend, gpus: tuple[str, ...], available: int, gib: int = 0) -> int:
    """Workers for ``-n auto`` on ``available`` cores: GPUs x slots where the backend needs a GPU, else one a core.

    gib: memory of the smallest GPU; 0: unknown.
    """
    if not SPECS[backend].needs_gpu or not gpus:
        return available
    fit = max(1, gib // _WORKER_GIB) if gib else _SLOTS
    return len(gpus) * min(_SLOTS, fit, max(1, available // len(gpus)))


def worker_environment(backend: Backend, worker: str, gpus: tuple[str, ...], workers: int = 1) -> dict[str, str]:
    """What one of ``workers`` sets before torch is imported: one thread, the lane's own variables, one GPU by the number in its id ("gw3"),
    and how many share it."""
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | dict(SPECS[backend].environment)
    if SPECS[backend].needs_gpu and gpus:
        number = int("".join(filter(str.isdigit, worker)) or 0)
        environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        environment[WORKERS_ON_GPU] = str(max(1, -(-workers // len(gpus))))
    return environment
