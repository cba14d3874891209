from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from references.formats import round_to
from references.microscaling import codes_and_values, group_scale, inverse, nvfp4, nvfp4_hull
from references.vocabulary import ActQuant, Format, Layout, Quotient

HOW = ActQuant(
    format=Format.E2M1, layout=Layout.GROUP16, dynamic=True, scale_store=Format.E4M3FN, store=Format.BF16, quotient=Quotient.DIVIDE
)
Quantizer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ONE = np.float32(1.0)


def by_numpy(x: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """The same in numpy's float32 and ml_dtypes' casts, group by group."""
    rows = x.numpy().astype(np.float32)
    out = np.zeros_like(rows)
    for r, row in enumerate(rows):
        g = ONE / np.float32(multiplier[r, 0])
        for start in range(0, row.size, 16):
            part = row[start : start + 16]
            scale = min(g * (np.abs(part).max() * np.float32(1.0 / 6.0)), np.float32(448.0))
            scale = np.float32(np.float32(scale).astype(ml_dtypes.float8_e4m3fn))
            if scale == 0:
                continue
            codes = np.clip(part * (g / scale), np.float32(-6.0), np.float32(6.0)).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
            out[r, start : start + 16] = (codes * (scale / g)).astype(ml_dtypes.bfloat16).astype(np.float32)
    return torch.from_numpy(out).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of many magnitudes, an all-zero group, ties of E2M1, groups whose scale saturates or is subnormal."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, 64, generator=g) * torch.exp2(torch.randint(-9, 6, (40, 4), generator=g).float()).repeat_interleave(16, 1)
    x[0, :16] = 0
    x[1, :16] = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5.0, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0.0])
    multiplier = torch.exp2(torch.randint(-12, -6, (40, 1), generator=g).float()) * (1 + torch.rand(40, 1, generator=g))
    multiplier[1] = 2.0**-8
    return round_to(x.double(), Format.BF16), round_to(multiplier.double(), Format.FP32)


def check(quantizer: Quantizer) -> None:
    x, multiplier = rows()
    assert torch.equal(quantizer(x, multiplier), by_numpy(x, multiplier))


def test_values_are_numpys() -> None:
    check(lambda x, multiplier: nvfp4(x, multiplier, HOW))
    scales = group_scale(torch.tensor([[1e9], [1e-9]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))
    assert scales.tolist() == [[448.0], [0.0]]


@pytest.mark.parametrize("fault", ["divided", "per_row", "not_stored", "no_global"])
def test_another_arithmetic_is_seen(fault: str) -> None:
    def faulty(x: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
        g = inverse(multiplier)
        amax = x.abs().unflatten(1, (-1, 16)).amax(2)
        match fault:
            case "divided":  # amax / 6 instead of amax * (1/6)
                scale = group_scale(amax, g)
                return codes_and_values(x, scale, g * (1.0 + 2.0**-23), Format.BF16)
            case "per_row":
                scale = group_scale(amax.amax(1, keepdim=True).expand_as(amax), g)
                return codes_and_values(x, scale, g, Format.BF16)
            case "not_stored":
                return codes_and_values(x, group_scale(amax, g), g, Format.FP32)
            case _:
                return nvfp4(x, torch.ones_like(multiplier), HOW)

    with pytest.raises(AssertionError):
        check(faulty)


def test_a_hull_holds_every_row_inside_and_is_the_value_where_nothing_is_in_doubt() -> None:
    x, multiplier = rows()
    low, high = nvfp4_hull(x, x, multiplier, HOW)
    assert torch.equal(low, high)
    assert torch.equal(low, nvfp4(x, multiplier, HOW))
    for spread in (2.0**-20, 2.0**-8, 0.3):
        below, above = x - spread * x.abs(), x + spread * x.abs()
        low, high = nvfp4_hull(below, above, multiplier, HOW)
        g = torch.Generator().manual_seed(5)
        for _ in range(20):
            inside = below + (above - below) * torch.rand(x.shape, generator=g).double()
            value = nvfp4(inside, multiplier, HOW)
            assert bool(((low <= value) & (value <= high)).all())
    assert bool((low < high).any())


@pytest.mark.parametrize("steps", [-1, 1])
def test_an_approximate_division_may_take_either_side_of_a_near_tie(steps: int) -> None:
    """-0.26953125 under g = 519.4203, as vLLM's emulation met it on an H200."""
    x = torch.full((1, 16), -0.26953125, dtype=torch.float64)
    x[0, 0] = 1.28125
    multiplier = torch.tensor([[1.0 / 519.4202880859375]], dtype=torch.float64).float().double()
    g, scale = inverse(multiplier), torch.tensor([[112.0]], dtype=torch.float64)
    assert torch.equal(group_scale(x.abs().amax(1, keepdim=True), g), scale)
    low, high = nvfp4_hull(x, x, multiplier, replace(HOW, quotient=Quotient.ANY))
    kernel = codes_and_values(x, scale, g, Format.BF16, (steps * 2.0**-23, 0.0))
    assert bool(((low <= kernel) & (kernel <= high)).all())
    assert float(low[0, 1]) < float(high[0, 1])
    known = nvfp4_hull(x, x, multiplier, HOW)
    assert known[0] is known[1]
