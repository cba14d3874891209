from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from cases.batch import make_batch
from cases.bits import bell, distinct_fp32, grid, permutation
from cases.case import Level, MoECase, Origin
from cases.checkpoint import make_checkpoint
from cases.dense import dense_experts
from cases.gating import swiglu
from cases.generate import cases
from cases.roles import zero_expert
from references.formats import decode
from references.gating import gated
from references.moe import Projection
from references.routing import route
from references.vocabulary import Activation, Format, Layout

ACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: torch.nn.functional.silu,
    Activation.SILU_NO_MUL: torch.nn.functional.silu,
    Activation.GELU: torch.nn.functional.gelu,
    Activation.GELU_NO_MUL: torch.nn.functional.gelu,
    Activation.GELU_TANH: torch.nn.functional.gelu,
    Activation.GELU_TANH_NO_MUL: torch.nn.functional.gelu,
    Activation.RELU2_NO_MUL: lambda value: value.relu().square(),
}
WIDE = [case for case in cases(Level.SMOKE) if case.tokens >= 17 and case.experts >= 4]
ids = lambda case: case.id  # noqa: E731


def weight(projection: Projection) -> torch.Tensor:
    values = decode(projection.codes, projection.format)
    if projection.scale is None:
        return values
    scale = projection.scale.double() * (1.0 if projection.global_scale is None else projection.global_scale.double())
    width = projection.layout.width
    if projection.layout is not Layout.BLOCK128 and width is not None:
        if projection.zero_point is not None:
            values = values - projection.zero_point.double().repeat_interleave(width, 1)
        return values * scale.repeat_interleave(width, 1)
    if projection.zero_point is not None:
        values = values - projection.zero_point.double()
    if projection.layout is Layout.BLOCK128:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
    return values * scale


def run(case: MoECase) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [M, H] of unquantized activations, and the largest intermediate."""
    batch = make_batch(case)
    routing = route(batch.router_logits, case.top_k, case.renormalize)
    x, out, peak = batch.hidden_states.double(), torch.zeros(case.tokens, case.hidden, dtype=torch.float64), torch.zeros(())
    for index, expert in enumerate(dense_experts(dataclasses.replace(case, bias=False))):
        up = x @ weight(expert.up).T
        given = swiglu(case)
        if expert.gate is None:
            middle = ACT[case.activation](up)
        elif given is not None:
            middle = gated(case.activation, given, x @ weight(expert.gate).T, up, None)
        else:
            middle = ACT[case.activation](x @ weight(expert.gate).T) * up
        share = torch.where(routing.topk_ids == index, routing.topk_weights, 0).sum(1, keepdim=True)
        out += share * (middle @ weight(expert.down).T)
        peak = torch.maximum(peak, middle.abs().max())
    return out, peak


@pytest.mark.parametrize("case", WIDE, ids=ids)
def test_outputs_are_neither_tiny_nor_near_overflow(case: MoECase) -> None:
    out, peak = run(case)
    weights = route(make_batch(case).router_logits, case.top_k, case.renormalize).topk_weights
    assert 0.2 < float(out.square().mean().sqrt() / weights.square().mean().sqrt()) < 10
    assert float(peak) < 65504 / 64


@pytest.mark.parametrize("case", [case for case in WIDE if case.static_input], ids=ids)
def test_static_scales_use_the_range_and_a_few_inputs_saturate(case: MoECase) -> None:
    largest = max(float(value) for name, value in make_checkpoint(case).tensors.items() if name.endswith("up_proj.input_scale"))
    codes = make_batch(case).hidden_states.double().abs() / largest
    limit = 127 if case.weight is Format.INT8 else 448
    assert 0.5 * limit < float(codes.max())
    assert float((codes > limit).double().mean()) < 0.01


def test_some_inputs_saturate_somewhere() -> None:
    case = MoECase.from_id("int8-tensor-static-quark-silu-fp16-e4k2m129h128i64-balanced")
    largest = max(float(value) for name, value in make_checkpoint(case).tensors.items() if name.endswith("up_proj.input_scale"))
    assert int((make_batch(case).hidden_states.double().abs() / largest > 127.5).sum()) > 0


def test_one_scale_is_tiny_in_channel_and_block_layouts() -> None:
    for text in (
        "int8-channel-dyntoken-ct-silu-fp16-e4k2m8h128i64-balanced",
        "e4m3fn-block128-dyngroup128-ct-silu-fp16-e4k2m8h384i256-balanced",
    ):
        scale = dense_experts(MoECase.from_id(text))[-1].up.scale
        assert scale is not None
        assert int((scale < 2.0**-18 * scale.median()).sum()) == 1
        assert float(scale.flatten()[0]) > 2.0**-4 * float(scale.median())


def test_biases_of_a_projection_differ_and_every_dtype_holds_them() -> None:
    case = MoECase.from_id("fp32-none-none-plain-silu-fp32-e4k2m8h128i64-balanced-bias")
    for expert in dense_experts(case):
        for projection in (expert.up, expert.down):
            bias = projection.bias
            assert bias is not None
            assert bias.unique().numel() == bias.numel()
            assert torch.equal(bias.to(torch.bfloat16).float(), bias)
            assert torch.equal(bias.half().float(), bias)


def test_channel_maxima_of_unquantized_weights_differ_between_experts() -> None:
    case = MoECase.from_id("e4m3fn-channel-dyntoken-online-silu-bf16-e5k2m8h128i64-balanced")
    assert case.origin is Origin.ONLINE
    maxima = [expert.down.codes.float().abs().amax(1) for expert in dense_experts(case)]
    alive = [values for values in maxima if bool(values.any())]
    for left, right in pairwise(alive):
        assert float((left != right).double().mean()) > 0.9


def test_plain_weights_are_the_same_online_and_not() -> None:
    online = make_checkpoint(MoECase.from_id("e4m3fn-channel-dyntoken-online-silu-bf16-e4k2m8h128i64-balanced")).tensors
    plain = make_checkpoint(MoECase.from_id("bf16-none-none-plain-silu-bf16-e4k2m8h128i64-balanced")).tensors
    assert all(torch.equal(online[name], plain[name]) for name in plain)


def test_the_bytes_are_these() -> None:
    """A literal, so that another machine, another torch or an edit that moves every number is seen."""
    assert permutation("a", 8).tolist() == [6, 3, 7, 0, 5, 1, 2, 4]
    assert [value.hex() for value in bell("a", (2,)).tolist()] == ["0x1.ea8e58037586ap+0", "-0x1.72157276aaac5p+0"]


def test_grids_and_nudged_scales_hold_no_value_twice() -> None:
    values = grid("x", (4, 1000), 0.5, 0.5 + 2.0**-14)  # fewer fp32 numbers than values
    assert values.to(torch.float32).unique().numel() < values.numel()
    moved = distinct_fp32(values)
    assert moved.unique().numel() == values.numel()
    assert torch.equal(moved.flatten().argsort(), values.to(torch.float32).flatten().argsort(stable=True))
    assert float((moved.double() / values - 1).abs().max()) < 4000 * 2.0**-23


TIGHT = [case for case in cases(Level.NIGHTLY) if case.tight]


@pytest.mark.parametrize("case", [case for case in TIGHT if case.tokens >= 17], ids=ids)
def test_inputs_cross_small_limits_on_both_signs(case: MoECase) -> None:
    given = swiglu(case)
    assert given is not None
    limit = given.limit or given.linear
    assert limit is not None
    x = make_batch(case).hidden_states.double()
    live = [expert for index, expert in enumerate(dense_experts(case)) if index != zero_expert(case)]
    up = torch.stack([x @ weight(expert.up).T for expert in live])
    gate = torch.stack([x @ weight(expert.gate).T for expert in live if expert.gate is not None])
    for beyond in (up > limit, up < -limit, gate > (given.situ or limit), gate < -1.0):
        assert 0.002 < float(beyond.double().mean()) < 0.4
