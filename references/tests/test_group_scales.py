"""Group scales as kernels' layouts hold them, and scales that multiply sums or stored results, against torch's own casts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from references.bounds import exactly
from references.enclosure import enclose
from references.formats import decode, torch_dtype
from references.kernel_layout import for_kernel
from references.loading import Matrix, for_router, load
from references.moe import Expert, Projection, Routing, forward
from references.products import operand
from references.tests.one_matrix import finished, gemm
from references.vocabulary import (
    Accumulator,
    Activation,
    Epilogue,
    Format,
    GlobalScale,
    Layout,
    Recipe,
    RouterWeight,
)

BF16 = torch.bfloat16


def plain(**changes: object) -> Recipe:
    made = Recipe(
        name="test",
        a1=None,
        a2=None,
        compute=(Format.BF16,),
        activation_store=Format.BF16,
        output=Format.BF16,
        accumulator=Accumulator.FP32,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def matrix(rows: int, groups: int, width: int) -> Matrix:
    codes = torch.randint(-7, 8, (rows, groups * width), generator=generator()).double()
    scale = (torch.rand(rows, groups, generator=generator()) / 16.0 + 0.004).to(BF16).double()
    return Matrix(codes=codes, low=codes, high=codes, format=Format.INT4, scale=scale, bias=None, width=width)


def test_fp8_scales_of_a_row_are_what_torch_casts_to() -> None:
    made = matrix(5, 3, 128)
    how = plain(weight_scale_fp8=True, weight_store=Format.E4M3FN)
    held = for_kernel(made, how).multiplied_out()
    assert made.scale is not None
    row = (made.scale.float().amax(1, keepdim=True) * torch.tensor(1.0 / 448.0)).clamp_min(1.0 / (448.0 * 512.0))
    first = (made.scale.float() * row.reciprocal()).to(torch.float8_e4m3fn).float()
    eighths = (first / 8.0).to(torch.float8_e4m3fn).float()
    products = (made.codes.float() * eighths.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    assert torch.equal(held.codes, products.double())
    assert held.scale is not None
    assert torch.equal(held.scale, (row * 8.0).double())
    assert not torch.equal(held.codes, made.codes * eighths.double().repeat_interleave(128, 1))  # products do round


def test_an_fp8_scale_half_way_between_two_falls_as_on_a_gpu() -> None:
    """Seen on an H200: 248, half-way between 240 and 256 by division, becomes 240, for the row's scale is multiplied out of 1 / 448."""
    codes = torch.ones(1, 256, dtype=torch.float64)
    scale = torch.tensor([[21.0 * 2.0**-11, 93.0 * 2.0**-14]], dtype=torch.float64)
    made = Matrix(codes=codes, low=codes, high=codes, format=Format.INT4, scale=scale, bias=None, width=128)
    held = for_kernel(made, plain(weight_scale_fp8=True, weight_store=Format.E4M3FN))
    assert scale[0, 1] / (scale[0, 0] / 448.0) == 248.0
    assert held.scale is not None
    assert held.scale.tolist() == [[56.0, 30.0]]


@pytest.mark.parametrize("bias", [None, torch.linspace(-2.0, 2.0, 6)])
def test_a_channel_scale_then_a_bias_each_round_the_stored_result(bias: torch.Tensor | None) -> None:
    made = matrix(6, 1, 128)
    made = replace(made, bias=None if bias is None else bias.double())
    rows = torch.randn(9, 128, generator=generator()).to(BF16)
    how = plain(epilogue=Epilogue.CHANNEL_THEN_BIAS)
    assert made.scale is not None
    kernel = (rows.float() @ made.codes.float().T).to(BF16) * made.scale[:, 0].to(BF16)
    kernel = kernel if bias is None else kernel + bias.to(BF16)
    prepared = operand(exactly(rows.double()), Format.BF16, how.accumulator)
    x = finished(gemm(prepared, replace(made, scale=None), how.accumulator), made, how)
    assert bool(((x.low <= kernel.double()) & (kernel.double() <= x.high)).all())
    if bias is not None:  # scale and bias contracted into one fma
        stored = (rows.float() @ made.codes.float().T).to(BF16).double()
        fused = (stored * made.scale[:, 0].to(BF16).double() + bias.to(BF16).double()).to(BF16).double()
        assert bool((fused != kernel.double()).any())
        assert bool(((x.low <= fused) & (fused <= x.high)).all())
    whole = (rows.double() @ made.codes.T) * made.scale[:, 0] + (0.0 if bias is None else bias.double())
    assert bool((whole.to(BF16).double() < x.low).any() | (whole.to(BF16).double() > x.high).any())  # one rounding is not three


def nvfp4(global_scale: GlobalScale, placement: RouterWeight) -> tuple[tuple[Expert, ...], Recipe]:
    def projection(rows: int, columns: int, seed: int) -> Projection:
        g = torch.Generator().manual_seed(seed)
        return Projection(
            codes=torch.randint(0, 16, (rows, columns), generator=g).to(torch.uint8),
            format=Format.E2M1,
            layout=Layout.GROUP16,
            scale=(torch.rand(rows, columns // 16, generator=g) * 200.0 + 20.0).to(torch.float8_e4m3fn).float(),
            global_scale=torch.tensor(0.00037 * (seed + 1)),
        )

    experts = tuple(Expert(gate=None, up=projection(48, 32, e), down=projection(32, 48, e + 10)) for e in range(2))
    how = plain(global_scale=global_scale, router_weight=placement, weight_store=Format.BF16, epilogue=Epilogue.BIAS_STORED)
    return experts, how


def dense(p: Projection) -> torch.Tensor:
    """[N, K] float32 but for the global scale: exact in bf16."""
    assert p.scale is not None
    values = decode(p.codes, p.format).float() * p.scale.repeat_interleave(16, 1)
    assert torch.equal(values, values.to(BF16).float())
    return values


@pytest.mark.parametrize(("where", "placement"), [(GlobalScale.SUMS, RouterWeight.SUM), (GlobalScale.ROUTER, RouterWeight.STORED)])
def test_a_global_scale_meets_sums_or_the_router_weight(where: GlobalScale, placement: RouterWeight) -> None:
    experts, how = nvfp4(where, placement)
    x = torch.randn(6, 32, generator=generator()).to(BF16)
    ids = torch.tensor([[0], [1], [0], [1], [1], [0]])
    weights = torch.linspace(0.3, 0.95, 6).reshape(6, 1)
    loaded = load(experts, how)
    routing = Routing(topk_ids=ids, topk_weights=weights.double(), exact=True)
    answer = forward(loaded, x, routing, Activation.RELU2_NO_MUL, how)[:, 0]
    bounds = enclose(loaded, x, routing, Activation.RELU2_NO_MUL, how)
    for token, e in enumerate(ids.flatten().tolist()):
        up, down = experts[e].up, experts[e].down
        assert up.global_scale is not None
        assert down.global_scale is not None
        h = ((x[token].float() @ dense(up).T) * up.global_scale).to(BF16)
        h = torch.nn.functional.relu(h).float().square().to(BF16)
        sums, weight = h.float() @ dense(down).T, weights[token, 0]
        if where is GlobalScale.ROUTER:
            kernel = sums.to(BF16) * (weight * down.global_scale).to(BF16)
        else:
            kernel = (sums * down.global_scale).to(BF16).float() * weight
        kernel = kernel.double()
        assert bool(((bounds.low[token] <= kernel) & (kernel <= bounds.high[token])).all())
        assert bool(((bounds.low[token] <= answer[token]) & (answer[token] <= bounds.high[token])).all())


def test_a_global_scale_meets_a_router_weight_that_enters_a_second_time() -> None:
    experts, given = nvfp4(GlobalScale.SUMS, RouterWeight.INPUT)
    how = replace(given, router_weight_again=RouterWeight.FIRST_STORED)
    x = torch.randn(4, 32, generator=generator()).to(BF16)
    weights = torch.linspace(0.3, 0.95, 4).reshape(4, 1)
    routing = Routing(topk_ids=torch.tensor([[0], [1], [1], [0]]), topk_weights=weights.double(), exact=True)
    factors = [for_router(expert.w13) for expert in load(experts, how)]
    loaded = tuple(replace(e, w13=w13, first_router_factor=f) for e, (w13, f) in zip(load(experts, how), factors, strict=True))
    bounds = enclose(loaded, x, routing, Activation.RELU2_NO_MUL, how)
    missed = enclose(load(experts, how), x, routing, Activation.RELU2_NO_MUL, replace(how, router_weight_again=None))
    for token, e in enumerate(routing.topk_ids.flatten().tolist()):
        up, down = experts[e].up, experts[e].down
        assert up.global_scale is not None
        assert down.global_scale is not None
        row = (x[token] * weights[token].to(BF16)).float()
        h = (row @ dense(up).T).to(BF16) * (weights[token] * up.global_scale).to(BF16)
        h = torch.nn.functional.relu(h).float().square().to(BF16)
        kernel = ((h.float() @ dense(down).T) * down.global_scale).to(BF16).double()
        assert bool(((bounds.low[token] <= kernel) & (kernel <= bounds.high[token])).all())
        assert bool(((missed.low[token] > kernel) | (kernel > missed.high[token])).any())


def test_the_store_of_a_matrix_keeps_the_factor_of_sums() -> None:
    experts, how = nvfp4(GlobalScale.SUMS, RouterWeight.SUM)
    w2 = load(experts, how)[1].w2
    out = w2.multiplied_out()
    assert out.format is Format.BF16
    assert out.scale is not None
    assert torch.equal(out.scale, torch.full((32, 1), float(experts[1].down.global_scale or 0.0), dtype=torch.float64))
    assert torch.equal(w2.values, out.codes * out.scale)
    assert out.codes.to(torch_dtype(Format.BF16)).double().equal(out.codes)
