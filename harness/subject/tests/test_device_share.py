"""What a worker may take of a GPU that others share, and what the allocator still has of it."""

from __future__ import annotations

import gc

import numpy
import pytest
import torch

from harness.gpus import WORKERS_ON_GPU
from harness.subject import Loaded, device, modes, watch_loading
from harness.subject.loading import Allocated

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


@pytest.mark.parametrize(
    ("reserved", "given_back"), [(5 * GIB, ["collected", "emptied"]), (3 * GIB // 2, ["collected", "emptied"]), (GIB // 2, [])]
)
def test_only_much_memory_is_given_back_after_a_failure(monkeypatch: pytest.MonkeyPatch, reserved: int, given_back: list[str]) -> None:
    seen: list[str] = []
    arange = torch.arange

    def asked(end: int, device: str) -> torch.Tensor:
        seen.append(f"asked on {device}")
        return arange(end)

    monkeypatch.setattr(torch, "arange", asked)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("waited"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    monkeypatch.setattr(gc, "collect", lambda: seen.append("collected"))
    assert device.recover() is None
    assert seen == ["waited", *given_back, "asked on cuda", "waited"]


def test_what_a_lost_device_raises_is_told_verbatim(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert device.recover() == "RuntimeError: CUDA error: device-side assert triggered"


def test_a_device_that_adds_wrongly_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "arange", lambda end, device: torch.ones(end))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    assert device.recover() == "0 + 1 + 2 + 3 came out as 4.0"


def test_what_was_asked_for_is_counted_not_the_blocks_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H200: a block of the large pool held 655 360 bytes more than were asked for."""
    layer = torch.nn.Linear(4, 4)
    stats = {"requested_bytes.all.current": 100, "requested_bytes.all.peak": 5000, "allocated_bytes.all.peak": 2**20}
    steps: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append("waited"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: stats.update({"requested_bytes.all.peak": 100}))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: steps.append("counted") or dict(stats))
    monkeypatch.setattr(gc, "collect", lambda: steps.append("collected"))
    seen = watch_loading.Watched()

    def process(layer: torch.nn.Module) -> str:
        steps.append("processed")
        layer.weight = torch.nn.Parameter(torch.zeros(8, 4))
        stats["requested_bytes.all.peak"] = max(stats["requested_bytes.all.peak"], 100 + 128 + 64)
        return "what it returns"

    assert watch_loading._counted_on_cuda(process, layer, seen) == "what it returns"
    assert seen.allocated == Allocated(peak=192, kept=128, largest=0)
    assert steps == ["collected", "waited", "counted", "processed", "waited", "counted"]


def test_a_new_tensor_where_an_old_one_lay_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = numpy.zeros(16, numpy.float32)
    layer = torch.nn.Module()
    layer.weight, layer.kept = (torch.nn.Parameter(torch.from_numpy(each)) for each in (memory, numpy.zeros(4, numpy.float32)))
    stats = {"requested_bytes.all.current": 0, "requested_bytes.all.peak": 64}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    seen = watch_loading.Watched()

    def process(layer: torch.nn.Module) -> None:
        del layer.weight
        layer.weight = torch.nn.Parameter(torch.from_numpy(memory))

    watch_loading._counted_on_cuda(process, layer, seen)
    assert seen.allocated == Allocated(peak=64, kept=memory.nbytes, largest=0)


def test_every_free_block_is_asked_for_whole_and_largest_first() -> None:
    mib = 2**20
    blocks = [
        {"size": 3 * mib, "state": "inactive"},
        {"size": 5 * mib, "state": "active_allocated"},
        {"size": mib + 512, "state": "inactive"},
    ]
    small = [
        {"size": 512, "state": "inactive"},
        {"size": 2 * mib - 512, "state": "inactive"},
        {"size": mib, "state": "active_pending_free"},
    ]
    segments = [{"segment_type": "small", "blocks": small}, {"segment_type": "large", "blocks": blocks}]
    assert modes.free_pieces(segments) == [3 * mib, mib + 512, mib, mib - 512, 512]


def test_scales_are_doubled_in_the_format_they_have() -> None:
    e8m0 = torch.tensor([126, 127, 129], dtype=torch.uint8)
    parameters = {
        "w13_weight_scale": e8m0.view(torch.float8_e8m0fnu),
        "w2_weight_scale": ((e8m0 - 112) << 3).view(torch.float8_e8m0fnu),
        "w2_input_scale": torch.ones(1),
        "w13_weight_scale_2": torch.tensor([0.5]),
    }
    assert modes.scale_in_place(Loaded(handle=None, parameters=parameters, quant_method="", experts_class=""), 2.0) == (
        "w13_weight_scale",
        "w2_weight_scale",
        "w13_weight_scale_2",
    )
    assert parameters["w13_weight_scale"].view(torch.uint8).tolist() == [127, 128, 130]
    assert (parameters["w2_weight_scale"].view(torch.uint8) >> 3).tolist() == [15, 16, 18]
    assert parameters["w13_weight_scale_2"].tolist() == [1.0]
    assert parameters["w2_input_scale"].tolist() == [1.0]
