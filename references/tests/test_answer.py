"""The whole answer: honest kernels inside, faults outside, no radius where everything is exact."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from references.answer import answer
from references.bounds import Interval
from references.enclosure import SCALES_OF_GEMM_2, enclose
from references.formats import torch_dtype
from references.loading import load
from references.moe import Answer, Expert, Projection, Routing, forward
from references.tests.honest import Choices, inside, margin, run
from references.tests.layers import Layer, make, projection
from references.vocabulary import Activation, ActQuant, Format, Layout, Quotient, Recipe, Rounding, RouterWeight, W13Merge, WeightQuant

CHOICES = (
    Choices(seed=1),
    Choices(seed=2, reciprocal=True, weight_scale_first=True, sequential=True),
)

FP16, BF16, FP32, INT8, E4M3 = Format.FP16, Format.BF16, Format.FP32, Format.INT8, Format.E4M3FN
QUANTIZED: dict[str, Callable[[Format, int], Layer]] = {
    "int8-channel-token": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TOKEN, seed=s),
    "int8-channel-token-half-away": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TOKEN, rounding=Rounding.HALF_AWAY, seed=s),
    "int8-tensor-dyntensor": lambda d, s: make(d, INT8, Layout.TENSOR, Layout.TENSOR, seed=s),
    "int8-channel-static": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TENSOR, static=True, seed=s),
    "int8-block-group": lambda d, s: make(d, INT8, Layout.BLOCK128, Layout.GROUP128, width=200, inner=144, seed=s),
    "fp8-channel-token": lambda d, s: make(d, E4M3, Layout.CHANNEL, Layout.TOKEN, seed=s),
    "fp8-tensor-static": lambda d, s: make(d, E4M3, Layout.TENSOR, Layout.TENSOR, static=True, seed=s),
    "fp8-block-group": lambda d, s: make(d, E4M3, Layout.BLOCK128, Layout.GROUP128, width=200, inner=144, seed=s),
    "fp8-channel-token-bias": lambda d, s: make(d, E4M3, Layout.CHANNEL, Layout.TOKEN, bias=True, seed=s),
    "int8-relu2": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TOKEN, activation=Activation.RELU2_NO_MUL, seed=s),
    "int8-gelu": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TOKEN, activation=Activation.GELU, seed=s),
    "fp8-gelu-tanh": lambda d, s: make(d, E4M3, Layout.CHANNEL, Layout.TOKEN, activation=Activation.GELU_TANH, seed=s),
    "int8-silu-no-mul": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TOKEN, activation=Activation.SILU_NO_MUL, seed=s),
    "int8-weight-on-gemm1": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TOKEN, top_k=1, router_weight=RouterWeight.GEMM1, seed=s),
    "fp8-weight-on-input": lambda d, s: make(d, E4M3, Layout.CHANNEL, Layout.TOKEN, top_k=1, router_weight=RouterWeight.INPUT, seed=s),
    "fp8-through-bf16": lambda d, s: make(d, E4M3, Layout.CHANNEL, Layout.TOKEN, compute=(BF16, d), seed=s),
    "int8-top-3": lambda d, s: make(d, INT8, Layout.CHANNEL, Layout.TOKEN, experts=5, top_k=3, seed=s),
}
OTHERS: dict[str, Callable[[Format, int], Layer]] = {
    "unquantized": lambda d, s: make(d, d, Layout.NONE, None, seed=s),
    "weight-only": lambda d, s: make(d, INT8, Layout.CHANNEL, None, seed=s),
}


def answered(layer: Layer) -> Answer:
    return answer(layer.experts, layer.hidden_states, layer.routing, layer.activation, layer.recipe)


def honest(layer: Layer, choices: Choices, experts: tuple[Expert, ...] | None = None) -> torch.Tensor:
    built = layer.experts if experts is None else experts
    return run(built, layer.hidden_states, layer.logits, layer.routing, layer.activation, layer.recipe, choices)


@pytest.mark.parametrize("hidden", [FP32, FP16, BF16])
@pytest.mark.parametrize("name", [*QUANTIZED, *OTHERS])
def test_honest_kernels_lie_inside_and_around_the_expected_value(name: str, hidden: Format) -> None:
    for seed in range(2):
        layer = (QUANTIZED | OTHERS)[name](hidden, seed)
        got = answered(layer)
        assert ((got.low <= got.expected) & (got.expected <= got.high)).all()
        for choices in CHOICES:
            actual = honest(layer, choices)
            assert inside(got, actual).all()
            assert float(margin(got, actual).max()) <= 1.0 + 1e-9


@pytest.mark.parametrize("hidden", [FP32, FP16, BF16])
@pytest.mark.parametrize("name", [*QUANTIZED, *OTHERS])
def test_numbers_lie_inside_the_intervals_they_were_not_computed_from(name: str, hidden: Format) -> None:
    layer = (QUANTIZED | OTHERS)[name](hidden, 3)
    loaded = load(layer.experts, layer.recipe)
    numbers = forward(loaded, layer.hidden_states, layer.routing, layer.activation, layer.recipe).sum(1)
    bounds = enclose(loaded, layer.hidden_states, layer.routing, layer.activation, layer.recipe)
    slack = 2.0**-45 * numbers.abs()  # float64's own rounding
    assert (bounds.low <= numbers + slack).all()
    assert (bounds.high >= numbers - slack).all()


def test_the_median_honest_margin_says_the_bound_is_neither_wide_nor_missing_a_term() -> None:
    """float32 outputs, where nothing hides the kernel's own error."""
    margins = {
        name: [
            float(margin(answered(layer := build(FP32, seed)), honest(layer, choices)).max()) for seed in range(2) for choices in CHOICES
        ]
        for name, build in QUANTIZED.items()
        if name != "fp8-through-bf16"  # every result is a sum of bf16 numbers: mostly equal, or half an interval away
    }
    everything = [value for values in margins.values() for value in values]
    assert max(everything) <= 1.0
    assert 0.02 < statistics.median(everything) < 1.0
    assert all(max(values) > 0.01 for values in margins.values()), margins


def _scaled(projection: Projection, factor: float, channel: int | None = None) -> Projection:
    assert projection.scale is not None
    scale = projection.scale.clone()
    if channel is None:
        scale *= factor
    else:
        scale[channel] *= factor
    return replace(projection, scale=scale)


def _fault(layer: Layer, name: str) -> tuple[Expert, ...]:
    experts = list(layer.experts)
    busy = int(layer.routing.topk_ids[0, 0])
    victim = experts[busy]
    match name:
        case "w2 scale x1.008":
            experts[busy] = replace(victim, down=_scaled(victim.down, 1.008))
        case "up scale x1.008":
            experts[busy] = replace(victim, up=_scaled(victim.up, 1.008))
        case "one w2 channel x1.05":
            experts[busy] = replace(victim, down=_scaled(victim.down, 1.05, channel=7))
        case "two experts swapped":
            other = (busy + 1) % len(experts)
            experts[busy], experts[other] = experts[other], victim
        case "gate and up swapped":
            assert victim.gate is not None
            experts[busy] = replace(victim, gate=victim.up, up=victim.gate)
    return tuple(experts)


FAULTS = ["w2 scale x1.008", "up scale x1.008", "one w2 channel x1.05", "two experts swapped", "gate and up swapped"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["int8-channel-token", "int8-channel-static", "fp8-channel-token"])
def test_a_planted_fault_lies_outside_in_float32(name: str, fault: str) -> None:
    layer = QUANTIZED[name](FP32, 0)
    got = answered(layer)
    assert inside(got, honest(layer, CHOICES[0])).all()
    wrong = honest(layer, CHOICES[0], _fault(layer, fault))
    affected = ~inside(got, wrong)
    assert affected[0].any()
    if fault == "one w2 channel x1.05":
        assert affected.any(0).nonzero().flatten().tolist() == [7]
    untouched = (layer.routing.topk_ids != layer.routing.topk_ids[0, 0]).all(1)
    if fault != "two experts swapped":
        assert not affected[untouched].any()


def test_a_wrong_activation_scale_and_a_wrong_router_weight_lie_outside() -> None:
    layer = QUANTIZED["int8-channel-static"](FP32, 0)
    got = answered(layer)
    shifted = tuple(replace(e, down=replace(e.down, input_scale=torch.tensor(3.0 / 127 * 1.02))) for e in layer.experts)
    assert not inside(got, honest(layer, CHOICES[0], shifted)).all()
    unnormalised = run(
        layer.experts, layer.hidden_states, layer.logits, layer.routing, layer.activation, layer.recipe, CHOICES[0], renormalize=False
    )
    assert not inside(got, unnormalised).all()


# ------------------------------------------------------------------------------------------------------------------ exact layers


def lattice(weight: Format, layout: Layout, act: Layout | None, hidden: Format, *, top_k: int) -> Layer:
    """Small integers and powers of two, relu2, router weights that are powers of two, amax 127 or 448 times a power of two."""
    layer = make(hidden, weight, layout, act, activation=Activation.RELU2_NO_MUL, experts=4, top_k=top_k, tokens=4, width=16, inner=8)
    g = torch.Generator().manual_seed(9)

    def integers(rows: int, cols: int, power: float) -> Projection:
        codes = torch.randint(-2, 3, (rows, cols), generator=g).float()
        scale = None if layout is Layout.NONE else torch.full((rows, 1) if layout is Layout.CHANNEL else (), power)
        return Projection(codes=codes.to(torch_dtype(weight)), format=weight, layout=layout, scale=scale)

    experts = tuple(Expert(gate=None, up=integers(8, 16, 0.5), down=integers(16, 8, 2.0**-e)) for e in range(4))
    x = torch.randint(-3, 4, (4, 16), generator=g).float()
    weights = torch.full((4, top_k), 0.25, dtype=torch.float64)
    ids = torch.stack([torch.randperm(4, generator=g)[:top_k] for _ in range(4)])
    return replace(
        layer,
        experts=experts,
        hidden_states=x.to(torch_dtype(hidden)),
        routing=Routing(topk_ids=ids, topk_weights=weights),
        recipe=replace(layer.recipe, router_weight_exact=True),
    )


@pytest.mark.parametrize("hidden", [FP32, FP16])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("weight", [None, INT8])
def test_where_everything_is_exact_there_is_no_radius(weight: Format | None, top_k: int, hidden: Format) -> None:
    fmt = hidden if weight is None else weight
    layer = lattice(fmt, Layout.NONE if weight is None else Layout.CHANNEL, None, hidden, top_k=top_k)
    got = answered(layer)
    assert torch.equal(got.low, got.expected)
    assert torch.equal(got.high, got.expected)
    assert got.expected.abs().max() > 0


@pytest.mark.parametrize("weight", [INT8, E4M3])
def test_a_static_power_of_two_scale_keeps_integers_exact(weight: Format) -> None:
    layer = lattice(weight, Layout.CHANNEL, Layout.TENSOR, FP32, top_k=2)
    how = layer.recipe.a1
    assert how is not None
    one = torch.tensor(1.0)
    experts = tuple(replace(e, up=replace(e.up, input_scale=one), down=replace(e.down, input_scale=one * 0.5)) for e in layer.experts)
    recipe = replace(layer.recipe, a1=replace(how, dynamic=False), a2=replace(how, dynamic=False))
    got = answered(replace(layer, experts=experts, recipe=recipe))
    assert torch.equal(got.low, got.expected)
    assert torch.equal(got.high, got.expected)


def test_a_dynamic_scale_that_is_a_power_of_two_keeps_integers_exact() -> None:
    layer = lattice(INT8, Layout.CHANNEL, Layout.TOKEN, FP32, top_k=1)
    x = layer.hidden_states.clone()
    x[:, 0] = 127.0
    up = torch.zeros(8, 16)
    up[torch.arange(8), torch.arange(8)] = 1.0  # relu2(127 * 0.5)**2: not a power of two times 127
    got = answered(replace(layer, hidden_states=x, recipe=replace(layer.recipe, a2=None)))
    assert torch.equal(got.low, got.expected)
    assert torch.equal(got.high, got.expected)


def test_the_doubt_in_a_row_s_scale_holds_what_its_largest_element_may_be() -> None:
    """An accumulator in any order, stored in bf16: a row's largest element may round either way, and its scale with it."""
    layer = make(BF16, INT8, Layout.CHANNEL, Layout.TOKEN, experts=4, top_k=2, tokens=40)
    got = answered(layer)
    assert got.row_scale_doubt is not None
    assert got.row_scale_doubt.shape == (40, 2)
    assert bool((got.row_scale_doubt >= 0).all())
    assert 0.0 < float(got.row_scale_doubt.amax()) < 0.05
    assert answered(replace(layer, recipe=replace(layer.recipe, a2=None))).row_scale_doubt is None


def test_the_doubt_in_a_row_s_scale_is_that_of_the_row_alone() -> None:
    layer = make(BF16, INT8, Layout.CHANNEL, Layout.TOKEN, experts=4, top_k=2, tokens=40)
    doubt = answered(layer).row_scale_doubt
    assert doubt is not None
    for token in torch.nonzero(doubt.amax(1) > 0).flatten()[:4].tolist():
        traced: dict[str, Interval] = {}
        here = slice(token, token + 1)
        routing = Routing(topk_ids=layer.routing.topk_ids[here], topk_weights=layer.routing.topk_weights[here])
        loaded = load(layer.experts, layer.recipe)
        enclose(loaded, layer.hidden_states[here], routing, layer.activation, layer.recipe, traced.__setitem__)
        scales = traced[SCALES_OF_GEMM_2]
        alone = ((scales.high - scales.low) / scales.low).flatten()[routing.rows.back]
        assert torch.equal(doubt[token], alone)


# ------------------------------------------------------------------------------------------------------------------ odds and ends


@pytest.mark.parametrize("layout", [Layout.TENSOR, Layout.CHANNEL, Layout.BLOCK128])
def test_online_quantization_answers_as_the_same_bytes_pre_quantized(layout: Layout) -> None:
    """TENSOR: one scale over gate and up together, so both halves are quantized with it before they are stored."""
    plain = make(FP32, FP32, Layout.NONE, None, width=200, inner=128)
    act = Layout.GROUP128 if layout is Layout.BLOCK128 else Layout.TOKEN
    how = ActQuant(format=E4M3, layout=act, dynamic=True, scale_floor=1e-12)
    online = WeightQuant(format=E4M3, layout=layout, quotient=Quotient.DIVIDE)
    recipe = replace(plain.recipe, a1=how, a2=how, weight_quant=online)
    got = answer(plain.experts, plain.hidden_states, plain.routing, plain.activation, recipe)

    def stored(expert: Expert) -> Expert:
        assert expert.gate is not None
        whole = torch.cat([expert.gate.codes, expert.up.codes])
        shared = whole.abs().max() / 448 if layout is Layout.TENSOR else None
        gate, up = (projection(p.codes, E4M3, layout, bias=None, input_scale=None, scale=shared) for p in (expert.gate, expert.up))
        return Expert(gate=gate, up=up, down=projection(expert.down.codes, E4M3, layout, bias=None, input_scale=None))

    same = tuple(stored(expert) for expert in plain.experts)
    pre = answer(same, plain.hidden_states, plain.routing, plain.activation, replace(recipe, weight_quant=None))
    assert torch.equal(got.expected, pre.expected)
    assert torch.equal(got.low, pre.low)
    assert torch.equal(got.high, pre.high)


@pytest.mark.parametrize("weight", [INT8, E4M3])
@pytest.mark.parametrize("hidden", [FP32, BF16])
def test_halves_merged_through_fp16_lie_inside_and_unmerged_ones_outside(weight: Format, hidden: Format) -> None:
    """As vLLM merges per-tensor halves: w8a8_utils.py, per_tensor_dequantize, then the static quantizer at the larger scale."""
    layer = make(hidden, weight, Layout.TENSOR, Layout.TOKEN)
    merged = replace(layer, recipe=replace(layer.recipe, w13_merge=W13Merge.REQUANTIZE_TO_MAX))

    def requantized(part: Projection, largest: torch.Tensor) -> Projection:
        assert part.scale is not None
        ratio = (part.codes.half() * part.scale).half().float() / largest
        codes = ratio.round() if weight is INT8 else ratio
        return replace(part, codes=codes.to(torch_dtype(weight)), scale=largest)

    def loaded(expert: Expert) -> Expert:
        assert expert.gate is not None
        assert expert.gate.scale is not None
        assert expert.up.scale is not None
        largest = torch.maximum(expert.gate.scale, expert.up.scale)
        return replace(expert, gate=requantized(expert.gate, largest), up=requantized(expert.up, largest))

    got = answered(merged)
    for choices in CHOICES:
        actual = honest(layer, choices, tuple(loaded(expert) for expert in layer.experts))
        assert inside(got, actual).all()
    assert not inside(got, honest(layer, CHOICES[0])).all()  # not merged at all: another layer


def test_a_tensor_scale_couples_rows_and_a_token_scale_does_not() -> None:
    for act, coupled in ((Layout.TENSOR, True), (Layout.TOKEN, False)):
        layer = make(FP32, INT8, Layout.CHANNEL, act, tokens=4)
        louder = layer.hidden_states.clone()
        louder[3] *= 8.0
        before, after = answered(layer), answered(replace(layer, hidden_states=louder))
        assert torch.equal(before.expected[:3], after.expected[:3]) is not coupled


def test_an_unknown_quotient_is_wider_and_holds_the_known_ones() -> None:
    layer = make(BF16, E4M3, Layout.CHANNEL, Layout.TOKEN, tokens=40, experts=3)
    how = layer.recipe.a1
    assert how is not None

    def told(quotient: Quotient) -> Recipe:
        known = replace(how, quotient=quotient)
        return replace(layer.recipe, a1=known, a2=known)

    hull = answered(layer)
    for quotient in (Quotient.DIVIDE, Quotient.RECIPROCAL, Quotient.AMAX_RATIO):
        known = answered(replace(layer, recipe=told(quotient)))
        assert (hull.low <= known.low).all()
        assert (known.high <= hull.high).all()
        assert (hull.high - hull.low).sum() > (known.high - known.low).sum()


def test_empty_experts_and_zero_rows_are_harmless() -> None:
    layer = make(FP16, INT8, Layout.CHANNEL, Layout.TOKEN, experts=6, top_k=1, tokens=3)
    x = layer.hidden_states.clone()
    x[1] = 0.0
    got = answered(replace(layer, hidden_states=x))
    assert (got.expected[1] == 0).all()
    assert (got.low[1] == 0).all()
    assert (got.high[1] == 0).all()
    assert torch.isfinite(got.low).all()


def test_a_value_that_overflows_is_expected_to_and_a_bound_that_may_overflow_is_open() -> None:
    layer = make(FP16, FP16, Layout.NONE, None, tokens=3)
    loud = layer.hidden_states.clone() * 1000
    got = answered(replace(layer, hidden_states=loud))
    finite = torch.isfinite(got.expected)
    assert not finite.all()
    assert torch.equal(got.low[~finite].nan_to_num(0.5), got.expected[~finite].nan_to_num(0.5))
    assert not torch.isnan(got.low[finite]).any()
    assert not torch.isnan(got.high[finite]).any()


def test_contributions_sum_to_the_expected_value() -> None:
    got = answered(make())
    assert got.contributions.shape == (5, 2, 160)
    assert torch.equal(got.contributions.sum(1), got.expected)
