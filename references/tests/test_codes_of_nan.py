"""Where a quantizer makes a code of NaN: what is NaN for sure has that code, what only may be has any number's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from references.bounds import Interval, exactly, opened, quantize, widen
from references.enclosure import _activated
from references.quantize import quantize_activations
from references.vocabulary import Accumulator, Activation, ActQuant, Format, Layout, Recipe, Swiglu

INF, NAN = torch.inf, torch.nan
CLAMPING = ActQuant(format=Format.E4M3FN, layout=Layout.TENSOR, dynamic=False, of_nan=448.0)
RECIPE = Recipe(
    name="of codes of NaN",
    a1=CLAMPING,
    a2=CLAMPING,
    compute=(Format.FP16,),
    activation_store=Format.FP16,
    output=Format.FP16,
    accumulator=Accumulator.FP32,
    gate_store=Format.FP16,
)


def interval(*ends: tuple[float, float]) -> Interval:
    """[1, N] of (low, high)."""
    low, high = torch.tensor(ends, dtype=torch.float64).T
    return Interval(low.unsqueeze(0), high.unsqueeze(0))


def stored(activation: Activation, h13: Interval, recipe: Recipe = RECIPE) -> list[tuple[float, float]]:
    x = _activated(h13, activation, recipe, lambda step, x: None)
    return list(zip(x.low.flatten().tolist(), x.high.flatten().tolist(), strict=True))


def same(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> bool:
    return torch.equal(*(torch.tensor(each).nan_to_num(0.5, INF, -INF) for each in (found, wanted)))


@pytest.mark.parametrize(("fmt", "code"), [(Format.E4M3FN, 448.0), (Format.INT8, 0.0)])
def test_zero_is_a_code_of_nan_too(fmt: Format, code: float) -> None:
    how = replace(CLAMPING, format=fmt, of_nan=code)
    nan, scale = torch.full((1, 2), NAN, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    assert quantize_activations(nan, how, scale).codes.tolist() == [[code, code]]
    codes, _ = quantize(exactly(nan), how, scale)
    assert codes.low.tolist() == codes.high.tolist() == [[code, code]]


def test_an_infinity_stays_what_it_is_whatever_its_error() -> None:
    ends = torch.tensor([INF, -INF, 1.0], dtype=torch.float64)
    radius = torch.tensor([INF, INF, 0.5], dtype=torch.float64)
    wider = widen(exactly(ends), radius, radius)
    assert wider.low.tolist() == [INF, -INF, 0.5]
    assert wider.high.tolist() == [INF, -INF, 1.5]


def test_one_end_that_is_nan_is_enough_to_be_in_doubt() -> None:
    there = opened(interval((NAN, 3.0), (3.0, NAN), (1.0, 2.0)))
    assert there.low.tolist() == [[-INF, -INF, 1.0]]
    assert there.high.tolist() == [[INF, INF, 2.0]]


def test_without_a_gate() -> None:
    """silu(-inf) is NaN, and silu(-200) -0."""
    h13 = interval((-INF, -INF), (-INF, -200.0), (NAN, NAN), (-300.0, -200.0))
    assert same(stored(Activation.SILU_NO_MUL, h13), [(NAN, NAN), (-INF, INF), (NAN, NAN), (0.0, 0.0)])
    for a2 in (None, replace(CLAMPING, of_nan=None)):
        kept = stored(Activation.SILU_NO_MUL, h13, replace(RECIPE, a2=a2))
        assert torch.isnan(torch.tensor(kept)).any(1).tolist() == [True, True, True, False]


GATED = [  # gate, up, act(gate) * up
    ((INF, INF), (0.0, 0.0), (NAN, NAN)),
    ((1.0, INF), (0.0, 0.0), (-INF, INF)),
    ((20.0, 20.0), (0.0, 0.0), (0.0, 0.0)),
    ((0.0, 0.0), (INF, INF), (NAN, NAN)),
    ((0.0, 0.0), (1.0, INF), (-INF, INF)),
    ((-INF, -200.0), (1.0, 1.0), (-INF, INF)),
    ((-INF, -INF), (1.0, 1.0), (NAN, NAN)),
]


def test_with_a_gate() -> None:
    h13 = interval(*[gate for gate, _, _ in GATED], *[up for _, up, _ in GATED])
    assert same(stored(Activation.SILU, h13), [product for _, _, product in GATED])


def test_a_gate_that_is_known_may_leave_the_activation_in_doubt() -> None:
    """gelu(-4.967) is stored as 0, which times infinity is NaN, or as less; gelu(-5.4) may be on either side."""
    h13 = interval((-4.967, -4.967), (-5.4, -5.4), (-1.0, -1.0), (0.0, 0.0), *[(INF, INF)] * 4)
    assert same(stored(Activation.GELU, h13), [(-INF, INF), (-INF, INF), (-INF, -INF), (NAN, NAN)])


@pytest.mark.parametrize("activation", [Activation.SWIGLUOAI, Activation.SITU])
def test_what_a_clamp_does_to_nan_is_not_said(activation: Activation) -> None:
    h13 = interval((NAN, NAN), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    with_parameters = replace(RECIPE, swiglu=Swiglu(alpha=1.0, situ=2.0))
    ends = stored(activation, h13, with_parameters)
    assert ends[0] == (-INF, INF)
    assert 0 < ends[1][0] <= ends[1][1] < 3
    assert torch.isnan(torch.tensor(stored(activation, h13, replace(with_parameters, a2=None))[0])).all()
