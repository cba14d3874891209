"""Top-k softmax routing: softmax over all experts, the k largest, optionally divided by their sum."""

from __future__ import annotations

import torch

from references.moe import Routing


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    """router_logits [M, E] -> topk_ids [M, k] int64 and topk_weights [M, k] float64, heaviest first, ties to the lower expert.

    Raises:
        ValueError: when ``top_k`` is not between 1 and E.
    """
    experts = router_logits.shape[1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the number of experts {experts}, got {top_k}")
    probabilities = torch.softmax(router_logits.to(torch.float64), -1)
    weights, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(topk_ids=ids.contiguous(), topk_weights=weights.contiguous())
