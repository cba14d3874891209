"""A kernel's own layout against the same steps in torch's float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from references.formats import decode, torch_dtype
from references.kernel_layout import for_kernel
from references.loading import Matrix
from references.vocabulary import Accumulator, Format, Layout, Quotient, Recipe, WeightQuant

PLAIN = Recipe(
    name="plain",
    a1=None,
    a2=None,
    compute=(Format.BF16,),
    activation_store=Format.BF16,
    output=Format.BF16,
    accumulator=Accumulator.FP32,
)
UE8M0 = WeightQuant(
    format=Format.E4M3FN,
    layout=Layout.BLOCK128,
    scale_floor=1e-4 / 448.0,
    quotient=Quotient.RECIPROCAL,
    power_of_two=True,
    scale_by_reciprocal=True,
)


def fp8(rows: int, columns: int, groups: int, seed: int = 0) -> Matrix:
    g = torch.Generator().manual_seed(seed)
    codes = decode((torch.randn(rows, columns, generator=g) * 60).to(torch.float8_e4m3fn), Format.E4M3FN)
    blocks = torch.rand(-(-rows // 128), groups, generator=g) * 0.01 + 0.001
    scale = blocks.double().repeat_interleave(128, 0)[:rows]
    return Matrix(codes=codes, low=codes, high=codes, format=Format.E4M3FN, scale=scale, bias=None)


def test_a_plain_recipe_changes_nothing() -> None:
    matrix = fp8(256, 256, 2)
    assert for_kernel(matrix, PLAIN) is matrix


@pytest.mark.parametrize("fmt", [Format.BF16, Format.FP16])
def test_scales_are_rounded_to_the_hidden_dtype(fmt: Format) -> None:
    matrix = fp8(256, 256, 2)
    assert matrix.scale is not None
    scale = for_kernel(matrix, replace(PLAIN, weight_scale_store=fmt)).scale
    assert scale is not None
    assert torch.equal(scale, matrix.scale.float().to(torch_dtype(fmt)).double())
    assert not torch.equal(scale, matrix.scale)


@pytest.mark.parametrize(("groups", "one_group_too", "stored"), [(2, False, True), (1, False, False), (1, True, True)])
def test_weights_are_multiplied_out_where_scales_change_along_k(groups: int, one_group_too: bool, stored: bool) -> None:
    how = replace(PLAIN, weight_store=Format.BF16, weight_store_one_group=one_group_too)
    assert (for_kernel(fp8(128, 128 * groups, groups), how).store is Format.BF16) is stored


def test_the_second_quantization_is_that_of_torch() -> None:
    """fp8_utils.py, requant_weight_ue8m0_inplace: float32 weights, a power of two no smaller than amax / 448 for each block."""
    matrix = fp8(256, 384, 3)
    assert matrix.scale is not None
    wide = (matrix.codes * matrix.scale.repeat_interleave(128, 1)).float()
    got = for_kernel(matrix, replace(PLAIN, weight_requant=UE8M0))
    assert got.scale is not None
    for i in range(2):
        for j in range(3):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = torch.exp2(torch.ceil(torch.log2(wide[block].abs().max() / 448.0)))
            assert (got.scale[128 * i : 128 * i + 128, j] == float(scale)).all()
            assert torch.equal(got.codes[block], (wide[block] / scale).to(torch.float8_e4m3fn).double())
    assert not torch.equal(got.scale, matrix.scale)


def test_a_code_in_doubt_stays_in_doubt() -> None:
    matrix = fp8(128, 128, 1)
    largest = matrix.codes.abs().argmax()
    place = int((largest + 1) % matrix.codes.numel())
    high = matrix.codes.clone()
    high.view(-1)[place] = high.view(-1)[place] * 0.5 + 0.25
    low, high = torch.minimum(matrix.codes, high), torch.maximum(matrix.codes, high)
    doubtful = replace(matrix, codes=low, low=low, high=high)
    got = for_kernel(doubtful, replace(PLAIN, weight_requant=UE8M0))
    assert bool((got.low <= got.codes).all() and (got.codes <= got.high).all())
    assert bool((got.low != got.high).sum() == 1)


def test_a_scale_in_doubt_is_refused() -> None:
    matrix = fp8(128, 128, 1)
    place = int(matrix.codes.argmax())
    high = matrix.codes.clone()
    high.view(-1)[place] *= 4.0
    with pytest.raises(NotImplementedError, match="the scale would be in doubt"):
        for_kernel(replace(matrix, high=high), replace(PLAIN, weight_requant=UE8M0))


@pytest.mark.parametrize("how", [replace(UE8M0, power_of_two=False), replace(UE8M0, layout=Layout.CHANNEL)])
def test_another_second_quantization_is_refused(how: WeightQuant) -> None:
    with pytest.raises(NotImplementedError, match="power-of-two scales only"):
        for_kernel(fp8(128, 128, 1), replace(PLAIN, weight_requant=how))


def test_float32_weights_lose_thirteen_bits_on_tensor_cores() -> None:
    codes = torch.tensor([[2049.99, 1.0]], dtype=torch.float64)
    matrix = Matrix(codes=codes, low=codes, high=codes, format=Format.FP32, scale=None, bias=None)
    assert for_kernel(matrix, replace(PLAIN, accumulator=Accumulator.TENSOR_CORE)).codes.tolist() == [[2048.0, 1.0]]
    assert for_kernel(matrix, PLAIN) is matrix
