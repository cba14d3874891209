"""Triton's interpreter computes what a GPU would: one test per gap, each through a kernel."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.vllm
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(scope="module")
def kernels(interpreter: None) -> ModuleType:
    from harness.subject.tests import kernels

    return kernels


def _one_program(kernel: Any, *arguments: Any, **constants: Any) -> None:
    kernel[(1,)](*arguments, **constants)


def _cast(kernels: ModuleType, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.zeros(source.shape, dtype=dtype)
    _one_program(kernels.cast, source, target, n=source.numel())
    return target


def _hard_values(count: int = 4096) -> torch.Tensor:
    """Random float32, their neighbours at ties of bfloat16, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-130, 120, (count,), generator=generator)
    ties = (values.view(torch.int32)[: count // 2] & -65536 | 0x8000).view(torch.float32)
    values[: count // 2] = ties
    values[-6:] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38])
    return values


def test_float32_to_bfloat16_rounds_half_to_even(kernels: ModuleType) -> None:
    x = _hard_values()
    assert torch.equal(_cast(kernels, x, BF16).nan_to_num(7), x.to(BF16).nan_to_num(7))


def test_bfloat16_to_float32_is_exact(kernels: ModuleType) -> None:
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(BF16)
    assert torch.equal(_cast(kernels, x, torch.float32).nan_to_num(7), x.float().nan_to_num(7))


def test_int8_to_bfloat16_keeps_the_value(kernels: ModuleType) -> None:
    x = torch.arange(-128, 128).to(torch.int8)
    assert torch.equal(_cast(kernels, x, BF16), x.to(BF16))


def test_float32_to_float16_rounds_half_to_even(kernels: ModuleType) -> None:
    x = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 5.97e-8, 2.9e-8, -0.0, 2.0**-24 * 1.5, 1.0])
    assert torch.equal(_cast(kernels, x, torch.float16), x.half())


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_float32_to_fp8_rounds_half_to_even_and_saturates(kernels: ModuleType, dtype: torch.dtype, largest: float) -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = grid[torch.isfinite(grid)].unique()
    halfway = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([grid, halfway, halfway * (1 + 2.0**-20), halfway * (1 - 2.0**-20), torch.tensor([largest * 4, -largest * 4])])
    x = torch.nn.functional.pad(x, (0, 1024 - x.numel()))
    assert torch.equal(_cast(kernels, x, dtype).float(), x.clamp(-largest, largest).to(dtype).float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_to_float32_is_exact(kernels: ModuleType, dtype: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert torch.equal(_cast(kernels, x, torch.float32).nan_to_num(7), x.float().nan_to_num(7))


def test_bfloat16_arithmetic(kernels: ModuleType) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(256, generator=generator).to(BF16) for _ in range(2))
    added, multiplied, largest = (torch.zeros(256, dtype=BF16) for _ in range(3))
    _one_program(kernels.add_mul_clamp, a, b, added, multiplied, largest, n=256)
    assert torch.equal(added, (a.float() + b.float()).to(BF16))
    assert torch.equal(multiplied, (a.float() * b.float()).to(BF16))
    assert torch.equal(largest, torch.maximum(a, b))


def test_bfloat16_comparison(kernels: ModuleType) -> None:
    a, b = torch.tensor([1.0, -1.0, -2.0, 0.0]).to(BF16), torch.tensor([2.0, -2.0, 1.0, 0.0]).to(BF16)
    out = torch.zeros(4, dtype=torch.bool)
    _one_program(kernels.greater, a, b, out, n=4)
    assert out.tolist() == [False, True, False, False]


def test_bfloat16_maximum_over_a_row(kernels: ModuleType) -> None:
    x, out = torch.tensor([1.0, -3.0, 2.5, 0.0]).to(BF16), torch.zeros(1, dtype=BF16)
    _one_program(kernels.row_amax, x, out, n=4)
    assert out.item() == 3.0


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, E4M3, E5M2])
def test_dot_adds_in_float32(kernels: ModuleType, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.zeros(32, 32)
    _one_program(kernels.matmul, a, b, out, n=32)
    truth = a.double() @ b.double()
    magnitude = a.double().abs() @ b.double().abs()
    assert (out.double() - truth).abs().le(32 * 2.0**-24 * magnitude).all()


def test_dot_of_int8_is_exact(kernels: ModuleType) -> None:
    generator = torch.Generator().manual_seed(9)
    a, b = (torch.randint(-128, 128, (64, 64), generator=generator).to(torch.int8) for _ in range(2))
    a[0], b[:, 0] = -128, -128
    out = torch.zeros(64, 64, dtype=torch.int32)
    _one_program(kernels.matmul, a, b, out, n=64)
    assert torch.equal(out.long(), a.long() @ b.long())


def test_libdevice_round_goes_half_away_from_zero(kernels: ModuleType) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 8388609.0, -1.4999999])
    out = torch.zeros(8)
    _one_program(kernels.rounded, x, out, n=8)
    assert out.tolist() == [1.0, 2.0, 3.0, -1.0, -3.0, 0.0, 8388609.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32])
def test_libdevice_takes_what_it_takes_on_a_gpu(kernels: ModuleType, dtype: torch.dtype) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -2.5, 1.0, 8.0, -1.5])
    with pytest.raises(Exception, match=r"libdevice.round takes fp32 and fp64, not (bf16|fp16|fp8e4nv|int32)"):
        _one_program(kernels.rounded, x.to(dtype), torch.zeros(8), n=8)
    out = torch.zeros(8, dtype=torch.float64)
    _one_program(kernels.rounded, x.double(), out, n=8)
    assert out.tolist() == [1.0, 2.0, 3.0, -1.0, -3.0, 1.0, 8.0, -2.0]


def test_libdevice_has_no_function_here_that_it_has_not_on_a_gpu() -> None:
    from harness.subject.interpreter import triton_gaps

    names = "import triton.language.extra.cuda.libdevice as d; print(*vars(d))"
    there = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True).stdout.split()
    assert set(triton_gaps._LIBDEVICE) <= set(there)


def test_math_functions_work_inside_nested_functions(kernels: ModuleType) -> None:
    x, out = torch.tensor([0.3, 1.0, 2.0, 5.0]), torch.zeros(4)
    _one_program(kernels.nested, x, out, n=4)
    d = x.double()
    truth = torch.exp2(torch.ceil(torch.log2(d))) + d.sqrt() + d.floor() + torch.sigmoid(d) + torch.exp(-d)
    assert (out.double() - truth).abs().max() < 1e-5


def test_infinities_and_nan_are_made_in_silence(kernels: ModuleType) -> None:
    out = torch.zeros(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _one_program(kernels.nested, torch.tensor([0.0, -1.0, torch.inf, 3e38]), out, n=4)
    assert bool(out[1].isnan())


def test_programs_and_masks(kernels: ModuleType) -> None:
    """What triton_speed.py replaces still launches, masks and patches: twice, over several programs."""
    a, b = torch.arange(37.0), torch.ones(37)
    for _ in range(2):
        out = torch.full((40,), -1.0)
        kernels.strided_add[(5,)](a, b, out, 37, block=8)
        assert out.tolist() == [*(a + b).tolist(), -1.0, -1.0, -1.0]


def test_filling_twice_fills_nothing(kernels: ModuleType) -> None:
    from harness.subject.interpreter import compiled_ops, triton_gaps

    assert triton_gaps.fill() == ()
    compiled_ops.register()  # Humming's operators exist once something has imported it
    assert compiled_ops.register() == ()


def test_builtins_through_the_core_module_and_as_methods(kernels: ModuleType) -> None:
    x = torch.arange(1, 65).float()
    less, floors = torch.zeros(64), torch.zeros(64)
    _one_program(kernels.core_and_members, x, less, floors, n=64)
    assert torch.equal(less, 5 - x)
    assert torch.equal(floors, torch.log2(x).floor())
