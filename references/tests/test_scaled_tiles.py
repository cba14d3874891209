"""Group scales that multiply the sums of tiles narrower than a group, as fused_moe_kernel does where BLOCK_SIZE_K is 64."""

from __future__ import annotations

import pytest
import torch

from references.bounds import Interval, exactly
from references.enclosure import gemm, read
from references.loading import Matrix, stacked
from references.products import Routed, operand
from references.vocabulary import Accumulator, Format

ROWS, COLUMNS = 64, 48


def codes(rows: int, k: int, seed: int) -> torch.Tensor:
    return torch.randint(-127, 128, (rows, k), generator=torch.Generator().manual_seed(seed)).double()


def scales(rows: int, groups: int, seed: int) -> torch.Tensor:
    return (torch.rand(rows, groups, generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001).float().double()


def enclosed(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, tile: int | None) -> Interval:
    matrix = Matrix(codes=w, low=w, high=w, format=Format.INT8, scale=w_scale, bias=None)
    prepared = operand(exactly(a), Format.INT8, Accumulator.INT32)
    alone, accumulator = stacked([matrix]), Accumulator.INT32
    return gemm(prepared, exactly(a_scale), read(alone, accumulator), alone, accumulator, Routed.of([a.shape[0]]), tile)


def kernel(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, tile: int) -> torch.Tensor:
    """[R, N] float32, each tile's sum times both scales, added with K ascending."""
    total = torch.zeros(a.shape[0], w.shape[0])
    for start in range(0, a.shape[1], tile):
        part = (a[:, start : start + tile] @ w[:, start : start + tile].T).float()
        total = total + part * a_scale[:, start // 128, None].float() * w_scale[:, start // 128].float()
    return total


@pytest.mark.parametrize(("k", "groups"), [(128, 1), (192, 2), (96, 1), (256, 2)])
def test_tiles_stay_inside_and_only_where_they_are_said(k: int, groups: int) -> None:
    a, w = codes(ROWS, k, 0), codes(COLUMNS, k, 1)
    a_scale, w_scale = scales(ROWS, groups, 2), scales(COLUMNS, groups, 3)
    came = kernel(a, a_scale, w, w_scale, 64).double()
    said, unsaid = (enclosed(a, a_scale, w, w_scale, tile) for tile in (64, None))
    assert bool(((said.low <= came) & (came <= said.high)).all())
    assert not bool(((unsaid.low <= came) & (came <= unsaid.high)).all())
    wide = kernel(a, a_scale, w, w_scale, 128).double()
    assert bool(((unsaid.low <= wide) & (wide <= unsaid.high)).all())
