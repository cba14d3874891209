"""Top-k softmax routing: softmax over all experts, the k largest, optionally divided by their sum."""

from __future__ import annotations

import math

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
    return Routing(topk_ids=ids.contiguous(), topk_weights=weights.contiguous(), exact=_one_over_k(router_logits, ids))


def _one_over_k(router_logits: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether every fp32 softmax gives each chosen expert exactly 1/k, k a power of two.

    So it is where the chosen logits are equal, exp(0) = 1, and each of the others' exponentials is below 2**-149, fp32's smallest number,
    by a factor e: the sum is k, and 1/k, k times 1/k and 1 have no rounding.
    """
    top_k = ids.shape[1]
    chosen = torch.gather(router_logits.to(torch.float64), 1, ids)
    others = router_logits.to(torch.float64).scatter(1, ids, -torch.inf)
    underflow = -(149 * math.log(2.0) + 1.0)
    return top_k & (top_k - 1) == 0 and bool((chosen == chosen[:, :1]).all()) and bool((others - chosen[:, :1] < underflow).all())
