from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from references.mx_online import quantize
from references.vocabulary import Format


def one_group(amax: float, *others: float) -> torch.Tensor:
    return torch.tensor([[amax, *others, *[0.0] * (31 - len(others))]], dtype=torch.float64)


@pytest.mark.parametrize("power", [-20, -1, 0, 5])
@pytest.mark.parametrize("times", [1.0, 1.0078125, 1.5, 1.75, 1.7578125, 1.9921875])
def test_mxfp8_takes_the_smallest_scale_that_saturates_nothing(power: int, times: float) -> None:
    amax = times * 2.0**power
    _, scale = quantize(one_group(amax), Format.E4M3FN)
    assert amax / float(scale) <= 448 < amax / (float(scale) / 2)


@pytest.mark.parametrize(("times", "up"), [(1.0, 0), (1.5, 0), (1.7421875, 0), (1.75, 1), (1.9921875, 1)])
def test_mxfp4_scales_up_from_seven_quarters(times: float, up: int) -> None:
    for power in (-9, 0, 3):
        assert float(quantize(one_group(times * 2.0**power), Format.E2M1)[1]) == 2.0 ** (power - 2 + up)


@pytest.mark.parametrize(("fmt", "kind"), [(Format.E4M3FN, ml_dtypes.float8_e4m3fn), (Format.E2M1, ml_dtypes.float4_e2m1fn)])
def test_codes_are_those_of_ml_dtypes(fmt: Format, kind: type) -> None:
    weights = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).double()
    codes, scale = quantize(weights, fmt)
    quotient = (weights / scale.repeat_interleave(32, 1)).numpy()
    largest = 448.0 if fmt is Format.E4M3FN else 6.0
    assert np.array_equal(codes.numpy(), np.clip(quotient, -largest, largest).astype(kind).astype(np.float64))
    assert codes.abs().max() <= largest


def test_zero_groups_have_the_smallest_scale() -> None:
    for fmt, power in ((Format.E4M3FN, -127), (Format.E2M1, -127)):
        codes, scale = quantize(torch.zeros(1, 32, dtype=torch.float64), fmt)
        assert (float(scale), bool((codes == 0).all())) == (2.0**power, True)


def test_half_groups_and_other_formats() -> None:
    with pytest.raises(ValueError, match="multiple, got 40"):
        quantize(torch.zeros(1, 40, dtype=torch.float64), Format.E2M1)
    with pytest.raises(ValueError, match="not int8"):
        quantize(torch.zeros(1, 32, dtype=torch.float64), Format.INT8)
