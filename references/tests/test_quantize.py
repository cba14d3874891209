from __future__ import annotations

import pytest
import torch

from references.formats import torch_dtype
from references.quantize import Quantized, quantize_activations, quantize_weights, requantize_to_max, symmetric
from references.vocabulary import ActQuant, Format, Layout, Rounding, WeightQuant


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def int8(layout: Layout, *, dynamic: bool = True, rounding: Rounding = Rounding.HALF_EVEN, floor: float = 0.0) -> ActQuant:
    return ActQuant(format=Format.INT8, layout=layout, dynamic=dynamic, rounding=rounding, scale_floor=floor)


def test_per_token_scales_are_amax_over_127() -> None:
    got = quantize_activations(rows([127.0, -63.5, 0.0], [2.54, 1.27, -0.01]), int8(Layout.TOKEN))
    assert got.codes.tolist() == [[127.0, -64.0, 0.0], [127.0, 64.0, 0.0]]  # -63.5 and 63.5 are ties, to even
    assert got.scale[0, 0] == 1.0
    assert got.scale[1, 0] == float(torch.tensor(2.54 / 127).float())


@pytest.mark.parametrize(
    ("rounding", "codes"),
    [
        (Rounding.HALF_EVEN, [127.0, 0.0, 2.0, -2.0, 1.0]),
        (Rounding.HALF_AWAY, [127.0, 1.0, 2.0, -3.0, 1.0]),
        (Rounding.TOWARD_ZERO, [127.0, 0.0, 1.0, -2.0, 0.0]),
    ],
)
def test_roundings_of_ties(rounding: Rounding, codes: list[float]) -> None:
    got = quantize_activations(rows([127.0, 0.5, 1.5, -2.5, 0.75]), int8(Layout.TOKEN, rounding=rounding))
    assert got.codes.tolist() == [codes]


def test_a_tensor_scale_couples_all_rows_and_a_group_scale_only_its_columns() -> None:
    x = torch.zeros(2, 130, dtype=torch.float64)
    x[0, 0], x[1, 0], x[1, 129] = 127.0, 254.0, 12.7
    whole = quantize_activations(x, int8(Layout.TENSOR))
    assert float(whole.group_scale) == 2.0
    assert whole.codes[0, 0] == 64.0  # 63.5, to even
    grouped = quantize_activations(x, int8(Layout.GROUP128))
    assert grouped.group_scale[:, 0].tolist() == [1.0, 2.0]
    assert grouped.group_scale[1, 1] == float(torch.tensor(12.7 / 127).float())  # the tail group of two columns
    assert grouped.codes[1, 129] == 127.0


def test_the_floor_keeps_an_all_zero_row_finite() -> None:
    got = quantize_activations(rows([0.0, 0.0], [1e-30, 0.0]), int8(Layout.TOKEN, floor=1e-10))
    assert got.codes.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert (got.scale == float(torch.tensor(1e-10))).all()
    assert quantize_activations(rows([0.0, 0.0]), int8(Layout.TOKEN)).codes.tolist() == [[0.0, 0.0]]


def test_a_static_scale_saturates_at_both_ends() -> None:
    got = quantize_activations(rows([1000.0, -1000.0, 0.75]), int8(Layout.TENSOR, dynamic=False), 0.5)
    assert got.codes.tolist() == [[127.0, -128.0, 2.0]]
    fp8 = ActQuant(format=Format.E4M3FN, layout=Layout.TENSOR, dynamic=False)
    assert quantize_activations(rows([1000.0, -1000.0, 17.0]), fp8, 1.0).codes.tolist() == [[448.0, -448.0, 16.0]]


def test_static_and_dynamic_are_not_confused() -> None:
    with pytest.raises(ValueError, match="static activation quantizer needs static_scale"):
        quantize_activations(rows([1.0]), int8(Layout.TENSOR, dynamic=False))
    with pytest.raises(ValueError, match="dynamic one computes its own"):
        quantize_activations(rows([1.0]), int8(Layout.TOKEN), 1.0)


def test_a_scale_kept_in_bf16_is_rounded_before_it_divides() -> None:
    how = ActQuant(format=Format.INT8, layout=Layout.TENSOR, dynamic=True, scale_store=Format.BF16)
    got = quantize_activations(rows([1.0, 0.3]), how)
    scale = (torch.tensor(1.0, dtype=torch.bfloat16) / 127.0).double()
    assert got.group_scale == scale
    assert got.codes[0, 0] == torch.round(1.0 / scale)


@pytest.mark.parametrize("dtype", [Format.BF16, Format.FP16])
def test_online_int8_computes_in_the_weights_own_dtype(dtype: Format) -> None:
    w = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)).to(torch_dtype(dtype))
    got = quantize_weights(w.double(), WeightQuant(format=Format.INT8, layout=Layout.CHANNEL, arithmetic=dtype))
    scale = w.abs().amax(1) / 127
    codes = w.div(scale.unsqueeze(1)).round().clamp(-127, 127)
    assert torch.equal(got.group_scale[:, 0], scale.double())
    assert torch.equal(got.codes, codes.double())
    in_fp32 = quantize_weights(w.double(), WeightQuant(format=Format.INT8, layout=Layout.CHANNEL))
    assert not torch.equal(in_fp32.codes, got.codes)  # the dtype of the arithmetic is visible


@pytest.mark.parametrize("layout", [Layout.TENSOR, Layout.CHANNEL, Layout.BLOCK128])
def test_online_fp8_is_the_rounded_quotient(layout: Layout) -> None:
    w = torch.randn(130, 140, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = quantize_weights(w.double(), WeightQuant(format=Format.E4M3FN, layout=layout, scale_floor=1e-6))
    wide = got.scale.expand(130, 140).float()
    assert torch.equal(got.codes, (w.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn).double())
    assert float(got.codes.abs().max()) == 448.0


def test_an_all_zero_channel_is_quantized_to_zero() -> None:
    got = quantize_weights(rows([0.0, 0.0], [1.0, 2.0]), WeightQuant(format=Format.INT8, layout=Layout.CHANNEL, arithmetic=Format.BF16))
    assert got.codes[0].tolist() == [0.0, 0.0]
    assert got.group_scale[0, 0] == 0.0


def test_requantizing_keeps_the_larger_half_and_moves_the_other() -> None:
    def half(codes: list[float], scale: float) -> Quantized:
        value = torch.tensor(scale, dtype=torch.float64)
        return Quantized(codes=rows(codes), scale=value.reshape(1, 1), group_scale=value)

    gate, up = requantize_to_max(half([100.0, -3.0, 2.0], 0.25), half([50.0, 7.0, -1.0], 1.0), Format.INT8)
    assert gate.codes.tolist() == [[25.0, -1.0, 0.0]]  # 25, -0.75, 0.5: to even
    assert up.codes.tolist() == [[50.0, 7.0, -1.0]]
    assert float(gate.group_scale) == float(up.group_scale) == 1.0


def test_weights_never_use_the_code_without_a_positive_twin() -> None:
    assert symmetric(rows([-128.0, -127.0, 127.0]), Format.INT8).tolist() == [[-127.0, -127.0, 127.0]]
