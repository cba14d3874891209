"""Tensor cores against a machine that truncates as they were measured to, and sums over K in slices against torch's 16-bit arithmetic."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references import enclosure, products
from references.accumulators import FP8_FRACTION_BITS, FP8_STEP, tf32
from references.bounds import Interval, exactly
from references.formats import saturate, torch_dtype
from references.loading import Matrix
from references.products import Routed, operand
from references.tests.one_matrix import finished, finished_in_slices, gemm, matmul, slices
from references.vocabulary import Accumulator, Epilogue, Format, Recipe

SEEDS = st.integers(0, 2**31)


def values(fmt: Format, rows: int, columns: int, seed: int, spread: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g, dtype=torch.float64) * torch.exp2(spread * torch.randn(rows, columns, generator=g))
    return saturate(x * 100.0 / x.abs().max(), fmt)


def truncated(x: torch.Tensor, quantum: torch.Tensor) -> torch.Tensor:
    return torch.trunc(x / quantum) * quantum


def quantum(magnitude: torch.Tensor, bits: int) -> torch.Tensor:
    exponent = torch.frexp(magnitude)[1].to(torch.float64) - 1.0 - bits
    return torch.where(magnitude == 0, 1.0, torch.exp2(exponent))


def machine(a: torch.Tensor, w: torch.Tensor, bits: int, step: int = FP8_STEP) -> torch.Tensor:
    """[M, N]: K ascending, as the module's docstring describes one step."""
    total = torch.zeros(a.shape[0], w.shape[0], dtype=torch.float64)
    for start in range(0, a.shape[1], step):
        products = a[:, None, start : start + step] * w[None, :, start : start + step]
        addends = torch.cat([total[..., None], products], -1)
        exact = truncated(addends, quantum(addends.abs().amax(-1, keepdim=True), bits)).sum(-1)
        total = truncated(exact, quantum(exact.abs(), bits))
    return total


def holds(interval: Interval, value: torch.Tensor) -> bool:
    return bool(((interval.low <= value) & (value <= interval.high)).all())


def sums(a: torch.Tensor, w: torch.Tensor, accumulator: Accumulator) -> Interval:
    left, right = (operand(exactly(x), Format.E4M3FN, accumulator) for x in (a, w))
    return matmul(left, right, accumulator)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.floats(0, 3), SEEDS)
def test_a_machine_of_fourteen_bits_stays_inside(columns: int, spread: float, seed: int) -> None:
    a, w = values(Format.E4M3FN, 3, columns, seed, spread), values(Format.E4M3FN, 4, columns, seed + 1, spread)
    found = machine(a, w, FP8_FRACTION_BITS)
    assert holds(sums(a, w, Accumulator.TENSOR_CORE_FP8), found)
    assert holds(sums(a, w, Accumulator.TENSOR_CORE_FP8_ANY), found)


@settings(max_examples=40, deadline=None)
@given(st.integers(33, 300), st.integers(2, 4), SEEDS)
def test_steps_divided_among_warps_stay_inside_the_bound_for_any_order(columns: int, warps: int, seed: int) -> None:
    a, w = values(Format.E4M3FN, 3, columns, seed, 1.0), values(Format.E4M3FN, 4, columns, seed + 1, 1.0)
    owner = torch.randint(0, warps, (-(-columns // FP8_STEP),), generator=torch.Generator().manual_seed(seed))
    mine = owner.repeat_interleave(FP8_STEP)[:columns]
    total = torch.zeros(3, 4)
    for warp in range(warps):
        kept = mine == warp
        total = total + machine(a * kept, w, FP8_FRACTION_BITS).float()
    assert holds(sums(a, w, Accumulator.TENSOR_CORE_FP8_ANY), total.double())


@pytest.mark.parametrize("accumulator", [Accumulator.TENSOR_CORE_FP8, Accumulator.TENSOR_CORE_FP8_ANY])
@settings(max_examples=40, deadline=None)
@given(columns=st.integers(1, 100), seed=SEEDS)
def test_codes_in_doubt_stay_inside_whichever_they_are(accumulator: Accumulator, columns: int, seed: int) -> None:
    """Some intervals hold codes of both signs, and there are rows of two experts."""
    g = torch.Generator().manual_seed(seed)
    a, w = values(Format.E4M3FN, 6, columns, seed, 2.0), values(Format.E4M3FN, 8, columns, seed + 1, 2.0)
    step = 2.0 ** torch.randint(-9, 3, a.shape, generator=g)
    low, high = saturate(a - step, Format.E4M3FN), saturate(a + step, Format.E4M3FN)
    rows = operand(Interval(low, high), Format.E4M3FN, accumulator)
    matrices = operand(exactly(w.reshape(2, 4, columns)), Format.E4M3FN, accumulator)
    interval = products.matmul(rows, matrices, accumulator, Routed.of([2, 4]))
    for _ in range(4):
        chosen = torch.where(torch.rand(a.shape, generator=g) < 0.5, low, high)
        found = torch.cat([machine(chosen[:2], w[:4], FP8_FRACTION_BITS), machine(chosen[2:], w[4:], FP8_FRACTION_BITS)])
        assert holds(interval, found)


def test_a_machine_of_fewer_bits_does_not() -> None:
    a, w = values(Format.E4M3FN, 8, 128, 3, 1.0), values(Format.E4M3FN, 16, 128, 4, 1.0)
    assert not holds(sums(a, w, Accumulator.TENSOR_CORE_FP8), machine(a, w, FP8_FRACTION_BITS - 3))


def test_what_survives_beside_one() -> None:
    """The probe: a big addend, a small one beside it, and the big one taken away in a later step."""
    for power, left in ((13, 2.0**-13), (14, 0.0)):
        a, w = torch.zeros(1, 64, dtype=torch.float64), torch.ones(1, 64, dtype=torch.float64)
        a[0, 0], a[0, 1], w[0, 1], a[0, 40] = 1.0, 2.0 ** -(power // 2), 2.0 ** -(power - power // 2), -1.0
        interval = sums(a, w, Accumulator.TENSOR_CORE_FP8)
        assert float(machine(a, w, FP8_FRACTION_BITS)) == left
        assert float(interval.low) <= left <= float(interval.high)
        assert (float(interval.low) == float(interval.high)) == (power == 13)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.floats(0, 3), SEEDS)
def test_sixteen_bit_operands_lose_one_unit_an_addition_at_most(columns: int, spread: float, seed: int) -> None:
    a, w = values(Format.BF16, 3, columns, seed, spread), values(Format.BF16, 4, columns, seed + 1, spread)
    left, right = (operand(exactly(x), Format.BF16, Accumulator.TENSOR_CORE) for x in (a, w))
    interval = matmul(left, right, Accumulator.TENSOR_CORE)
    assert holds(interval, truncated_to_24(a, w))


def truncated_to_24(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Steps of 16 columns, 25 fraction bits inside a step, 24 bits kept."""
    total = torch.zeros(a.shape[0], w.shape[0], dtype=torch.float64)
    for start in range(0, a.shape[1], 16):
        addends = torch.cat([total[..., None], a[:, None, start : start + 16] * w[None, :, start : start + 16]], -1)
        exact = truncated(addends, quantum(addends.abs().amax(-1, keepdim=True), 25)).sum(-1)
        total = truncated(exact, quantum(exact.abs(), 23))
    return total


def test_tf32_drops_the_low_thirteen_bits() -> None:
    given_ = torch.tensor([2049.99, -2049.99, 1.0 + 2.0**-10, 1.0 + 2.0**-11, 0.0], dtype=torch.float64)
    assert tf32(given_).tolist() == [2048.0, -2048.0, 1.0 + 2.0**-10, 1.0, 0.0]


# ------------------------------------------------------------------------------------------------------------- K in slices


def recipe(fmt: Format, epilogue: Epilogue) -> Recipe:
    return Recipe(
        name="slices",
        a1=None,
        a2=None,
        compute=(fmt,),
        activation_store=fmt,
        output=fmt,
        accumulator=Accumulator.TENSOR_CORE,
        epilogue=epilogue,
        split_store=fmt,
    )


def in_slices(a: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, how: Recipe, cuts: list[int]) -> torch.Tensor:
    """[M, N] in the stored format: each slice stored, finished with the bias in the first, then added one after another."""
    dtype = torch_dtype(how.output)
    out: torch.Tensor | None = None
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, a.shape[1]], strict=True)):
        part = (a[:, start:end] @ w[:, start:end].T).float()
        own = bias if number == 0 else torch.zeros_like(bias)
        if how.epilogue is Epilogue.CHANNEL_STORED:
            part = (part.to(dtype).double() * scale + own).to(dtype)
        else:
            part = ((part * scale.float()).to(dtype).double() + own).to(dtype)
        out = part if out is None else out + part
    assert out is not None
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([Format.FP16, Format.BF16]), st.sampled_from([Epilogue.CHANNEL_STORED, Epilogue.BIAS_STORED]), st.integers(2, 5), SEEDS
)
def test_slices_stay_inside(fmt: Format, epilogue: Epilogue, blocks: int, seed: int) -> None:
    interval, a, w, scale, bias, how = sliced(fmt, epilogue, blocks, seed)
    for cuts in ([], [128], [128 * k for k in range(1, blocks)]):
        assert holds(interval, in_slices(a, w, scale, bias, how, cuts).double())


def sliced(
    fmt: Format, epilogue: Epilogue, blocks: int, seed: int
) -> tuple[Interval, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Recipe]:
    g = torch.Generator().manual_seed(seed)
    a, w = values(fmt, 3, 128 * blocks, seed, 1.0) / 64.0, values(Format.INT8, 6, 128 * blocks, seed + 1, 1.0)
    a = a.to(torch_dtype(fmt)).double()
    scale, bias = (torch.rand(6, generator=g).to(torch_dtype(fmt)).double() / divisor for divisor in (64.0, 0.25))
    how = recipe(fmt, epilogue)
    matrix = Matrix(codes=w, low=w, high=w, format=Format.INT8, scale=scale[:, None], bias=bias)
    bare = Matrix(
        codes=w, low=w, high=w, format=Format.INT8, scale=None if epilogue is Epilogue.CHANNEL_STORED else scale[:, None], bias=bias
    )
    rows = operand(exactly(a), fmt, how.accumulator)
    divided = slices(rows, operand(exactly(w), Format.INT8, how.accumulator))
    assert divided is not None
    return finished_in_slices(gemm(rows, bare, how.accumulator), divided, bare, matrix, how), a, w, scale, bias, how


@pytest.mark.parametrize("epilogue", [Epilogue.CHANNEL_STORED, Epilogue.BIAS_STORED])
def test_slices_do_not_stay_inside_the_bound_of_one_block(epilogue: Epilogue) -> None:
    _, a, w, scale, bias, how = sliced(Format.BF16, epilogue, 4, 5)
    matrix = Matrix(codes=w, low=w, high=w, format=Format.INT8, scale=scale[:, None], bias=bias)
    bare = Matrix(
        codes=w, low=w, high=w, format=Format.INT8, scale=None if epilogue is Epilogue.CHANNEL_STORED else scale[:, None], bias=bias
    )
    whole = finished(gemm(operand(exactly(a), Format.BF16, how.accumulator), bare, how.accumulator), matrix, how)
    assert not holds(whole, in_slices(a, w, scale, bias, how, [128, 256, 384]).double())


def test_slices_that_cancel_keep_the_errors_of_both_their_roundings() -> None:
    g = torch.Generator().manual_seed(7)
    a = torch.zeros(1, 256, dtype=torch.float64)
    a[0, 0], a[0, 128] = 1.0 + 2.0**-8, -1.0
    w = torch.zeros(4096, 256, dtype=torch.float64)
    w[:, 0] = torch.randint(65, 67, (4096,), generator=g).double()
    w[:, 128] = w[:, 0] + torch.randint(-1, 2, (4096,), generator=g)
    scale = 1.0 + torch.rand(4096, generator=g).double() / 64.0
    how, bias = recipe(Format.BF16, Epilogue.CHANNEL_STORED), torch.zeros(4096, dtype=torch.float64)
    matrix = Matrix(codes=w, low=w, high=w, format=Format.INT8, scale=scale[:, None], bias=None)
    bare = Matrix(codes=w, low=w, high=w, format=Format.INT8, scale=None, bias=None)
    rows = operand(exactly(a), Format.FP16, how.accumulator)
    divided = slices(rows, operand(exactly(w), Format.INT8, how.accumulator))
    assert divided is not None
    interval = finished_in_slices(gemm(rows, bare, how.accumulator), divided, bare, matrix, how)
    found = in_slices(a, w, scale, bias, how, [128]).double()
    assert holds(interval, found)
    exact = (a @ w.T) * scale
    assert float((found - exact).abs().max()) > 0.5  # more than one rounding of each slice, to halves, can do


def of_blocks(each: float, blocks: int, how: Recipe, bias: float = 0.0) -> tuple[Interval, float]:
    """Bounds of ``blocks`` blocks whose products add up to ``each``, a product of two fp16 numbers; and what a machine gives."""
    a, w = (torch.zeros(1, 128 * blocks, dtype=torch.float64) for _ in range(2))
    a[0, ::128], w[0, ::128] = 2.0**-12, each * 2.0**12
    one, added = torch.ones(1, dtype=torch.float64), torch.full((1,), bias, dtype=torch.float64)
    matrix = Matrix(codes=w, low=w, high=w, format=Format.FP16, scale=one[:, None], bias=added)
    rows = operand(exactly(a), Format.FP16, how.accumulator)
    divided = slices(rows, operand(exactly(w), Format.FP16, how.accumulator))
    assert divided is not None
    interval = finished_in_slices(gemm(rows, matrix, how.accumulator), divided, matrix, matrix, how)
    return interval, in_slices(a, w, one, added, how, [128 * k for k in range(1, blocks)]).double().item()


def test_slices_below_the_smallest_number_are_all_lost() -> None:
    how, little = recipe(Format.FP16, Epilogue.BIAS_STORED), (1.0 - 2.0**-6) * 2.0**-25
    interval, found = of_blocks(little, 4, how)
    assert found == 0
    assert interval.low.item() <= 0
    assert of_blocks(4 * little, 4, replace(how, stored_share=0.25))[0].low.item() <= 0  # a quarter of each is as little


@pytest.mark.parametrize("blocks", [2, 6])
def test_slices_are_lost_beside_the_bias_that_the_first_begins_with(blocks: int) -> None:
    interval, found = of_blocks(0.25 - 2.0**-10, blocks, recipe(Format.FP16, Epilogue.BIAS_STORED), bias=513.0)
    assert found == 513
    assert interval.low.item() <= 513


def test_what_is_made_whole_after_it_was_stored_may_overflow() -> None:
    how = replace(recipe(Format.FP16, Epilogue.BIAS_STORED), stored_share=0.25)
    assert enclosure._results(exactly(torch.tensor([100000.0, -100000.0, 3.0]).double()), how).low.tolist() == [inf, -inf, 3.0]


def test_up_to_128_columns_are_one_block() -> None:
    x = operand(exactly(torch.ones(1, 128, dtype=torch.float64)), Format.FP16, Accumulator.TENSOR_CORE)
    assert slices(x, x) is None
