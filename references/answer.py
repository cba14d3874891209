"""The reference's answer for one layer and one batch: the recipe on numbers and on intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from references.bounds import Interval
from references.enclosure import SCALES_OF_GEMM_2, enclose
from references.loading import load
from references.moe import Answer, Expert, Routing, forward
from references.vocabulary import Activation, Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from references.loading import LoadedExpert

# Both evaluations add up in float64, each in its own order: gamma(n) with u = 2**-53 over n = 2**12 terms, more than any K here, at the
# size of the largest output, since a sum may cancel.
_FLOAT64_NOISE = 2.0**12 * 2.0**-53


class ReferenceDisagreesWithItself(ArithmeticError):
    """The recipe on numbers lies outside the recipe on intervals: one of the two is wrong, and no verdict may rest on them."""


def answer(experts: Sequence[Expert], hidden_states: torch.Tensor, routing: Routing, activation: Activation, recipe: Recipe) -> Answer:
    """Expected values and the interval every honest result lies in.

    experts: as the checkpoint holds them (references/checkpoint.py). hidden_states [M, H] in ``recipe.output``'s dtype.
    Where the expected value is not finite, nothing but that value is allowed; where only a bound is not finite, that side is open.

    Raises:
        ValueError: when checkpoint and recipe contradict each other (a missing static scale, top-k other than 1 with weights on input).
        ReferenceDisagreesWithItself: expected outside [low, high] by more than float64's own noise.
    """
    return answer_of(load(experts, recipe), hidden_states, routing, activation, recipe)


def answer_of(
    loaded: tuple[LoadedExpert, ...], hidden_states: torch.Tensor, routing: Routing, activation: Activation, recipe: Recipe
) -> Answer:
    """The same of experts as loading left them. Raises ReferenceDisagreesWithItself."""
    contributions = forward(loaded, hidden_states, routing, activation, recipe)
    expected = contributions.sum(1)
    traced: dict[str, Interval] = {}
    bounds = enclose(loaded, hidden_states, routing, activation, recipe, traced.__setitem__)
    low = torch.nan_to_num(bounds.low, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    high = torch.nan_to_num(bounds.high, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    finite = torch.isfinite(expected)
    _agree(expected, low, high, finite)
    return Answer(
        expected=expected,
        low=torch.where(finite, torch.minimum(low, expected), expected),
        high=torch.where(finite, torch.maximum(high, expected), expected),
        contributions=contributions,
        routing=routing,
        output=recipe.output,
        loaded=loaded,
        row_scale_doubt=_row_scale_doubt(traced.get(SCALES_OF_GEMM_2), routing),
    )


def _row_scale_doubt(scales: Interval | None, routing: Routing) -> torch.Tensor | None:
    """Of scales [R, 1], rows expert by expert, or [1, 1] for all -> [M, k]."""
    if scales is None or scales.low.shape[-1] != 1 or scales.low is scales.high:
        return None
    doubt = ((scales.high - scales.low) / scales.low).nan_to_num(0.0).expand(routing.topk_ids.numel(), 1)
    return doubt[routing.rows.back].reshape(routing.topk_ids.shape)


def _agree(expected: torch.Tensor, low: torch.Tensor, high: torch.Tensor, finite: torch.Tensor) -> None:
    outside = torch.maximum(low - expected, expected - high).masked_fill(~finite, 0.0)
    wrong = outside > _FLOAT64_NOISE * float(expected.abs().masked_fill(~finite, 0.0).amax())
    if bool(wrong.any()):
        token, channel = divmod(int(outside.argmax()), expected.shape[1])
        interval = f"[{float(low[token, channel])!r}, {float(high[token, channel])!r}]"
        raise ReferenceDisagreesWithItself(
            f"token {token}, channel {channel}: the reference's number {float(expected[token, channel])!r} is not in its own interval "
            f"{interval}, nor are {int(wrong.sum()) - 1} more; references/moe.py or enclosure.py, or what it calls, is wrong"
        )
