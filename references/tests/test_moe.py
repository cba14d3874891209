"""The layer against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from references.answer import answer
from references.formats import round_to, torch_dtype
from references.loading import load
from references.moe import Expert, Projection, Routing, forward
from references.routing import route
from references.tests.layers import make
from references.vocabulary import Accumulator, Activation, ActQuant, Format, Layout, Recipe, RouterWeight


def int8(codes: list[list[int]], scale: list[float]) -> Projection:
    return Projection(
        codes=torch.tensor(codes, dtype=torch.int8),
        format=Format.INT8,
        layout=Layout.CHANNEL,
        scale=torch.tensor(scale).unsqueeze(1),
    )


def recipe(act: ActQuant | None, output: Format = Format.FP32, placement: RouterWeight = RouterWeight.GEMM2) -> Recipe:
    return Recipe(
        name="worked",
        a1=act,
        a2=act,
        compute=(output,),
        activation_store=output,
        output=output,
        accumulator=Accumulator.FP32 if act is None else Accumulator.INT32,
        router_weight=placement,
        router_weight_exact=True,
    )


TOKEN = ActQuant(format=Format.INT8, layout=Layout.TOKEN, dynamic=True)


def test_two_experts_by_hand() -> None:
    """One token x = [127, -64], INT8 per channel x dynamic per token, relu2 without a gate, router weights 3/4 and 1/4.

    x: amax 127, scale 1, codes [127, -64].
    Expert 0: up rows [1, 0] * 1/2 and [0, 1] * 2 give [63.5, -128]; relu2 [4032.25, 0]; amax / 127 = 31.75, codes [127, 0];
      down rows [1, 2] * 1 and [3, 4] * 1/2 give [127 * 31.75, 381 * 31.75 / 2] = [4032.25, 6048.375].
    Expert 1: up rows [1, 1] * 1 and [2, 0] * 1/4 give [63, 63.5]; relu2 [3969, 4032.25]; scale 31.75, 3969 / 31.75 = 125.008,
      codes [125, 127]; down rows [1, 0] * 2 and [0, 1] * 1 give [250 * 31.75, 127 * 31.75] = [7937.5, 4032.25].
    Output: 3/4 * [4032.25, 6048.375] + 1/4 * [7937.5, 4032.25] = [5008.5625, 5544.34375].
    """
    experts = (
        Expert(gate=None, up=int8([[1, 0], [0, 1]], [0.5, 2.0]), down=int8([[1, 2], [3, 4]], [1.0, 0.5])),
        Expert(gate=None, up=int8([[1, 1], [2, 0]], [1.0, 0.25]), down=int8([[1, 0], [0, 1]], [2.0, 1.0])),
    )
    routing = Routing(topk_ids=torch.tensor([[0, 1]]), topk_weights=torch.tensor([[0.75, 0.25]], dtype=torch.float64))
    got = answer(experts, torch.tensor([[127.0, -64.0]]), routing, Activation.RELU2_NO_MUL, recipe(TOKEN))
    assert got.expected.tolist() == [[5008.5625, 5544.34375]]
    assert got.contributions.tolist() == [[[3024.1875, 4536.28125], [1984.375, 1008.0625]]]
    width = (got.high - got.low) / got.expected
    assert (width < 2.0**-20).all()  # 31.75 is no power of two: the scale's division and the products may round


def test_the_routing_of_the_worked_example() -> None:
    routing = route(torch.tensor([[math.log(3.0), 0.0]]), 2, renormalize=False)
    assert routing.topk_ids.tolist() == [[0, 1]]
    assert routing.topk_weights[0].tolist() == pytest.approx([0.75, 0.25], rel=1e-7)


def test_a_gated_expert_by_hand() -> None:
    """x = 1, gate 1, up 2, down 3: silu(1) * 2 * 3 = 6 / (1 + 1/e)."""

    def one(value: float) -> Projection:
        return Projection(codes=torch.tensor([[value]]), format=Format.FP32, layout=Layout.NONE)

    expert = Expert(gate=one(1.0), up=one(2.0), down=one(3.0))
    routing = Routing(topk_ids=torch.tensor([[0]]), topk_weights=torch.ones(1, 1, dtype=torch.float64))
    got = answer((expert,), torch.tensor([[1.0]]), routing, Activation.SILU, recipe(None))
    assert float(got.expected) == pytest.approx(6.0 / (1.0 + math.exp(-1.0)), rel=2.0**-23)  # fp32 stores


@pytest.mark.parametrize("placement", list(RouterWeight))
def test_the_router_weight_enters_where_the_recipe_says(placement: RouterWeight) -> None:
    """relu2 squares its input: a weight of 1/2 on the input or the first GEMM counts twice, on the second once."""

    def eye(value: float) -> Projection:
        return Projection(codes=torch.eye(2) * value, format=Format.FP32, layout=Layout.NONE)

    routing = Routing(topk_ids=torch.tensor([[0]]), topk_weights=torch.tensor([[0.5]], dtype=torch.float64))
    expert = Expert(gate=None, up=eye(1.0), down=eye(1.0))
    got = answer((expert,), torch.tensor([[4.0, -4.0]]), routing, Activation.RELU2_NO_MUL, recipe(None, placement=placement))
    squared = placement in (RouterWeight.GEMM1, RouterWeight.FIRST_STORED, RouterWeight.INPUT)
    assert got.expected.tolist() == [[4.0 if squared else 8.0, 0.0]]
    assert torch.equal(got.low, got.expected)
    assert torch.equal(got.high, got.expected)


@pytest.mark.parametrize("place", [place for place in RouterWeight if place is not RouterWeight.INPUT])
@pytest.mark.parametrize("hidden", [Format.FP32, Format.BF16, Format.FP16])
def test_a_router_weight_that_enters_twice(place: RouterWeight, hidden: Format) -> None:
    """Two tokens of one expert that is the identity, by torch's own casts."""
    dtype = torch_dtype(hidden)
    one = torch.tensor([[1.0]], dtype=dtype)
    identity = Projection(codes=one, format=hidden, layout=Layout.NONE)
    weights = torch.tensor([[0.7], [0.3]])
    routing = Routing(topk_ids=torch.zeros(2, 1, dtype=torch.int64), topk_weights=weights.double(), exact=True)
    x = torch.tensor([[1.37], [-2.9]]).to(dtype)
    how = replace(recipe(None, hidden, RouterWeight.INPUT), router_weight_again=place)
    got = answer((Expert(gate=None, up=identity, down=identity),), x, routing, Activation.RELU2_NO_MUL, how)
    row = x * weights.to(dtype)
    if place is RouterWeight.GEMM1:
        row = (row.float() * weights).to(dtype)
    if place is RouterWeight.FIRST_STORED:
        row = row * weights.to(dtype)
    row = row.float().relu().square().to(dtype)
    if place in (RouterWeight.GEMM2, RouterWeight.SUM):
        row = (row.float() * weights).to(dtype)
    if place is RouterWeight.STORED:
        row = row * weights.to(dtype)
    low, high = (round_to(end, hidden) for end in (got.low, got.high))
    assert ((low <= row.double()) & (row.double() <= high)).all()
    once = answer(
        (Expert(gate=None, up=identity, down=identity),), x, routing, Activation.RELU2_NO_MUL, replace(how, router_weight_again=None)
    )
    assert (round_to(once.low, hidden)[0] > row[0].double()).all()


def test_results_rounded_at_a_share_lose_the_bits_that_are_subnormal_there() -> None:
    """Three columns that are scaled each by itself; a quarter of 2**-13 + 2**-23 lies half way between two fp16 numbers."""
    columns = torch.tensor([1.0 + 2.0**-10, 2.0**-13 + 2.0**-23, 65504.0], dtype=torch.float16)
    identity, down = (Projection(codes=w, format=Format.FP16, layout=Layout.NONE) for w in (torch.eye(3).half(), columns.diag()))
    routing = Routing(topk_ids=torch.zeros(1, 1, dtype=torch.int64), topk_weights=torch.ones(1, 1, dtype=torch.float64), exact=True)
    x, how = torch.tensor([[1.0, 1.0, 1.5]], dtype=torch.float16), recipe(None, Format.FP16)
    for share, second in ((1.0, 2.0**-13 + 2.0**-23), (0.25, 2.0**-13)):
        expert = Expert(gate=None, up=identity, down=down)
        got = answer((expert,), x, routing, Activation.RELU2_NO_MUL, replace(how, stored_share=share))
        assert got.expected.tolist() == got.low.tolist() == got.high.tolist() == [[1.0 + 2.0**-10, second, math.inf]]


def test_router_weights_on_the_input_need_top_1() -> None:
    layer = make(router_weight=RouterWeight.INPUT)
    with pytest.raises(ValueError, match="top-k 1 only, got 2"):
        answer(layer.experts, layer.hidden_states, layer.routing, layer.activation, layer.recipe)


def test_a_missing_static_scale_names_the_expert() -> None:
    layer = make(act=Layout.TENSOR, static=True)
    stripped = Projection(codes=layer.experts[1].down.codes, format=Format.INT8, layout=Layout.CHANNEL, scale=layer.experts[1].down.scale)
    experts = (layer.experts[0], Expert(gate=layer.experts[1].gate, up=layer.experts[1].up, down=stripped), layer.experts[2])
    with pytest.raises(ValueError, match="expert 1 has no w2 input_scale"):
        answer(experts, layer.hidden_states, layer.routing, layer.activation, layer.recipe)


@pytest.mark.parametrize(
    ("weight", "layout", "act"),
    [(Format.INT8, Layout.CHANNEL, None), (Format.E4M3FN, Layout.BLOCK128, None), (Format.INT8, Layout.TENSOR, None)],
)
def test_without_activation_quantization_the_layer_is_plain_linear_algebra(weight: Format, layout: Layout, act: Layout | None) -> None:
    layer = make(Format.FP32, weight, layout, act, width=160, inner=136, tokens=3)
    numbers = forward(load(layer.experts, layer.recipe), layer.hidden_states, layer.routing, layer.activation, layer.recipe)
    for token in range(3):
        for slot in range(2):
            expert = layer.experts[int(layer.routing.topk_ids[token, slot])]
            x = layer.hidden_states[token].double()
            assert expert.gate is not None
            gate, up, down = (dense(p) for p in (expert.gate, expert.up, expert.down))
            y = down @ (torch.nn.functional.silu(gate @ x) * (up @ x)) * layer.routing.topk_weights[token, slot]
            torch.testing.assert_close(numbers[token, slot], y, rtol=0, atol=float(y.abs().max()) * 2.0**-20)  # fp32 stores


def dense(projection: Projection) -> torch.Tensor:
    assert projection.scale is not None
    values, scale = projection.codes.double(), projection.scale.double()
    if projection.layout is not Layout.BLOCK128:
        return values * scale
    out = torch.empty_like(values)
    for row in range(values.shape[0]):
        for col in range(values.shape[1]):
            out[row, col] = values[row, col] * scale[row // 128, col // 128]
    return out
