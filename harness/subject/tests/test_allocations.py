"""Poisoned memory and the ledger of allocations, on torch alone."""

from __future__ import annotations

import pytest
import torch

from harness.subject.allocations import Ledger, Poison, fill

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("interpreter")]  # torch's modes import triton, and the lane must come first
SIZES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.bool]


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_memory_that_nobody_writes_holds_the_sentinel(dtype: torch.dtype, byte: int) -> None:
    like = torch.zeros(3, 2, dtype=dtype)
    with Poison(byte):
        made = [torch.empty(3, 2, dtype=dtype), torch.empty_like(like), like.new_empty(4), torch.empty_strided((2, 3), (3, 1), dtype=dtype)]
        written = torch.zeros(3, dtype=dtype)
    assert not written.any()
    for tensor in made:
        if dtype.is_floating_point:
            assert torch.isnan(tensor.float()).all()
        elif dtype is torch.bool:
            assert tensor.all()
        else:
            assert (tensor.view(torch.uint8) == byte).all()


def test_integers_tell_the_two_sentinels_apart() -> None:
    first, second = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    fill(first, 0x7F)
    fill(second, 0xFF)
    assert (first != second).all()


def test_meta_and_empty_tensors_are_left_alone() -> None:
    fill(torch.empty(3, device="meta"), 0x7F)
    fill(torch.empty(0), 0x7F)


def test_the_peak_is_what_lived_at_once() -> None:
    known = torch.zeros(100)
    with Ledger([known]) as ledger:
        first = known + 1  # 400 bytes
        second = first * 2  # 800
        del first
        view = second.view(10, 10)[1:]  # nothing
        known.add_(1)  # nothing
        third = view.to(torch.float64)  # 400 + 720
    assert ledger.peak == 1120
    assert ledger.largest == 720
    assert ledger.knows(known.untyped_storage())
    assert not ledger.knows(third.untyped_storage())


def test_temporaries_one_after_another_do_not_add_up() -> None:
    known = torch.zeros(1000)
    with Ledger([known]) as ledger:
        for _ in range(20):
            (known * 2).sum()
    assert ledger.peak < 2 * known.nbytes
