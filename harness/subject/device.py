"""The GPU of this process: is it still there, how much of it is ours."""

from __future__ import annotations

import gc
import os

import torch

from harness.gpus import WORKERS_ON_GPU
from harness.subject.errors import verbatim

_MUCH = 2**30  # bytes


def recover() -> str | None:
    """Try the device, and give back what a failed pair held where it is much. None when it works, else what it raised, verbatim.

    Not after every refusal: to give memory back to the driver and fetch it again takes longer than most pairs.
    """
    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > _MUCH:
            gc.collect()
            torch.cuda.empty_cache()
        answer = torch.arange(4, device="cuda").sum().item()
        torch.cuda.synchronize()
    except RuntimeError as error:  # torch.AcceleratorError and OutOfMemoryError are such
        return verbatim(error)
    return None if answer == 6 else f"0 + 1 + 2 + 3 came out as {answer}"


def settle(device: str) -> None:
    """Wait for the device, so that what it raises late is raised at the stage it belongs to."""
    if device == "cuda":
        torch.cuda.synchronize()


def share() -> float:
    """The part of the GPU's memory that is this process's: its workers' share alike.

    Each keeps a context of its own outside the allocator; a tenth of the memory is left for these.
    """
    workers = int(os.environ.get(WORKERS_ON_GPU, "1"))
    return 0.9 / workers if workers > 1 else 1.0


def share_memory() -> None:
    """Let this process take its part of the GPU, so that the workers of one GPU do not exhaust it."""
    if share() < 1.0:
        torch.cuda.set_per_process_memory_fraction(share())
