"""The reference's answer for one layer and one batch: the recipe on numbers and on intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from references.enclosure import enclose
from references.loading import load
from references.moe import Answer, Expert, Routing, forward
from references.vocabulary import Activation, Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence


def answer(experts: Sequence[Expert], hidden_states: torch.Tensor, routing: Routing, activation: Activation, recipe: Recipe) -> Answer:
    """Expected values and the interval every honest result lies in.

    experts: as the checkpoint holds them (references/checkpoint.py). hidden_states [M, H] in ``recipe.output``'s dtype.
    Where the expected value is not finite, nothing but that value is allowed; where only a bound is not finite, that side is open.

    Raises:
        ValueError: when checkpoint and recipe contradict each other (a missing static scale, top-k other than 1 with weights on input).
    """
    loaded = load(experts, recipe)
    contributions = forward(loaded, hidden_states, routing, activation, recipe)
    expected = contributions.sum(1)
    bounds = enclose(loaded, hidden_states, routing, activation, recipe)
    low = torch.nan_to_num(bounds.low, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    high = torch.nan_to_num(bounds.high, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    finite = torch.isfinite(expected)
    return Answer(
        expected=expected,
        low=torch.where(finite, torch.minimum(low, expected), expected),
        high=torch.where(finite, torch.maximum(high, expected), expected),
        contributions=contributions,
        routing=routing,
        output=recipe.output,
    )
