"""Rows packed per expert: a scale of each expert's own rows, and contributions added in the hidden dtype in any order."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from references.answer import answer
from references.bounds import exactly, quantize, sum_over_slots
from references.formats import round_to, torch_dtype
from references.moe import Answer, Routing
from references.tests.layers import Layer, make
from references.vocabulary import ActQuant, Format, Layout

HALVES = (Format.BF16, Format.FP16)


def answered(layer: Layer, rows: torch.Tensor | None = None, *, per_expert: bool) -> Answer:
    a1, a2 = (replace(how, per_expert=per_expert) for how in (layer.recipe.a1, layer.recipe.a2) if how is not None)
    rows = torch.arange(layer.hidden_states.shape[0]) if rows is None else rows
    routing = Routing(topk_ids=layer.routing.topk_ids[rows], topk_weights=layer.routing.topk_weights[rows])
    recipe = replace(layer.recipe, a1=a1, a2=a2)
    return answer(layer.experts, layer.hidden_states[rows], routing, layer.activation, recipe)


@pytest.mark.parametrize("weight", [Format.INT8, Format.E4M3FN])
def test_an_experts_rows_are_quantized_as_if_they_were_alone(weight: Format) -> None:
    layer = make(Format.BF16, weight, Layout.TENSOR, Layout.TENSOR, top_k=1, seed=3)
    together, apart = answered(layer, per_expert=True), answered(layer, per_expert=False)
    assert not torch.equal(together.expected, apart.expected)
    for e in layer.routing.topk_ids.unique().tolist():
        rows = (layer.routing.topk_ids[:, 0] == e).nonzero().flatten()
        alone = answered(layer, rows, per_expert=False)
        assert torch.allclose(together.expected[rows], alone.expected, rtol=0, atol=0)
        assert torch.allclose(together.low[rows], alone.low, rtol=0, atol=0)
        assert torch.allclose(together.high[rows], alone.high, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", HALVES)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_every_order_of_stored_sums_is_allowed(fmt: Format, slots: int) -> None:
    x = round_to(torch.randn(7, slots, 33, generator=torch.Generator().manual_seed(slots), dtype=torch.float64), fmt)
    allowed, in_fp32 = sum_over_slots(exactly(x), fmt), sum_over_slots(exactly(x))
    outside = False
    for order in permutations(range(slots)):
        total = torch.zeros(7, 33, dtype=torch.float64)
        for slot in order:
            total = total.to(torch_dtype(fmt)).double() + x[:, slot]  # the last one is rounded by whoever stores the output
        assert bool(((allowed.low <= total) & (total <= allowed.high)).all())
        outside |= bool(((in_fp32.low > total) | (total > in_fp32.high)).any())
    assert outside == (slots > 2)
    if slots <= 2:
        assert torch.equal(allowed.low, allowed.high)


@pytest.mark.parametrize("stored", [Format.BF16, Format.FP32])
def test_a_power_of_two_whose_logarithm_was_rounded_to_bf16_is_allowed_where_the_recipe_says_so(stored: Format) -> None:
    """csrc, persistent_masked_m_silu_mul_quant: amax times bf16(1 / 448), its binary logarithm in bf16, the ceiling of that."""
    amax = 2.0 ** torch.arange(-10, 10, dtype=torch.float64).unsqueeze(1) * (1 + torch.arange(128, dtype=torch.float64) / 128)
    rows = amax.reshape(-1, 1).repeat(1, 128)
    product = (rows[:, 0].bfloat16() * torch.tensor(1 / 448).bfloat16()).float()
    kernel = 2.0 ** torch.ceil(torch.log2(product).bfloat16().double())
    how = ActQuant(format=Format.E4M3FN, layout=Layout.GROUP128, dynamic=True, scale_store=stored, power_of_two=True)
    _, scale = quantize(exactly(rows), how, None)
    allowed = (scale.low[:, 0] <= kernel) & (kernel <= scale.high[:, 0])
    assert bool(allowed.all()) == (stored is Format.BF16)
