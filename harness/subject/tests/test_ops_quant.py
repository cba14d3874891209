"""Quantizers: worked numbers, ties, floors and saturation, each where two readings of the source would differ."""

from __future__ import annotations

import pytest
import torch

from cases.case import Entry, MoECase
from harness.backends import Backend
from harness.recipes import recipe
from harness.subject import fake_kernel
from harness.subject.interpreter import ops_quant as q
from references.formats import torch_dtype

FP8 = torch.float8_e4m3fn


def _codes(values: list[float], scale: float) -> list[int]:
    out = torch.zeros(1, len(values), dtype=torch.int8)
    q.static_scaled_int8_quant(out, torch.tensor([values]), torch.tensor([scale]))
    return out[0].tolist()


def test_static_int8_rounds_half_to_even_and_saturates() -> None:
    assert _codes([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -128.5, -1e9], 1.0) == [0, 2, 2, 0, -2, 126, 127, 127, -128, -128]


def test_static_int8_divides() -> None:
    x, scale = torch.tensor(45.5), torch.tensor(7.0)
    assert x / scale == 6.5
    assert torch.round(x * (1 / scale)) == 7  # the reciprocal would carry it past the tie
    assert _codes([45.5], 7.0) == [6]


def test_nan_becomes_zero_in_int8_and_the_largest_in_fp8() -> None:
    assert q.to_int8_rn(torch.tensor([float("nan")])).item() == 0
    assert q.to_e4m3_saturating(torch.tensor([float("nan"), float("inf"), -float("inf")])).float().tolist() == [448.0, 448.0, -448.0]


@pytest.mark.parametrize("weight", ["int8", "e4m3fn"])
def test_static_operators_make_of_nan_what_the_recipe_says(weight: str) -> None:
    case = MoECase.from_id(f"{weight}-channel-static-quark-silu-fp16-e4k2m8h64i32-balanced")
    how = recipe(case, Entry.FUSED_EXPERTS, Backend.INTERPRETER).a2
    assert how is not None
    out = torch.zeros(1, 1, dtype=torch_dtype(how.format))
    operator = q.static_scaled_int8_quant if weight == "int8" else q.static_scaled_fp8_quant
    operator(out, torch.tensor([[torch.nan]]), torch.tensor([0.25]))
    codes, _ = fake_kernel._quantize(torch.tensor([[torch.nan]]), how, torch.tensor([[0.25]]))
    assert out.double().item() == codes.item() == how.of_nan


def test_a_scale_of_another_dtype_raises_as_on_a_gpu() -> None:
    for dtype, name in ((torch.float16, "Half"), (torch.bfloat16, "BFloat16")):
        with pytest.raises(RuntimeError, match=f"expected scalar type Float but found {name}"):
            q.static_scaled_int8_quant(torch.zeros(1, 1, dtype=torch.int8), torch.ones(1, 1), torch.ones(1, dtype=dtype))


def test_dynamic_int8_multiplies_by_127_over_amax() -> None:
    x = torch.tensor([[3.0, 1.0, -3.0], [0.0, 0.0, 0.0]])
    out, scale = torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 1)
    q.dynamic_scaled_int8_quant(out, x, scale)
    assert out.tolist() == [[127, 42, -127], [0, 0, 0]]
    assert scale.flatten().tolist() == [(torch.tensor(3.0) / 127).item(), 0.0]


def test_127_over_amax_is_rounded_once() -> None:
    amax = (torch.arange(1, 501, dtype=torch.float64) / 7).float()
    ties = ((torch.arange(127) + 0.5)[None] * amax.double()[:, None] / 127).float()  # where the last bit of the factor decides
    x = torch.cat([ties, amax[:, None]], 1)
    out, scale = torch.zeros(500, 128, dtype=torch.int8), torch.zeros(500, 1)
    q.dynamic_scaled_int8_quant(out, x, scale)
    inverse = (127.0 / amax.double()).float()[:, None]  # the correctly rounded float32 quotient
    assert torch.equal(out, torch.round(x * inverse).to(torch.int8))
    assert not torch.equal(out, torch.round(x * (amax.reciprocal() * 127)[:, None]).to(torch.int8))


def test_static_fp8_multiplies_by_the_reciprocal() -> None:
    scale = torch.tensor([3.0])
    x = torch.linspace(-50, 50, 4097)[None]
    out = torch.zeros(x.shape, dtype=FP8)
    q.static_scaled_fp8_quant(out, x, scale)
    assert torch.equal(out.float(), (x * (1.0 / scale)).to(FP8).float())
    assert not torch.equal(x * (1.0 / scale), x / scale)


def test_fp8_saturates_instead_of_overflowing() -> None:
    out = torch.zeros(1, 4, dtype=FP8)
    q.static_scaled_fp8_quant(out, torch.tensor([[447.0, 465.0, 1e30, -1e30]]), torch.ones(1))
    assert out.float().tolist() == [[448.0, 448.0, 448.0, -448.0]]


def test_dynamic_tensor_fp8_has_no_floor() -> None:
    out, scale = torch.zeros(2, 2, dtype=FP8), torch.ones(1)
    q.dynamic_scaled_fp8_quant(out, torch.tensor([[1.0, -2.0], [0.0, 7.0]]), scale)
    assert scale.item() == (torch.tensor(7.0) / 448).item()
    assert out[1, 1].float() == 448
    q.dynamic_scaled_fp8_quant(out, torch.zeros(2, 2), scale)
    assert scale.item() == 0.0
    assert out.float().tolist() == [[448.0, 448.0], [448.0, 448.0]]  # 0 * (1 / 0) is NaN, and fminf drops NaN


def test_dynamic_token_fp8_divides_and_has_a_floor() -> None:
    x = torch.tensor([[448.0, 10.0], [1e-9, 0.0]])
    out, scale = torch.zeros(2, 2, dtype=FP8), torch.zeros(2, 1)
    q.dynamic_per_token_scaled_fp8_quant(out, x, scale)
    assert scale.flatten().tolist() == [1.0, q.MIN_FP8_SCALE]
    assert torch.tensor(1 / (448 * 512), dtype=torch.float32).item() == q.MIN_FP8_SCALE
    q.dynamic_per_token_scaled_fp8_quant(out, x, scale, torch.tensor([224.0]))
    assert scale[0].item() == 0.5


def test_fp8_groups_keep_their_own_scale() -> None:
    x = torch.cat([torch.full((1, 128), 2.0), torch.full((1, 128), 1e-20)], 1)
    out, scale = torch.zeros(x.shape, dtype=FP8), torch.zeros(1, 2)
    q.per_token_group_fp8_quant(x, out, scale, 128, 1e-10, -448.0, 448.0, False, False, False)
    assert scale[0].tolist() == pytest.approx([2 / 448, 1e-10 / 448], rel=1e-6)
    assert out[0, 0].float() == 448


def test_power_of_two_group_scales_round_up() -> None:
    x = torch.tensor([[448.0, 450.0]]).repeat_interleave(64, 1)
    out, scale = torch.zeros(x.shape, dtype=FP8), torch.zeros(1, 1)
    q.per_token_group_fp8_quant(x, out, scale, 128, 1e-10, -448.0, 448.0, True, False, False)
    assert scale.item() == 2.0


def test_int8_groups_truncate() -> None:
    x = torch.zeros(1, 128)
    x[0, :4] = torch.tensor([127.0, 1.99, -1.99, 0.99])
    out, scale = torch.zeros(1, 128, dtype=torch.int8), torch.zeros(1, 1)
    q.per_token_group_quant_int8(x, out, scale, 128, 1e-10, -128.0, 127.0)
    assert scale.item() == 1.0
    assert out[0, :4].tolist() == [127, 1, -1, 0]


def test_fused_silu_keeps_float32_until_the_code() -> None:
    gate, up = torch.full((1, 128), 1.0), torch.linspace(1, 2, 128)[None]
    x = torch.cat([gate, up], 1).to(torch.float16)
    out, scale = torch.zeros(1, 128, dtype=FP8), torch.zeros(1, 1)
    q.silu_and_mul_per_block_quant(out, x, scale, 128)
    value = x[:, :128].float() * torch.sigmoid(x[:, :128].float()) * x[:, 128:].float()
    assert scale.item() == pytest.approx(value.max().item() / 448, rel=1e-6)
    assert not torch.equal(value, value.half().float())
    assert torch.equal(out.float(), (value / scale).to(FP8).float())


def test_fused_silu_refuses_float32_as_on_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="Input must be FP16 or BF16"):
        q.silu_and_mul_per_block_quant(torch.zeros(1, 128, dtype=FP8), torch.zeros(1, 256), torch.zeros(1, 1), 128)


def test_static_fp8_by_rows_columns_and_blocks() -> None:
    x = torch.arange(1.0, 9.0).reshape(2, 4)
    for scale, shape, expanded in (
        (torch.tensor([1.0, 2.0]), (1, -1), torch.tensor([[1.0], [2.0]])),
        (torch.tensor([1.0, 2.0, 4.0, 8.0]), (-1, 1), torch.tensor([[1.0, 2.0, 4.0, 8.0]])),
        (torch.tensor([[1.0, 4.0]]), None, torch.tensor([[1.0, 1.0, 4.0, 4.0]])),
    ):
        out = torch.zeros(2, 4, dtype=FP8)
        q.static_scaled_fp8_quant(out, x, scale, shape)
        assert torch.equal(out.float(), (x / expanded).to(FP8).float())


@pytest.mark.parametrize(("shape", "reason"), [((4, 1, 1), "2D tensor, but got 3D"), ((3, 1), r"divisible by scale.size\(0\) \(3\)")])
def test_a_static_fp8_scale_of_a_shape_that_the_kernel_does_not_take_is_refused_in_its_words(shape: tuple[int, ...], reason: str) -> None:
    x = torch.ones(8, 32)
    with pytest.raises(RuntimeError, match=reason):
        q.static_scaled_fp8_quant(torch.empty(8, 32, dtype=FP8), x, torch.ones(shape))
