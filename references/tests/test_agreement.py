"""The two evaluations of a recipe watch each other: a wrong number cannot be hidden by widening its interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from references import moe, quantize
from references.answer import ReferenceDisagreesWithItself, answer
from references.formats import round_to
from references.loading import load
from references.tests.layers import Layer, make
from references.vocabulary import Activation, ActQuant, Format, Layout, WeightQuant

E4M3, INT8 = Format.E4M3FN, Format.INT8


def answered(layer: Layer) -> None:
    answer(layer.experts, layer.hidden_states, layer.routing, layer.activation, layer.recipe)


@pytest.mark.parametrize("dtype", [Format.FP32, Format.FP16, Format.BF16])
@pytest.mark.parametrize(("weight", "layout", "act"), [(E4M3, Layout.CHANNEL, Layout.TOKEN), (INT8, Layout.CHANNEL, Layout.TOKEN)])
def test_a_dynamic_scale_one_percent_off_in_the_numbers_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: Format, weight: Format, layout: Layout, act: Layout
) -> None:
    honest: Callable[[torch.Tensor, ActQuant | WeightQuant], torch.Tensor] = quantize.dynamic_scale
    layer = make(dtype, weight, layout, act, seed=3)
    answered(layer)

    def planted(amax: torch.Tensor, how: ActQuant | WeightQuant) -> torch.Tensor:
        return round_to(honest(amax, how) * 1.01, Format.FP32)

    monkeypatch.setattr(quantize, "dynamic_scale", planted)
    with pytest.raises(ReferenceDisagreesWithItself, match=r"token \d+, channel \d+: the reference's number .* is not in its own interval"):
        answered(layer)


def test_contributions_a_thousandth_off_in_the_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(Format.BF16, E4M3, Layout.CHANNEL, Layout.TOKEN, bias=True, seed=3)
    honest = moe.forward
    monkeypatch.setattr("references.answer.forward", lambda *given: honest(*given) * 1.001)
    with pytest.raises(ReferenceDisagreesWithItself):
        answered(layer)


def test_router_weights_given_as_fp32_are_the_ones_multiplied() -> None:
    layer = make(Format.FP32, INT8, Layout.CHANNEL, Layout.TOKEN, activation=Activation.RELU2_NO_MUL, seed=3)
    given = replace(layer.recipe, router_weight_exact=True)
    built = load(layer.experts, given)
    rounded = replace(layer.routing, topk_weights=round_to(layer.routing.topk_weights, Format.FP32))
    assert not torch.equal(rounded.topk_weights, layer.routing.topk_weights)
    outputs = [moe.forward(built, layer.hidden_states, routing, layer.activation, given) for routing in (layer.routing, rounded)]
    assert torch.equal(*outputs)
    answer(layer.experts, layer.hidden_states, layer.routing, layer.activation, given)
