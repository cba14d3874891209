"""Activations of rows packed per expert: those of whole tensors, on the rows that are counted and on no other."""

from __future__ import annotations

import pytest
import torch

from harness.subject.interpreter.ops_activation import IMPLEMENTATIONS as WHOLE
from harness.subject.interpreter.ops_masked import masked_moe_activation

COUNTS = torch.tensor([0, 2, 5, 9], dtype=torch.int32)  # none, some, all, more than there are
GATED = {
    "silu": ("_C::silu_and_mul", ()),
    "gelu": ("_C::gelu_and_mul", ()),
    "gelu_tanh": ("_C::gelu_tanh_and_mul", ()),
    "silu_with_clamp": ("_C::silu_and_mul_with_clamp", (1.5, 1.25, 0.5)),
    "swigluoai_uninterleave": ("_C::silu_and_mul_with_clamp", (1.5, 1.25, 0.5)),
    "swigluoai": ("_C::swigluoai_and_mul", (1.25, 1.5)),
    "situ": ("_C::situ_and_mul", (0.75, 2.0)),
}
UNGATED = {
    "silu_no_mul": torch.nn.functional.silu,
    "gelu_no_mul": torch.nn.functional.gelu,
    "gelu_tanh_no_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2_no_mul": lambda x: torch.nn.functional.relu(x) ** 2,
}


def masked(activation: str, x: torch.Tensor, width: int) -> torch.Tensor:
    out = torch.full((4, 5, width), 7.0, dtype=x.dtype)
    masked_moe_activation(out, x, COUNTS, activation, 1.5, 1.25, 0.5, 0.75, 2.0)
    return out


def numbers(width: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(4, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 2:] = torch.nan
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", GATED)
def test_gated(activation: str, dtype: torch.dtype) -> None:
    x = numbers(12, dtype)
    wanted = torch.full((4, 5, 6), 7.0, dtype=dtype)
    name, parameters = GATED[activation]
    for e, count in enumerate((0, 2, 5, 5)):
        WHOLE[name](wanted[e, :count], x[e, :count], *parameters)
    assert torch.equal(masked(activation, x, 6), wanted)
    assert not torch.equal(wanted[2], torch.full((5, 6), 7.0, dtype=dtype))


@pytest.mark.parametrize("activation", UNGATED)
def test_without_a_gate(activation: str) -> None:
    x = numbers(6, torch.float32)
    out = masked(activation, x, 6)
    for e, count in enumerate((0, 2, 5, 5)):
        assert torch.equal(out[e, :count].bfloat16(), UNGATED[activation](x[e, :count]).bfloat16())  # float32's last bits aside
        assert bool((out[e, count:] == 7.0).all())


def test_swiglustep_clamps_the_activation_and_both_sides_of_up() -> None:
    x = torch.tensor([[[4.0, 4.0, 0.5, -3.0, 3.0, 0.5]]])
    out = torch.zeros(1, 1, 3)
    masked_moe_activation(out, x, torch.tensor([1], dtype=torch.int32), "swiglustep", 1.5)
    silu = torch.nn.functional.silu(torch.tensor(0.5))
    assert out.flatten().bfloat16().tolist() == torch.stack([torch.tensor(-2.25), torch.tensor(2.25), silu * 0.5]).bfloat16().tolist()


def test_rows_without_experts_and_an_unknown_activation() -> None:
    x, out = torch.ones(5, 6), torch.zeros(5, 6)
    masked_moe_activation(out, x, torch.tensor([3], dtype=torch.int32), "relu2_no_mul")
    assert out.sum(1).tolist() == [6.0, 6.0, 6.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="Unsupported masked MoE activation: mish"):
        masked_moe_activation(out, x, torch.tensor([3], dtype=torch.int32), "mish")
