"""GEMM 1 with the activation fused into it, and router weights that are rounded before they multiply."""

from __future__ import annotations

from dataclasses import replace

import torch

from references.answer import answer
from references.formats import round_to
from references.moe import Answer
from references.tests.honest import inside
from references.tests.layers import Layer, make
from references.vocabulary import Format, Layout, Recipe, RouterWeight

BF16 = Format.BF16


def layer() -> Layer:
    return make(BF16, BF16, Layout.NONE, None, seed=5)


def answered(given: Layer, recipe: Recipe) -> Answer:
    return answer(given.experts, given.hidden_states, given.routing, given.activation, recipe)


def by_hand(given: Layer, *, first_stored: bool, weight_store: Format | None) -> torch.Tensor:
    """Float64, rounded where the kernel stores."""
    x, out = given.hidden_states.double(), torch.zeros(given.hidden_states.shape, dtype=torch.float64)
    for token, slots in enumerate(given.routing.topk_ids.tolist()):
        for slot, e in enumerate(slots):
            gate, up, down = (part.codes.double() for part in (given.experts[e].gate, given.experts[e].up, given.experts[e].down) if part)
            g, u = x[token] @ gate.T, x[token] @ up.T
            g, u = (round_to(g, BF16), round_to(u, BF16)) if first_stored else (g, u)
            weight = given.routing.topk_weights[token, slot]
            weight = weight if weight_store is None else round_to(weight, weight_store)
            middle = round_to(torch.nn.functional.silu(g) * u, BF16)
            out[token] += round_to((middle @ down.T) * weight, BF16)
    return out.bfloat16()


def test_a_fused_activation_sees_what_is_not_stored() -> None:
    given = layer()
    recipe = replace(given.recipe, gate_store=None, router_weight=RouterWeight.GEMM2, router_weight_exact=True)
    fused, stored = answered(given, replace(recipe, first_stored=False)), answered(given, recipe)
    assert bool(inside(fused, by_hand(given, first_stored=False, weight_store=None)).all())
    assert bool(inside(stored, by_hand(given, first_stored=True, weight_store=None)).all())
    assert not bool(inside(fused, by_hand(given, first_stored=True, weight_store=None)).all())
    assert not bool(inside(stored, by_hand(given, first_stored=False, weight_store=None)).all())


def test_router_weights_are_rounded_first() -> None:
    given = layer()
    recipe = replace(given.recipe, gate_store=None, router_weight=RouterWeight.GEMM2, router_weight_exact=True, router_weight_store=BF16)
    rounded = answered(given, recipe)
    assert bool(inside(rounded, by_hand(given, first_stored=True, weight_store=BF16)).all())
    assert not bool(inside(rounded, by_hand(given, first_stored=True, weight_store=None)).all())
