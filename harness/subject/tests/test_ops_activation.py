"""Gated activations: values, and the rounding between the activation and the product."""

from __future__ import annotations

import math

import pytest
import torch

from harness.subject.interpreter.ops_activation import IMPLEMENTATIONS

TRUTH = {
    "_C::silu_and_mul": lambda x: x / (1 + math.exp(-x)),
    "_C::gelu_and_mul": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "_C::gelu_tanh_and_mul": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("name", TRUTH)
def test_values(name: str) -> None:
    gate = torch.linspace(-4, 8, 97)
    out = torch.zeros(1, 97)
    IMPLEMENTATIONS[name](out, torch.cat([gate, torch.full((97,), 3.0)])[None])
    truth = torch.tensor([3 * TRUTH[name](x) for x in gate.double().tolist()])
    assert (out[0].double() - truth).abs().max() < 1e-6 * 24


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_activation_is_rounded_before_it_multiplies(name: str, dtype: torch.dtype) -> None:
    gate = torch.linspace(0.3, 3, 255).to(dtype)
    up = torch.full((255,), 1.1).to(dtype)
    once, twice = torch.zeros(1, 255, dtype=dtype), torch.zeros(1, 255, dtype=dtype)
    IMPLEMENTATIONS[name](twice, torch.cat([gate, up])[None])
    full = torch.zeros(1, 255)
    IMPLEMENTATIONS[name](full, torch.cat([gate, up]).float()[None])
    once.copy_(full.to(dtype))
    activated = torch.zeros(1, 255)
    IMPLEMENTATIONS[name](activated, torch.cat([gate.float(), torch.ones(255)])[None])
    assert torch.equal(twice[0], (activated[0].to(dtype).float() * up.float()).to(dtype))
    assert not torch.equal(twice, once)


def test_relu_squared() -> None:
    out = torch.zeros(1, 3)
    IMPLEMENTATIONS["_C::relu_squared"](out, torch.tensor([[-2.0, 0.0, 3.0]]))
    assert out.tolist() == [[0.0, 0.0, 9.0]]
