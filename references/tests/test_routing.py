from __future__ import annotations

import math

import pytest
import torch

from references.routing import route


def test_softmax_top_k_by_hand() -> None:
    logits = torch.tensor([[math.log(1.0), math.log(4.0), math.log(3.0)]])
    kept = route(logits, 2, renormalize=False)
    assert kept.topk_ids.tolist() == [[1, 2]]
    assert kept.topk_weights.tolist()[0] == pytest.approx([4 / 8, 3 / 8], rel=1e-7)
    assert route(logits, 2, renormalize=True).topk_weights.tolist()[0] == pytest.approx([4 / 7, 3 / 7], rel=1e-7)


def test_weights_descend_and_ties_go_to_the_lower_expert() -> None:
    got = route(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 3, renormalize=True)
    assert got.topk_ids.tolist() == [[1, 2, 0]]
    assert got.topk_ids.dtype is torch.int64
    assert got.topk_weights.dtype is torch.float64


def test_large_logits_do_not_overflow() -> None:
    assert route(torch.tensor([[1000.0, 0.0]]), 1, renormalize=False).topk_weights.tolist() == [[1.0]]


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_top_k_that_cannot_be_is_named(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"number of experts 2, got {top_k}"):
        route(torch.zeros(1, 2), top_k, renormalize=True)
