from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references.activations import SIMPLE, activate, function, function_range, gelu, gelu_tanh, silu
from references.vocabulary import Activation


def exact(activation: Activation, x: float) -> float:
    """The textbook formula in Python's own math."""
    match activation:
        case Activation.SILU | Activation.SILU_NO_MUL:
            return x / (1 + math.exp(-x))
        case Activation.GELU | Activation.GELU_NO_MUL:
            return x * 0.5 * math.erfc(-x / math.sqrt(2))
        case Activation.GELU_TANH | Activation.GELU_TANH_NO_MUL:
            return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case _:
            return max(x, 0.0) ** 2


@pytest.mark.parametrize("activation", list(SIMPLE))
def test_functions_follow_the_textbook(activation: Activation) -> None:
    for x in (-20.0, -3.0, -1.2784645, -0.7517915, -0.1, 0.0, 0.5, 2.0, 30.0):
        value = float(function(activation)(torch.tensor(x, dtype=torch.float64)))
        assert math.isclose(value, exact(activation, x), rel_tol=1e-10, abs_tol=1e-14)


@pytest.mark.parametrize("act", [silu, gelu, gelu_tanh])
def test_the_interior_minimum_is_where_the_derivative_vanishes(act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    low, high = -2.0, -0.5  # bisection of the derivative's sign, from autograd
    for _ in range(80):
        middle = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(act(middle), middle)
        low, high = (float(middle.detach()), high) if slope < 0 else (low, float(middle.detach()))
    activation = next(a for a in SIMPLE if function(a) is act)
    bottom, _ = function_range(activation, torch.tensor([-3.0]).double(), torch.tensor([0.0]).double())
    assert math.isclose(float(bottom), exact(activation, low), rel_tol=1e-14)


@given(st.sampled_from(list(SIMPLE)), st.floats(-30, 30), st.floats(-30, 30), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_range_contains_every_value_inside(activation: Activation, a: float, b: float, inside: list[float]) -> None:
    low, high = (torch.tensor([f(a, b)], dtype=torch.float64) for f in (min, max))
    bottom, top = function_range(activation, low, high)
    points = (low + (high - low) * torch.tensor(inside, dtype=torch.float64)).clamp(float(low), float(high))
    values = function(activation)(points)
    assert (values >= bottom - 1e-15).all()
    assert (values <= top + 1e-15 * top.abs()).all()


def test_the_range_without_the_interior_minimum_would_miss_it() -> None:
    bottom, _ = function_range(Activation.SILU, torch.tensor([-3.0]).double(), torch.tensor([-0.5]).double())
    ends = min(exact(Activation.SILU, -3.0), exact(Activation.SILU, -0.5))
    assert float(bottom) < ends - 0.05
    assert math.isclose(float(bottom), -0.27846454276107, rel_tol=1e-12)


def test_gates_multiply_and_non_gated_take_none() -> None:
    two = torch.tensor([2.0], dtype=torch.float64)
    assert float(activate(Activation.SILU, two, 3 * two)) == pytest.approx(exact(Activation.SILU, 2.0) * 6.0, rel=1e-15)
    assert float(activate(Activation.RELU2_NO_MUL, None, 3 * two)) == 36.0
    with pytest.raises(ValueError, match="silu needs a gate"):
        activate(Activation.SILU, None, two)
    with pytest.raises(ValueError, match="relu2_no_mul takes no gate"):
        activate(Activation.RELU2_NO_MUL, two, two)
