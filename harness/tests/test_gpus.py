from __future__ import annotations

import pytest

from harness.backends import Backend
from harness.gpus import WORKERS_ON_GPU, default_backend, visible_gpus, worker_count, worker_environment


@pytest.mark.parametrize(("value", "gpus"), [("", ()), ("0", ("0",)), ("2, 3", ("2", "3")), ("GPU-ab,GPU-cd", ("GPU-ab", "GPU-cd"))])
def test_a_list_of_the_user_is_taken_as_it_stands(value: str, gpus: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == gpus


def test_the_lane_of_a_machine() -> None:
    assert default_backend(()) is Backend.INTERPRETER
    assert default_backend(("0",)) is Backend.TRITON


@pytest.mark.parametrize(
    ("backend", "gpus", "available", "workers"),
    [
        (Backend.INTERPRETER, (), 2, 2),
        (Backend.INTERPRETER, ("0", "1"), 16, 16),  # the interpreter leaves the GPUs alone
        (Backend.TRITON, ("0",), 4, 4),
        (Backend.TRITON, ("0",), 64, 8),
        (Backend.TRITON, ("0", "1", "2", "3"), 2, 4),  # every GPU gets a worker
        (Backend.TRITON, ("0", "1"), 8, 8),
    ],
)
def test_workers_of_n_auto(backend: Backend, gpus: tuple[str, ...], available: int, workers: int) -> None:
    assert worker_count(backend, gpus, available) == workers


def test_a_worker_owns_one_gpu_and_a_restarted_one_too() -> None:
    owned = [worker_environment(Backend.TRITON, f"gw{number}", ("0", "5")).get("CUDA_VISIBLE_DEVICES") for number in range(5)]
    assert owned == ["0", "5", "0", "5", "0"]
    assert worker_environment(Backend.TRITON, "main", ("7",))["CUDA_VISIBLE_DEVICES"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(Backend.INTERPRETER, "gw1", ("0", "5"))


def test_a_small_gpu_takes_fewer_workers_and_always_one() -> None:
    assert worker_count(Backend.TRITON, ("0",), 16, gib=139) == 8
    assert worker_count(Backend.TRITON, ("0", "1"), 16, gib=16) == 10
    assert worker_count(Backend.TRITON, ("0",), 16, gib=1) == 1


def test_workers_of_one_gpu_know_how_many_share_it() -> None:
    shared = [worker_environment(Backend.TRITON, f"gw{n}", ("0", "5"), workers=5)[WORKERS_ON_GPU] for n in range(5)]
    assert shared == ["3"] * 5
    assert worker_environment(Backend.TRITON, "main", ("0",))[WORKERS_ON_GPU] == "1"
