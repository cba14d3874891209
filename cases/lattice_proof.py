"""Proving that data is exact for one recipe: the interval reference leaves no radius, at no step.

A step may round: bf16 rounds a sum that fp32 holds exactly, and to nearest even gives one result. What may not be is a result that
depends on the order of a sum, on a division's last bit or on how a function is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cases.axes import InvalidCase
from references.enclosure import enclose
from references.formats import round_to, torch_dtype
from references.loading import load
from references.moe import forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from references.bounds import Interval
    from references.moe import Expert, Routing
    from references.vocabulary import Activation, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """output: [M, H] in the output dtype, the only honest result. inexact: steps with a radius that a later rounding takes away."""

    output: torch.Tensor
    inexact: tuple[str, ...]


def prove(experts: Sequence[Expert], hidden_states: torch.Tensor, routing: Routing, activation: Activation, recipe: Recipe) -> Proof:
    """The one honest output.

    Raises:
        InvalidCase: there is more than one; names the first step whose result is not known to the bit.
    """
    steps: list[tuple[str, str]] = []

    def trace(step: str, x: Interval) -> None:
        if where := _first_open(x.low, x.high):
            steps.append((step, where))

    loaded = load(experts, recipe)
    expected = round_to(forward(loaded, hidden_states, routing, activation, recipe).sum(1), recipe.output)
    bounds = enclose(loaded, hidden_states, routing, activation, recipe, trace)
    if where := _first_open(round_to(bounds.low, recipe.output), round_to(bounds.high, recipe.output)):
        first, at = steps[0] if steps else ("the last rounding", where)
        raise InvalidCase(f"lattice data is not exact: {first} can be more than one number ({at}), and so can the output ({where})")
    if not torch.equal(expected, round_to(bounds.low, recipe.output)):
        raise InvalidCase("lattice data is not exact: numbers and intervals of the reference round to different outputs")
    return Proof(output=expected.to(torch_dtype(recipe.output)), inexact=tuple(dict.fromkeys(step for step, _ in steps)))


def _first_open(low: torch.Tensor, high: torch.Tensor) -> str:
    """ "[i, j] in [low, high]" of the first element that is not one finite number; empty when there is none."""
    where = ((low != high) | ~torch.isfinite(low)).nonzero()
    if not len(where):
        return ""
    index = tuple(int(i) for i in where[0])
    return f"element {list(index)} in [{float(low[index])!r}, {float(high[index])!r}]"
