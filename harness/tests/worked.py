"""Hand-made answers for tests: contributions by expert, a radius, an output dtype."""

from __future__ import annotations

import torch

from references.moe import Answer, Routing
from references.vocabulary import Format


def answer(contributions: torch.Tensor, topk_ids: list[list[int]], radius: float = 0.0, output: Format = Format.BF16) -> Answer:
    """contributions [M, k, H]; the interval is radius times each row's largest expected value, to both sides."""
    given = contributions.double()
    expected = given.sum(1)
    room = radius * expected.abs().amax(1, keepdim=True)
    ids = torch.tensor(topk_ids)
    routing = Routing(topk_ids=ids, topk_weights=torch.ones(ids.shape, dtype=torch.float64))
    return Answer(expected=expected, low=expected - room, high=expected + room, contributions=given, routing=routing, output=output)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """float64 standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
