"""What a worker may take of a GPU that others share."""

from __future__ import annotations

import pytest
import torch

from harness.gpus import WORKERS_ON_GPU
from harness.subject import device, modes

GIB = 2**30


@pytest.mark.parametrize(
    ("workers", "free", "left"),
    [("1", 90 * GIB, 90 * GIB), ("9", 90 * GIB, 5 * GIB), ("9", 2 * GIB, 2 * GIB)],  # 5 GiB are allocated, 5 reserved
)
def test_free_is_what_is_free_of_ones_own_part(monkeypatch: pytest.MonkeyPatch, workers: str, free: int, left: int) -> None:
    monkeypatch.setenv(WORKERS_ON_GPU, workers)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 * GIB)
    assert modes.free_bytes() == left


def test_alone_a_process_has_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKERS_ON_GPU, raising=False)
    assert device.share() == 1.0
    device.share_memory()  # sets no fraction: that would start CUDA
