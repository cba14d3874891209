from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from references.bounds import Interval
from references.gating import gated, gated_interval, situ_minimum
from references.vocabulary import Activation, Format, Swiglu

CASES = [
    (Activation.SILU, Swiglu(limit=1.5)),
    (Activation.SWIGLUOAI, Swiglu(limit=7.0, alpha=1.702, beta=1.0)),
    (Activation.SWIGLUOAI_UNINTERLEAVE, Swiglu(limit=1.5, alpha=1.25, beta=0.5)),
    (Activation.SWIGLUSTEP, Swiglu(limit=7.0)),
    (Activation.SWIGLUSTEP, Swiglu(limit=0.5)),
    (Activation.SITU, Swiglu(situ=4.0, linear=25.0)),
    (Activation.SITU, Swiglu(situ=1.5)),
]
ids = [f"{activation}-{index}" for index, (activation, _) in enumerate(CASES)]


def spelled_out(activation: Activation, s: Swiglu, g: float, u: float) -> float:
    """With math alone."""
    limit = math.inf if s.limit is None else s.limit
    up = min(max(u, -limit), limit)
    if activation is Activation.SITU:
        assert s.situ is not None
        act = s.situ * math.tanh(g / s.situ) / (1.0 + math.exp(-g))
        up = up if s.linear is None else s.linear * math.tanh(up / s.linear)
    elif activation is Activation.SWIGLUSTEP:
        act = min(g / (1.0 + math.exp(-g)), limit)
    else:
        g = min(g, limit)
        act = g / (1.0 + math.exp(-s.alpha * g))
    return act * (up + s.beta)


def tensor(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


@pytest.mark.parametrize(("activation", "swiglu"), CASES, ids=ids)
@given(st.floats(-30, 30), st.floats(-30, 30))
def test_products_follow_the_definitions(activation: Activation, swiglu: Swiglu, g: float, u: float) -> None:
    expected = spelled_out(activation, swiglu, g, u)
    assert float(gated(activation, swiglu, tensor(g), tensor(u), None)) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_every_parameter_is_used() -> None:
    g, u = tensor(2.0), tensor(-3.0)
    base = Swiglu(limit=1.5, alpha=1.25, beta=0.5)
    kind = Activation.SWIGLUOAI_UNINTERLEAVE
    values = {
        float(gated(kind, s, g, u, None))
        for s in (base, Swiglu(limit=7.0, alpha=1.25, beta=0.5), Swiglu(limit=1.5, beta=0.5), Swiglu(limit=1.5, alpha=1.25))
    }
    assert len(values) == 4
    assert float(gated(kind, base, tensor(1.3), tensor(1.1), Format.BF16)) != float(gated(kind, base, tensor(1.3), tensor(1.1), None))


def test_a_stored_up_is_rounded_before_the_product() -> None:
    kind, plain = Activation.SWIGLUOAI_UNINTERLEAVE, Swiglu(limit=7.0, beta=1.0)
    stored = Swiglu(limit=7.0, beta=1.0, up_store=Format.BF16)
    g, u = tensor(2.0), tensor(0.00390625)  # u + 1 lies between two bf16 numbers
    whole = float(gated(kind, stored, g, tensor(0.0), None))
    assert float(gated(kind, stored, g, u, None)) == whole < float(gated(kind, plain, g, u, None))
    exact = Interval(g, g), Interval(u, u)
    bounds, without = (gated_interval(kind, each, *exact, None) for each in (stored, plain))
    assert float(bounds.low) <= whole <= float(bounds.high) < float(without.low)


@pytest.mark.parametrize(("activation", "swiglu"), CASES, ids=ids)
@given(st.floats(-20, 20), st.floats(0, 3), st.floats(-20, 20), st.floats(0, 3), st.floats(0, 1), st.floats(0, 1))
def test_intervals_hold_what_is_inside(
    activation: Activation, swiglu: Swiglu, g: float, dg: float, u: float, du: float, at_g: float, at_u: float
) -> None:
    gate, up = Interval(tensor(g), tensor(g + dg)), Interval(tensor(u), tensor(u + du))
    bounds = gated_interval(activation, swiglu, gate, up, None)
    value = gated(activation, swiglu, tensor(g + at_g * dg), tensor(u + at_u * du), None)
    slack = 1e-12 * value.abs()
    assert bool((bounds.low - slack <= value) & (value <= bounds.high + slack))


@pytest.mark.parametrize(("activation", "swiglu"), CASES, ids=ids)
def test_intervals_hold_float32_code_and_are_narrow(activation: Activation, swiglu: Swiglu) -> None:
    g, u = torch.meshgrid(torch.linspace(-25, 25, 401), torch.linspace(-9, 9, 37), indexing="ij")
    exact = Interval(g.double(), g.double()), Interval(u.double(), u.double())
    bounds = gated_interval(activation, swiglu, *exact, None)
    limit = math.inf if swiglu.limit is None else swiglu.limit
    if activation is Activation.SITU:
        assert swiglu.situ is not None
        act = (swiglu.situ * 0.5) * torch.tanh(g * (1.0 / swiglu.situ)) * (1.0 + torch.tanh(g * 0.5))
        up = u if swiglu.linear is None else swiglu.linear * torch.tanh(u * (1.0 / swiglu.linear))
        value = act * up
    elif activation is Activation.SWIGLUSTEP:
        value = torch.clamp(g * torch.sigmoid(g), max=limit) * u.clamp(-limit, limit)
    else:
        gate = g.clamp(max=limit)
        value = gate * (u.clamp(-limit, limit) + swiglu.beta) / (1.0 + torch.exp(-swiglu.alpha * gate))
    assert bool(((bounds.low <= value) & (value <= bounds.high)).all())
    floor = 1.0 if activation is Activation.SITU else 2.0**-20  # 1 + tanh cancels
    width = (bounds.high - bounds.low) / (value.double().abs() + floor)
    assert float(width.max()) < 2.0**-14
    wrong = value * (1.0 + 2.0**-10)
    assert not bool(((bounds.low <= wrong) & (wrong <= bounds.high)).all())


def test_situ_has_its_minimum_there() -> None:
    for beta in (1.5, 4.0):
        at = situ_minimum(beta)
        around = [spelled_out(Activation.SITU, Swiglu(situ=beta), at + step, 1.0) for step in (-1e-3, 0.0, 1e-3)]
        assert around[1] < min(around[0], around[2])
