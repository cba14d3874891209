"""Single factors on what experts contributed, and where they are put."""

from __future__ import annotations

import torch

from references.moe import Routing


def target(given: torch.Tensor, routing: Routing) -> tuple[int, int]:
    """Where a single gain is put: the expert with the largest share of the output, and its channel with the largest share.

    Shares are of each row's energy, so that small tokens count. given: contributions [M, k, H].
    """
    energy = given.to(torch.float64).square()
    share = energy / energy.sum((1, 2), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    per_expert = share.new_zeros(int(routing.topk_ids.max()) + 1, share.shape[2])
    per_expert.index_add_(0, routing.topk_ids.flatten(), share.flatten(0, 1))
    expert = int(per_expert.sum(1).argmax())
    return expert, int(per_expert[expert].argmax())


def gained(given: torch.Tensor, routing: Routing, factor: float, expert: int, channel: int | None = None) -> torch.Tensor:
    """Contributions with one expert's, or one of its output channels, multiplied by ``factor``."""
    columns = torch.ones(given.shape[2], dtype=torch.bool)
    if channel is not None:
        columns = torch.arange(given.shape[2]) == channel
    return torch.where((routing.topk_ids == expert).unsqueeze(2) & columns, given * factor, given)


def expert_gain(given: torch.Tensor, routing: Routing) -> torch.Tensor:
    """1.008 on the expert with the largest share."""
    return gained(given, routing, 1.008, target(given, routing)[0])


def channel_gain(given: torch.Tensor, routing: Routing) -> torch.Tensor:
    """1.05 on its channel with the largest share."""
    return gained(given, routing, 1.05, *target(given, routing))
